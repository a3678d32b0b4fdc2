"""The command: runs programs, writes failing programs to files, and prints a summary."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from .script import save
from .workers import Result, Settings, results


def main() -> int:
    """Run the command. Return exit code 1 if a program failed."""
    args = _arguments()
    settings = Settings(
        args.seed, args.device, args.inductor_share, args.recipe, args.shrink_seconds
    )
    start = time.monotonic()
    summary = Summary()
    try:
        for result in results(settings, args.first, args.programs, args.seconds, args.workers):
            summary.add(result)
            if result.outcome.failure:
                _report(result, args)
            elif summary.programs % 500 == 0:
                print(f"{summary.programs} programs, {time.monotonic() - start:.0f} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    print(summary.text(args, time.monotonic() - start))
    return int(bool(summary.failures))


class Summary:
    """Statistics of all programs so far."""

    def __init__(self) -> None:
        self.programs = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.compilers: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.stock: Counter[str] = Counter()
        self.judged = self.unjudged = self.fp8 = self.low_bit = 0
        self.slowest = Result(-1, "", "", outcome=None)  # type: ignore[arg-type]
        self.worst = 0.0

    def add(self, result: Result) -> None:
        """Count a result."""
        outcome = result.outcome
        self.programs += 1
        self.compilers[result.compiler] += 1
        kind = (outcome.failure and "failed") or (outcome.refused and "refused")
        kind = kind or (outcome.stock and "stock wrong") or "passed"
        self.outcomes[result.recipe, str(kind)] += 1
        if outcome.failure:
            self.failures[outcome.failure] += 1
        if outcome.stock:
            self.stock[outcome.stock.split(":")[0] if "Error" in outcome.stock else "numbers"] += 1
        self.judged += outcome.judged
        self.unjudged += outcome.unjudged
        self.fp8 += bool(outcome.fp8)
        self.low_bit += bool(outcome.low_bit)
        self.worst = max(self.worst, outcome.worst)
        if self.slowest.outcome is None or outcome.seconds > self.slowest.outcome.seconds:
            self.slowest = result

    def text(self, args: argparse.Namespace, seconds: float) -> str:
        """Return the summary as text."""
        recipes = sorted({recipe for recipe, _ in self.outcomes})
        lines = [
            f"{self.programs} programs in {seconds:.0f} s, {sum(self.failures.values())} failures"
            f" {dict(self.failures)}",
            *(
                f"  {recipe}: "
                + ", ".join(f"{n} {kind}" for (r, kind), n in self.outcomes.items() if r == recipe)
                for recipe in recipes
            ),
            f"  compiled with {dict(self.compilers)}",
            f"  of {self.judged + self.unjudged} tensors compared with noise {self.judged} were"
            f" judged, the largest error was {self.worst:.2f} of the accepted one",
            f"  stock PyTorch wrong: {dict(self.stock)}",
        ]
        if self.slowest.outcome is not None:
            slowest = self.slowest
            lines.append(
                f"  slowest compilation: {slowest.outcome.seconds:.1f} s of CPU time,"
                f" program {slowest.index}"
            )
        lines.append(
            f"seed {args.seed}, from program {args.first}, on {args.device},"
            f" PyTorch {torch.__version__}, commit {_commit()}"
        )
        return "\n".join(lines)


def _report(result: Result, args: argparse.Namespace) -> None:
    title = f"Program {result.index} of seed {args.seed}, recipe {result.recipe}: fails."
    print(f"{result.outcome.failure}: {title}\n{result.outcome.message[-1500:]}", flush=True)
    if result.program is not None:
        path = save(result.program, result.outcome, args.save, title, args.device)
        print(f"{result.program.model_source()}written to {path}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, help="time limit; the default is 60, or none with --programs")
    add("--programs", type=int, help="largest number of programs")
    add("--seed", type=int, default=random.randrange(10**6), help="seed; the default is random")
    add("--first", type=int, default=0, help="index of the first program")
    add("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="processes")
    add(
        "--inductor-share",
        type=float,
        default=1 / 15,
        help="share of programs that Inductor compiles",
    )
    add("--recipe", choices=("exact", "coat", "agoq", "linear"), help="use only this recipe")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--save", type=Path, default=Path("fuzz-failures"), help="folder for programs that fail")
    add("--shrink-seconds", type=float, default=120.0, help="time to shrink a failing program")
    args = parser.parse_args()
    if args.seconds is None and args.programs is None:
        args.seconds = 60.0
    return args


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
