"""FP8 GEMMs: cuBLASLt beside the fastest of Inductor's Triton templates.

    python benchmarks/gemms.py                         needs an NVIDIA GPU with FP8 tensor cores
    python benchmarks/gemms.py --cases "h2048 gate"    one layer; results in the file are kept

Forward, dgrad and wgrad of linear layers, with a scale for each operand and for each row. Under
`mode="max-autotune"` fp8pass's GEMMs are whatever Inductor finds to be faster. Here it may choose
among its templates only, persistent ones that load by TMA included; its choice is compared with
cuBLASLt's results before it is timed. A product of the shape of an earlier one is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import busiest_ms
from merged import codes
from report import print_rows, resume, write_json
from tables_kernels import gemms_table
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

# Smaller tiles, four fifths of all choices, read their operands too often for products like these.
TILES = (64, 128, 256)
_SIZE = "|".join(map(str, TILES))
CHOICES = {
    "max_autotune_gemm_backends": "TRITON",
    "triton.enable_persistent_tma_matmul": True,
    "test_configs.autotune_choice_desc_regex": rf"BLOCK_K=({_SIZE}),.*BLOCK_M=({_SIZE}),"
    rf".*BLOCK_N=({_SIZE}),",
    # Code that comes from a cache cannot be looked at.
    "fx_graph_cache": False,
}
# Fast accumulation truncates sums to 14 bits after every 32 products: some 2% of them where 16384
# are summed, if one kernel does and the other does not.
TOLERANCE = 0.05
# Calls that are timed together, as compiled code takes about as long to launch as a small GEMM.
CALLS = 8


@dataclass(frozen=True)
class Case:
    """A linear layer."""

    name: str
    rows: int
    inputs: int
    outputs: int

    def products(self) -> dict[str, tuple[int, int, int]]:
        """M, N and K of every product: [M, K] times [N, K] transposed."""
        return {
            "forward": (self.rows, self.outputs, self.inputs),
            "dgrad": (self.rows, self.inputs, self.outputs),
            "wgrad": (self.outputs, self.inputs, self.rows),
        }


CASES = (
    Case("h4096 q", 16384, 4096, 4096),
    Case("h4096 gate", 16384, 4096, 11008),
    Case("h4096 down", 16384, 11008, 4096),
    Case("h2048 gate", 8192, 2048, 5504),
)


@dataclass
class Result:
    """A product with a scale for each operand, then with one for each row."""

    case: str
    product: str
    size: tuple[int, int, int]
    cublaslt_ms: tuple[float, ...]
    triton_ms: tuple[float, ...]
    templates: tuple[str, ...]
    differences: tuple[float, ...]


def distinct_products() -> dict[tuple[int, int, int], tuple[str, str]]:
    """Case and name of every product by its size; the first of those of one size."""
    found: dict[tuple[int, int, int], tuple[str, str]] = {}
    for case in CASES:
        for name, size in case.products().items():
            found.setdefault(size, (case.name, name))
    return found


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """a bᵀ in BF16, as fp8pass's lowering has it; run eagerly it is cuBLASLt's."""
    return torch._scaled_mm(
        a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def scales(m: int, n: int, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Random scales of both operands."""
    shapes: tuple[Any, Any] = ((m, 1), (1, n)) if by_row else ((), ())
    scale_a, scale_b = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes)
    return scale_a, scale_b


def template_of(code: str) -> str:
    """The Triton template that generated code is, with its tile; exits if it is none."""
    if "triton_tem_" not in code or "extern_kernels._scaled_mm" in code:
        sys.exit(f"what Inductor generated is no Triton template:\n{code}")
    tile = [_number(rf"BLOCK_{dim} : tl\.constexpr = (\d+)", code) for dim in "MNK"]
    warps, stages = (_number(rf"{name}=(\d+)", code) for name in ("num_warps", "num_stages"))
    kind = "TMA, " if "tensor_descriptor" in code else ""
    return f"{kind}{' × '.join(tile)}, {warps} warps, {stages} stages"


def _number(pattern: str, code: str) -> str:
    found = re.search(pattern, code)
    return found[1] if found else "?"


def milliseconds(run: Callable[[], Tensor]) -> float:
    """Of one product."""

    def several() -> None:
        for _ in range(CALLS):
            run()

    return busiest_ms(several) / CALLS


def compare(operands: tuple[Tensor, ...]) -> tuple[float, float, str, float]:
    """Milliseconds of cuBLASLt and of the fastest template, which that is, and how they differ."""
    compiled = torch.compile(product, mode="max-autotune-no-cudagraphs", dynamic=False)
    result, generated = run_and_get_code(compiled, *operands)
    template = template_of("\n".join(generated))
    expected = product(*operands).float()
    difference = ((result.float() - expected).norm() / expected.norm()).item()
    if not difference < TOLERANCE:
        sys.exit(f"{template} differs from cuBLASLt by {difference:.3f}")
    del result, expected
    runs = (partial(f, *operands) for f in (product, compiled))
    cublaslt, triton = map(milliseconds, runs)
    return cublaslt, triton, template, difference


def measure(case: str, name: str, size: tuple[int, int, int]) -> Result:
    """One product, with both kinds of scales."""
    m, n, k = size
    a, b = codes(m, k), codes(n, k)
    found = [compare((a, b, *scales(m, n, by_row=by_row))) for by_row in (False, True)]
    cublaslt, triton, templates, differences = zip(*found, strict=True)
    return Result(case, name, size, cublaslt, triton, templates, differences)


def main() -> None:
    """Command line."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/gemms.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("GEMMs are timed on a GPU, and there is none")
    record = resume(args.out, {"tiles": list(TILES), "calls": CALLS}, again=args.again)
    done = {(r["case"], r["product"]) for r in record["results"]}
    for size, (case, name) in distinct_products().items():
        if case not in args.cases or (case, name) in done:
            continue
        with inductor_config.patch(CHOICES):
            record["results"].append(asdict(measure(case, name, size)))
        write_json(args.out, record)
    print_rows("FP8 GEMMs, ms", gemms_table(record))


if __name__ == "__main__":
    main()
