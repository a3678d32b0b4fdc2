"""Profile the kernels of a layer, and compare each with the limit of the GPU.

    python benchmarks/kernels.py                    the cases of layer.py, needs a GPU
    python benchmarks/kernels.py --cases h4096      one of them

The script profiles forward and backward of decoder layers: recipes coat and block with the kernels
of `codegen/`, coat with only Inductor's generated code, and torchao. It measures calls and
milliseconds of each kernel per step. The bandwidth of a memory-bound kernel is compared with the
bandwidth of a large copy in the same run. A kernel's bytes are the bytes of its arguments; in-place
arguments count twice. GEMMs are compared with the FP8 rate of one large GEMM. The floor is
the time of GEMMs and attention, plus the time of all other bytes at copy bandwidth. Better or
fewer kernels could save the rest of the step.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from layer import CASES, Case, Subject, Variant, median_times, torchao, with_fp8pass
from models import Stack, init_weights, rope_tables
from report import environment, print_rows, write_json
from tables_kernels import kernels_table
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fp8pass.passes import ENTRIES, LOWERING_PASSES
from fp8pass.passes.lowering.lower_dialect import lower_dialect

STEPS = 5
KINDS = {
    "ours": re.compile("^(rows|tiles)_"),
    "generated": re.compile("^triton_"),
    "gemm": re.compile("nvjet|gemm|cutlass|_scaled_mm", re.IGNORECASE),
    "attention": re.compile("cudnn|flash|fmha|sdpa", re.IGNORECASE),
}


BEFORE_LOWERING = LOWERING_PASSES[: LOWERING_PASSES.index(lower_dialect)]
KERNEL_PASSES = ",".join(p.__name__ for p in BEFORE_LOWERING if not ENTRIES[p].required)


@dataclass
class Kernel:
    """One kernel in a step; `bytes` is 0 if unknown."""

    name: str
    kind: str
    calls: float
    ms: float
    bytes: float = 0.0


@dataclass
class Limits:
    """Measured limits of the GPU: bytes read and written per second, FP8 FLOPs per second."""

    copy_bandwidth: float
    fp8_flops: float


@dataclass
class Breakdown:
    """One profiled case. Times are per step; `idle_ms` is the time without a running kernel."""

    case: str
    step_ms: float
    idle_ms: float
    gemm_flops: float
    attention_flops: float
    kernels: list[Kernel]


def busiest_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median GPU milliseconds of `run`. A copy keeps the GPU busy during its launch.

    An earlier call of `run` cannot replace the copy: the GPU runs short kernels faster than the CPU
    launches them.
    """
    source, target = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    times = []
    for _ in range(repeats):
        run()
        target.copy_(source)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def measure_limits() -> Limits:
    """Measure the rates of a copy of 1 GiB and of an FP8 GEMM of 16384 × 8192 × 8192."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = busiest_ms(lambda: target.copy_(source))
    a = torch.randn(16384, 8192, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(8192, 8192, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def product() -> Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    flops = 2 * 16384 * 8192 * 8192
    return Limits(2 * source.nbytes / copy_ms * 1e3, flops / busiest_ms(product) * 1e3)


@contextmanager
def count_bytes() -> Iterator[dict[str, list[int]]]:
    """Yield a dict that collects the argument bytes of each launch, by name of the kernel."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    counted: dict[str, list[int]] = defaultdict(list)
    original = CachingAutotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        in_place = [name.startswith("in_out") for name in self.fn.arg_names]
        tensors = {
            x.data_ptr(): x.nbytes * (2 if twice else 1)
            for x, twice in zip(args, in_place, strict=False)
            if isinstance(x, Tensor)
        }
        counted[self.fn.__name__].append(sum(tensors.values()))
        return original(self, *args, **kwargs)

    with patch.object(CachingAutotuner, "run", run):
        yield counted


def flops_of(subject: Subject) -> tuple[float, float]:
    """Count the FLOPs of GEMMs and of attention in a step."""
    with FlopCounterMode(display=False) as counter:
        subject.step()
    by_operator = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in by_operator.items() if "attention" in str(op))
    return sum(by_operator.values()) - attention, attention


def profile(case: Case, compile_model: Variant, rounds: int) -> Breakdown:
    """Profile one case, compiled by `compile_model`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(case.layers, case.hidden, case.heads, case.ffn).to("cuda", torch.bfloat16)
    init_weights(model)
    x = torch.randn(case.batch, case.seq, case.hidden, device="cuda", dtype=torch.bfloat16)
    inputs = x.requires_grad_(), *rope_tables(case.seq, case.hidden // case.heads, x.device)
    grad = torch.randn_like(x)
    flops = flops_of(Subject(model, inputs, grad))
    subject = Subject(compile_model(model), inputs, grad)
    for _ in range(3):
        subject.step()
        subject.clear()
    step_ms = median_times({"": subject}, rounds)[""].ms
    with count_bytes() as counted:
        subject.step()
    subject.clear()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            subject.step()
            subject.clear()
        torch.cuda.synchronize()
    kernels = [
        Kernel(
            event.key,
            next((kind for kind, names in KINDS.items() if names.search(event.key)), "other"),
            event.count / STEPS,
            event.self_device_time_total / STEPS / 1e3,
            float(sum(counted.get(event.key, ()))),
        )
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
    kernels.sort(key=lambda k: -k.ms)
    return Breakdown(case.name, step_ms, idle_ms(profiler) / STEPS, *flops, kernels)


def start_profiler() -> None:
    """Start GPU tracing early: the start would delay the first profile of the process."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.ones(1, device="cuda")
        torch.cuda.synchronize()


def idle_ms(profiler: torch.profiler.profile) -> float:
    """Return the milliseconds without a running kernel, from the first kernel to the last."""
    cuda = torch.autograd.DeviceType.CUDA
    ran = [e.time_range for e in profiler.events() or () if e.device_type == cuda]
    idle, until = 0.0, None
    for interval in sorted(ran, key=lambda x: x.start):
        if until is not None:
            idle += max(0.0, interval.start - until)
        until = interval.end if until is None else max(until, interval.end)
    return idle / 1e3


GENERATED = "generated code only"
VARIANTS: dict[str, Variant] = {
    "coat": with_fp8pass(),
    GENERATED: with_fp8pass(),
    "block": with_fp8pass(recipe="block"),
    "torchao tensorwise": torchao("tensorwise"),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/kernels.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a GPU, and there is none")
    limits = measure_limits()
    start_profiler()
    results = []
    for case in (c for c in CASES if c.name in args.cases):
        for name in args.variants:
            disabled = KERNEL_PASSES if name == GENERATED else ""
            optional = (ImportError,) if name.startswith("torchao") else ()
            with suppress(*optional), patch.dict(os.environ, FP8PASS_DISABLE_PASSES=disabled):
                result = profile(case, VARIANTS[name], args.rounds)
                result.case += f", {name}" if name != "coat" else ""
                results.append(result)
    record = {
        **environment(),
        "limits": asdict(limits),
        "results": [asdict(r) for r in results],
    }
    print_rows("kernels of a step", kernels_table(record))
    write_json(args.out, record)


if __name__ == "__main__":
    main()
