"""`transpose_segments` as an operator of lowered graphs: on a GPU it is a Triton kernel.

The kernel is imported when it first runs: there may be no Triton where there is no GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.codegen.buffers import library
from fp8pass.dialect import ops


def _on_gpu(
    x: Tensor, scales: Tensor, offsets: Tensor, format: str, rows: Tensor | None = None
) -> Tensor:
    from fp8pass.codegen.kernels.segments import transpose_segments

    return transpose_segments(x, scales, offsets, format, rows)


library.define(
    "transpose_segments(Tensor x, Tensor scales, Tensor offsets, str format, Tensor? rows=None) "
    "-> Tensor"
)
library.impl("transpose_segments", _on_gpu, "CUDA")
library.impl("transpose_segments", ops.transpose_segments, "CPU")
torch.library.register_fake(
    "fp8pass_codegen::transpose_segments",
    ops.OPERATORS[torch.ops.fp8pass.transpose_segments.default].fake,
    lib=library,
)
segments = torch.ops.fp8pass_codegen.transpose_segments.default
