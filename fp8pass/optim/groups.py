"""Groups of values to codes and back, in fp32 and plain PyTorch, for any device.

Each row of values [R, G] is a group. Without expansion a value is `scale · code`; `scale` makes the
group's largest magnitude the format's. With Dynamic Range Expansion (COAT 4.2) a power `k` expands
the group around the format's middle `mid`, the geometric mean of its smallest and largest number:

    code = mid · (|x| / scale)^k        |x| = scale · (code / mid)^(1/k)

`scale` is the geometric mean of the group's smallest and largest magnitude, C of COAT G.4, which
keeps powers within the range of fp32, and `k` makes the group's range the format's. Scale and power
are stored in bf16, 2 bytes each for a group; codes are computed with the stored ones.

A group with a NaN or an infinity has the scale NaN, so that all its values become NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE, SMALLEST_SCALE, rounded_up, truncated
from fp8pass.optim.rounding import round_to_bf16, uniform
from fp8pass.optim.state_formats import StateFormat

EXPONENT_BITS = 0x7F800000
# Of the noise by which codes of dynamic formats are rounded.
DIGITS = 23
# A range wider than the square of the format's is cut at its lower end: smaller powers would make
# the codes of the whole group coarser for the sake of its smallest values.
MIN_POWER = 0.5
# Groups of nearly equal values need no finer codes, and larger powers amplify fp32's own errors.
MAX_POWER = 64.0
# Binades left free at each end of a format, so that errors of fp32 logarithms, and what is added to
# numbers that are rounded stochastically, do not exceed it.
SPARE = 2.0**-7


class Stored(NamedTuple):
    """A state as it is stored: codes [R, G], scales and powers bf16 [R] if the format has them."""

    codes: Tensor
    scale: Tensor | None = None
    power: Tensor | None = None


def encode(x: Tensor, format: StateFormat, bits: Tensor | None = None) -> Stored:
    """fp32 rows `x` [R, G] in `format`, rounded to nearest, or stochastically by random `bits`.

    A group in which all numbers are subnormal in fp32 becomes zero.
    """
    if not format.grouped:
        return Stored(x.to(format.dtype) if bits is None else round_to_bf16(x, bits))
    amax = x.abs().amax(-1)
    amax = torch.where(amax < SMALLEST_SCALE, 0.0, amax)
    x = torch.where(amax.unsqueeze(-1) == 0, 0.0, x)
    if not format.expands:
        scale = _scale(amax, format)
        return Stored(_codes(x * scale.float().reciprocal().unsqueeze(-1), format, bits), scale)
    scale, power = _expansion(x.abs(), amax, format)
    relative = x.abs() * scale.float().reciprocal().unsqueeze(-1)
    expanded = (power.float().unsqueeze(-1) * relative.log2()).exp2() * format.middle
    if bits is not None:
        expanded = expanded * (1 + (1 - power.float().reciprocal()) * format.lost).unsqueeze(-1)
    return Stored(_codes(expanded.copysign(x), format, bits), scale, power)


def decode(stored: Stored, format: StateFormat) -> Tensor:
    """The fp32 values [R, G] of a stored state."""
    codes, scale, power = stored
    if not format.grouped:
        return codes.float()
    assert scale is not None
    if format.values:
        values = values_of(format, codes.device)[codes.int()]
    else:
        values = codes.view(format.dtype).float()
    scale = scale.float().unsqueeze(-1)
    if power is None:
        return values * scale
    inverse = power.float().reciprocal().unsqueeze(-1)
    roots = ((values.abs() * (1 / format.middle)).log2() * inverse).exp2()
    return roots.copysign(values) * scale


def boundaries(format: StateFormat, device: torch.device) -> Tensor:
    """The boundaries between the codes of a dynamic format, fp32 [255], ascending."""
    values = torch.tensor(format.values, dtype=torch.float64)
    return ((values[1:] + values[:-1]) / 2).float().to(device)


def values_of(format: StateFormat, device: torch.device) -> Tensor:
    """The values of the codes of a dynamic format, fp32 [256]."""
    return torch.tensor(format.values, dtype=torch.float32, device=device)


def _scale(amax: Tensor, format: StateFormat) -> Tensor:
    """amax / max, rounded up to bf16, so that nothing exceeds the largest code."""
    scale = (amax * (1 / format.max)).clamp_min(SMALLEST_SCALE)
    return _of_groups(rounded_up(scale), amax, zero=1.0, not_finite=torch.nan)


def _expansion(magnitude: Tensor, amax: Tensor, format: StateFormat) -> tuple[Tensor, Tensor]:
    """Scale and power of groups, bf16 [R] each."""
    high = amax.log2()
    low = torch.where(magnitude < SMALLEST_SCALE, torch.inf, magnitude).amin(-1).log2()
    low = torch.maximum(low, high - format.span / MIN_POWER)
    scale = _of_groups(((high + low) * 0.5).exp2(), amax, zero=1.0, not_finite=torch.nan)
    center = scale.float().log2()
    reach = torch.maximum(high - center, center - low)
    power = ((format.span / 2 - SPARE) / reach).clamp_max(MAX_POWER)
    return scale, _of_groups(truncated(power), amax, zero=1.0, not_finite=1.0)


def _of_groups(x: Tensor, amax: Tensor, *, zero: float, not_finite: float) -> Tensor:
    """`x` in bf16, replaced by `zero` for groups of zeros and `not_finite` for those not finite."""
    x = torch.where(amax.isfinite(), x, not_finite)
    return torch.where(amax == 0, zero, x).to(GROUP_SCALE_DTYPE)


def _codes(x: Tensor, format: StateFormat, bits: Tensor | None) -> Tensor:
    """The codes of scaled values `x`."""
    if not format.signed:
        x = torch.where(x > 0, x.clamp_min(format.min), x)
    if format.values:
        if bits is not None:
            return _up_or_down(x, format, bits).to(format.dtype)
        return torch.bucketize(x, boundaries(format, x.device)).to(format.dtype)
    if bits is not None:
        x = _dithered(x, format, bits)
    return x.clamp(-format.max, format.max).to(format.dtype).view(format.stored)


def _dithered(x: Tensor, format: StateFormat, bits: Tensor) -> Tensor:
    """`x` rounded stochastically to the numbers of a float format.

    There is noise of as many digits as are dropped, so that the sum of both is exact.
    """
    magnitude = x.abs()
    binade = (magnitude.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    step = (binade * 2.0**-format.mantissa).clamp_min(format.min)
    return ((magnitude / step + uniform(bits, format.dropped)).floor() * step).copysign(x)


def _up_or_down(x: Tensor, format: StateFormat, bits: Tensor) -> Tensor:
    """The codes of `x` in a dynamic format, rounded stochastically."""
    values = values_of(format, x.device)
    below = (torch.bucketize(x, values, right=True) - 1).clamp(0, len(values) - 2)
    low, high = values[below], values[below + 1]
    return below + (x - low > uniform(bits, DIGITS) * (high - low))
