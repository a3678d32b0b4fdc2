"""Measure time and memory of forward and backward of GPT-2 124M, as nanoGPT trains it.

    python benchmarks/gpt2.py                      all variants, writes results/gpt2.json
    python benchmarks/gpt2.py --tiny --out x.json  a small model, on the CPU too

Weights are in FP32, under BF16 autocast; a batch has 16 × 1024 tokens. The residual stream is in
FP32 and its branches are in BF16, so a branch takes half the bytes of the sum that includes it.
Variants share their weights, and alternate (`layer.py`).

Measured for each variant: median milliseconds of a step, milliseconds in which a kernel runs
(profiler), bytes held between forward and backward, the planned number of these bytes, and the
memory peaks of forward and backward. Memory allocated before the step is subtracted.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from layer import median_times, share_parameters, with_own_code
from models import GPT
from report import environment, print_rows, use_expandable_segments, write_json
from tables_layers import gpt2_table
from torch import Tensor, nn

from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.dynamo import Backend

CONFIGS = {
    "coat": Config(),
    "coat, all in FP8": Config(fp8_gemms="all"),
    "agoq": Config.recipe("agoq"),
    "agoq, 4 bits": Config(save_format="e2m1"),
    "linear": Config.recipe("linear"),
}
PROFILED = 5


@dataclass(frozen=True)
class Size:
    """A GPT-2 and its batch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    seq: int


FULL = Size(12, 768, 12, 50304, batch=16, seq=1024)
TINY = Size(2, 64, 2, 128, batch=2, seq=32)


@dataclass
class Result:
    """One variant; see the module's docstring."""

    variant: str
    rounds: int
    compile_s: float = 0.0
    ms: float = 0.0
    cpu_ms: float = 0.0
    gpu_ms: float = 0.0
    saved_bytes: int = 0
    planned_bytes: int | None = None
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


@dataclass
class Subject:
    """A compiled variant and its batch."""

    model: Callable[[Tensor, Tensor], Tensor]
    parameters: list[nn.Parameter]
    inputs: tuple[Tensor, Tensor]
    planned: list[int] = field(default_factory=list)

    def loss(self) -> Tensor:
        """Run the forward."""
        with torch.autocast(self.inputs[0].device.type, torch.bfloat16):
            return self.model(*self.inputs)

    def step(self) -> None:
        """Run forward and backward."""
        self.loss().backward()

    def clear(self) -> None:
        """Delete the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def subject_of(base: nn.Module, inputs: tuple[Tensor, Tensor], config: Config | None) -> Subject:
    """Return a compiled variant of a model; without `config`, stock `torch.compile`."""
    model, planned = with_own_code(share_parameters(base)), list[int]()

    def observe(compiled: CompiledGraph) -> None:
        planned.append(compiled.plan.saved_bytes)

    backend = Backend(config, observe) if config else "inductor"
    compiled = torch.compile(model, backend=backend)
    return Subject(compiled, list(base.parameters()), inputs, planned)


def measure_memory(subject: Subject, result: Result) -> None:
    """Add the bytes held between forward and backward, and the peaks of both, to a result."""
    if subject.inputs[0].device.type != "cuda":
        return
    subject.clear()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = subject.loss()
    torch.cuda.synchronize()
    result.saved_bytes = torch.cuda.memory_allocated() - before
    result.forward_peak_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    result.backward_peak_bytes = torch.cuda.max_memory_allocated() - before
    subject.clear()


def busy_ms(subject: Subject) -> float:
    """Return the milliseconds of a step in which a kernel runs, without waits for the CPU."""
    if subject.inputs[0].device.type != "cuda":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            subject.clear()
            subject.step()
        torch.cuda.synchronize()
    subject.clear()
    return sum(e.self_device_time_total for e in profile.key_averages()) / PROFILED / 1e3


def measure(size: Size, device: torch.device, rounds: int) -> list[Result]:
    """Measure all variants of a model."""
    torch.manual_seed(0)
    with device:
        base = GPT(size.layers, size.hidden, size.heads, size.vocabulary, size.seq)
    ids = torch.randint(size.vocabulary, (size.batch, size.seq + 1), device=device)
    inputs = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    subjects, results = {}, {}
    configs = {"bf16 compile": None, **{f"fp8pass {n}": c for n, c in CONFIGS.items()}}
    for name, config in configs.items():
        subject, result = subject_of(base, inputs, config), Result(name, rounds)
        start = time.perf_counter()
        subject.step()
        result.compile_s = time.perf_counter() - start
        result.planned_bytes = sum(subject.planned) if subject.planned else None
        subject.step()
        measure_memory(subject, result)
        result.gpu_ms = busy_ms(subject)
        print(asdict(result), file=sys.stderr, flush=True)
        subjects[name], results[name] = subject, result
    for name, times in median_times(subjects, rounds).items():  # type: ignore[arg-type]
        results[name].ms, results[name].cpu_ms = times.ms, times.cpu_ms
    return list(results.values())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/gpt2.json")
    args = parser.parse_args()
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not args.tiny:
        sys.exit("GPT-2 124M needs an NVIDIA GPU; --tiny runs on the CPU.")
    size = TINY if args.tiny else FULL
    results = [asdict(r) for r in measure(size, device, args.rounds)]
    record = {**environment(), "settings": asdict(size), "results": results}
    write_json(args.out, record)
    print_rows("GPT-2 124M, forward + backward", gpt2_table(record))


if __name__ == "__main__":
    main()
