"""Ways to compile and run a model that work with stock `torch.compile` also work with fp8pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers import COAT_EAGER, MLP, Spy, compiled, cosine, step, stock_eager
from torch import nn

import fp8pass
from fp8pass import Config, Monitor, compat
from fp8pass.dynamo import Backend
from fp8pass.stability.monitor.sampler import Versions

SIZES = (64, 128, 64)


def gradients(program, model, x) -> list[torch.Tensor]:
    """Return the gradients of all parameters after two steps."""
    for _ in range(2):
        model.zero_grad()
        program(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


# --- compiled autograd --------------------------------------------------------------------------


class Skipped(nn.Module):
    """A layer in FP8 and a layer in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8, self.exact = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.exact(torch.nn.functional.gelu(self.fp8(x)))


@pytest.mark.long
@pytest.mark.parametrize("enabled", ["for a step", "for backwards"])
def test_compiled_autograd_has_equal_gradients(enabled):
    """It compiles the rewritten backward as a separate graph."""
    config = Config(compiler="eager", skip=("exact",))
    model, x = Skipped(), torch.randn(32, 64)
    want = gradients(torch.compile(model, backend=Backend(config)), model, x)
    torch._dynamo.reset()
    spy = Spy()
    program = torch.compile(model, backend=Backend(config, spy))
    if enabled == "for a step":
        with torch._dynamo.config.patch(compiled_autograd=True):
            got = gradients(torch.compile(program, backend=Backend(config, spy)), model, x)
    else:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=Backend(config, spy))):
            got = gradients(program, model, x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert [y.module for plan in spy.plans for y in plan.linears] == ["fp8", "exact"]


# --- interpreted graphs -------------------------------------------------------------------------


class ChangedView(nn.Module):
    """A view that is changed in place after a graph break, like the masked features of Wav2Vec2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP(SIZES), MLP(SIZES)
        self.mask = nn.Parameter(torch.randn(64))

    def forward(self, x):
        features = self.first(x)
        torch._dynamo.graph_break()
        features[torch.arange(8).expand(4, 8) > 5] = self.mask
        return self.second(features)


def changed_view() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return ChangedView(), torch.randn(4, 8, 64)


def loss(model, x):
    return model(x).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("hooks", [(), (Versions(Monitor()),)])
def test_an_interpreted_graph_returns_no_views(hooks):
    model, x = changed_view()
    want = step(torch.compile(model, backend=stock_eager), model, [x])
    torch._dynamo.reset()
    got = step(torch.compile(model, backend=Backend(COAT_EAGER, hooks=hooks)), model, [x])
    for name, gradient in want.gradients.items():
        assert cosine(got.gradients[name], gradient) > 0.99


@pytest.mark.long
@pytest.mark.parametrize(
    "tool", [fp8pass.explain, fp8pass.diagnose, fp8pass.calibrate, fp8pass.bisect]
)
def test_tools_run_a_model_that_changes_a_view(tool):
    model, x = changed_view()
    assert tool(model, x) if tool is fp8pass.explain else tool(model, loss, x)


# --- default dtypes -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype):
    """Graphs and predictions do not change. In bfloat16 counts of 1000 rows would be rounded."""
    config = Config.recipe("agoq", compiler="eager")
    model, x = MLP(SIZES), torch.randn(1000, 64)
    found = []
    for default in (torch.float32, dtype):
        torch._dynamo.reset()
        torch.set_default_dtype(default)
        try:
            explanation = fp8pass.explain(model, x, config=config)
            layers = fp8pass.diagnose(model, loss, x, config=config).layers
        finally:
            torch.set_default_dtype(torch.float32)
        code = [p.after for g in explanation.graphs for p in g.passes]
        found.append((explanation.saved_bytes, layers, code))
    assert found[0] == found[1]


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(64, 0), (0, 64)])
def test_an_empty_weight_stays_exact(sizes):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.empty = nn.Linear(64, sizes[0]), nn.Linear(*sizes)

        def forward(self, x):
            return self.empty(self.into(x))

    model = Model()
    program, spy = compiled(model)
    found = step(program, model, [torch.randn(32, 64, requires_grad=True)])
    assert {y.module: y.reason for y in spy.plan.linears if not y.fp8}["empty"] == "empty weight"
    assert all(x is None or x.isfinite().all() for x in found.gradients.values())


# --- layers that are frozen and unfrozen ----------------------------------------------------------


def test_layers_can_be_frozen_and_unfrozen_between_steps():
    """PyTorch 2.11 by itself compiles the model once, and never trains the unfrozen layer."""
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(16, 64)
    program = torch.compile(model, backend=Backend(COAT_EAGER))
    for trained in (False, True, False, True):
        model.zero_grad()
        model[0].requires_grad_(trained)
        program(x).square().mean().backward()
        assert (model[0].weight.grad is not None) == trained
        assert model[2].weight.grad is not None


# --- a missing C++ compiler -----------------------------------------------------------------------


def test_a_missing_cpp_compiler_raises_an_error(monkeypatch):
    monkeypatch.setattr(compat, "has_cpp_compiler", lambda: False)
    program = torch.compile(MLP(), backend="fp8pass")
    with pytest.raises(Exception, match=r"No working C\+\+ compiler.*'compiler': 'eager'"):
        program(torch.randn(16, 64))
    torch._dynamo.reset()
    program = torch.compile(MLP(), backend="fp8pass", options={"compiler": "eager"})
    assert program(torch.randn(16, 64)).isfinite().all()


# --- the documents ------------------------------------------------------------------------------


def documented_lines() -> list[str]:
    top = Path(fp8pass.__file__).parents[1]
    pages = [top / "README.md", *(top / "docs" / f"{name}.md" for name in ("recipes", "tools"))]
    text = "\n".join(page.read_text() for page in pages)
    lines = re.findall(r"^(?:model = )?(torch\.compile\(model, .*\))$", text, re.MULTILINE)
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("line", documented_lines())
def test_documented_lines_compile(line, monkeypatch):
    seen = []

    def record(gm, inputs, **kwargs):
        seen.append(kwargs["config_patches"])
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", record)
    names = {"torch": torch, "fp8pass": fp8pass, "model": MLP(), "monitor": None}
    eval(line, names)(torch.randn(16, 64))
    assert seen
    assert ("max_autotune" in line or "max-autotune" in line) == bool(seen[0].get("max_autotune"))
