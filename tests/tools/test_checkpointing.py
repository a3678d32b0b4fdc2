"""fp8pass warns users of `torch.utils.checkpoint` that no saved tensor is left to quantize."""

from __future__ import annotations

import pytest
import torch
from helpers import COAT_EAGER, MLP, compiled, llama, step, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8pass import Config, explain
from fp8pass.compilation import Compilation
from fp8pass.dynamo import Backend
from fp8pass.passes.runner import warn_about_checkpointing


@pytest.fixture(autouse=True)
def no_lowered_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the passes on forward and backward graphs, which these tests do not need."""
    monkeypatch.setattr(Compilation, "shows_halves", False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), MLP((64, 128, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Residual blocks without attention, checkpointed or not."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.first, self.layers = nn.Linear(64, 64), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


X = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "torch.utils.checkpoint" in r.getMessage()]


@pytest.mark.long
@pytest.mark.parametrize("around", [False, True])
def test_checkpointing_causes_one_warning(caplog, around):
    """Regions are in a graph, or around graphs."""
    warn_about_checkpointing.cache_clear()
    model = Stack()
    if around:
        for layer in model.layers:
            layer.compile(backend="fp8pass", options={"compiler": "eager"})
        model(X).sum().backward()
    for _ in range(2):
        torch.compile(Stack(), backend=Backend(COAT_EAGER))(X).sum().backward()
        torch._dynamo.reset()
    (message,) = warnings_of(caplog)
    assert "memory_budget" in message
    assert "fp8pass.explain" in message


@pytest.mark.long
def test_models_without_checkpointing_cause_no_warning(caplog):
    warn_about_checkpointing.cache_clear()
    torch.compile(Stack(checkpointed=False), backend=Backend(COAT_EAGER))(X).sum().backward()
    assert not warnings_of(caplog)


@pytest.mark.long
def test_explain_reports_bytes_without_checkpointing(caplog):
    want = explain(Stack(checkpointed=False), X)
    warn_about_checkpointing.cache_clear()
    got = explain(Stack(), X)
    assert not warnings_of(caplog)  # the explanation has the warning
    assert want.graphs[0].plan.checkpointing is None
    (graph,) = got.graphs
    checkpointing = graph.plan.checkpointing
    assert checkpointing.products == 4
    assert checkpointing.bytes_without == want.saved_bytes > got.saved_bytes
    assert "makes the backward recompute 4 GEMMs and attention operators" in str(got)
    least = checkpointing.least_without
    assert least < 0.5 * want.saved_bytes
    budget = Config(memory_budget=least)  # the budget can be met
    assert explain(Stack(checkpointed=False), X, config=budget).saved_bytes <= least


def test_explain_reports_what_regions_around_graphs_recompute():
    model = Stack()
    for layer in model.layers:
        layer.compile(backend="fp8pass", options={"compiler": "eager"})
    text = str(explain(model, X))
    assert "torch.utils.checkpoint reruns 2 compiled graphs in the backward" in text


@pytest.mark.long
def test_inputs_of_regions_are_quantized_where_the_rules_allow_it():
    """The rules allow it for norms and activations, also recomputed ones, but not for attention."""
    program, spy = compiled(Stack())
    program(X)
    sums = [s for s in spy.plan.saved if s.op == "aten.add.Tensor"]
    assert [s.saved_as for s in sums] == ["e4m3 1×64"]
    torch._dynamo.reset()
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    program, spy = compiled(model)
    program(tokens())
    assert all(s.saved_as == "exact" for s in spy.plan.saved)
    assert any("attention" in s.reason for s in spy.plan.saved)


@pytest.mark.long
def test_quantized_inputs_of_regions_change_no_forward_value():
    """Gradients differ from regions with exact inputs only by rounding."""
    exact, low_bits = Stack(), Stack()
    want = step(compiled(exact, Config.recipe("linear", compiler="eager"))[0], exact, [X])
    torch._dynamo.reset()
    config = Config(scales="tensorwise", compiler="eager")
    got = step(compiled(low_bits, config)[0], low_bits, [X])
    assert torch.equal(got.outputs[0], want.outputs[0])
    for name, gradient in want.gradients.items():
        error = (got.gradients[name] - gradient).norm() / gradient.norm()
        assert error < 0.1, name
