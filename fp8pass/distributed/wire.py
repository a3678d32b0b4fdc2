"""Numbers on the wire: E4M3 codes in groups of 128 (AGoQ 5) with their scales, in one buffer.

    rows [R, N]  ->  uint8 [R, B]    the codes of a row, one zero more if N is odd, and behind them
                                     a scale in bf16 for each group; the last may be shorter

That is 1.016 bytes an element. A group with a NaN or an infinity arrives as NaN.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8pass import hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import Quantization, group
from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE, quotient_of, rounded_up

fp8 = torch.ops.fp8pass

GROUP_SIZE = 128
# One way to code groups, on all ranks.
QUANTIZATION = str(Quantization(E4M3, group(GROUP_SIZE)))


def packed(rows: Tensor) -> Tensor:
    """Rows [R, N] of any float dtype as they are sent, uint8 [R, B]."""
    length = rows.shape[-1]
    if _fuses(rows):
        wire = torch.empty(len(rows), sent_bytes(length), dtype=torch.uint8, device=rows.device)
        _kernels().pack(rows.contiguous(), wire, GROUP_SIZE)
        return wire
    whole, scales = grouped(rows)
    codes = fp8.quantize.default(whole, scales, QUANTIZATION).view(torch.uint8)
    return torch.cat((codes[:, : _even(length)], scales.view(torch.uint8)), -1)


def grouped(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, N] in fp32, filled up to whole groups, and the scales of these."""
    whole = pad(rows.float(), (0, -rows.shape[-1] % GROUP_SIZE))
    return whole, scales_of(whole.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1))


def add_up(wire: Tensor, into: Tensor, factor: float = 1.0) -> Tensor:
    """Write the sums of terms uint8 [T, R, B], times `factor`, to `into` [R, N], and return it.

    They are computed in fp32; `into` is contiguous, of any float dtype.
    """
    if _fuses(wire):
        _kernels().add_up(wire, into, factor, GROUP_SIZE)
        return into
    length = into.shape[-1]
    codes, scales = wire.tensor_split([_even(length)], -1)
    whole = pad(codes[..., :length], (0, -length % GROUP_SIZE)).view(torch.float8_e4m3fn)
    scales = scales.contiguous().view(GROUP_SCALE_DTYPE)
    values = fp8.dequantize.default([whole], scales, QUANTIZATION, torch.float32)
    return into.copy_(values[..., :length].sum(0).mul_(factor))


def scales_of(amax: Tensor) -> Tensor:
    """Scales, rounded up: with less than amax / 448 the largest numbers would arrive too small."""
    scales = torch.where(amax.isfinite(), rounded_up(quotient_of(amax, E4M3)), torch.nan)
    return scales.to(GROUP_SCALE_DTYPE)


def sent_bytes(length: int) -> int:
    """Bytes that a row of `length` elements is sent as."""
    return _even(length) + GROUP_SCALE_DTYPE.itemsize * -(-length // GROUP_SIZE)


def _even(length: int) -> int:
    """Bytes of codes: scales of two bytes follow."""
    return length + length % 2


def _fuses(x: Tensor) -> bool:
    return hardware.why_no_triton_kernels(x.device) is None


@functools.cache
def _kernels() -> Any:
    """The kernels, which can only be imported where there is Triton."""
    from fp8pass.distributed import wire_kernels

    return wire_kernels
