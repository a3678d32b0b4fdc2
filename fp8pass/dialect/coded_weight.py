"""Weights in codes, as they enter a graph: E4M3, a scale for each row (LLMQ 3.2).

Compiled code takes the codes as they are for the forward's GEMM, which would code a BF16 weight by
row into the same bits. The backward decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8pass import compat
from fp8pass.dialect import hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3

aten = torch.ops.aten
fp8 = torch.ops.fp8pass


class CodedWeight(Tensor):
    """A matrix [M, K] as E4M3 codes and a scale for each row; its values to every operator.

    Attributes:
        codes: float8_e4m3fn [M, K].
        scales: fp32 [M, 1].
        source: the matrix that was coded, if it is elsewhere; copies to the weight go there.
    """

    codes: Tensor
    scales: Tensor
    source: Tensor | None = None

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedWeight:
        return compat.wrapper(cls, codes, dtype)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    def __repr__(self) -> str:  # type: ignore[override]
        """Without numbers: compilers print weights that have none."""
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    def decoded(self) -> Tensor:
        """The values, in a plain tensor."""
        return fp8.dequantize.default(self.codes, self.scales, self.dtype)

    def code_again(self, first: int = 0, rows: Tensor | None = None) -> None:
        """Make codes of the source anew, or of `rows` [R, K] of it, from row `first` on."""
        if rows is None:
            assert self.source is not None
            rows = self.source.to(self.codes.device)
        part = slice(first, first + len(rows))
        into = self.codes[part], self.scales[part]
        if hardware.why_no_triton_kernels(rows.device) is None:
            _kernel().code_rows([rows.contiguous()], self.dtype, into)
            return
        for old, new in zip(into, *coded([rows], self.dtype), strict=True):
            old.copy_(new)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> CodedWeight:
        return CodedWeight(inner["codes"], inner["scales"], dtype)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for its cache."""
        return f"CodedWeight {tuple(self.shape)} {self.dtype} {self.requires_grad}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # FSDP2 and nn.Parameter look at a weight in these ways, which change nothing of it.
        if func is aten.detach.default or (
            func is aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        ):
            weight = args[0]
            found = CodedWeight(weight.codes, weight.scales, weight.dtype)
            found.source = weight.source
            return found
        if func is aten.copy_.default and args[0].source is not None:
            args[0].source.copy_(args[1])
            args[0].code_again()
            return args[0]
        if compat.schema_of(func).is_mutable:
            raise RuntimeError(
                f"{func} would change a weight whose values are lost: it is in codes. Change what "
                "it was made of, a shard or a matrix on the host, or name its layer in `skip` of "
                "compress or offload_weights."
            )
        args, kwargs = compat.tree_map_only(CodedWeight, CodedWeight.decoded, (args, kwargs or {}))
        return func(*args, **kwargs)


@torch.no_grad()
def coded(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales of matrices [M, K], rounded to `dtype` before, as `quantize` gives them."""
    if hardware.why_no_triton_kernels(matrices[0].device) is None:
        return _kernel().code_rows([x.contiguous() for x in matrices], dtype)
    found = []
    for x in matrices:
        scales = fp8.scale.default(fp8.row_amax.default(x.to(dtype)), E4M3.name)
        found.append((fp8.quantize.default(x.to(dtype), scales, E4M3.name), scales))
    return found


def _kernel() -> Any:
    """The kernel, which can only be imported where there is Triton."""
    from fp8pass.dialect import row_kernel

    return row_kernel
