"""Pieces of Triton source that both kernels write: operators, codes, names, pointers."""

from __future__ import annotations

import math

from fp8pass.codegen.kernels.prelude import quotient_of
from fp8pass.codegen.program.ir import Load, Program, Step
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.pointwise import triton_template

# The Triton types of codes, by format.
CODE_TYPES = {"e4m3": "tl.float8e4nv"}
# Formats that kernels read and store in groups.
GROUP_FORMATS = frozenset({*CODE_TYPES, *(f.name for f in FORMATS.values() if f.in_nibbles)})


def expression(step: Step) -> str | None:
    """The Triton of a step that is no reduction, None where there is none."""
    if step.target == "scale":
        amax, format = step.args
        return f"power_of_two({quotient_of(amax, format)})"
    template = triton_template(step.target, step.args)
    return template and template.format(*map(_literal, step.args))


def _literal(argument: str | float) -> str:
    """A name as it is, a number in parentheses."""
    if isinstance(argument, str):
        return argument
    return f"({argument!r})" if math.isfinite(argument) else f"float('{argument}')"


def kernel_name(kind: str, program: Program) -> str:
    """The name that profilers show: the kind of kernel, and the operators that it computes."""
    targets = [step.target.split(".")[1] for step in program.steps if "." in step.target]
    words = [kind, *dict.fromkeys(targets)]
    if program.takes_amaxes:
        words.append("amax")
    elif not targets:
        words.append("scale" if program.finishes_amax else "cast")
    return "_".join(words)[:80]


def coded(value: str, scale: str) -> str:
    """A value divided by its scale. The conversion to codes rounds, saturates and keeps NaN."""
    return f"({value} * tl.div_rn(1.0, {scale}))"


def pointers(program: Program) -> dict[Load, list[str]]:
    """The pointer parameters of each load."""
    found, number = {}, 0
    for load in program.loads:
        count = 2 if load.operand == "groups" else 1
        found[load] = [f"in{number + i}" for i in range(count)]
        number += count
    return found
