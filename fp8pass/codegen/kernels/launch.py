"""Launches: one Triton kernel for several programs, whose grids follow one another.

A launch takes the CPU ten to twenty microseconds. That is what a layer of hidden 2048 waits for:
its weights are quantized in five. So what can run together is launched together.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

from fp8pass import compat
from fp8pass.codegen.kernels.prelude import prelude

# Parts of a launch. Each is compiled into it, and what is common to equal programs is not shared.
MOST_PARTS = 8

_FUNCTION = """
@triton.jit
def {name}(index, {parameters}):
{body}
"""
_KERNEL = """
@triton.jit
def {name}({parameters}):
    index = tl.program_id(0)
{calls}
"""


@dataclass(frozen=True)
class Function:
    """A Triton function of `index`, the number of the Triton program that runs it, and parameters.

    Attributes:
        name: what a profiler shows.
        pointers: parameters for tensors, inputs and then results.
        sizes: run-time parameters.
        constants: compile-time parameters.
        body: the lines.
    """

    name: str
    pointers: tuple[str, ...]
    sizes: tuple[str, ...]
    constants: tuple[str, ...]
    body: str

    def source(self, name: str) -> str:
        """The function, called `name`."""
        constants = (f"{constant}: tl.constexpr" for constant in self.constants)
        parameters = ", ".join((*self.pointers, *self.sizes, *constants))
        body = textwrap.indent(self.body, " " * 4)
        return _FUNCTION.format(name=name, parameters=parameters, body=body)


@dataclass(frozen=True)
class Part:
    """What one program is in a launch.

    Attributes:
        function: what its Triton programs run.
        grid: how many there are.
        sizes: its run-time arguments.
        constants: its compile-time arguments.
        num_warps: of a Triton program.
        inputs: numbers of the tensors it reads, among the operator's.
        outputs: numbers of the tensors it writes, among the operator's results.
    """

    function: Function
    grid: Any
    sizes: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A kernel with what it is launched with.

    Attributes:
        kernel: the Triton function, of inputs `in0`, ..., results `out0`, ... and `sizes`.
        grid: how many Triton programs.
        sizes: run-time arguments.
        num_warps: of a Triton program.
        inputs: numbers of the tensors it reads, among the operator's.
        outputs: numbers of the tensors it writes, among the operator's results.
    """

    kernel: Any
    grid: Any
    sizes: dict[str, Any]
    num_warps: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Launch with an operator's inputs and results."""
        tensors = [inputs[i] for i in self.inputs] + [outputs[i] for i in self.outputs]
        self.kernel[(self.grid,)](*tensors, **self.sizes, num_warps=self.num_warps)


def launches(parts: Iterable[Part]) -> list[Launch]:
    """The launches of parts: as few as there can be."""
    return [launch(alike) for alike in grouped(parts)]


def grouped(parts: Iterable[Part]) -> list[list[Part]]:
    """Parts that share a launch: of as many warps, and not too many.

    Parts that are alike are side by side, so that models of many layers have few kernels.
    """
    by_warps: dict[int, list[Part]] = {}
    for part in sorted(parts, key=lambda part: (part.function.name, part.function.body)):
        by_warps.setdefault(part.num_warps, []).append(part)
    return [
        alike[i : i + MOST_PARTS]
        for alike in by_warps.values()
        for i in range(0, len(alike), MOST_PARTS)
    ]


def launch(parts: Sequence[Part]) -> Launch:
    """One launch of parts of as many warps."""
    inputs = tuple(i for part in parts for i in part.inputs)
    # Programs may store side by side in one.
    outputs = tuple(dict.fromkeys(i for part in parts for i in part.outputs))
    ends = list(accumulate(part.grid for part in parts))
    sizes = {f"end_{i}": end for i, end in enumerate(ends[:-1])}
    calls: list[Call] = []
    read = 0
    for number, part in enumerate(parts):
        sizes |= {f"{name}_{number}": value for name, value in part.sizes.items()}
        pointers = [f"in{read + i}" for i in range(len(part.inputs))]
        read += len(part.inputs)
        pointers += [f"out{outputs.index(i)}" for i in part.outputs]
        calls.append(Call(part.function, tuple(pointers), tuple(part.constants.items())))
    parameters = [f"in{i}" for i in range(len(inputs))]
    parameters += [f"out{i}" for i in range(len(outputs))]
    kernel = _kernel(tuple(calls), (*parameters, *sizes))
    return Launch(kernel, ends[-1], sizes, parts[0].num_warps, inputs, outputs)


@dataclass(frozen=True)
class Call:
    """A part in the source of a kernel: its function, pointers and constants."""

    function: Function
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]

    def source(self, name: str, number: int, index: str) -> str:
        """Calls the function by its `name`, as the part of a number."""
        sizes = [f"{size}={size}_{number}" for size in self.function.sizes]
        constants = [f"{constant}={value!r}" for constant, value in self.constants]
        return f"{name}({', '.join((index, *self.pointers, *sizes, *constants))})"


@cache
def _kernel(calls: tuple[Call, ...], parameters: tuple[str, ...]) -> Any:
    counted = Counter(call.function.name for call in calls)
    name = "_and_".join(x + f"_x{n}" * (n > 1) for x, n in counted.items())[:120]
    return getattr(compat.load_source(_source(name, calls, parameters)), name)


def _source(name: str, calls: Sequence[Call], parameters: Sequence[str]) -> str:
    """The Triton module of a kernel."""
    functions = list(dict.fromkeys(call.function for call in calls))
    names = {function: f"part_{i}" for i, function in enumerate(functions)}
    lines = []
    for i, call in enumerate(calls):
        index = f"index - end_{i - 1}" if i else "index"
        lines.append(_when(i, len(calls)) + call.source(names[call.function], i, index))
    return (
        prelude()
        + "".join(function.source(names[function]) for function in functions)
        + _KERNEL.format(
            name=name,
            parameters=", ".join(parameters),
            calls=textwrap.indent("\n".join(lines), " " * 4),
        )
    )


def _when(number: int, count: int) -> str:
    """Whether the index is in the part of a number, of as many, as the beginning of a line."""
    if count == 1:
        return ""
    if number == count - 1:
        return "else: "
    return f"{'elif' if number else 'if'} index < end_{number}: "
