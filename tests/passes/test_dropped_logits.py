"""Models that return logits beside their loss run the head in chunks with `return_logits=False`."""

from __future__ import annotations

import pytest
import torch
from head_helpers import Model, batch, plain
from helpers import relative
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import Config
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


def train(model: nn.Module, **options) -> tuple[Tensor, Tensor, Tensor, list]:
    torch._dynamo.reset()
    model.zero_grad()
    graphs: list = []
    config = Config.recipe("exact", compiler="eager", **options)
    loss, logits = torch.compile(model, backend=Backend(config, graphs.append))(*batch())
    loss.backward()
    assert model.lm_head.weight.grad is not None
    return loss, logits, model.lm_head.weight.grad, graphs[0].plan.heads


@pytest.mark.parametrize("loss_of", [plain, softcapped, by_log_softmax])
def test_the_head_runs_in_chunks_and_the_logits_are_nan(loss_of):
    model = WithLogits(loss_of)
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
