"""Assertions that hold for every module: equal bits, close gradients, and exact plans.

Each assertion first calls `torch.compiler.reset()`, which discards all compiled code. Otherwise
Dynamo would reach its limit of recompilations after eight examples of a hypothesis test.
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
from fp8pass.testing.noise import Formats
from fp8pass.testing.steps import (
    SavedCounts,
    TrainingStep,
    assert_same_step,
    count_planned,
    count_saved,
    step,
)


def assert_exact(module: nn.Module, *args: Any, seed: int = 7) -> None:
    """Assert that compilation does not change a single bit if formats do not round.

    All passes run, with formats that store values exactly (recipe `exact`). The result is compared
    with stock `torch.compile`. Both graphs run op by op, so only the passes can cause differences.
    The comparison covers outputs, buffers, and gradients of parameters and arguments.

    Args:
        module: a module of any dtype on any device. It is copied, and not changed.
        args: arguments of the module.
        seed: seed of dropout and of the incoming gradients.

    Raises:
        AssertionError: names the first tensor that differs, and by how much.
    """
    ours = Backend(Config.recipe("exact", compiler="eager"))
    got, want = (_run_step(module, args, backend, seed) for backend in (ours, stock_eager))
    assert_same_step(got, want)


def assert_close(
    module: nn.Module,
    *args: Any,
    config: Config | None = None,
    cosine: float | None = None,
    norm: float | None = None,
    sqnr: float | None = None,
) -> None:
    """Assert that outputs and gradients are as close to an fp64 step as the formats allow.

    With `cosine`, `norm` or `sqnr`, only gradients are checked, against these bounds. Without
    bounds, the accepted error is measured (formula in `closeness.py`): the same step runs in eager
    PyTorch, and simulated noise (`noise.py`) rounds its GEMM operands and saved tensors. If noise
    flips an argmax, only finiteness and norm of the tensors after it are checked. FP8 GEMMs
    accumulate like Hopper's tensor cores, on every device.

    Args:
        module: a float32 or bfloat16 module on any device. It is copied, and not changed.
        args: arguments of the module.
        config: the tested configuration, by default `Config()`.
        cosine: smallest accepted cosine similarity of a gradient and the exact gradient.
        norm: largest accepted difference of the norms of a gradient and the exact gradient, as a
            share of the norm of the exact gradient.
        sqnr: smallest accepted ratio of the norm of the exact gradient to the norm of the error, in
            dB.

    Raises:
        AssertionError: lists the tensors whose errors are too large, with their errors.
    """
    config = replace(checked_config(config), compiler="eager")
    with hardware_accumulation():
        got = _run_step(module, args, Backend(config))
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    reference = Reference(module, lambda: [copy.deepcopy(args)], Formats.of(config, dtype))
    bounds = {"cosine": cosine, "norm": norm, "sqnr": sqnr}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if given:
        complaints = list(_find_violations(got, reference.exact[0], given))
    else:
        complaints = reference.judge([got]).complaints
    assert not complaints, "\n".join(complaints)


def assert_plan_is_true(module: nn.Module, *args: Any, config: Config | None = None) -> None:
    """Assert that autograd saves exactly the tensors that the plans list, by dtype and shape.

    Args:
        module: a module on any device that compiles without graph breaks. After a graph break, code
            outside of graphs would save tensors that no plan lists.
        args: arguments of the module.
        config: the tested configuration, by default `Config()`.

    Raises:
        AssertionError: lists tensors that are saved but not planned, or planned but not saved.
    """
    graphs: list[CompiledGraph] = []
    backend = Backend(replace(checked_config(config), compiler="eager"), graphs.append)
    twin, inputs = copy.deepcopy((module, args))
    own = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    with _compile(twin, backend) as program:
        saved = count_saved(program, inputs, [*own, *twin.buffers()])
    planned: SavedCounts = Counter()
    for graph in graphs:
        for _ in range(graph.runs_kept):
            planned += count_planned(graph.plan)
    more, less = dict(saved - planned), dict(planned - saved)
    assert saved == planned, f"saved but not in the plan: {more}, in the plan but not saved: {less}"


def stock_eager(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile like stock `torch.compile` up to code generation, then run op by op."""
    return compat.compile_fx(  # type: ignore[return-value]
        gm, list(inputs), inner_compile=lambda graph, _, **kwargs: compat.interpret(graph)
    )


def _run_step(module: nn.Module, args: Sequence[Any], backend: Any, seed: int = 7) -> TrainingStep:
    twin, inputs = copy.deepcopy((module, args))
    with _compile(twin, backend) as program:
        return step(program, twin, inputs, seed=seed)


@contextmanager
def _compile(module: nn.Module, backend: Any) -> Iterator[Callable[..., Any]]:
    torch.compiler.reset()
    with compat.fresh_compilation():
        yield torch.compile(module, backend=backend, dynamic=False)


def _find_violations(
    got: TrainingStep, exact: TrainingStep, bounds: dict[str, float]
) -> Iterator[str]:
    for name, want in exact.gradients.items():
        found = got.gradients[name]
        if want is None:
            continue
        x, want = torch.zeros_like(want) if found is None else found.double(), want.double()
        norm, exact_norm, error = float(x.norm()), float(want.norm()), (x - want).norm()
        values = {
            "cosine": float(torch.cosine_similarity(x.flatten(), want.flatten(), dim=0)),
            "norm": abs(norm - exact_norm) / max(exact_norm, 1e-300),
            "sqnr": float(20 * torch.log10(want.norm() / error)),
        }
        for measure, bound in bounds.items():
            value = values[measure]
            holds = value <= bound if measure == "norm" else value >= bound
            if not holds and not torch.equal(x, want):  # all zeros have neither cosine nor SQNR
                yield f"gradient of {name}: {measure} is {value:.4g}, the bound is {bound:g}"
