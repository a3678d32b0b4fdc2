"""Checks of a program: equal bits or close gradients, planned saved tensors, and time."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from functorch.compile import default_partition
from helpers import (
    Spy,
    TrainingStep,
    aot_exact,
    assert_same_step,
    count_planned,
    count_saved,
    step,
    stock_eager,
)
from torch import fx

from fp8pass import compat
from fp8pass.compilation import Compilation
from fp8pass.dynamo import Backend
from fp8pass.passes.joint.materialize_plan import Carrier
from fp8pass.testing.closeness import Reference, Verdict
from fp8pass.testing.noise import Formats

from .drawing import in_mode
from .program import Program

# Seconds of CPU time for a compilation and its steps.
SLOWEST = {
    "eager": 30.0,
    "lowered": 30.0,
    "inductor": 240.0,
}


@dataclass
class Outcome:
    """The outcome of a program.

    Attributes:
        failure: kind of failure, '' for none: `error`, `bits`, `close`, `plan`, `memory`, `slow`,
            `recompiled`.
        message: what is wrong.
        stock: an error of stock PyTorch on the same program, which excuses fp8pass.
        refused: whether no plan meets the memory budget.
        seconds: CPU time of compilation and steps.
        judged, unjudged: numbers of tensors that were compared with noise, or too chaotic for it.
        worst: largest error relative to the accepted error.
        low_bit, fp8: numbers of quantized saved tensors and of linear layers in FP8.
    """

    failure: str = ""
    message: str = ""
    stock: str = ""
    refused: bool = False
    seconds: float = 0.0
    judged: int = 0
    unjudged: int = 0
    worst: float = 0.0
    low_bit: int = 0
    fp8: int = 0


@dataclass
class Run:
    """The steps of one compilation."""

    steps: list[TrainingStep]
    spy: Spy
    seconds: float
    program: Callable[..., Any]
    model: Any = field(repr=False, default=None)


class Failed(Exception):
    """A check failed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check(program: Program, device: str = "cpu") -> Outcome:
    """Run a program and its checks."""
    outcome = Outcome()
    try:
        with compat.fresh_compilation(), _same_random_numbers(program):
            _check(program, device, outcome)
    except Failed as failed:
        outcome.failure, outcome.message = failed.kind, str(failed)
    finally:
        torch._dynamo.reset()
    return outcome


def _check(program: Program, device: str, outcome: Outcome) -> None:
    try:
        run = _ours(program, device)
    except Exception as error:
        if "cannot be met" in str(error):
            outcome.refused = True
            return
        text = traceback.format_exc(limit=-12)
        outcome.stock = _stock_error(program, device)
        if outcome.stock:
            return
        raise Failed("error", text) from None
    outcome.seconds = run.seconds
    plans = run.spy.plans
    outcome.low_bit = sum(1 for p in plans for s in p.saved if s.expected_error)
    outcome.fp8 = sum(bool(y.fp8) for p in plans for y in p.linears)
    if run.seconds > SLOWEST[program.compiler]:
        raise Failed("slow", f"took {run.seconds:.0f} s")
    if program.is_bitwise:
        _check_bits(program, device, run, outcome)
    else:
        _check_closeness(program, device, run, outcome)
    if program.dynamic:
        _check_recompilations(program, device, run)
    elif len(plans) == 1:
        _check_plan(program, device, run)


def _ours(program: Program, device: str) -> Run:
    if program.path == "aot":
        return _run(program, device, aot_exact)
    spy = Spy()
    backend = Backend(program.config, spy if program.observed else None)
    with _lower_if_needed(program):
        return _run(program, device, backend, spy)


def _run(program: Program, device: str, backend: Any, spy: Spy | None = None) -> Run:
    torch._dynamo.reset()
    model = program.model(device)
    compiled = torch.compile(model, backend=backend, dynamic=program.dynamic, fullgraph=True)
    mode = in_mode(program, device)(compiled)
    start = time.process_time()
    steps = []
    for i in range(len(program.batches)):
        program.act(model, i)
        if isinstance(backend, Backend):
            program.use_tools(compiled, i, program.batch(i, device))
        steps.append(step(mode, model, program.batch(i, device)))
    return Run(steps, spy or Spy(), time.process_time() - start, mode, model)


def _stock(program: Program) -> Any:
    if program.path == "aot":
        return "aot_eager"
    return "inductor" if program.compiler == "inductor" else stock_eager


def _stock_error(program: Program, device: str) -> str:
    """Return the error of stock PyTorch, '' if it compiles the program."""
    try:
        _run(program, device, _stock(program))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _check_bits(program: Program, device: str, run: Run, outcome: Outcome) -> None:
    want = _run(program, device, _stock(program)).steps
    try:
        for a, b in zip(run.steps, want, strict=True):
            assert_same_step(a, b)
    except AssertionError as error:
        if _equal(run.steps, _without_recomputation(program, device)):
            outcome.stock = f"recomputes another value: {error}"
            return
        if _equal(_keeping_views(program, device), want):
            return
        if any(_equal(run.steps, steps) for steps in _multiplying_copies(program, device)):
            return
        reference = _reference(program, device)
        ours, stock = reference.judge(run.steps), reference.judge(want)
        if stock.complaints and not ours.complaints:
            outcome.stock = stock.complaints[0]
            return
        gaps = [_gap(steps, reference.plain) for steps in (run.steps, want)]
        if 4 * gaps[0] < gaps[1]:
            outcome.stock = f"is {gaps[1]:.1e} from eager PyTorch, fp8pass {gaps[0]:.1e}"
            return
        raise Failed("bits", f"{error}; against eager: {ours.complaints[:3]}") from None


def _gap(got: list[TrainingStep], want: list[TrainingStep]) -> float:
    """Return the norm of the difference of all gradients."""
    pairs = ((a.gradients, b.gradients) for a, b in zip(got, want, strict=True))
    gaps = [
        float((a[name].double() - x.double()).norm())  # type: ignore[union-attr]
        for a, b in pairs
        for name, x in b.items()
        if x is not None
    ]
    return math.hypot(*gaps)


def _equal(got: list[TrainingStep], want: list[TrainingStep]) -> bool:
    try:
        for a, b in zip(got, want, strict=True):
            assert_same_step(a, b)
    except AssertionError:
        return False
    return True


def _keeping_views(program: Program, device: str) -> list[TrainingStep]:
    """Our steps if saved views are not copied.

    Vectorized kernels round some functions differently if elements are not contiguous, as they are
    in a copy.
    """
    copy = Carrier._copy

    def copy_overwritten(self: Carrier, node: Any) -> Any:
        return copy(self, node) if node in self.ctx.facts.overwritten else node

    with patch.object(Carrier, "_copy", copy_overwritten):
        return _ours(program, device).steps


def _without_recomputation(program: Program, device: str) -> list[TrainingStep]:
    """Return the steps of stock PyTorch without recomputation.

    PyTorch's partitioner recomputes from buffers that the forward changes later, and saves such
    buffers without a copy.
    """
    return _stock_steps(program, device, _copy_what_is_written)


def _multiplying_copies(program: Program, device: str) -> Iterator[list[TrainingStep]]:
    """Yield the steps of stock PyTorch with dense copies of strided operands of GEMMs.

    GEMMs add up strided and dense operands in different order, and fp8pass saves dense tensors.
    An expanded operand has two possible layouts of its copy, so both are tried.
    """
    for flipped in (False, True):
        yield _stock_steps(program, device, partial(_copy_operands_with_gaps, flipped=flipped))


def _stock_steps(
    program: Program, device: str, change: Callable[[fx.Graph], None]
) -> list[TrainingStep]:
    """Return the steps of stock PyTorch with changed joint graphs and its default partitioner."""

    def partition(gm: Any, inputs: Any, *, compiler: str = "", **kwargs: Any) -> Any:
        change(gm.graph)
        return default_partition(gm, inputs, **kwargs)

    with contextlib.ExitStack() as patches:
        for module in ("torch._inductor.compile_fx", "torch._dynamo.backends.debugging"):
            name = f"{module}.min_cut_rematerialization_partition"
            patches.enter_context(patch(name, partition))
        return _run(program, device, _stock(program)).steps


def _copy_operands_with_gaps(graph: fx.Graph, *, flipped: bool) -> None:
    """Make each GEMM of a joint graph read dense copies, with strides in the same order.

    If `flipped`, expanded operands are copied with the other order of strides.
    """
    aten = torch.ops.aten
    for gemm in graph.nodes:
        if gemm.target not in (aten.mm.default, aten.bmm.default, aten.addmm.default):
            continue
        for operand in gemm.all_input_nodes:
            value = operand.meta["val"]
            if torch.empty_like(value).stride() == value.stride():
                continue
            swaps = flipped and 0 in value.stride()[-2:]
            copied, copy = operand, torch.empty_like(value.mT if swaps else value)
            with graph.inserting_before(gemm):
                if swaps:
                    copied = graph.call_function(aten.transpose.int, (copied, -1, -2))
                    copied.meta = {**operand.meta, "val": value.mT}
                copied = graph.call_function(aten.clone.default, (copied,))
                copied.meta = {**operand.meta, "val": copy}
                if swaps:
                    copied = graph.call_function(aten.transpose.int, (copied, -1, -2))
                    copied.meta = {**operand.meta, "val": copy.mT}
            gemm.replace_input_with(operand, copied)


def _copy_what_is_written(graph: fx.Graph) -> None:
    """Make a joint graph read a copy of each input that it writes to at its end."""
    inputs = graph.find_nodes(op="placeholder")
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {write.args[0] for write in writes}.intersection(inputs)
    readers = {node: [user for user in node.users if user not in writes] for node in written}
    for node, users in readers.items():
        with graph.inserting_after(inputs[-1]):
            copied = graph.call_function(torch.ops.aten.clone.default, (node,))
        copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied, users.__contains__)


def _check_closeness(program: Program, device: str, run: Run, outcome: Outcome) -> None:
    reference = _reference(program, device)
    verdict = reference.judge(run.steps)
    if verdict.complaints:
        verdict = reference.judge(run.steps, _expected_error(program, device))
    if verdict.complaints:
        stock = _verdict_of_stock(program, device, reference)
        if stock.complaints:
            outcome.stock = stock.complaints[0]
            return
        raise Failed("close", "\n".join(verdict.complaints))
    outcome.judged, outcome.unjudged = verdict.judged, verdict.unjudged
    outcome.worst = verdict.worst


def _expected_error(program: Program, device: str) -> float:
    """Return the largest error of a gradient that the plan expects from a saved tensor."""
    plans = _ours(program.changed(observed=True), device).spy.plans
    return max((s.expected_error for plan in plans for s in plan.saved), default=0.0)


def _verdict_of_stock(program: Program, device: str, reference: Reference) -> Verdict:
    return reference.judge(_run(program, device, _stock(program)).steps)


def _reference(program: Program, device: str) -> Reference:
    return Reference(
        program.model(device),
        lambda: program.all_batches(device),
        Formats.of(program.config),
        in_mode(program, device),
        between=program.act,
    )


def _check_recompilations(program: Program, device: str, run: Run) -> None:
    """Check that guards of fp8pass do not cause more recompilations than stock PyTorch."""
    if len(run.spy.plans) < 2:
        return
    compiled = []

    def counting(gm: Any, inputs: Any) -> Any:
        compiled.append(gm)
        return stock_eager(gm, inputs)

    _run(program, device, counting)
    if len(run.spy.plans) > len(compiled):
        raise Failed(
            "recompiled", f"{len(run.spy.plans)} compilations, {len(compiled)} by stock PyTorch"
        )


def _check_plan(program: Program, device: str, run: Run) -> None:
    """Check that autograd saves the planned tensors, and no more bytes than with stock PyTorch.

    Recipe `exact` is an exception: its quantized tensors are as large as values and saved in
    addition, and its lowered `transpose` is a view.
    """
    plan = run.spy.plan
    contiguous = all(i.layout == "contiguous" for i in program.inputs.values())
    trained = any(y.requires_grad for y in run.steps[0].outputs) or plan.saved
    if plan.inference or plan.note or not trained:
        return
    exact = program.recipe == "exact"
    if contiguous and (program.compiler == "eager" or not exact):
        batch = program.batch(0, device)
        held = [x for x in batch if x.requires_grad]
        try:
            saved = count_saved(run.program, batch, [*held, *run.model.buffers()])
        except AssertionError as error:
            raise Failed("plan", str(error)) from None
        planned = count_planned(plan)
        if saved != planned:
            more, less = dict(saved - planned), dict(planned - saved)
            raise Failed("plan", f"saved but not planned {more}, planned but not saved {less}")
    # Stock PyTorch does not save the values of buffers before the forward writes to them.
    allowed = 64 + sum(b.nbytes for b in run.model.buffers())
    # Stock PyTorch repeats the last GEMM of a checkpointed region instead of saving a mask.
    if any(instruction.operator == "checkpointed" for instruction in program.code):
        allowed += sum(s.bytes for s in plan.saved if s.dtype == "bool")
    if not exact and plan.saved_bytes > (plan.stock_bytes or 0) * 1.02 + allowed:
        raise Failed("memory", f"saves {plan.saved_bytes} bytes, stock {plan.stock_bytes}")


@contextlib.contextmanager
def _lower_if_needed(program: Program) -> Iterator[None]:
    """Skip lowering that no code needs, and run `lowered` graphs op by op."""
    interpreted = lambda gm, inputs, **kwargs: compat.interpret(gm)  # noqa: E731
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Compilation, "shows_halves", False))
        if program.compiler == "lowered":
            patches.enter_context(patch.object(compat, "compile_fx_inner", interpreted))
        yield


@contextlib.contextmanager
def _same_random_numbers(program: Program) -> Iterator[None]:
    """Make Inductor draw the random numbers of eager PyTorch if results are compared with it."""
    if program.is_bitwise:
        yield
    else:
        with torch._inductor.config.patch(fallback_random=True):
            yield
