"""Products of matrices that are added up in fp32, in place: sums of GEMMs over chunks of rows.

`fp8pass_codegen::product(a, b)` is `a @ b` in fp32 and `fp8pass_codegen::add_product(total, a, b)`
adds another one. On GPUs the GEMM itself writes and adds in fp32. Libraries for the CPU cannot:
there each product is rounded to the dtype of its operands first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.codegen.buffers import library
from fp8pass.graph.chunks import sum_dtype

library.define("product(Tensor a, Tensor b) -> Tensor")
library.define("add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()")


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b).to(sum_dtype(a.dtype))


def _product_on_gpu(a: Tensor, b: Tensor) -> Tensor:
    if sum_dtype(a.dtype) is a.dtype:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=sum_dtype(a.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    total += torch.mm(a, b)


def _add_product_on_gpu(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype is a.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def _fake_product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=sum_dtype(a.dtype))


def _fake_add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


library.impl("product", _product, "CPU")
library.impl("product", _product_on_gpu, "CUDA")
library.impl("add_product", _add_product, "CPU")
library.impl("add_product", _add_product_on_gpu, "CUDA")
torch.library.register_fake("fp8pass_codegen::product", _fake_product, lib=library)
torch.library.register_fake("fp8pass_codegen::add_product", _fake_add_product, lib=library)

product = torch.ops.fp8pass_codegen.product.default
add_product = torch.ops.fp8pass_codegen.add_product.default
