"""Numbers as they cross the wire: E4M3 codes in groups of 128 and their scales, in one buffer.

    rows [R, N]  ->  uint8 [R, B]    the codes of a row, one zero more if N is odd, and behind them
                                     a scale in bf16 for each group; the last may be shorter

That is 1.016 bytes an element. A group with a NaN or an infinity arrives as NaN (AGoQ 5.1).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE

fp8 = torch.ops.fp8pass

GROUP_SIZE = 128
# One way to code groups, on all ranks.
CODED = E4M3.name, GROUP_SIZE


def packed(rows: Tensor) -> Tensor:
    """Rows [R, N] of any float dtype as they are sent, uint8 [R, B]."""
    length = rows.shape[-1]
    whole = pad(rows.float(), (0, -length % GROUP_SIZE))
    scales = fp8.group_scale.default(whole, *CODED)
    codes = fp8.quantize_groups.default(whole, scales, *CODED).view(torch.uint8)
    return torch.cat((codes[:, : length + length % 2], scales.view(torch.uint8)), -1)


def unpacked(wire: Tensor, length: int) -> Tensor:
    """The fp32 rows [R, `length`] behind uint8 [R, B]."""
    codes, scales = wire.tensor_split([length + length % 2], -1)
    whole = pad(codes[:, :length], (0, -length % GROUP_SIZE)).view(torch.float8_e4m3fn)
    scales = scales.contiguous().view(GROUP_SCALE_DTYPE)
    values = fp8.dequantize_groups.default([whole], scales, *CODED, torch.float32)
    return values[:, :length]
