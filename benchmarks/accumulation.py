"""Measure fast and precise accumulation in FP8 GEMMs: time by role, and relative error.

    python benchmarks/accumulation.py                    needs an NVIDIA GPU with FP8 tensor cores
    python benchmarks/accumulation.py --cases gpt2       one model; results in the file are kept

The script times every FP8 GEMM in a step of a model, in its shape and with its kind of scales. The
forward and experts have row scales; dgrad and wgrad have one scale for each operand. dgrads of
layers that share an input are one GEMM, as after `merge_dgrads`. Each GEMM is timed with fast and
with precise accumulation, in turn.

The relative error of a GEMM is measured against FP64 on a sample of rows and columns. Operands have
a mean of half their standard deviation, because real activations and gradients are correlated. In
sums of correlated terms, the error of truncation is larger than the error of rounding in sums of
independent terms.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


class Product(NamedTuple):
    """A GEMM [M, K] × [N, K]ᵀ, or one for each expert; all experts have equally many tokens."""

    role: str
    m: int
    n: int
    k: int
    experts: int

    @property
    def per_expert(self) -> int:
        """The number of tokens of each expert."""
        return (self.k if self.role == "wgrad" else self.m) // self.experts

    def operands(self) -> tuple[Tensor, Tensor]:
        """Return random FP8 matrices [M, K] and [N, K]. Experts' weights are [experts · N, K]."""
        weights = 1 if self.role == "wgrad" else max(self.experts, 1)
        shapes = (self.m, self.k), (weights * self.n, self.k)
        a, b = (torch.randn(shape, device="cuda") + MEAN for shape in shapes)
        return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)

    def multiply(self, a: Tensor, b: Tensor, *, fast: bool) -> Tensor:
        """Run the FP8 GEMM of the operands, with scales of 1 and a BF16 result."""
        role, m, n, k, experts = self
        how: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        ones = partial(torch.ones, device="cuda")
        if not experts:
            scales = (ones(m, 1), ones(1, n)) if role == "forward" else (ones(()), ones(()))
            return torch._scaled_mm(a, b.t(), *scales, **how)
        ends = self.per_expert * torch.arange(1, experts + 1, dtype=torch.int32, device="cuda")
        if role == "wgrad":
            right, scales = b.t(), (ones(experts * m), ones(experts * n))
        else:
            right, scales = b.view(experts, n, k).transpose(1, 2), (ones(m), ones(experts, n))
        return torch._scaled_grouped_mm(a, right, *scales, ends, **how)

    def error(self, a: Tensor, b: Tensor, *, fast: bool) -> float:
        """Return the result's relative error in some rows and columns (of the first expert)."""
        found = self.multiply(a, b, fast=fast)
        found = (found[0] if found.ndim == 3 else found)[:SAMPLE, :SAMPLE].double()
        length = self.per_expert if self.experts and self.role == "wgrad" else self.k
        exact = a[:SAMPLE, :length].double() @ b[:SAMPLE, :length].double().t()
        return ((found - exact).norm() / exact.norm()).item()

    def milliseconds(self, a: Tensor, b: Tensor, *, fast: bool) -> float:
        """Measure the milliseconds of one GEMM."""

        def several() -> None:
            for _ in range(CALLS):
                self.multiply(a, b, fast=fast)

        return busiest_ms(several, repeats=8) / CALLS


@dataclass(frozen=True)
class Case:
    """The linear layers of a model.

    Attributes:
        name: name of the model.
        tokens: number of tokens, the rows of every layer's input.
        groups: groups of layers that share an input. A layer is (input features, output features).
        layers: number of layers of the model; each has these groups.
        experts: number of experts in each layer, each with its own weights; 0 without experts.
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


def measure(case: Case, product: Product) -> dict[str, Any]:
    """Return milliseconds and relative errors of a GEMM with both accumulations.

    Rounds alternate both accumulations; times are the smallest medians.
    """
    a, b = product.operands()
    ways = {"fast": True, "precise": False}
    rounds = [
        {f"{way}_ms": product.milliseconds(a, b, fast=fast) for way, fast in ways.items()}
        for _ in range(ROUNDS)
    ]
    return {
        "case": case.name,
        "role": product.role,
        "size": product[1:4],
        "experts": product.experts,
        "count": case.layers * list(case.products()).count(product),
        **{key: min(times[key] for times in rounds) for key in rounds[0]},
        **{f"{way}_error": product.error(a, b, fast=fast) for way, fast in ways.items()},
    }


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
        for product in dict.fromkeys(case.products()):
            merge(record, measure(case, product), ("case", "role", "size"))
        write_json(args.out, record)
    print_rows("FP8 GEMMs, fast and precise accumulation", accumulation_table(record))


if __name__ == "__main__":
    main()
