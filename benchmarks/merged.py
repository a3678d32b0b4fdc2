"""Linear layers that share an input, as one GEMM each for forward, dgrad and wgrad.

    python benchmarks/merged.py        needs an NVIDIA GPU with FP8 tensor cores

q, k and v, and gate and up, of the layers of `layer.py` and of the 1B model of `model.py`. Forward
and wgrad concatenate outputs; dgrad contracts over all of them, so that one sum is written instead
of several that are added up afterwards: *sums* is what that moves, at the bandwidth of a copy.
Scales are by row in the forward, for one tensor in the backward, where merged gradients share one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from kernels import busiest_ms, measure_limits
from report import environment, print_rows, write_json
from tables_layers import merged_table
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Layers with a common input of `rows` by `inputs`."""

    name: str
    rows: int
    inputs: int
    outputs: tuple[int, ...]


CASES = (
    Case("h4096 q, k, v", 16384, 4096, (4096,) * 3),
    Case("h4096 gate, up", 16384, 4096, (11008,) * 2),
    Case("h2048 q, k, v", 8192, 2048, (2048,) * 3),
    Case("h2048 gate, up", 8192, 2048, (5504,) * 2),
    Case("1B q, k, v", 16384, 2048, (2048, 512, 512)),
    Case("1B gate, up", 16384, 2048, (8192,) * 2),
)


@dataclass
class Result:
    """Milliseconds: apart, then merged."""

    case: str
    forward: tuple[float, float]
    dgrad: tuple[float, float]
    wgrad: tuple[float, float]
    sums: float


def codes(rows: int, columns: int) -> Tensor:
    """A random FP8 matrix."""
    return torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)


def product(a: Tensor, b: Tensor, *, by_row: bool) -> Callable[[], Tensor]:
    """a bᵀ in BF16, as fp8pass runs it."""
    of_a, of_b = ((a.shape[0], 1), (1, b.shape[0])) if by_row else ((), ())
    return partial(
        torch._scaled_mm,
        a,
        b.t(),
        scale_a=torch.ones(of_a, device="cuda"),
        scale_b=torch.ones(of_b, device="cuda"),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def apart_and_merged(
    operands: list[tuple[Tensor, Tensor]], merged: tuple[Tensor, Tensor], *, by_row: bool = False
) -> tuple[float, float]:
    """Milliseconds of several products, and of one."""
    products = [product(a, b, by_row=by_row) for a, b in operands]

    def apart() -> None:
        for run in products:
            run()

    return busiest_ms(apart), busiest_ms(product(*merged, by_row=by_row))


def measure(case: Case, copy_bandwidth: float) -> Result:
    """One case."""
    rows, inputs, total = case.rows, case.inputs, sum(case.outputs)
    x, x_transposed = codes(rows, inputs), codes(inputs, rows)
    forward = [(x, codes(n, inputs)) for n in case.outputs]
    dgrad = [(codes(rows, n), codes(inputs, n)) for n in case.outputs]
    wgrad = [(codes(n, rows), x_transposed) for n in case.outputs]
    moved = 2 * (len(case.outputs) - 1) * rows * inputs * 2
    return Result(
        case.name,
        apart_and_merged(forward, (x, codes(total, inputs)), by_row=True),
        apart_and_merged(dgrad, (codes(rows, total), codes(inputs, total))),
        apart_and_merged(wgrad, (codes(total, rows), x_transposed)),
        moved / copy_bandwidth * 1e3,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/merged.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("GEMMs are timed on a GPU, and there is none")
    bandwidth = measure_limits().copy_bandwidth
    results = [asdict(measure(case, bandwidth)) for case in CASES]
    record = {**environment(), "results": results}
    print_rows("GEMMs apart and merged, ms", merged_table(record))
    write_json(args.out, record)


if __name__ == "__main__":
    main()
