"""Time, memory and gradient error of an output head with its loss, whole and in chunks of tokens.

    python benchmarks/head.py                      all cases, writes benchmarks/results/head.json
    python benchmarks/head.py --cases gpt2         one case
    python benchmarks/head.py --tiny --out x.json  a small case, on the CPU too

A linear layer without bias and the mean cross-entropy of its logits in FP32, all tensors in BF16.
Variants take turns. Liger's fused linear cross-entropy is in the table where it is installed.

Per variant: milliseconds of forward and backward (median), the most bytes allocated meanwhile,
gradients included, inputs and weight not; relative L2 errors of both gradients against FP32.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from layer import sharing, with_own_code
from report import environment, print_rows, use_expandable_segments, write_json
from tables_layers import head_table
from torch import Tensor, nn

CHUNKS = (2, 4, 8, 16)
ROWS_AT_ONCE = 1024  # of the reference


@dataclass(frozen=True)
class Case:
    """Sizes of one head."""

    name: str
    tokens: int
    hidden: int
    vocabulary: int


CASES = (
    Case("Llama-3-8B", 8192, 4096, 128256),
    Case("1.2B", 16384, 2048, 50304),
    Case("GPT-2 124M", 16384, 768, 50304),
)
TINY = (Case("tiny", 256, 64, 512),)


@dataclass
class Result:
    """One variant of one case; see the module's docstring."""

    case: str
    variant: str
    ms: float
    peak_bytes: int
    x_grad_error: float
    weight_grad_error: float


class Head(nn.Module):
    """A linear layer and the loss of its logits."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.lm_head = nn.Linear(case.hidden, case.vocabulary, bias=False, dtype=torch.bfloat16)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the tokens in x [T, H]."""
        return F.cross_entropy(self.lm_head(x).float(), targets)


Step = Callable[[Tensor, Tensor], Tensor]


def variants(head: Head) -> dict[str, Step]:
    """What is compared, by name."""

    def compiled(**how: Any) -> Step:
        return torch.compile(with_own_code(sharing(head)), dynamic=False, **how)

    def chunked(count: int) -> Step:
        return compiled(backend="fp8pass", options={"head_chunks": count})

    table: dict[str, Step] = {
        "bf16 compile": compiled(),
        "fp8pass, whole": chunked(1),
        **{f"fp8pass, {count} chunks": chunked(count) for count in CHUNKS},
    }
    if torch.cuda.is_available() and find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        for name, options in (("", {}), (", sums in FP32", {"accum_dtype": torch.float32})):
            fused = LigerFusedLinearCrossEntropyLoss(**options)
            table["Liger" + name] = partial(fused, head.lm_head.weight)
    return table


def reference(weight: Tensor, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the mean loss in FP32."""
    wide, dw, dx = weight.detach().float(), torch.zeros_like(weight, dtype=torch.float32), []
    for rows, labels in zip(
        x.detach().split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True
    ):
        gradient = (rows.float() @ wide.T).softmax(-1)
        gradient[torch.arange(len(labels), device=x.device), labels] -= 1
        gradient /= len(targets)
        dx.append(gradient @ wide)
        dw += gradient.T @ rows.float()
    return torch.cat(dx), dw


def run_case(case: Case, device: torch.device, rounds: int) -> list[Result]:
    """All variants of one case."""
    torch.manual_seed(0)
    head = Head(case).to(device)
    x = torch.randn(case.tokens, case.hidden, device=device, dtype=torch.bfloat16)
    x.requires_grad_()
    targets = torch.randint(case.vocabulary, (case.tokens,), device=device)
    expected = reference(head.lm_head.weight, x, targets)
    leaves = (x, head.lm_head.weight)

    def step(variant: Step) -> None:
        for leaf in leaves:
            leaf.grad = None
        variant(x, targets).backward()

    table = variants(head)
    errors, peaks = {}, {}
    times: dict[str, list[float]] = {name: [] for name in table}
    for name, variant in table.items():
        step(variant)
        errors[name] = [_error(leaf, want) for leaf, want in zip(leaves, expected, strict=True)]
        peaks[name] = _peak(partial(step, variant), leaves, device)
    for _ in range(rounds):
        # In any order: a GEMM is faster after a variant that let the GPU cool down.
        for name, variant in random.sample(list(table.items()), len(table)):
            times[name].append(_milliseconds(partial(step, variant), device))
    return [
        Result(case.name, name, statistics.median(times[name]), peaks[name], *errors[name])
        for name in table
    ]


def _error(leaf: Tensor, expected: Tensor) -> float:
    assert leaf.grad is not None
    return ((leaf.grad - expected).norm() / expected.norm()).item()


def _peak(run: Callable[[], None], leaves: tuple[Tensor, ...], device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    for leaf in leaves:
        leaf.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="one small case, on the CPU too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/head.json")
    args = parser.parse_args()
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results: list[Result] = []
    for case in TINY if args.tiny else [c for c in CASES if c.name in args.cases]:
        results += run_case(case, device, args.rounds)
        data = {**environment(), "results": [asdict(r) for r in results]}
        write_json(args.out, data)
    print_rows("output heads, forward + backward", head_table(data))


if __name__ == "__main__":
    main()
