"""Training steps of GPT-2 124M, optimizer included, by recipe, with CUDA graphs and without.

    python benchmarks/gpt2_steps.py                      all, writes results/gpt2_steps.json
    python benchmarks/gpt2_steps.py --recipes coat       some, always beside BF16
    python benchmarks/gpt2_steps.py --tiny --out x.json  a small model, on the CPU too

The model and batch of `gpt2.py`. A step is forward and backward of each micro-batch, AdamW and
`zero_grad`: BF16 compile with PyTorch's fused AdamW, fp8pass with its own, both in nanoGPT's two
groups. Variants take turns (`layer.py`). CUDA graphs are `mode="reduce-overhead"`, on GPUs only.

What a graph returns is overwritten by its next replay, gradients, too, so that stock PyTorch cannot
add them up to a `.grad` which is one of them. With CUDA graphs and several micro-batches BF16 is
given a `.grad` beforehand, which stays: `zero_grad(set_to_none=False)`.

Per variant: milliseconds of a step (median), until the CPU has launched it, and in which a kernel
runs (profiler); how far the gradients of a step are from those without CUDA graphs. Compilation
takes most of a run: 8 models, some 30 seconds each. GPUs work for about half a minute.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpt2 import FULL, TINY, Size, busy_ms
from layer import median_times, relative_error, with_own_code
from models import GPT
from report import environment, print_rows, write_json
from tables_layers import BF16, gpt2_steps_table
from torch import Tensor, nn

import fp8pass
from fp8pass.optim import AdamW

RECIPES = ("coat", "agoq", "linear")
ACCUMULATED = (1, 4)
OPTIONS: dict[str, Any] = {"lr": 6e-4, "betas": (0.9, 0.95)}
# Runs that a CUDA graph takes until it is replayed: one to warm up, one to be recorded.
UNTIL_REPLAYED = 2

Batch = tuple[Tensor, Tensor]


@dataclass
class Result:
    """One variant; see the module's docstring."""

    recipe: str
    graphed: bool
    micro_batches: int
    rounds: int
    compile_s: float = 0.0
    ms: float = 0.0
    cpu_ms: float = 0.0
    gpu_ms: float = 0.0
    gradient_error: float = 0.0


@dataclass
class Trained:
    """A compiled model with its optimizer.

    Attributes:
        recipe: of fp8pass, or `BF16`.
        graphed: whether CUDA graphs are replayed.
    """

    base: nn.Module
    recipe: str
    graphed: bool
    compile_s: float = 0.0
    program: Any = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        model = with_own_code(copy.deepcopy(self.base))
        self.parameters = list(model.parameters())
        mode = "reduce-overhead" if self.graphed else None
        if self.recipe == BF16:
            self.program = torch.compile(model, mode=mode)
            fused = self.parameters[0].is_cuda
            self.optimizer = torch.optim.AdamW(in_groups(model), fused=fused, **OPTIONS)
        else:
            backend = fp8pass.backend(fp8pass.Config.recipe(self.recipe))
            self.program = torch.compile(model, backend=backend, mode=mode)
            self.optimizer = AdamW(in_groups(model), **OPTIONS)


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters as nanoGPT groups them: matrices decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


class Subject:
    """Steps of a model with a number of micro-batches."""

    def __init__(self, trained: Trained, batches: list[Batch]) -> None:
        self.trained, self.batches = trained, batches
        self.inputs = batches[0]
        of_pytorch = trained.graphed and trained.recipe == BF16
        self.keeps_gradients = of_pytorch and len(batches) > 1
        self.sums: list[Tensor | None] = [
            torch.zeros_like(p) if self.keeps_gradients else None for p in trained.parameters
        ]

    def backwards(self) -> None:
        """Forward and backward of all micro-batches."""
        for batch in self.batches:
            with torch.autocast(batch[0].device.type, torch.bfloat16):
                loss = self.trained.program(*batch)
            (loss / len(self.batches)).backward()

    def step(self) -> None:
        """All of a training step."""
        self.backwards()
        self.trained.optimizer.step()
        self.trained.optimizer.zero_grad(set_to_none=not self.keeps_gradients)

    def clear(self) -> None:
        """Leave gradients as a step finds them."""
        for parameter, kept in zip(self.trained.parameters, self.sums, strict=True):
            parameter.grad = kept

    def gradients(self) -> Tensor:
        """The gradients of a step, without the step, as one vector."""
        self.clear()
        self.backwards()
        found = torch.cat([p.grad.flatten() for p in self.trained.parameters if p.grad is not None])
        self.trained.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return found


def batches_of(size: Size, device: torch.device) -> list[Batch]:
    """Micro-batches of random tokens."""
    shape = max(ACCUMULATED), size.batch, size.seq + 1
    tokens = torch.randint(size.vocabulary, shape, device=device)
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in tokens]


def compiled(base: nn.Module, recipe: str, graphed: bool, batch: Batch) -> Trained:
    """A model with its optimizer, as it is after the first step."""
    trained = Trained(base, recipe, graphed)
    subject = Subject(trained, [batch])
    start = time.perf_counter()
    subject.gradients()
    if batch[0].is_cuda:
        torch.cuda.synchronize()
    trained.compile_s = time.perf_counter() - start
    for _ in range(UNTIL_REPLAYED):
        subject.gradients()
    return trained


def measure(size: Size, device: torch.device, recipes: list[str], rounds: int) -> list[Result]:
    """All variants of some recipes."""
    torch.manual_seed(0)
    with device:
        base = GPT(size.layers, size.hidden, size.heads, size.vocabulary, size.seq)
    batches = batches_of(size, device)
    results: dict[str, Result] = {}
    subjects: dict[str, Subject] = {}
    for recipe in (BF16, *recipes):
        reference: dict[int, Tensor] = {}
        for graphed in (False, True)[: 1 + (device.type == "cuda")]:
            trained = compiled(base, recipe, graphed, batches[0])
            for count in ACCUMULATED:
                subject = Subject(trained, batches[:count])
                result = Result(recipe, graphed, count, rounds, trained.compile_s)
                gradients = subject.gradients()
                result.gradient_error = relative_error(
                    gradients, reference.setdefault(count, gradients)
                )
                name = f"{recipe} {graphed} {count}"
                subjects[name], results[name] = subject, result
                print(asdict(result), file=sys.stderr, flush=True)
    for name, subject in subjects.items():
        subject.clear()
        subject.step()  # which makes the optimizer's states
        results[name].gpu_ms = busy_ms(subject)  # type: ignore[arg-type]
    for name, times in median_times(subjects, rounds).items():  # type: ignore[arg-type]
        results[name].ms, results[name].cpu_ms = times.ms, times.cpu_ms
    return list(results.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU too")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results/gpt2_steps.json"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not args.tiny:
        sys.exit("GPT-2 124M needs an NVIDIA GPU; --tiny runs on the CPU.")
    size = TINY if args.tiny else FULL
    results = [asdict(r) for r in measure(size, device, args.recipes, args.rounds)]
    record = {**environment(), "settings": asdict(size), "results": results}
    write_json(args.out, record)
    print_rows("GPT-2 124M, training steps", gpt2_steps_table(record))


if __name__ == "__main__":
    main()
