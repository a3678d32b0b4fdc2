"""Pieces of Triton source that row and tile kernels share: operators, casts, names, pointers."""

from __future__ import annotations

import math

from fp8pass.codegen.kernels.device_functions import call_quotient_of
from fp8pass.codegen.program.ir import Load, Program, Step
from fp8pass.dialect.formats import FORMATS
from fp8pass.graph.pointwise import triton_template

TRITON_TYPES = {"e4m3": "tl.float8e4nv"}
GROUP_FORMATS = frozenset({*TRITON_TYPES, *(f.name for f in FORMATS.values() if f.packed)})


def write_expression(step: Step) -> str | None:
    if step.target == "scale":
        amax, format = step.args
        return f"power_of_two({call_quotient_of(amax, format)})"
    template = triton_template(step.target, step.args)
    return template and template.format(*map(_write_argument, step.args))


def _write_argument(argument: str | float) -> str:
    if isinstance(argument, str):
        return argument
    return f"({argument!r})" if math.isfinite(argument) else f"float('{argument}')"


def name_kernel(kind: str, program: Program) -> str:
    """Return the name that profilers show, e.g. `rows_mul_sigmoid`."""
    targets = [step.target.split(".")[1] for step in program.steps if "." in step.target]
    words = [kind, *dict.fromkeys(targets)]
    if program.reduces_tiles:
        words += sorted({layout for store in program.stores for layout in store.layouts})
    elif not targets:
        words.append("scale" if program.finishes_amax else "cast")
    return "_".join(words)[:80]


def divide_by_scale(value: str, scale: str) -> str:
    """Return an expression of the quotient, which the caller casts to the FP8 format."""
    return f"({value} * tl.div_rn(1.0, {scale}))"


def name_pointers(program: Program) -> dict[Load, list[str]]:
    found, number = {}, 0
    for load in program.loads:
        found[load] = [f"in{number + i}" for i in range(load.tensor_count)]
        number += load.tensor_count
    return found
