"""`diagnose`, `bisect` and `calibrate` accept models that are compiled as a whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import MLP, relative
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass import graph
from fp8pass.config import Config
from fp8pass.tools.bisection import Trials
from fp8pass.tools.culprit_search import CulpritSearch
from fp8pass.tools.recording import record_step

OPTIONS = {"compiler": "eager"}
X = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block, optionally followed by a graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks, self.norm, self.mlp = breaks, nn.RMSNorm(64), MLP((64, 128, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x


class Stack(nn.Module):
    """Three blocks. With `checkpoints` the backward recomputes each forward."""

    def __init__(self, breaks: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(Block(breaks) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def in_place(model: Stack) -> nn.Module:
    model.compile(backend="fp8pass", options=OPTIONS)
    return model


def test_explain_shows_the_options_that_run():
    """If a module is compiled in place and again by `torch.compile`, the inner options run."""
    inner = MLP()
    inner.compile(backend="fp8pass", options={**OPTIONS, "recipe": "linear"})
    outer = torch.compile(inner, backend="fp8pass", options={**OPTIONS, "recipe": "agoq"})
    found = fp8pass.explain(outer, X)
    assert found.config == Config.recipe("linear", compiler="eager")
    assert found.is_compiled
    assert not fp8pass.explain(MLP(), X).is_compiled
    assert "not compiled with fp8pass" in str(fp8pass.explain(MLP(), X))


def by_blocks(model: Stack) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="fp8pass", options=OPTIONS)
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "wrapped": lambda: torch.compile(Stack(), backend="fp8pass", options=OPTIONS),
    "in place": lambda: in_place(Stack()),
    "graph breaks": lambda: in_place(Stack(breaks=True)),
    "blocks": lambda: by_blocks(Stack()),
    "checkpointed": lambda: in_place(Stack(checkpoints=True)),
    "checkpointed blocks": lambda: by_blocks(Stack(checkpoints=True)),
}


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def weight_errors(model: nn.Module) -> dict[str, float]:
    """Return errors of GEMMs. Errors of saved tensors depend on the boundaries of graphs."""
    found = fp8pass.diagnose(model, loss, X, config=Config.recipe("linear"))
    return {y.module: y.relative for y in found.layers if y.gradient == "weight" and "×" in y.shape}


@pytest.fixture(scope="module")
def whole_errors() -> dict[str, float]:
    """The errors of a model that the tool compiles as a whole."""
    return weight_errors(Stack())


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_every_layer_has_its_error_and_path(way, whole_errors):
    errors = weight_errors(WAYS[way]())
    layers = {n for n, m in Stack().named_modules() if isinstance(m, nn.Linear)}
    assert errors.keys() == whole_errors.keys() == layers
    for path, error in errors.items():
        assert error == pytest.approx(whole_errors[path], rel=0.1)


def test_each_recorded_backward_belongs_to_its_forward():
    """Only the incoming gradient of the last block follows from its output."""
    records = record_step(WAYS["blocks"](), loss, X, Config())
    assert [r.module for r in records] == ["blocks.0", "blocks.1", "blocks.2"]
    follows = []
    for record in records:
        (tangent,) = (x for name, x in record.inputs.items() if "tangents" in name)
        output = record.exact_values()[graph.outputs(record.exact.graph)[0].name]
        follows.append(relative(tangent, 2 * output / output.numel()) < 0.03)
    assert follows == [False, False, True]


def test_runs_without_a_backward_are_not_recorded():
    block = in_place(Block(breaks=False))

    def loss_of_first(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        model(100 * x)
        return y.square().mean()

    (record,) = record_step(block, loss_of_first, X.clone().requires_grad_(), Config())
    assert any(x.shape == X.shape and torch.equal(x, X) for x in record.inputs.values())


@pytest.mark.long
@pytest.mark.parametrize("way", ["blocks", "graph breaks"])
def test_suggestions_of_bisect_are_valid_options(way):
    model = WAYS[way]()
    trials = Trials(model, loss, X, Config(**OPTIONS), lambda total: None)
    assert trials.error(frozenset()) > 0.01
    assert trials.error(frozenset(range(len(trials.units)))) == 0


@pytest.mark.long
def test_bisect_reports_that_names_are_relative(monkeypatch):
    monkeypatch.setattr(CulpritSearch, "culprits", lambda self, most: [0])
    found = fp8pass.bisect(WAYS["blocks"](), loss, X)
    assert found.suggested.keys() <= {"skip", "keep_exact"}
    assert "relative to the compiled parts blocks.*. Identical parts share one entry." in str(found)
    assert found.remaining < found.error


@pytest.mark.long
def test_moments_of_blocks_have_names_within_blocks():
    model = WAYS["blocks"]()
    calibration = fp8pass.calibrate(model, loss, X)
    names = {name for name, _, _ in calibration}
    assert len(names) == len(calibration) > 0
    modules = {name.split(":")[0] for name in names}
    assert modules <= {path for path, _ in model.blocks[0].named_modules()}


@pytest.mark.parametrize("tool", [fp8pass.diagnose, fp8pass.bisect, fp8pass.calibrate])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": len}, "takes a torch.nn.Module, got builtin_function_or_method"),
        ({"config": "agoq"}, r"Config.recipe\('agoq'\)"),
        ({"config": {"recipe": "agoq"}}, r"got dict.*Config.recipe\('coat'\)"),
        ({"loss_fn": lambda output: output.sum()}, "take the model and the batch.*too many"),
        ({"loss_fn": (X,)}, "got tuple. Pass loss_fn before the batch"),
        (
            {"loss_fn": lambda model, x: model(x)},
            r"a tensor of one element.*it returned a tensor of shape \(4, 64\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(tool, changes, message):
    arguments = {"model": nn.ReLU(), "loss_fn": loss, "batch": X[0, :4], "config": None} | changes
    with pytest.raises(TypeError, match=message):
        tool(**arguments)


class AnyArguments(nn.Module):
    """Accepts any keyword arguments, like models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Skipping((64, 128, 64))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.inner(x, skip=kwargs.get("skip", False))


class Skipping(MLP):
    """Has an argument with the name of an option."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x if skip else super().forward(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "agoq"}, "Pass options as config="),
        ({"memory_budget": 0.5}, "Pass options as config="),
        ({"cnfig": Config()}, "Did you mean 'config'"),
    ],
)
def test_options_of_a_tool_are_not_passed_to_the_model(options, message):
    with pytest.raises(TypeError, match=message):
        fp8pass.explain(AnyArguments(), X, **options)
    fp8pass.explain(AnyArguments(), X, use_cache=False, skip=False, block_mask=None)


@pytest.mark.long
@pytest.mark.parametrize("tool", ["explain", "diagnose", "bisect", "calibrate"])
def test_tools_leave_no_versions_of_a_model_behind(tool):
    """Dynamo compiles at most eight versions of a function."""
    torch._dynamo.reset()
    model = MLP((64, 128, 64))
    program = torch.compile(model, backend="fp8pass", options=OPTIONS)
    program(X).sum().backward()
    for _ in range(8):
        if tool == "explain":
            fp8pass.explain(program, X)
        else:
            getattr(fp8pass, tool)(program, loss, X)
    counters.clear()
    program(X[:3]).sum().backward()
    program(X[0]).sum().backward()
    assert counters["frames"]["ok"] == 2


@pytest.mark.long
def test_a_function_that_raised_in_a_tool_is_compiled_again():
    torch._dynamo.reset()

    class Picky(MLP):
        def forward(self, x: Tensor | None = None) -> Tensor:
            if x is None:
                raise ValueError("no input")
            return super().forward(x)

    model = Picky((64, 128, 64))
    for _ in range(3):
        with pytest.raises(ValueError, match="no input"):
            fp8pass.fit(model, gpu="16GiB")
        found = fp8pass.explain(model, X)
        assert len(found.graphs) == 1
        assert len(found.graphs[0].plan.linears) == 2


def test_a_model_without_layers_has_no_errors():
    found = fp8pass.diagnose(nn.ReLU(), loss, X)
    assert "No gradient has an error" in str(found)
    assert fp8pass.calibrate(nn.ReLU(), loss, X) == ()
