"""Buffers that ranks send: gradients in E4M3, in groups of 128 (section 5 of the paper AGoQ).

    rows [R, N]  ->  uint8 [R, B]    the E4M3 data of a row, padded to an even length, then one BF16
                                     scale for each group; the last group may be shorter

A buffer takes 1.016 bytes per element. All elements of a group with NaN or infinity become NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8pass import hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import Quantization, group
from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE, amax_quotient, round_up_to_bf16

fp8 = torch.ops.fp8pass

WIRE_GROUP_SIZE = 128
# All ranks must use the same quantization.
WIRE_QUANTIZATION = str(Quantization(E4M3, group(WIRE_GROUP_SIZE)))


def pack(rows: Tensor) -> Tensor:
    """Quantize rows [R, N] of any float dtype into a buffer, uint8 [R, B]."""
    length = rows.shape[-1]
    if (kernels := load_kernels(rows.device)) is not None:
        wire = torch.empty(len(rows), packed_bytes(length), dtype=torch.uint8, device=rows.device)
        kernels.pack(rows.contiguous(), wire, WIRE_GROUP_SIZE)
        return wire
    padded, scales = split_into_groups(rows)
    data = fp8.quantize.default(padded, scales, WIRE_QUANTIZATION).view(torch.uint8)
    return torch.cat((data[:, : _round_up_to_even(length)], scales.view(torch.uint8)), -1)


def split_into_groups(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 rows [R, N], padded to whole groups, and the BF16 scale of each group.

    Scales are rounded up: a scale below amax / 448 would clip the largest elements.
    """
    padded = pad(rows.float(), (0, -rows.shape[-1] % WIRE_GROUP_SIZE))
    amax = padded.unflatten(-1, (-1, WIRE_GROUP_SIZE)).abs().amax(-1)
    scales = torch.where(amax.isfinite(), round_up_to_bf16(amax_quotient(amax, E4M3)), torch.nan)
    return padded, scales.to(GROUP_SCALE_DTYPE)


def add_up(wire: Tensor, into: Tensor, factor: float = 1.0) -> Tensor:
    """Dequantize `wire`, uint8 [T, R, B], and write `factor` times the sum over T to `into`.

    The sum is computed in fp32. `into` is [R, N], contiguous, of any float dtype, and is returned.
    """
    if (kernels := load_kernels(wire.device)) is not None:
        kernels.add_up(wire, into, factor, WIRE_GROUP_SIZE)
        return into
    length = into.shape[-1]
    data, scales = wire.tensor_split([_round_up_to_even(length)], -1)
    padded = pad(data[..., :length], (0, -length % WIRE_GROUP_SIZE)).view(torch.float8_e4m3fn)
    scales = scales.contiguous().view(GROUP_SCALE_DTYPE)
    values = fp8.dequantize.default([padded], scales, WIRE_QUANTIZATION, torch.float32)
    return into.copy_(values[..., :length].sum(0).mul_(factor))


def packed_bytes(length: int) -> int:
    return _round_up_to_even(length) + GROUP_SCALE_DTYPE.itemsize * -(-length // WIRE_GROUP_SIZE)


def _round_up_to_even(length: int) -> int:
    return length + length % 2  # aligns the two-byte scales that follow the data


def load_kernels(device: torch.device) -> Any:
    """Return the module `wire_kernels`, if the device runs Triton kernels."""
    if hardware.why_no_triton_kernels(device) is not None:
        return None
    from fp8pass.distributed import wire_kernels  # late, because CPU builds of PyTorch lack Triton

    return wire_kernels
