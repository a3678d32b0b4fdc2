"""Which parameters `split_parameters` gives to Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8pass
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size
from fp8pass.optim import AdamW, Muon, split_parameters


def names(model: nn.Module, **options) -> set[str]:
    """Return the names of the parameters for Muon; check that AdamW gets all others."""
    matrices, others = split_parameters(model, **options)
    known = {id(p): name for name, p in model.named_parameters()}
    found = {known[id(p)] for p in matrices}
    assert len(matrices) == len(found)
    assert {known[id(p)] for p in others} == set(known.values()) - found
    return found


class LanguageModel(nn.Module):
    """A model whose head may have any name, and may be tied to the embedding."""

    def __init__(self, head: str, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(64, 16), nn.Parameter(torch.ones(8, 16))
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16))
        self.gate = nn.Linear(16, 1)
        self.conv = nn.Conv1d(16, 16, 3)
        setattr(self, head, nn.Linear(16, 64, bias=False))
        if tied:
            getattr(self, head).weight = self.embedding.weight


@pytest.mark.parametrize("head", ["lm_head", "output", "head", "unembed"])
def test_a_head_with_a_known_name(head):
    matrices = names(LanguageModel(head), skip="positions")
    assert matrices == {"block.1.weight", "block.2.weight"}


def test_a_tied_head():
    assert names(LanguageModel("project", tied=True), skip=["posit*"]) == {
        "block.1.weight",
        "block.2.weight",
    }


def test_a_head_with_another_name_is_found_by_its_size():
    """A layer of the same size as the head is trained by AdamW, too."""
    assert names(LanguageModel("project"), skip="positions") == {"block.2.weight"}


def test_patterns_name_modules_or_parameters():
    model = LanguageModel("lm_head")
    assert names(model, skip=("block.1", "*itions")) == {"block.2.weight"}
    with pytest.warns(UserWarning, match="'blocks' matches no parameter"):
        names(model, skip="blocks")


def test_wrapped_and_classified():
    model = nn.Sequential()
    model.body, model.classifier = nn.Linear(8, 8), nn.Linear(8, 3)
    assert names(model) == {"body.weight"}
    matrices, _ = split_parameters(torch.compile(model))
    assert [id(p) for p in matrices] == [id(model.body.weight)]


def test_a_decoder_trains():
    model = Decoder(Size(32, 2, 2, 2, 64, seq=16, batch=2, steps=1, peak_lr=1e-3))
    matrices, others = split_parameters(model)
    assert all(p.ndim == 2 for p in matrices)
    assert {p.shape for p in others if p.ndim == 2} == {(256, 32)}
    optimizers = [Muon(matrices), AdamW(others)]
    model(torch.randint(256, (2, 16)), torch.randint(256, (2, 16))).backward()
    for optimizer in optimizers:
        optimizer.step()
    with pytest.raises(fp8pass.ConfigError, match=r"must be a torch\.nn\.Module, got list"):
        split_parameters([])
