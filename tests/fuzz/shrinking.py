"""Shrink a failing program as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .checks import Outcome
from .drawing import remove_unused, runs
from .program import Program

Check = Callable[[Program], Outcome]


def shrink(program: Program, failure: str, check: Check, seconds: float = 120.0) -> Program:
    """Return the smallest program with the same kind of failure that is found in the time."""
    end = time.monotonic() + seconds
    shrunk = True
    while shrunk and time.monotonic() < end:
        shrunk = False
        for smaller in _smaller(program):
            if time.monotonic() > end:
                break
            if smaller != program and runs(smaller) and check(smaller).failure == failure:
                program, shrunk = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield simpler programs, the simplest first."""
    yield from _fewer_results(program)
    yield from _fewer_instructions(program)
    yield from _simpler_compilation(program)
    yield from _simpler_inputs(program)
    yield from _simpler_parameters(program)
    yield from _smaller_sizes(program)


def _fewer_results(program: Program) -> Iterator[Program]:
    for name in program.returned:
        if len(program.returned) > 1:
            yield remove_unused(program.changed(returned=(name,)))
    for name in program.returned:
        rest = tuple(r for r in program.returned if r != name)
        if rest:
            yield remove_unused(program.changed(returned=rest))


def _fewer_instructions(program: Program) -> Iterator[Program]:
    """Yield programs without an instruction. Its readers read one of its operands instead."""
    for removed in reversed(program.code):
        for operand in dict.fromkeys(removed.operands):
            named = {removed.name: operand}
            code = tuple(i.with_operands(named) for i in program.code if i is not removed)
            results = tuple(dict.fromkeys(named.get(r, r) for r in program.returned))
            computed = tuple(r for r in results if r not in program.inputs)
            if computed:
                yield remove_unused(program.changed(code=code, returned=computed))


def _simpler_compilation(program: Program) -> Iterator[Program]:
    if program.dynamic:
        yield program.changed(dynamic=False, batches=program.batches[:1])
    for i, event in enumerate(program.events):
        if event:
            yield program.changed(events=(*program.events[:i], "", *program.events[i + 1 :]))
    if len(program.batches) > 1:
        yield program.changed(batches=program.batches[:1])
    for name in program.options:
        yield program.changed(options={k: v for k, v in program.options.items() if k != name})
    for compiler in ("eager", "lowered"):
        if program.compiler not in (compiler, "eager"):
            yield program.changed(compiler=compiler)
    if program.dtype != "float32":
        yield program.changed(dtype="float32")
    if program.recipe in ("agoq", "linear"):
        yield program.changed(recipe="coat")


def _simpler_inputs(program: Program) -> Iterator[Program]:
    for name, value in program.inputs.items():
        for change in ({"layout": "contiguous"}, {"grad": False}):
            simpler = value.changed(**change)
            yield program.changed(inputs={**program.inputs, name: simpler})


def _simpler_parameters(program: Program) -> Iterator[Program]:
    for name, p in program.parameters.items():
        if p.trained and not p.buffer:
            yield program.changed(parameters={**program.parameters, name: p.changed(trained=False)})


def _smaller_sizes(program: Program) -> Iterator[Program]:
    for name, size in program.batches[0].items():
        for smaller in (1, 2, 16):
            if smaller < size:
                yield program.changed(batches=tuple({**b, name: smaller} for b in program.batches))
    widths = {d for p in program.parameters.values() for d in p.shape}
    for width in sorted(widths, reverse=True):
        for smaller in (16, 32):
            if smaller < width:
                yield _renamed_width(program, width, smaller)


def _renamed_width(program: Program, width: int, smaller: int) -> Program:
    """Replace a width by a smaller width everywhere."""

    def sizes(dims: tuple) -> tuple:
        return tuple(smaller if d == width else d for d in dims)

    return program.changed(
        inputs={n: i.changed(dims=sizes(i.dims)) for n, i in program.inputs.items()},
        parameters={n: p.changed(shape=sizes(p.shape)) for n, p in program.parameters.items()},
    )
