"""Models that return logits beside their loss run the head in chunks with `return_logits=False`."""

from __future__ import annotations

import logging

import pytest
import torch
from head_helpers import LOSSES, VOCABULARY, Model, batch, plain
from helpers import relative
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import Config, backend, compat, compile_log
from fp8pass.dynamo import Backend


class WithLogits(Model):
    """Returns logits as models of Hugging Face do; `loss_of` computes the loss."""

    def __init__(self, loss_of=plain) -> None:
        super().__init__()
        self.loss_of = loss_of

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        logits = self.lm_head(x + torch.tanh(self.block(x)))
        return self.loss_of(logits.float(), targets), logits


def softcapped(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(20 * torch.tanh(logits / 20), targets)


def by_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), dim=-1), targets.flatten())


def by_function(logits: Tensor, targets: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.flatten(0, 1), dim=-1)
    return -log_p.gather(-1, targets.reshape(-1, 1)).mean()


class Cast(WithLogits):
    """Returns logits of another dtype and shape than the logits of the loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = super().forward(ids, targets)
        return loss, logits.to(torch.float16).flatten(0, 1)


def train(model: nn.Module, **options) -> tuple[Tensor, Tensor, Tensor, list]:
    torch._dynamo.reset()
    model.zero_grad()
    graphs: list = []
    config = Config.recipe("exact", compiler="eager", **options)
    loss, logits = torch.compile(model, backend=Backend(config, graphs.append))(*batch())
    loss.backward()
    assert model.lm_head.weight.grad is not None
    return loss, logits, model.lm_head.weight.grad, graphs[0].plan.heads


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "model",
    [
        *map(WithLogits, (*LOSSES, softcapped, by_log_softmax, by_function)),
        Cast(),
    ],
    ids=lambda model: f"{type(model).__name__} {model.loss_of.__name__}",
)
def test_the_head_runs_in_chunks_and_the_logits_are_nan(model):
    want, returned, gradient, (head,) = train(model, head_chunks=3)
    assert head.chunks == 1
    assert "return_logits=False" in head.reason
    loss, logits, found, (head,) = train(model, head_chunks=3, return_logits=False)
    assert head.chunks == 3
    assert relative(loss, want) < 1e-6
    assert relative(found, gradient) < 1e-6
    assert logits.shape == returned.shape
    assert logits.dtype == returned.dtype
    assert logits.isnan().all()
    assert logits.untyped_storage().nbytes() <= 8


# --- the hint -----------------------------------------------------------------------------------

# Bytes of the FP32 logits of 24 tokens and of their gradients, without one of three chunks.
AVOIDABLE = 2 * (4 * 24 * VOCABULARY - 4 * 8 * VOCABULARY)


def hints(caplog, model: nn.Module, *data: Tensor, grad: bool = True, **options) -> list[str]:
    """Compile and call a model, and return the hints about returned logits."""
    torch._dynamo.reset()
    caplog.clear()
    config = Config.recipe("exact", compiler="eager", **options)
    with compat.fresh_compilation(), torch.set_grad_enabled(grad):
        program = torch.compile(model, backend=backend(config), dynamic=False)
        for tokens in (data or batch(), batch((3, 12))):  # compiled twice
            program(*tokens)
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in texts if "return_logits" in text]


@pytest.mark.parametrize("least", [AVOIDABLE - 1, AVOIDABLE])
def test_large_logits_cause_one_hint(monkeypatch, caplog, least):
    monkeypatch.setattr(compile_log, "LARGE_LOGITS", least)
    found = hints(caplog, WithLogits(), head_chunks=3)
    # Only the logits of the second batch, which has more tokens, are above the second limit.
    size = "20 KiB" if least < AVOIDABLE else "30 KiB"
    assert len(found) == 1
    assert f"return_logits=False saves {size} of logits" in found[0]


def test_small_logits_cause_no_hint(caplog):
    assert not hints(caplog, WithLogits(), head_chunks=3)


@pytest.mark.parametrize(
    ("make", "grad", "options"),
    [
        (WithLogits, True, {"head_chunks": 3, "return_logits": False}),
        (WithLogits, True, {"head_chunks": 1}),
        (WithLogits, True, {}),  # too few tokens for chunks
        (WithLogits, False, {"head_chunks": 3}),
        (Model, True, {"head_chunks": 3}),
    ],
)
def test_no_hint_where_the_option_would_save_nothing(monkeypatch, caplog, make, grad, options):
    monkeypatch.setattr(compile_log, "LARGE_LOGITS", 0)
    assert not hints(caplog, make(), grad=grad, **options)


def test_no_hint_if_the_option_does_not_know_the_loss(monkeypatch, caplog):
    def by_logsumexp(logits: Tensor, targets: Tensor) -> Tensor:
        picked = logits.gather(-1, targets[..., None]).squeeze(-1)
        return (logits.logsumexp(-1) - picked).mean()

    monkeypatch.setattr(compile_log, "LARGE_LOGITS", 0)
    assert not hints(caplog, WithLogits(by_logsumexp), head_chunks=3)


# --- results that stay values -------------------------------------------------------------------


def test_logits_of_an_evaluation_are_values():
    model = WithLogits()
    config = Config.recipe("exact", compiler="eager", return_logits=False)
    with torch.no_grad():
        _, logits = torch.compile(model, backend=Backend(config))(*batch())
    assert logits.isfinite().all()


def test_logits_without_a_loss_are_values():
    model = nn.Sequential(nn.Linear(16, 32))
    config = Config.recipe("exact", compiler="eager", return_logits=False)
    assert torch.compile(model, backend=Backend(config))(torch.randn(4, 16)).isfinite().all()


@pytest.mark.parametrize("whole", [False, True])
def test_log_probabilities_without_a_loss_are_values(whole):
    class Scores(Model):
        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            log_p = self.lm_head(self.block(self.embedding(ids))).float().log_softmax(-1)
            return log_p if whole else log_p.flatten(0, 1)[range(24), targets.flatten()]

    config = Config.recipe("exact", compiler="eager", return_logits=False)
    assert torch.compile(Scores(), backend=Backend(config))(*batch()).isfinite().all()


def test_other_results_are_values():
    class Returns(WithLogits):
        def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embedding(ids)
            hidden = x + torch.tanh(self.block(x))
            return plain(self.lm_head(hidden), targets), hidden

    _, hidden, _, _ = train(Returns(), return_logits=False)
    assert hidden.isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_models_of_hugging_face(dynamic):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(512, (2, 16))
    want = model(input_ids=ids, labels=ids).loss
    options = {"recipe": "exact", "return_logits": False, "head_chunks": 4}
    program = torch.compile(model, backend="fp8pass", options=options, dynamic=dynamic)
    found = program(input_ids=ids, labels=ids)
    found.loss.backward()
    assert relative(found.loss, want) < 1e-5
    assert found.logits.isnan().all()
    assert found.logits.untyped_storage().nbytes() <= 8
