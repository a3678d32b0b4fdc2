"""Compare time and memory of models of many kinds with stock `torch.compile`.

    python benchmarks/never_slower.py                     fp8pass's default on all workloads
    python benchmarks/never_slower.py gpt2                all recipes on GPT-2
    python benchmarks/never_slower.py ablation            fp8pass without each optional part
    python benchmarks/never_slower.py --cases ViT-B/16    one workload
    python benchmarks/never_slower.py --tiny --out x.json small models, on the CPU too
    python benchmarks/never_slower.py --at-once 5         compile five workloads at the same time

A step is a forward and a backward. Each GPU of the machine measures different workloads. The
variants of a workload share their weights, and alternate in a different order each round
(`layer.py`). A part stays in fp8pass if some workload is at least 1% faster with the part.

Measured for each variant: median milliseconds of a step; milliseconds in which the CPU launches it;
milliseconds in which a kernel runs (profiler); launched kernels; bytes held between forward and
backward, and the planned number of these bytes; the memory peaks of forward and backward. Memory
allocated before the step is subtracted. GPT-2's held bytes include its FP32 residual stream.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Compile caches are off, because they would return the code of another variant.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
from layer import CASES as LAYERS
from layer import in_torchao, median_times, share_parameters, with_own_code
from report import merge, print_rows, resume, use_expandable_segments, write_json
from tables_layers import ALL_PARTS, GRAPHED, ablation_table, gpt2_table, never_slower_table
from torch import Tensor, fx, nn
from workers import ALONE, run_jobs
from workloads import WORKLOADS, Workload

from fp8pass import compat
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.demo.train import free_memory
from fp8pass.dynamo import Backend

STOCK, TORCHAO, DEFAULT = "bf16 compile", "torchao tensorwise", "fp8pass coat"


@dataclass(frozen=True)
class Variant:
    """How a variant compiles its model.

    Attributes:
        config: options of fp8pass; None is stock `torch.compile`.
        without: names of passes that are left out.
        convert: replaces layers of a model, and returns the model.
        how: other arguments of `torch.compile`.
    """

    config: Config | None = field(default_factory=Config)
    without: str = ""
    convert: Callable[[nn.Module], nn.Module] | None = None
    how: dict[str, Any] = field(default_factory=dict)


APART = "fuse_launches,fuse_scales"
REPLAYED = {"mode": "reduce-overhead"}
COMBINED = {"options": {"combo_kernels": True, "benchmark_combo_kernel": False}}
RECIPES = {
    STOCK: Variant(None),
    DEFAULT: Variant(),
    "fp8pass coat, all in FP8": Variant(Config(fp8_gemms="all")),
    "fp8pass agoq": Variant(Config.recipe("agoq")),
    "fp8pass agoq, 4 bits": Variant(Config(save_format="e2m1")),
    "fp8pass linear": Variant(Config.recipe("linear")),
}
PARTS = {
    ALL_PARTS: Variant(),
    "dgrads apart": Variant(without="merge_dgrads"),
    "launches apart": Variant(without=APART),
    "launches apart, combo_kernels": Variant(without=APART, how=COMBINED),
    "losses generated": Variant(without="fuse_losses"),
    ALL_PARTS + GRAPHED: Variant(how=REPLAYED),
    "dgrads apart" + GRAPHED: Variant(without="merge_dgrads", how=REPLAYED),
    "launches apart" + GRAPHED: Variant(without=APART, how=REPLAYED),
}
OTHERS = {
    "fp8pass coat, all compact": Variant(Config(compact_saves="all")),
    TORCHAO: Variant(None, convert=partial(in_torchao, "tensorwise")),
}
VARIANTS = RECIPES | PARTS | OTHERS
PROFILED = 5


@dataclass(frozen=True)
class Experiment:
    """The workloads and variants of one record, and its table."""

    cases: tuple[str, ...]
    variants: tuple[str, ...]
    table: Callable[[dict[str, Any]], list[list[str]]]


EXPERIMENTS = {
    "never_slower": Experiment(
        tuple(w for w in WORKLOADS if w not in [case.name for case in LAYERS]),
        (STOCK, DEFAULT),
        never_slower_table,
    ),
    "gpt2": Experiment(("GPT-2 124M",), tuple(RECIPES), gpt2_table),
    "ablation": Experiment(
        (*(case.name for case in LAYERS), "GPT-2 124M", "Llama 7B"), tuple(PARTS), ablation_table
    ),
}


@dataclass
class Result:
    """One variant of a workload; see the module's docstring."""

    case: str
    variant: str
    rounds: int
    compile_s: float = 0.0
    ms: float = 0.0
    cpu_ms: float = 0.0
    gpu_ms: float = 0.0
    kernels: int = 0
    saved_bytes: int = 0
    planned_bytes: int | None = None
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


@dataclass
class Subject:
    """A compiled variant and its batch."""

    model: nn.Module
    batch: dict[str, Tensor]
    context: Callable[[], AbstractContextManager[Any]]
    planned: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of the batch."""
        return [*self.batch.values()]

    def loss(self) -> Tensor:
        """Run the forward."""
        with self.context():
            return self.model(**self.batch)

    def step(self) -> None:
        """Run forward and backward."""
        self.loss().backward()

    def clear(self) -> None:
        """Delete the gradients."""
        self.model.zero_grad(set_to_none=True)
        for x in self.inputs:
            x.grad = None


def subject_of(
    base: nn.Module, batch: dict[str, Tensor], workload: Workload, variant: Variant
) -> Subject:
    """Return a compiled variant of a model."""
    model, planned = share_parameters(base), list[int]()
    model = variant.convert(model) if variant.convert else model
    compile_module = partial(torch.compile, backend=backend_of(variant, planned), **variant.how)
    if workload.blocks:
        layers: Any = model.get_submodule(workload.blocks)
        own = type(with_own_code(layers[0]))  # all layers share the class and its compiled code
        for i, layer in enumerate(layers):
            layer.__class__ = own
            layers[i] = compile_module(layer)
    else:
        model = compile_module(with_own_code(model))  # type: ignore[assignment]
    autocast = partial(torch.autocast, next(base.parameters()).device.type, torch.bfloat16)
    return Subject(model, batch, autocast if workload.autocast else nullcontext, planned)


def backend_of(variant: Variant, planned: list[int]) -> Any:
    """Return a variant's backend, which adds the saved bytes of each graph to `planned`."""
    if variant.config is None:
        return "inductor"

    def observe(compiled: CompiledGraph) -> None:
        planned.append(compiled.plan.saved_bytes)

    backend = Backend(variant.config, observe)

    def compile_graph(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        with patch.dict(os.environ, FP8PASS_DISABLE_PASSES=variant.without):
            return backend(gm, inputs, **kwargs)

    return compile_graph


def measure_memory(subject: Subject, result: Result) -> None:
    """Add the bytes held between forward and backward, and the peaks of both, to a result."""
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


def profile(subject: Subject, result: Result) -> None:
    """Add the kernels of a step and their milliseconds, without waits for the CPU, to a result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            subject.clear()
            subject.step()
        torch.cuda.synchronize()
    subject.clear()
    events = profile.key_averages()
    result.gpu_ms = sum(e.self_device_time_total for e in events) / PROFILED / 1e3
    result.kernels = sum(e.count for e in events if e.self_device_time_total) // PROFILED


def measure(
    tiny: bool, rounds: int, variants: list[str], name: str, device: torch.device
) -> Iterator[Any]:
    """Measure the variants of a workload, after all of them are compiled."""
    use_expandable_segments()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # above the limit, a model would run uncompiled
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.manual_seed(0)
    base, batch = WORKLOADS[name].place(device, tiny)
    subjects, results = {}, {}
    for variant in variants:
        subject = subject_of(base, batch, WORKLOADS[name], VARIANTS[variant])
        result = Result(name, variant, rounds)
        compat.forget_sizes()  # else sizes of an earlier variant make later variants dynamic
        start = time.perf_counter()
        subject.step()
        result.compile_s = time.perf_counter() - start
        result.planned_bytes = sum(subject.planned) if subject.planned else None
        subject.clear()
        subject.step()
        subject.clear()
        subjects[variant], results[variant] = subject, result
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # other workloads share the GPU
    yield ALONE
    for variant, subject in subjects.items() if device.type == "cuda" else ():
        if "mode" not in VARIANTS[variant].how:  # the allocator does not see CUDA graphs
            measure_memory(subject, results[variant])
        profile(subject, results[variant])
    for variant, times in median_times(subjects, rounds).items():  # type: ignore[arg-type]
        results[variant].ms, results[variant].cpu_ms = times.ms, times.cpu_ms
    yield from map(asdict, results.values())
    del subjects, subject, base
    free_memory()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", nargs="?", default="never_slower", choices=EXPERIMENTS)
    parser.add_argument("--cases", nargs="+", choices=WORKLOADS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=1, help="workloads that share a GPU")
    parser.add_argument("--again", action="store_true", help="discard the results in the file")
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--out", type=Path, help="record to add results to")
    args = parser.parse_args()
    experiment = EXPERIMENTS[args.experiment]
    path = args.out or Path(__file__).parent / f"results/{args.experiment}.json"
    variants = args.variants or list(experiment.variants)
    record = resume(path, {"tiny": args.tiny}, again=args.again)
    done = {(r["case"], r["variant"]) for r in record["results"]}
    cases = args.cases or experiment.cases
    jobs = [case for case in cases if any((case, v) not in done for v in variants)]
    work = partial(measure, args.tiny, args.rounds, variants)
    for result in run_jobs(work, jobs, at_once=args.at_once):
        print(result, flush=True)
        merge(record, result, ("case", "variant"))
        write_json(path, record)
    print_rows("forward and backward, beside stock torch.compile", experiment.table(record))


if __name__ == "__main__":
    main()
