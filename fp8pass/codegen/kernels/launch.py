"""Launch several programs as one Triton kernel, with concatenated grids.

A launch takes 10 to 20 microseconds on the CPU. The GPU quantizes a weight of hidden size 2048 in
5 microseconds.
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
from fp8pass.codegen.kernels.device_functions import shared_source

# The most programs in one kernel. Each program makes the compiled kernel larger, even if the kernel
# already contains an equal program.
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
    """The Triton function of a `Program`. Its first parameter is the program id within its grid."""

    name: str  # the name that profilers show
    pointers: tuple[str, ...]  # tensor parameters: first inputs, then results
    sizes: tuple[str, ...]  # run-time parameters
    constants: tuple[str, ...]  # compile-time parameters
    body: str

    def source(self, name: str) -> str:
        constants = (f"{constant}: tl.constexpr" for constant in self.constants)
        parameters = ", ".join((*self.pointers, *self.sizes, *constants))
        body = textwrap.indent(self.body, " " * 4)
        return _FUNCTION.format(name=name, parameters=parameters, body=body)


@dataclass(frozen=True)
class LaunchPart:
    """One program in a launch."""

    function: Function
    grid: Any  # number of Triton programs
    sizes: dict[str, Any]  # run-time arguments, by parameter name
    constants: dict[str, Any]  # compile-time arguments, by parameter name
    num_warps: int
    inputs: tuple[int, ...] = ()  # indices of the operator's inputs that the kernel reads
    outputs: tuple[int, ...] = ()  # indices of the operator's results that the kernel writes


@dataclass(frozen=True)
class Launch:
    """A Triton kernel and its arguments."""

    kernel: Any  # parameters: inputs `in0`, ..., results `out0`, ..., and the names in `sizes`
    grid: Any
    sizes: dict[str, Any]
    num_warps: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        tensors = [inputs[i] for i in self.inputs] + [outputs[i] for i in self.outputs]
        self.kernel[(self.grid,)](*tensors, **self.sizes, num_warps=self.num_warps)


def plan_launches(parts: Iterable[LaunchPart]) -> list[Launch]:
    return [build_launch(group) for group in group_into_launches(parts)]


def group_into_launches(parts: Iterable[LaunchPart]) -> list[list[LaunchPart]]:
    """Group parts by number of warps, sorted so that repeated layers have equal launches."""
    by_warps: dict[int, list[LaunchPart]] = {}
    for part in sorted(parts, key=lambda part: (part.function.name, part.function.body)):
        by_warps.setdefault(part.num_warps, []).append(part)
    return [
        same_warps[i : i + MOST_PARTS]
        for same_warps in by_warps.values()
        for i in range(0, len(same_warps), MOST_PARTS)
    ]


def build_launch(parts: Sequence[LaunchPart]) -> Launch:
    inputs = tuple(i for part in parts for i in part.inputs)
    # Parts that write to different columns of one result share one parameter.
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
    kernel = _load_kernel(tuple(calls), (*parameters, *sizes))
    return Launch(kernel, ends[-1], sizes, parts[0].num_warps, inputs, outputs)


@dataclass(frozen=True)
class Call:
    function: Function
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]

    def source(self, name: str, number: int, index: str) -> str:
        """Return the source that calls the function `name` for part `number` of the launch."""
        sizes = [f"{size}={size}_{number}" for size in self.function.sizes]
        constants = [f"{constant}={value!r}" for constant, value in self.constants]
        return f"{name}({', '.join((index, *self.pointers, *sizes, *constants))})"


@cache
def _load_kernel(calls: tuple[Call, ...], parameters: tuple[str, ...]) -> Any:
    name = _name_kernel(calls)
    return getattr(compat.load_source(_write_kernel(name, calls, parameters)), name)


def _name_kernel(calls: Sequence[Call]) -> str:
    """Return a name that counts the calls of each function, e.g. `norm_x3_and_silu`."""
    counts = Counter(call.function.name for call in calls)
    words = (name if count == 1 else f"{name}_x{count}" for name, count in counts.items())
    return "_and_".join(words)[:120]


def _write_kernel(name: str, calls: Sequence[Call], parameters: Sequence[str]) -> str:
    functions = list(dict.fromkeys(call.function for call in calls))
    names = {function: f"part_{i}" for i, function in enumerate(functions)}
    lines = []
    for i, call in enumerate(calls):
        index = f"index - end_{i - 1}" if i else "index"
        lines.append(_write_condition(i, len(calls)) + call.source(names[call.function], i, index))
    return (
        shared_source()
        + "".join(function.source(names[function]) for function in functions)
        + _KERNEL.format(
            name=name,
            parameters=", ".join(parameters),
            calls=textwrap.indent("\n".join(lines), " " * 4),
        )
    )


def _write_condition(number: int, count: int) -> str:
    """Return the source that tests whether the program id lies in part `number` of `count`."""
    if count == 1:
        return ""
    if number == count - 1:
        return "else: "
    return f"{'elif' if number else 'if'} index < end_{number}: "
