"""Formats of optimizer states, and quantization of fp32 values to these formats, on any device.

`bf16` and `fp32` store values directly. Otherwise a group of consecutive elements, a row of [R, G],
shares a scale: `x = scale · code`. Formats with `+expand` use Dynamic Range Expansion (paper COAT,
section 4.2): a power `k` maps the range of the group to the range of the format.

    code = mid · (|x| / scale)^k        |x| = scale · (code / mid)^(1/k)

`mid` is the geometric mean of the smallest positive and the largest code. `scale` is the geometric
mean of the group's smallest and largest magnitudes (`C` in appendix G.4 of COAT), so that the power
does not overflow fp32. `scale` and `k` are stored in bf16. A group that contains NaN or infinity
gets the scale NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp8pass.dialect.formats import E4M3, E5M2, Format
from fp8pass.dialect.scaling import (
    EXPONENT_MASK,
    GROUP_SCALE_DTYPE,
    SMALLEST_SCALE,
    round_up_to_bf16,
    truncate_to_bf16,
)
from fp8pass.optim.rounding import round_to_bf16, uniform
from fp8pass.option_checks import ConfigError, unknown

EXPAND = "+expand"
DYNAMIC_DECADES = 7
# Number of consecutive elements that share a scale in a sum of gradients.
SUM_GROUP_SIZE = 128
# Noise bits of stochastic rounding to dynamic formats (`de8`).
DIGITS = 23
# A smaller power would represent the smallest values of a very wide group, but would make the whole
# group coarser.
MIN_POWER = 0.5
# Groups of nearly equal values do not need finer codes. Larger powers amplify fp32 rounding errors.
MAX_POWER = 64.0
# Binades left free at each end of a format, for errors of fp32 logarithms and rounding noise.
SPARE = 2.0**-7


@dataclass(frozen=True)
class StateFormat:
    """A number format of optimizer states.

    Positive values of an unsigned state (the second moment) never round to zero, because the update
    divides by the state.
    """

    name: str  # as written in options
    dtype: torch.dtype
    max: float = math.inf  # largest code; infinite if values are stored directly
    min: float = 0.0  # smallest positive code
    signed: bool = True  # whether the state has negative values
    mantissa: int = 0  # bits of the magnitude below the exponent; 0 if codes are indices
    expands: bool = False  # whether Dynamic Range Expansion is used
    values: tuple[float, ...] = ()  # of all codes, ascending; () if PyTorch has the dtype

    @property
    def grouped(self) -> bool:
        """Whether each group of codes has a scale."""
        return math.isfinite(self.max)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Return uint8 for 8-bit codes, because every operator supports uint8."""
        return torch.uint8 if self.dtype.itemsize == 1 else self.dtype

    @property
    def zero_code(self) -> int:
        return self.values.index(0.0) if self.values else 0

    @property
    def span(self) -> float:
        """Binades from the smallest positive to the largest code."""
        return math.log2(self.max / self.min)

    @property
    def middle(self) -> float:
        """Geometric mean of the smallest positive and the largest code."""
        return math.sqrt(self.max * self.min)

    @property
    def mean_loss(self) -> float:
        """Relative correction of codes that preserves the mean of dequantized values.

        Stochastic rounding preserves the mean of codes, but the mean of the p-th power loses (1 -
        p) · p/2 · variance / code². In float formats, variance / code² is a twelfth of the squared
        distance between adjacent codes, averaged over a binade. Dynamic formats need no correction.
        """
        return 4.0**-self.mantissa / (32 * math.log(2)) if self.mantissa else 0.0

    @property
    def parts(self) -> tuple[str, ...]:
        """Fields of `Quantized` with one number for each group."""
        return ("scale", "power")[: 1 + self.expands] if self.grouped else ()


def dynamic_values(*, signed: bool) -> tuple[float, ...]:
    """Return the 256 values of the 8-bit dynamic exponent (Dettmers et al. 2021), ascending.

    The values of decade `d`, [0.1, 1]·10^-d, are midpoints of equal intervals. Each of the seven
    decades has half as many values as the next larger decade. 0 and 1 are added.
    """
    positive = []
    for decade in range(DYNAMIC_DECADES):
        count = 2 ** (DYNAMIC_DECADES - 1 - decade + (not signed))
        midpoints = (0.1 + 0.9 * (i + 0.5) / count for i in range(count))
        positive += [x * 10.0**-decade for x in midpoints]
    negative = [-x for x in positive] if signed else []
    return tuple(sorted((*negative, 0.0, *positive, 1.0)))


def _make_float_format(format: Format) -> StateFormat:
    smallest = 2.0 ** (format.min_exponent - format.mantissa)
    assert format.dtype is not None
    return StateFormat(format.name, format.dtype, format.max, smallest, mantissa=format.mantissa)


PLAIN = {"bf16": StateFormat("bf16", torch.bfloat16), "fp32": StateFormat("fp32", torch.float32)}
_GROUPED = {
    "e4m3": _make_float_format(E4M3),
    "e5m2": _make_float_format(E5M2),
    "fp16": StateFormat("fp16", torch.float16, 65504.0, 2.0**-24, mantissa=10),
    "de8": StateFormat("de8", torch.uint8, 1.0),
    "int8": StateFormat("int8", torch.int8, 127.0, 1.0, mantissa=7),
}
# FP16 does not need expansion, because its range is wide enough for any group.
EXPANDABLE = ("e4m3", "e5m2", "de8")
ALL_FORMATS = (*_GROUPED, *(f"{name}{EXPAND}" for name in EXPANDABLE), *PLAIN)
# AdamW divides moments elementwise, so small elements need small errors. The errors of `int8` are
# equal for all elements of a group.
MOMENT_FORMATS = tuple(name for name in ALL_FORMATS if name != "int8")


@cache
def moment_format(
    name: str, *, signed: bool, choices: tuple[str, ...] = MOMENT_FORMATS
) -> StateFormat:
    """Return the format `name`. Raise ConfigError if it is not among `choices`."""
    if name not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"{unknown('format', name, choices)} Formats: {listed}.")
    if name in PLAIN:
        return PLAIN[name]
    base = _GROUPED[name.removesuffix(EXPAND)]
    values = dynamic_values(signed=signed) if base.name == "de8" else ()
    smallest = min((x for x in values if x > 0), default=base.min)
    # The largest code must exist with both signs. Otherwise the most negative value of a group
    # would be clipped in every addition to a sum of gradients.
    largest = min(max(values), -min(values)) if values and signed else base.max
    expands = name.endswith(EXPAND)
    return replace(
        base, name=name, max=largest, min=smallest, signed=signed, expands=expands, values=values
    )


class Quantized(NamedTuple):
    """Data [R, G], with scales and powers in bf16 [R] if the format has them."""

    data: Tensor
    scale: Tensor | None = None
    power: Tensor | None = None


def quantize(x: Tensor, format: StateFormat, bits: Tensor | None = None) -> Quantized:
    """Convert fp32 rows `x` [R, G] to `format`. Each row is a group.

    A row becomes zero if all its values are subnormal in fp32. With random int32 `bits` [R, G],
    rounding is stochastic, otherwise to nearest.
    """
    if not format.grouped:
        return Quantized(x.to(format.dtype) if bits is None else round_to_bf16(x, bits))
    amax = x.abs().amax(-1)
    amax = torch.where(amax < SMALLEST_SCALE, 0.0, amax)
    x = torch.where(amax.unsqueeze(-1) == 0, 0.0, x)
    if not format.expands:
        # The scale is rounded up to bf16, so that no scaled value exceeds the largest code.
        scale = round_up_to_bf16((amax * (1 / format.max)).clamp_min(SMALLEST_SCALE))
        scale = _select_by_group(scale, amax, not_finite=torch.nan)
        x = x * scale.float().reciprocal().unsqueeze(-1)
        return Quantized(_round_to_codes(x, format, bits), scale)
    scale, power = _compute_expansion(x.abs(), amax, format)
    relative = x.abs() * scale.float().reciprocal().unsqueeze(-1)
    expanded = (power.float().unsqueeze(-1) * relative.log2()).exp2() * format.middle
    if bits is not None:
        correction = 1 + (1 - power.float().reciprocal()) * format.mean_loss
        expanded = expanded * correction.unsqueeze(-1)
    return Quantized(_round_to_codes(expanded.copysign(x), format, bits), scale, power)


def dequantize(stored: Quantized, format: StateFormat) -> Tensor:
    """Return the dequantized values, fp32 [R, G]."""
    data, scale, power = stored
    if not format.grouped:
        return data.float()
    assert scale is not None
    if format.values:
        values = values_of(format, data.device)[data.int()]
    else:
        values = data.view(format.dtype).float()
    scale = scale.float().unsqueeze(-1)
    if power is None:
        return values * scale
    inverse = power.float().reciprocal().unsqueeze(-1)
    roots = ((values.abs() * (1 / format.middle)).log2() * inverse).exp2()
    return roots.copysign(values) * scale


def values_of(format: StateFormat, device: torch.device) -> Tensor:
    """Return the values of all codes of a dynamic format, fp32 [256]."""
    return torch.tensor(format.values, dtype=torch.float32, device=device)


def _compute_expansion(
    magnitude: Tensor, amax: Tensor, format: StateFormat
) -> tuple[Tensor, Tensor]:
    """Return the scale and the power of each group, bf16 [R]."""
    high = amax.log2()
    low = torch.where(magnitude < SMALLEST_SCALE, torch.inf, magnitude).amin(-1).log2()
    low = torch.maximum(low, high - format.span / MIN_POWER)
    scale = _select_by_group(((high + low) * 0.5).exp2(), amax, not_finite=torch.nan)
    center = scale.float().log2()
    reach = torch.maximum(high - center, center - low)
    power = ((format.span / 2 - SPARE) / reach).clamp_max(MAX_POWER)
    return scale, _select_by_group(truncate_to_bf16(power), amax, not_finite=1.0)


def _select_by_group(x: Tensor, amax: Tensor, *, not_finite: float) -> Tensor:
    """Return bf16 `x`, but 1 where `amax` is 0, and `not_finite` where `amax` is not finite."""
    x = torch.where(amax.isfinite(), x, not_finite)
    return torch.where(amax == 0, 1.0, x).to(GROUP_SCALE_DTYPE)


def _round_to_codes(x: Tensor, format: StateFormat, bits: Tensor | None) -> Tensor:
    if not format.signed:
        x = torch.where(x > 0, x.clamp_min(format.min), x)
    if format.values:
        if bits is None:
            exact = torch.tensor(format.values, dtype=torch.float64)
            boundaries = ((exact[1:] + exact[:-1]) / 2).float().to(x.device)
            return torch.bucketize(x, boundaries).to(format.dtype)
        values = values_of(format, x.device)
        below = (torch.bucketize(x, values, right=True) - 1).clamp(0, len(values) - 2)
        low, high = values[below], values[below + 1]
        return (below + (x - low > uniform(bits, DIGITS) * (high - low))).to(format.dtype)
    if bits is not None:
        magnitude = x.abs()
        binade = (magnitude.view(torch.int32) & EXPONENT_MASK).view(torch.float32)
        step = (binade * 2.0**-format.mantissa).clamp_min(format.min)
        # The noise has as many bits as rounding removes from fp32's mantissa, so the sum is exact.
        noise = uniform(bits, 23 - format.mantissa)
        x = ((magnitude / step + noise).floor() * step).copysign(x)
    elif format.dtype == torch.int8:
        x = x.round()
    return x.clamp(-format.max, format.max).to(format.dtype).view(format.storage_dtype)
