"""Number formats: the bits of one element.

This module does not import PyTorch, so that options can be parsed without loading PyTorch.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Bytes of one scale in `scaling.GROUP_SCALE_DTYPE`.
GROUP_SCALE_BYTES = 2

# Smallest and largest number of bits in a simulated format.
EXPONENT_BITS, MANTISSA_BITS = (1, 8), (0, 23)


@dataclass(frozen=True)
class Format:
    """A number format, such as E4M3."""

    name: str
    # Dtype of stored tensors; '' if a tensor keeps its own dtype (`exact`, simulated formats).
    stored_as: str
    max: float  # the largest finite value
    mantissa: int  # the number of stored mantissa bits
    min_exponent: int  # the exponent of the smallest normal number
    # Bits of an element in each plane, lowest bits first. (4, 1) means that one tensor has four
    # bits of all elements, and another tensor the fifth bit.
    planes: tuple[int, ...] = (8,)
    # Whether the format is converted with integer arithmetic, which any GPU supports.
    emulated: bool = False
    # Bits of NaN in an emulated format, or 0 if the format has no NaN. Without NaN, only the scale
    # of a group shows that the group contained NaN or Inf.
    nan: int = 0
    multiplies: bool = False  # whether GEMMs support the format
    saves: bool = False  # whether users can choose the format for saved tensors

    @cached_property
    def dtype(self) -> torch.dtype | None:
        import torch

        return getattr(torch, self.stored_as) if self.stored_as else None

    @property
    def lossless(self) -> bool:
        return math.isinf(self.max)

    @property
    def packed(self) -> bool:
        return self.planes != (8,)

    @property
    def bits(self) -> int:
        """Bits of an element, including the sign."""
        return sum(self.planes)

    @property
    def max_exponent(self) -> int:
        return math.frexp(self.max)[1] - 1

    @property
    def relative_error(self) -> float:
        """Root-mean-square relative rounding error of a value in the format's normal range.

        For values in [1, 2), the error is uniform over a step of 2^-m, so its root mean square is
        2^-m / √12. The logarithm of the value is assumed to be uniform.
        """
        if self.lossless:
            return 0.0
        step = 2.0**-self.mantissa
        return step / math.sqrt(12) * math.sqrt((1 - 1 / 4) / (2 * math.log(2)))

    @property
    def group_multiple(self) -> int:
        """The size of a group must be a multiple of this number, to fill whole bytes of planes."""
        return 8 // min(self.planes)

    @property
    def half_step(self) -> float:
        """Largest relative rounding error of a value in the format's normal range."""
        return 0.0 if self.lossless else 2.0 ** -(self.mantissa + 1)

    @property
    def keeps_signs(self) -> bool:
        """Whether the format rounds so few values to zero that almost all keep their sign."""
        return self.flushed_share < 2.0**-11

    @property
    def flushed_share(self) -> float:
        """The fraction of a group's amax up to which elements are rounded to zero."""
        return 0.0 if self.lossless else 2.0 ** (self.min_exponent - self.mantissa - 1) / self.max

    def stored_bytes(self, elements: int, group_size: int) -> float:
        """Return the bytes of data and scales; infinite if a group does not fill whole bytes."""
        if group_size % self.group_multiple:
            return math.inf
        return elements * self.bits // 8 + elements // group_size * GROUP_SCALE_BYTES


E4M3 = Format("e4m3", "float8_e4m3fn", 448.0, 3, -6, multiplies=True, saves=True)
E5M2 = Format("e5m2", "float8_e5m2", 57344.0, 2, -14, multiplies=True)
EXACT = Format("exact", "", math.inf, 0, 0)
# E4M3 stored as uint8, for GPUs before Ada (sm89), on which Triton has no cast to E4M3.
E4M3_BYTES = Format("e4m3_bytes", "uint8", 448.0, 3, -6, emulated=True, nan=0x7F)
# In these formats all bit patterns are finite numbers, as in OCP's FP4 and FP6.
E2M1 = Format("e2m1", "uint8", 6.0, 1, 0, (4,), emulated=True, saves=True)
E2M2 = Format("e2m2", "uint8", 7.0, 2, 0, (4, 1), emulated=True, saves=True)
E2M3 = Format("e2m3", "uint8", 7.5, 3, 0, (4, 2), emulated=True, saves=True)
# E2M5 has 8 bits, like E4M3. Its two more mantissa bits divide the error by four; its range is
# smaller.
E2M5 = Format("e2m5", "uint8", 7.875, 5, 0, emulated=True)

FORMATS: dict[str, Format] = {
    f.name: f for f in (E4M3, E5M2, EXACT, E4M3_BYTES, E2M1, E2M2, E2M3, E2M5)
}

SAVED_FORMATS = tuple(sorted((f for f in FORMATS.values() if f.saves), key=lambda f: f.bits))


@cache
def simulated_format(name: str) -> Format:
    """Return the format with a name such as `e8m3`: 8 exponent bits and 3 mantissa bits.

    Formats that are not in `FORMATS` follow IEEE 754: E8M7 is bfloat16. With one exponent bit, a
    format has only normal numbers, with magnitudes in [2, 4).

    Raises:
        ValueError: the name is not `ExMy`, or the format has more bits than float32.
    """
    match = re.fullmatch(r"e(\d+)m(\d+)", name)
    exponent, mantissa = map(int, match.groups()) if match else (0, 0)
    in_range = EXPONENT_BITS[0] <= exponent <= EXPONENT_BITS[1] and mantissa <= MANTISSA_BITS[1]
    if not match or not in_range:
        raise ValueError(
            f"{name!r} is not a format. A format has 1 to 8 exponent bits and 0 to 23 mantissa "
            "bits, such as 'e4m3'."
        )
    if name in FORMATS:
        return FORMATS[name]
    bias = 2 ** (exponent - 1) - 1
    largest = (2 - 2.0**-mantissa) * 2.0 ** max(bias, 1 - bias)
    return Format(name, "", largest, mantissa, 1 - bias, (1 + exponent + mantissa,))


def divisor_group(length: int, group_size: int, multiple: int = 1) -> int | None:
    """Return the largest group size from 16 to `group_size` that divides `length`.

    The size must be a multiple of `multiple`. Return None if there is no such size.
    """
    for size in range(min(group_size, length), 15, -1):
        if length % size == 0 and size % multiple == 0:
            return size
    return None
