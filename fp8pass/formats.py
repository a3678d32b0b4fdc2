"""Number formats: what one stored element looks like and what storing it costs.

A *format* says how an element is coded (`E4M3`, `E5M2`, ...), a *granularity* how many elements
share one scale: a whole tensor (linear layers) or 1×G groups along the last dimension (saved
activations), COAT section 5.2. Everywhere `x ≈ data * scale` with `scale = amax / format.max`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One element format.

    `dtype` is the storage dtype, None where the format keeps the tensor's own (`exact`). `max` is
    the largest finite value, `mantissa` the number of stored mantissa bits. `emulated` formats are
    coded with integer arithmetic, for GPUs that cannot convert to `torch.float8_*` themselves.
    """

    name: str
    dtype: torch.dtype | None
    max: float
    mantissa: int
    min_exponent: int
    emulated: bool = False

    @property
    def lossless(self) -> bool:
        """Whether storing in this format returns the very same tensor."""
        return self.dtype is None

    @property
    def bits(self):
        return 8

    def stored_bytes(self, elements, group):
        return elements + elements // group * 2

    @property
    def half_step(self) -> float:
        """The largest relative rounding error of a value in the format's normal range."""
        return 0.0 if self.lossless else 2.0 ** -(self.mantissa + 1)

    @property
    def relative_error(self) -> float:
        """Root-mean-square relative rounding error of a value in the format's normal range.

        Rounding to nearest is off by a uniform share of the step 2^-m of the binade [1, 2): an
        absolute error of 2^-m / √12, divided by a value whose logarithm is uniform.
        """
        if self.lossless:
            return 0.0
        step = 2.0**-self.mantissa
        return step / math.sqrt(12) * math.sqrt((1 - 1 / 4) / (2 * math.log(2)))


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2, -14)
EXACT = Format("exact", None, math.inf, 0, 0)
# The same code points as E4M3, held in bytes: Triton has no E4M3 conversion before Ada (sm89).
E4M3_BYTES = Format("e4m3_bytes", torch.uint8, 448.0, 3, -6, emulated=True)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, EXACT, E4M3_BYTES)}

SAVED_FORMATS = (E4M3,)

# Group scales are a 1/G share of the bytes: bf16 has the range of fp32 and 0.2% of rounding error,
# far below the format's own.
GROUP_SCALE_DTYPE = torch.bfloat16


def divisor_group(length: int, group_size: int, smallest: int = 16) -> int | None:
    """The largest group that divides a row of `length` elements evenly.

    Returns a size in [`smallest`, `group_size`], or None where the row has no such divisor.
    """
    for size in range(min(group_size, length), smallest - 1, -1):
        if length % size == 0:
            return size
    return None
