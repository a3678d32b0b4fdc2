"""Emulate the accumulation of FP8 tensor cores, bit by bit, in plain PyTorch.

A Hopper instruction adds 32 products of FP8 numbers to a running sum. It shifts these 33 numbers to
the largest exponent among them, drops the bits after the 13th fraction bit, adds exactly, and
truncates the sum to 13 fraction bits. *Fast* accumulation has one running sum. *Precise*
accumulation adds the running sum to an FP32 sum after every 128 products.

Fast sums of 16,384 products of correlated operands are 4% too small (`benchmarks/accumulation.py`).
On an H100, the emulation is bit-identical to cuBLASLt, CUTLASS and Triton for fast sums of up to
16,384 products, and to cuBLASLt and CUTLASS for precise sums of up to 4,096 products. If a library
uses split-K, its sums are more precise than the emulation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8pass import compat, hardware

INSTRUCTION = 32  # products that one instruction adds
FRACTION_BITS = 13
PROMOTION = 128  # products between two additions to the FP32 sum
_ZERO_EXPONENT = -(2**10)  # less than all other exponents
_SMALLEST_EXPONENT = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
_MULTIPLE = 16  # `_scaled_mm` needs sizes that are divisible by this number
_BLOCK = 2**23  # products in memory at a time


@dataclass(frozen=True)
class _Mode:
    """How reference GEMMs accumulate. If both fields are False, they accumulate in FP32."""

    on_tensor_cores: bool = False
    emulated: bool = False


_mode = _Mode()


@contextlib.contextmanager
def hardware_accumulation(*, emulate: bool = True) -> Iterator[None]:
    """Within the context, make reference implementations of GEMMs accumulate as tensor cores do.

    A GPU with FP8 tensor cores uses its tensor cores. On other devices, `emulate=True` emulates
    tensor cores, which takes about 10 elementwise operations for each product. The context applies
    to all threads. It affects graphs that run operator by operator, with `compiler="eager"` or in
    `diagnose`. Compiled graphs do not call the reference implementations.
    """
    global _mode
    before, _mode = _mode, _Mode(True, emulate or _mode.emulated)
    try:
        yield
    finally:
        _mode = before


def product(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    """Return `a @ b.T` as FP32 [M, N]. `a` [M, K] and `b` [N, K] are FP8 matrices."""
    is_traced = isinstance(a, compat.FakeTensor)
    if _mode.on_tensor_cores and not is_traced and _fits_tensor_cores(a, b):
        one = torch.ones((), device=a.device)
        return compat.scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
    if _mode.emulated and not is_traced:
        return accumulate(a, b, fast=fast)
    return a.float() @ b.float().t()


def _fits_tensor_cores(a: Tensor, b: Tensor) -> bool:
    sizes = a.shape[1], *b.shape
    whole = all(size > 0 and size % _MULTIPLE == 0 for size in sizes) and len(a) > 0
    return a.is_cuda and whole and hardware.why_no_fp8_gemm(a.device) is None


def accumulate(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    """Emulate `a @ b.T` on Hopper. `a` [M, K] and `b` [N, K] are FP8. Returns FP32 [M, N]."""
    rows = max(1, _BLOCK // (INSTRUCTION * max(len(b), 1)))
    return torch.cat([_accumulate_rows(some, b, fast=fast) for some in a.split(rows)])


def _accumulate_rows(a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
    of_a, of_b = (_exponents(x.float(), _SMALLEST_EXPONENT[x.dtype]) for x in (a, b))
    a, b = a.float(), b.float()
    total, running = (a.new_zeros(len(a), len(b)) for _ in range(2))
    for start in range(0, a.shape[1], INSTRUCTION):
        if start % PROMOTION == 0 and not fast:
            total, running = total + running, torch.zeros_like(running)
        some = slice(start, start + INSTRUCTION)
        products = a[:, None, some] * b[None, :, some]
        exponents = of_a[:, None, some] + of_b[None, :, some]
        running = _add(running, products, exponents.amax(-1))
    return total + running


def _add(running: Tensor, products: Tensor, exponent: Tensor) -> Tensor:
    """Add `products` [M, N, K], with largest exponents [M, N], to the running sums [M, N]."""
    exponent = torch.maximum(exponent, _exponents(running, _ZERO_EXPONENT)).clamp_min(-100)
    steps = torch.exp2((FRACTION_BITS - exponent).float())
    added = (products * steps.unsqueeze(-1)).trunc().sum(-1) + (running * steps).trunc()
    return _truncate(added / steps)


def _exponents(x: Tensor, smallest: int) -> Tensor:
    """Return the exponent of each element: `smallest` for denormals, `_ZERO_EXPONENT` for zero."""
    exponents = (torch.frexp(x)[1] - 1).clamp_min(smallest)
    return torch.where(x == 0, _ZERO_EXPONENT, exponents)


def _truncate(x: Tensor) -> Tensor:
    dropped = torch.finfo(torch.float32).bits - 9 - FRACTION_BITS
    return (x.view(torch.int32) & -(1 << dropped)).view(torch.float32)
