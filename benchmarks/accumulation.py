"""Measure fast and precise accumulation in FP8 GEMMs: time by role, and error of the products.

    python benchmarks/accumulation.py                    needs an NVIDIA GPU with FP8 tensor cores
    python benchmarks/accumulation.py --cases gpt2       one model; results in the file are kept

The script times every FP8 GEMM in a step of a model, in its shape and with its kind of scales. The
forward and experts have row scales; dgrad and wgrad have one scale for each operand. dgrads of
layers that share an input are one GEMM, as after `merge_dgrads`. Each GEMM is timed with fast and
with precise accumulation, in turn.

The relative error of a product is measured against FP64 on a sample of rows and columns. Operands
have a mean of half their standard deviation, because activations and gradients are correlated.
Truncation removes more from sums of correlated terms than rounding does from independent terms.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernels import busiest_ms
from report import merge, print_rows, resume, write_json
from tables_kernels import accumulation_table
from torch import Tensor

MERGED = 16384  # `merge_dgrads` does not make longer contractions
CALLS = 4  # calls in one measurement
SAMPLE = 64
MEAN = 0.5
ROUNDS = 3


@dataclass(frozen=True)
class Product:
    """A GEMM [M, K] × [N, K]ᵀ, or one such GEMM for each expert; experts divide the tokens."""

    role: str
    m: int
    n: int
    k: int
    experts: int = 0


@dataclass(frozen=True)
class Case:
    """The linear layers of a model.

    Attributes:
        name: name of the model.
        tokens: number of tokens, the rows of every layer's input.
        groups: groups of layers that share an input. A layer is (inputs, outputs).
        layers: how often the groups are repeated.
        experts: number of experts in each layer, with a weight each; 0 without experts.
    """

    name: str
    tokens: int
    groups: tuple[tuple[tuple[int, int], ...], ...]
    layers: int = 1
    experts: int = 0

    def products(self) -> Iterator[Product]:
        """Yield the GEMMs of one layer of the model."""
        for group in self.groups:
            for inputs, outputs in group:
                yield Product("forward", self.tokens, outputs, inputs, self.experts)
                yield Product("wgrad", outputs, inputs, self.tokens, self.experts)
            widths = [outputs for _, outputs in group]
            merged = [sum(widths)] if sum(widths) <= MERGED and not self.experts else widths
            for length in merged:
                yield Product("dgrad", self.tokens, group[0][0], length, self.experts)


def llama(name: str, tokens: int, hidden: int, ffn: int, kv: int, layers: int = 1) -> Case:
    """Return a Llama's linear layers in groups: q, k, v; attention output; gate and up; down."""
    qkv = (hidden, hidden), (hidden, kv), (hidden, kv)
    groups = qkv, ((hidden, hidden),), ((hidden, ffn), (hidden, ffn)), ((ffn, hidden),)
    return Case(name, tokens, groups, layers)


CASES = (
    llama("layer, hidden 2048", 8192, 2048, 5504, 2048),
    llama("layer, hidden 4096", 16384, 4096, 11008, 4096),
    llama("Llama 1.2B", 16384, 2048, 8192, 2048, 16),
    llama("Llama 7B", 4096, 4096, 11008, 4096, 32),
    Case(
        "GPT-2 124M",
        16384,
        (((768, 2304),), ((768, 768),), ((768, 3072),), ((3072, 768),)),
        layers=12,
    ),
    Case("Mixtral layer", 32768, (((4096, 28672),), ((14336, 4096),)), experts=8),
    Case("Qwen3-MoE layer", 131072, (((2048, 1536),), ((768, 2048),)), experts=128),
)


@dataclass
class Result:
    """A GEMM, its count in a step, and milliseconds and relative errors of both accumulations."""

    case: str
    role: str
    size: tuple[int, int, int]
    experts: int
    count: int
    fast_ms: float
    precise_ms: float
    fast_error: float
    precise_error: float


def codes(rows: int, columns: int) -> Tensor:
    """Return a random FP8 matrix."""
    return (torch.randn(rows, columns, device="cuda") + MEAN).to(torch.float8_e4m3fn)


def ones(*shape: int) -> Tensor:
    """Return scales of 1."""
    return torch.ones(shape, device="cuda")


class Operands:
    """A GEMM with random operands."""

    def __init__(self, product: Product) -> None:
        self.of = product
        experts = product.experts
        matrices = 1 if product.role == "wgrad" else max(experts, 1)
        self.a, self.b = codes(product.m, product.k), codes(matrices * product.n, product.k)

    def multiply(self, *, fast: bool) -> Tensor:
        """Compute the product in BF16."""
        m, n, k, experts = self.of.m, self.of.n, self.of.k, self.of.experts
        out = torch.bfloat16
        if not experts:
            by_row = self.of.role == "forward"
            scales = (ones(m, 1), ones(1, n)) if by_row else (ones(), ones())
            return torch._scaled_mm(self.a, self.b.t(), *scales, out_dtype=out, use_fast_accum=fast)
        rows = k if self.of.role == "wgrad" else m
        step = rows // experts
        ends = torch.arange(step, rows + 1, step, dtype=torch.int32, device="cuda")
        if self.of.role == "wgrad":
            right, scales = self.b.t(), (ones(experts * m), ones(experts * n))
        else:
            right = self.b.view(experts, n, k).transpose(1, 2)
            scales = ones(m), ones(experts, n)
        return torch._scaled_grouped_mm(
            self.a, right, *scales, ends, out_dtype=out, use_fast_accum=fast
        )

    def error(self, *, fast: bool) -> float:
        """Return the relative error on a sample of rows and columns (of the first expert)."""
        found = self.multiply(fast=fast)
        found = (found[0] if found.ndim == 3 else found)[:SAMPLE, :SAMPLE].double()
        length = self.of.k
        if self.of.experts and self.of.role == "wgrad":
            length //= self.of.experts
        a, b = (x[:SAMPLE, :length].double() for x in (self.a, self.b))
        exact = a @ b.t()
        return ((found - exact).norm() / exact.norm()).item()

    def milliseconds(self, *, fast: bool) -> float:
        """Measure the milliseconds of one product."""

        def several() -> None:
            for _ in range(CALLS):
                self.multiply(fast=fast)

        return busiest_ms(several, repeats=8) / CALLS


def measure(case: Case, product: Product, count: int) -> Result:
    """Measure one GEMM. Rounds alternate both accumulations; times are the smallest medians."""
    operands = Operands(product)
    times = [[operands.milliseconds(fast=fast) for fast in (True, False)] for _ in range(ROUNDS)]
    errors = [operands.error(fast=fast) for fast in (True, False)]
    size = product.m, product.n, product.k
    best = map(min, zip(*times, strict=True))
    return Result(case.name, product.role, size, product.experts, count, *best, *errors)


def main() -> None:
    """Run the command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--again", action="store_true", help="discard the results in the file")
    default = Path(__file__).parent / "results/accumulation.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("GEMMs are timed on a GPU, and there is none")
    record: dict[str, Any] = resume(args.out, {"mean": MEAN}, again=args.again)
    for case in (case for case in CASES if case.name in args.cases):
        products = list(case.products())
        for product in dict.fromkeys(products):
            result = measure(case, product, case.layers * products.count(product))
            merge(record, asdict(result), ("case", "role", "size"))
        write_json(args.out, record)
    print_rows("FP8 GEMMs, fast and precise accumulation", accumulation_table(record))


if __name__ == "__main__":
    main()
