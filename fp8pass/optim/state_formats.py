"""The formats of optimizer states: an element format, with or without Dynamic Range Expansion.

`bf16` and `fp32` hold values as they are. In other formats a 1×G group shares a scale, and if the
name ends in `+expand` also a power (`groups.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from fp8pass.config import ConfigError, unknown
from fp8pass.dialect.formats import E4M3, E5M2, Format

EXPAND = "+expand"
DYNAMIC_DECADES = 7


@dataclass(frozen=True)
class StateFormat:
    """One way to store a state.

    Attributes:
        name: as in the options.
        dtype: dtype of an element.
        max: the largest code; infinite if values are stored as they are.
        min: the smallest code above zero.
        signed: whether the state has negative values. An unsigned state is a divisor and is never
            rounded to zero.
        mantissa: stored mantissa bits of codes that are floats.
        expands: whether each group's range is mapped to the format's.
        values: the values of the codes 0, 1, ..., ascending, of a format without PyTorch dtype.
    """

    name: str
    dtype: torch.dtype
    max: float = math.inf
    min: float = 0.0
    signed: bool = True
    mantissa: int = 0
    expands: bool = False
    values: tuple[float, ...] = ()

    @property
    def grouped(self) -> bool:
        """Whether the state consists of codes with a scale for each group."""
        return math.isfinite(self.max)

    @property
    def stored(self) -> torch.dtype:
        """The dtype of stored tensors; uint8 for codes of a byte, as all of PyTorch supports it."""
        return torch.uint8 if self.dtype.itemsize == 1 else self.dtype

    @property
    def rounds(self) -> bool:
        """Whether it does not hold every fp32 number."""
        return self.dtype != torch.float32

    @property
    def dropped(self) -> int:
        """How many of fp32's mantissa bits a code that is a float does not have."""
        return 23 - self.mantissa

    @property
    def zero(self) -> int:
        """The code of 0."""
        return self.values.index(0.0) if self.values else 0

    @property
    def span(self) -> float:
        """Binades between the smallest and the largest code."""
        return math.log2(self.max / self.min)

    @property
    def middle(self) -> float:
        """The geometric mean of the smallest and the largest code."""
        return math.sqrt(self.max * self.min)

    @property
    def lost(self) -> float:
        """What stochastic rounding takes from the mean of values with a large power of expansion.

        It keeps the mean of codes, of which a power p keeps (1 - p) · p/2 · variance / code² less.
        Relative to codes, and for floats: a twelfth of the squared distance of two codes, on
        average over a binade. That of dynamic formats is not worth a correction.
        """
        return 4.0**-self.mantissa / (32 * math.log(2)) if self.mantissa else 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        """The tensors stored beside the codes: scales of the groups, and powers."""
        if not self.grouped:
            return ()
        return ("scale", "power") if self.expands else ("scale",)


def dynamic_values(*, signed: bool) -> tuple[float, ...]:
    """The 256 values of the 8-bit dynamic exponent (Dettmers et al. 2021), ascending.

    Decade `d` of seven, [0.1, 1]·10^-d, has half as many values as the decade above it: midpoints
    of equal intervals. 0 and 1 complete them.
    """
    positive = []
    for decade in range(DYNAMIC_DECADES):
        count = 2 ** (DYNAMIC_DECADES - 1 - decade + (not signed))
        midpoints = (0.1 + 0.9 * (i + 0.5) / count for i in range(count))
        positive += [x * 10.0**-decade for x in midpoints]
    negative = [-x for x in positive] if signed else []
    return tuple(sorted((*negative, 0.0, *positive, 1.0)))


def _of_floats(format: Format) -> StateFormat:
    smallest = 2.0 ** (format.min_exponent - format.mantissa)
    assert format.dtype is not None
    return StateFormat(format.name, format.dtype, format.max, smallest, mantissa=format.mantissa)


PLAIN = {
    "bf16": StateFormat("bf16", torch.bfloat16),
    "fp32": StateFormat("fp32", torch.float32),
}
_GROUPED = {
    "e4m3": _of_floats(E4M3),
    "e5m2": _of_floats(E5M2),
    "fp16": StateFormat("fp16", torch.float16, 65504.0, 2.0**-24, mantissa=10),
    "de8": StateFormat("de8", torch.uint8, 1.0),
}
# FP16 needs no expansion: its range is wide enough for any group.
EXPANDABLE = ("e4m3", "e5m2", "de8")
MOMENT_FORMATS = (*_GROUPED, *(f"{name}{EXPAND}" for name in EXPANDABLE), *PLAIN)


@cache
def moment_format(name: str, *, signed: bool) -> StateFormat:
    """The format `name` for a moment, `signed` if it has negative values.

    Raises:
        ConfigError: there is no such format.
    """
    if name not in MOMENT_FORMATS:
        listed = ", ".join(map(repr, MOMENT_FORMATS))
        raise ConfigError(f"{unknown('format', name, MOMENT_FORMATS)} Formats: {listed}.")
    if name in PLAIN:
        return PLAIN[name]
    base = _GROUPED[name.removesuffix(EXPAND)]
    values = dynamic_values(signed=signed) if base.name == "de8" else ()
    smallest = min((x for x in values if x > 0), default=base.min)
    # The largest magnitude of both signs: -1 would be cut, and a sum lose by it in every addition.
    largest = min(max(values), -min(values)) if values and signed else base.max
    return replace(
        base,
        name=name,
        max=largest,
        min=smallest,
        signed=signed,
        expands=name.endswith(EXPAND),
        values=values,
    )
