"""`fp8pass_codegen::add_product(total, a, b)` adds `a @ b` to `total`, in place.

The three matrices have the same dtype. The GEMM computes the sum in fp32, and rounds it once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8pass.codegen.buffers import library

library.define("add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()")


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    torch.addmm(total, a, b, out=total)


def _fake(total: Tensor, a: Tensor, b: Tensor) -> None:
    return None


library.impl("add_product", _add_product, "CompositeExplicitAutograd")
torch.library.register_fake("fp8pass_codegen::add_product", _fake, lib=library)
add_product = torch.ops.fp8pass_codegen.add_product.default
