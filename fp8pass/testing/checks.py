"""What must hold for every module: equal bits, close gradients, a plan that is true.

Each check begins with `torch.compiler.reset()`: what was compiled before is compiled again when it
is next called. Without, Dynamo would run the ninth of hypothesis's examples as it is.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fp8pass import compat
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config, checked_config
from fp8pass.dialect.accumulation import hardware_accumulation
from fp8pass.dynamo import Backend
from fp8pass.testing.closeness import Reference
from fp8pass.testing.kept import Kept, kept_tensors, planned_tensors
from fp8pass.testing.noise import Formats
from fp8pass.testing.steps import TrainingStep, assert_same_step, step


def assert_exact(module: nn.Module, *args: Any, seed: int = 7) -> None:
    """The rewritten module gives the very bits of the one that was not, if nothing is rounded.

    All passes run, with formats that store a value as it is (recipe `exact`); both programs run op
    by op, so that the rewrite alone can differ. Outputs, gradients of parameters and of arguments
    that require one, and buffers are compared.

    Args:
        module: in any dtype, on any device. It is copied and left as it is.
        args: what it is called with.
        seed: of dropout and of the incoming gradients.

    Raises:
        AssertionError: names the first tensor that differs, and by how much.
    """
    ours = Backend(Config.recipe("exact", compiler="eager"))
    got, want = (_step(module, args, backend, seed) for backend in (ours, stock_eager))
    assert_same_step(got, want)


def assert_close(
    module: nn.Module,
    *args: Any,
    config: Config | None = None,
    cosine: float | None = None,
    norm: float | None = None,
    sqnr: float | None = None,
) -> None:
    """Outputs and gradients are as close to those in fp64 as the formats allow, or as asked for.

    Without a bound, what is accepted is measured: the same step in eager PyTorch, with GEMMs and
    what autograd saves rounded by a model of the formats that shares no code with the package
    (`closeness.py` has the formula). It follows the module: where an argmax may flip only
    finiteness and size are asked for. FP8 GEMMs accumulate like Hopper's tensor cores, on every
    device.

    Args:
        module: in float32 or bfloat16, on any device. It is copied and left as it is.
        args: what it is called with.
        config: the configuration that is tested, by default that of the backend.
        cosine: least cosine of a gradient with the exact one.
        norm: largest relative difference of its norm.
        sqnr: least ratio of the exact gradient to the error, in dB.

    Raises:
        AssertionError: lists every tensor that is off, and by how much.
    """
    config = replace(checked_config(config), compiler="eager")
    with hardware_accumulation():
        got = _step(module, args, Backend(config))
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    reference = Reference(module, lambda: [copy.deepcopy(args)], Formats.of(config, dtype))
    bounds = {"cosine": cosine, "norm": norm, "sqnr": sqnr}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if given:
        complaints = list(_beyond(got, reference.exact[0], given))
    else:
        complaints = reference.judge([got]).complaints
    assert not complaints, "\n".join(complaints)


def assert_plan_is_true(module: nn.Module, *args: Any, config: Config | None = None) -> None:
    """Autograd keeps the tensors that the plans say, by dtype and shape, and no others.

    Args:
        module: on any device. All of it must be compiled: what runs beside its graphs keeps tensors
            that no plan knows of.
        args: what it is called with.
        config: the configuration that is tested, by default that of the backend.

    Raises:
        AssertionError: lists what is kept but not planned, and what is planned but not kept.
    """
    graphs: list[CompiledGraph] = []
    backend = Backend(replace(checked_config(config), compiler="eager"), graphs.append)
    twin, inputs = copy.deepcopy((module, args))
    own = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    with _compiled(twin, backend) as program:
        kept = kept_tensors(program, inputs, [*own, *twin.buffers()])
    planned: Kept = Counter()
    for graph in graphs:
        for _ in range(graph.runs_kept):
            planned += planned_tensors(graph.plan)
    more, less = dict(kept - planned), dict(planned - kept)
    assert kept == planned, f"kept but not planned {more}, planned but not kept {less}"


def stock_eager(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """What stock `torch.compile` does up to code generation, then op by op."""
    return compat.compile_fx(  # type: ignore[return-value]
        gm, list(inputs), inner_compile=lambda graph, _, **kwargs: compat.interpret(graph)
    )


def _step(module: nn.Module, args: Sequence[Any], backend: Any, seed: int = 7) -> TrainingStep:
    twin, inputs = copy.deepcopy((module, args))
    with _compiled(twin, backend) as program:
        return step(program, twin, inputs, seed=seed)


@contextmanager
def _compiled(module: nn.Module, backend: Any) -> Iterator[Callable[..., Any]]:
    torch.compiler.reset()
    with compat.fresh_compilation():
        yield torch.compile(module, backend=backend, dynamic=False)


def _beyond(got: TrainingStep, exact: TrainingStep, bounds: dict[str, float]) -> Iterator[str]:
    """A line for each gradient that is beyond a bound."""
    for name, want in exact.gradients.items():
        found = got.gradients[name]
        if want is None:
            continue
        x = torch.zeros_like(want) if found is None else found.double()
        for measure, bound in bounds.items():
            value, holds = MEASURES[measure](x, want.double(), bound)
            if not holds:
                yield f"gradient of {name}: {measure} is {value:.4g}, asked for was {bound:g}"


def _cosine(x: Tensor, want: Tensor, least: float) -> tuple[float, bool]:
    value = float(torch.cosine_similarity(x.flatten(), want.flatten(), dim=0))
    return value, value >= least or bool(x.norm() == want.norm() == 0)


def _norm(x: Tensor, want: Tensor, largest: float) -> tuple[float, bool]:
    value = abs(float(x.norm()) - float(want.norm())) / max(float(want.norm()), 1e-300)
    return value, value <= largest


def _sqnr(x: Tensor, want: Tensor, least: float) -> tuple[float, bool]:
    value = float(20 * torch.log10(want.norm() / (x - want).norm()))
    return value, value >= least or torch.equal(x, want)


MEASURES = {"cosine": _cosine, "norm": _norm, "sqnr": _sqnr}
