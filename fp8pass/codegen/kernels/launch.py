"""Launches: one Triton kernel for several programs, whose grids follow one another.

A launch takes the CPU ten to twenty microseconds, while the GPU quantizes a weight of a layer of
hidden 2048 in five: small layers wait for launches. So programs that can run together share one.
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

# Parts of a launch. Each adds to the size of the compiled kernel, even if several are equal.
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
    """A Triton function that computes a program; its first parameter is `index`, a program id.

    Attributes:
        name: the name that profilers show.
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
class LaunchPart:
    """One program in a launch.

    Attributes:
        function: the Triton function that computes it.
        grid: how many Triton programs run the function.
        sizes: run-time arguments.
        constants: compile-time arguments.
        num_warps: warps of a Triton program.
        inputs: which of the operator's inputs are read.
        outputs: which of the operator's results are written.
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
    """A Triton kernel and its arguments.

    Attributes:
        kernel: the Triton function, of inputs `in0`, ..., results `out0`, ... and `sizes`.
        grid: how many Triton programs run it.
        sizes: run-time arguments.
        num_warps: warps of a Triton program.
        inputs: which of the operator's inputs are read.
        outputs: which of the operator's results are written.
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


def launches(parts: Iterable[LaunchPart]) -> list[Launch]:
    """The launches that run parts, as few as possible."""
    return [launch(group) for group in parts_by_launch(parts)]


def parts_by_launch(parts: Iterable[LaunchPart]) -> list[list[LaunchPart]]:
    """The parts of each launch: at most `MOST_PARTS`, with the same number of warps.

    Parts of the same function are neighbours, so that models of many layers have few kernels.
    """
    by_warps: dict[int, list[LaunchPart]] = {}
    for part in sorted(parts, key=lambda part: (part.function.name, part.function.body)):
        by_warps.setdefault(part.num_warps, []).append(part)
    return [
        same_warps[i : i + MOST_PARTS]
        for same_warps in by_warps.values()
        for i in range(0, len(same_warps), MOST_PARTS)
    ]


def launch(parts: Sequence[LaunchPart]) -> Launch:
    """One launch of parts with the same number of warps."""
    inputs = tuple(i for part in parts for i in part.inputs)
    # Several programs may write to one result, side by side.
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
    """How the source of a kernel calls the function of a part."""

    function: Function
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]

    def source(self, name: str, number: int, index: str) -> str:
        """The call of the function `name` by part `number`, which starts at `index`."""
        sizes = [f"{size}={size}_{number}" for size in self.function.sizes]
        constants = [f"{constant}={value!r}" for constant, value in self.constants]
        return f"{name}({', '.join((index, *self.pointers, *sizes, *constants))})"


@cache
def _kernel(calls: tuple[Call, ...], parameters: tuple[str, ...]) -> Any:
    name = _name(calls)
    return getattr(compat.load_source(_source(name, calls, parameters)), name)


def _name(calls: Sequence[Call]) -> str:
    """The name of a kernel: its functions, and how often each is called if more than once."""
    counts = Counter(call.function.name for call in calls)
    words = (name if count == 1 else f"{name}_x{count}" for name, count in counts.items())
    return "_and_".join(words)[:120]


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
    """The condition before a call: that the index lies in part `number` of `count`."""
    if count == 1:
        return ""
    if number == count - 1:
        return "else: "
    return f"{'elif' if number else 'if'} index < end_{number}: "
