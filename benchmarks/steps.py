"""Compare whole training steps, with and without `capture_step`, with stock `torch.compile`.

    python benchmarks/steps.py                       all models of the record
    python benchmarks/steps.py --cases "GPT-2 124M"
    python benchmarks/steps.py --tiny --out x.json   small models, on the CPU too

A step has four micro-batches, clips gradients to a norm of 1, and updates the weights with AdamW:
PyTorch's fused AdamW for stock `torch.compile` and torchao, fp8pass's AdamW for fp8pass. nanochat
d20 has nanochat's optimizers: Muon for the matrices of layers, AdamW for embeddings and the head.
The learning rate is 0, so that all variants of a model share their weights. Variants alternate in a
different order each round (`layer.py`). The variants of nanochat d20 are jobs of their own: with
--at-once 3 they compile in parallel, and are measured one after the other.

Measured: median milliseconds of a step, median milliseconds in which the CPU launches it, and the
memory that PyTorch's allocator reserves for a step. The memory of a captured step stays reserved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layer import median_times
from never_slower import DEFAULT, STOCK, TORCHAO, Subject, subject_of
from never_slower import VARIANTS as BACKENDS
from report import merge, print_rows, record_parser, resume, use_expandable_segments, write_json
from tables_layers import CAPTURED, steps_table
from torch import Tensor, nn
from workers import ALONE, run_jobs
from workloads import WORKLOADS

from fp8pass import compat
from fp8pass.demo.train import free_memory
from fp8pass.optim import AdamW, Muon, capture_step, split_parameters

ALTERNATING = ((STOCK, STOCK + CAPTURED, DEFAULT, DEFAULT + CAPTURED),)
WITH_MUON = "nanochat d20"
# The variants of each job of a model.
CASES = {
    "GPT-2 124M": ALTERNATING,
    "nanochat d12": ALTERNATING,
    "ViT-B/16": ALTERNATING,
    "BERT base": ALTERNATING,
    WITH_MUON: ((STOCK,), (TORCHAO,), (DEFAULT,)),
}
MICRO_BATCHES, NORM = 4, 1.0
FIRST = 5  # steps that compile, warm up and capture


@dataclass
class Result:
    """One variant of a model; see the module's docstring."""

    case: str
    variant: str
    ms: float = 0.0
    cpu_ms: float = 0.0
    reserved_bytes: int = 0


class Training:
    """A whole step, as a subject of `median_times`."""

    def __init__(self, subject: Subject, name: str, variant: str) -> None:
        self.inputs = subject.inputs
        parameters, names = list(subject.model.parameters()), list(subject.batch)
        matrices, others = list[nn.Parameter](), parameters
        if name == WITH_MUON:
            matrices, others = split_parameters(subject.model)
        optimizers = new_optimizers(matrices, others, ours=variant.startswith(DEFAULT))

        def step(*inputs: Tensor) -> None:
            batch = dict(zip(names, inputs, strict=True))
            for _ in range(MICRO_BATCHES):
                with subject.context():
                    loss = subject.model(**batch) / MICRO_BATCHES
                loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, NORM)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        self.run = capture_step(step) if variant.endswith(CAPTURED) else step

    def step(self) -> None:
        """Run the step."""
        self.run(*self.inputs)

    def clear(self) -> None:
        """Do nothing: a step deletes its gradients."""


def new_optimizers(
    matrices: list[nn.Parameter], others: list[nn.Parameter], *, ours: bool
) -> list[torch.optim.Optimizer]:
    """Create Muon for `matrices` and AdamW for `others`. `ours` selects fp8pass's optimizers."""
    muon: Any = Muon if ours else torch.optim.Muon
    first = [muon(matrices, lr=0.0)] if matrices else []
    if ours:
        return [*first, AdamW(others, lr=0.0)]
    capturable = others[0].is_cuda
    return [*first, torch.optim.AdamW(others, 0.0, fused=True, capturable=capturable)]


def measure(
    tiny: bool, rounds: int, job: tuple[str, tuple[str, ...]], device: torch.device
) -> Iterator[Any]:
    """Measure variants of a model, after all of them are compiled."""
    name, variants = job
    use_expandable_segments()
    torch._dynamo.reset()
    torch.manual_seed(0)
    base, batch = WORKLOADS[name].place(device, tiny)
    compiled: dict[str, Subject] = {}  # stock has equal code with and without capture
    subjects, results = {}, {}
    for variant in variants:
        code = STOCK if variant.startswith(STOCK) else variant
        if code not in compiled:
            backend = BACKENDS[variant.removesuffix(CAPTURED)]
            compat.forget_sizes()
            compiled[code] = subject_of(base, batch, WORKLOADS[name], backend)
        subjects[variant] = Training(compiled[code], name, variant)
        results[variant] = Result(name, variant)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
        for _ in range(FIRST):
            subjects[variant].step()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            subjects[variant].step()
            torch.cuda.synchronize()
            results[variant].reserved_bytes = torch.cuda.max_memory_reserved() - before
        print(f"{name}, {variant}: compiled", file=sys.stderr, flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # other jobs share the GPU
    yield ALONE
    for variant, times in median_times(subjects, rounds).items():  # type: ignore[arg-type]
        results[variant].ms, results[variant].cpu_ms = times.ms, times.cpu_ms
    yield from map(asdict, results.values())
    del subjects, compiled, base
    free_memory()


def main() -> None:
    """Run the command line."""
    parser = record_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=1, help="jobs that share a GPU")
    args = parser.parse_args()
    path = args.out or Path(__file__).parent / "results/steps.json"
    settings = {"tiny": args.tiny, "micro_batches": MICRO_BATCHES, "clip": NORM}
    record = resume(path, settings, again=args.again)
    done = {(r["case"], r["variant"]) for r in record["results"]}
    groups = [(case, group) for case in args.cases for group in CASES[case]]
    jobs = [(case, group) for case, group in groups if (case, group[0]) not in done]
    work = partial(measure, args.tiny, args.rounds)
    for result in run_jobs(work, jobs, at_once=args.at_once):
        print(result, flush=True)
        merge(record, result, ("case", "variant"))
        write_json(path, record)
    print_rows("training steps, beside stock torch.compile", steps_table(record))


if __name__ == "__main__":
    main()
