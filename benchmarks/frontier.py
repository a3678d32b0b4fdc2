"""Memory against time: stock torch.compile with activation budgets, and fp8pass with its own.

    python benchmarks/frontier.py                 all points that are not in the results yet
    python benchmarks/frontier.py --limit 540     stop before nine minutes are over
    python benchmarks/frontier.py --tiny --out x.json  a small stack, on the CPU too

Eight decoder layers of hidden 4096, sequence 4096, batch 4, weights in BF16. Stock torch.compile
recomputes more of the forward as `torch._functorch.config.activation_memory_budget` falls (a share
of what lies between keeping nothing and its default); fp8pass takes `memory_budget`, a share of
what stock torch.compile keeps. Shares of the two are not the same thing: compare bytes. Measured
per point, one after the other from large budgets to small: compile seconds (code shared with
earlier points comes from Inductor's cache), milliseconds for forward + backward (CUDA events,
median), bytes held for the backward, and the peak of a step above what was allocated before it,
gradients included. A budget that cannot be met is recorded with the error.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from layer import TINY, Case, Subject, Variant, median_times, with_fp8pass
from models import Stack, init_weights, rope_tables
from report import merge, print_rows, resume, write_json
from tables_models import frontier_table
from torch._dynamo.exc import BackendCompilerFailed

from fp8pass.demo.train import free_memory

CASE = Case("h4096x8", 8, 4096, 32, 11008, 4096)

STOCK = "torch.compile"
RECIPES = ("coat", "agoq")
STOCK_BUDGETS = (1.0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
BUDGETS = (None, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclass
class Point:
    """One variant with one budget; see the module's docstring."""

    variant: str
    budget: float | None
    compile_s: float = 0.0
    ms: float = 0.0
    activation_bytes: int = 0
    peak_bytes: int = 0
    error: str | None = None


def points(recipes: Sequence[str]) -> list[Point]:
    """What to measure, from large budgets to small."""
    stock = [Point(STOCK, budget) for budget in STOCK_BUDGETS]
    ours = [Point(f"fp8pass {recipe}", budget) for budget in BUDGETS for recipe in recipes]
    return sorted(stock + ours, key=lambda p: -(p.budget or 1.0))


def variant(point: Point) -> Variant:
    """How a point compiles a model."""
    if point.variant == STOCK:
        return lambda m: torch.compile(m)  # type: ignore[return-value]
    budget = {} if point.budget is None else {"memory_budget": point.budget}
    return with_fp8pass(recipe=point.variant.removeprefix("fp8pass "), **budget)


class Bench:
    """The model and its inputs, which all points share."""

    def __init__(self, case: Case, device: torch.device, rounds: int) -> None:
        torch.manual_seed(0)
        self.model = Stack(case.layers, case.hidden, case.heads, case.ffn)
        self.model.to(device, torch.bfloat16)
        init_weights(self.model)
        shape = case.batch, case.seq, case.hidden
        x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.inputs = (x, *rope_tables(case.seq, case.hidden // case.heads, device))
        self.grad = torch.randn_like(x)
        self.device, self.rounds = device, rounds

    def measure(self, point: Point) -> None:
        """Fill in a point."""
        free_memory()
        stock = point.variant == STOCK
        budget = point.budget if stock else functorch_config.activation_memory_budget
        subject = Subject(variant(point)(self.model), self.inputs, self.grad)
        with functorch_config.patch(activation_memory_budget=budget):
            start = time.perf_counter()
            try:
                subject.step()
            except BackendCompilerFailed as error:
                point.error = str(error.inner_exception)
                return
            self._synchronize()
            point.compile_s = time.perf_counter() - start
            point.ms = median_times({"": subject}, self.rounds)[""].ms
            point.activation_bytes = subject.activation_bytes()
            point.peak_bytes = self.peak_bytes(subject)
        subject.clear()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, subject: Subject) -> int:
        subject.clear()
        if self.device.type != "cuda":
            return 0
        self._synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        subject.step()
        self._synchronize()
        return torch.cuda.max_memory_allocated() - before


def dominated(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each stock point the fastest of fp8pass that holds no more bytes for the backward."""
    measured = [r for r in results if not r["error"]]
    rows = []
    for stock in (r for r in measured if r["variant"] == STOCK):
        smaller = [
            r
            for r in measured
            if r["variant"] != STOCK and r["activation_bytes"] <= stock["activation_bytes"]
        ]
        best = min(smaller, key=lambda r: r["ms"], default=None)
        rows.append(
            {
                "budget": stock["budget"],
                "by": best and {k: best[k] for k in ("variant", "budget")},
                "ratio": best and best["ms"] / stock["ms"],
            }
        )
    return rows


def largest_rise(results: list[dict[str, Any]]) -> dict[str, float]:
    """By how much a variant's peak is at most above what it was with a larger budget, a share."""
    found = {}
    for name in dict.fromkeys(r["variant"] for r in results):
        mine = [r for r in results if r["variant"] == name and not r["error"]]
        peaks = [r["peak_bytes"] for r in sorted(mine, key=lambda r: -(r["budget"] or 1.0))]
        least = itertools.accumulate(peaks, min)
        found[name] = max((p / max(q, 1) - 1 for p, q in zip(peaks, least, strict=True)), default=0)
    return found


def conclusions(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What follows from the points."""
    return {"dominated": dominated(results), "largest_rise_of_peak": largest_rise(results)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="*", default=RECIPES, help="of fp8pass")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, help="seconds after which no point starts")
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="a small stack, on the CPU too")
    default = Path(__file__).parent / "results/frontier.json"
    parser.add_argument("--out", type=Path, default=default, help="results to add to")
    args = parser.parse_args()
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = TINY if args.tiny else CASE
    record = resume(args.out, {**asdict(case), "rounds": args.rounds}, again=args.again)
    done = {(r["variant"], r["budget"]) for r in record["results"]}
    todo = [p for p in points(args.recipes) if (p.variant, p.budget) not in done]
    bench = Bench(case, device, args.rounds)
    longest = 0.0
    for number, point in enumerate(todo):
        began = time.perf_counter()
        if args.limit and began - start + longest > args.limit:
            print(f"stopping: {len(todo) - number} points are left", file=sys.stderr)
            break
        bench.measure(point)
        longest = max(longest, time.perf_counter() - began)
        print(point, file=sys.stderr, flush=True)
        merge(record, asdict(point), ("variant", "budget"))
        write_json(args.out, record | conclusions(record["results"]))
    record |= conclusions(record["results"])
    print_rows("memory against time", frontier_table(record))
    print(f"largest rise of the peak as the budget falls: {record['largest_rise_of_peak']}")


if __name__ == "__main__":
    main()
