"""Measure FP8 optimizer states: rounding errors, and the time and memory of a step.

    python benchmarks/optimizer.py errors            any device
    python benchmarks/optimizer.py sums              any device
    python benchmarks/optimizer.py speed             needs an NVIDIA GPU; torchao to compare with
    python benchmarks/optimizer.py muon              needs an NVIDIA GPU, or several

`errors` trains the demo's model with states in FP32, and then rounds the states to every pair of
formats, in two ways: stochastically (the optimizer's default), and to nearest (as in the paper
COAT). It measures the mean squared error of the update m / (√v + ε). Tables 1 and 9 of COAT report
the same error, and the record contains COAT's numbers, too.

`sums` adds gradients to buffers of every format (`step_in_backward(..., accumulate=n)`): equal
gradients, and random gradients with mean zero. It measures the relative error of the sum, and the
sum's projection on the exact sum.

`speed` runs optimizer steps on the parameters of Llama models, with weights and gradients in BF16.
A step reads and writes weights and states, and reads gradients. `limit` is the time of these bytes
at the bandwidth of a large copy in the same run.

`muon` runs steps of Muon on the matrices of hidden layers of the same models: on one GPU, and
sharded over all GPUs as by FSDP2. There, `torch.optim.Muon` multiplies DTensors, and the variant
"gathered" gathers and orthogonalizes all matrices on every rank.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kernels import busiest_ms
from report import environment, print_rows, use_expandable_segments, write_json
from tables_kernels import (
    optimizer_errors_table,
    optimizer_muon_table,
    optimizer_speed_table,
    optimizer_sums_table,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from workers import run_jobs

from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import new_model
from fp8pass.demo.sizes import SIZES
from fp8pass.demo.train import free_memory, learning_rate
from fp8pass.optim import AdamW, Muon, muon
from fp8pass.optim.group_options import STATE_ROUNDINGS
from fp8pass.optim.rounding import ROTATIONS, keys, random_bits, rotate
from fp8pass.optim.shards import shard_of
from fp8pass.optim.slots import from_rows, to_rows
from fp8pass.optim.state_formats import dequantize, moment_format, quantize

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE = 128
EPS = 1e-8

# Errors from the paper COAT, which does not state the unit. Keys are formats of the first moment;
# the columns are the formats of the second moment in `SECOND`.
SECOND = ("e4m3", "e4m3+expand", "e5m2", "e5m2+expand", "de8", "de8+expand")
COAT = {
    "e4m3": (20.10, 18.08, 25.65, 18.16, None, None),
    "e4m3+expand": (15.13, 12.31, 21.96, 12.43, 14.01, 18.84),
    "e5m2": (37.02, 35.96, 40.30, 36.00, None, None),
    "e5m2+expand": (17.79, 15.48, 23.84, 15.57, None, None),
    "de8": (12.11, 8.27, 20.02, 8.43, 10.54, 16.25),
    "de8+expand": (11.57, 7.47, 19.69, 7.65, 9.91, 15.81),
}


# --- errors -------------------------------------------------------------------------------------


def trained_states(size_name: str, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the moments of every parameter of the demo's model after training, in FP32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = replace(SIZES[size_name], steps=steps)
    data = Data.of(read_text(None), size, device)
    model = new_model(size, 0, device)
    exact: dict[str, Any] = dict.fromkeys(("first_moment", "second_moment", "weights"), "fp32")
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, **exact)
    for step, batch in enumerate(data.train_batches(size, 0)):
        optimizer.param_groups[0]["lr"] = learning_rate(step, size)
        loss = model(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{size_name}: loss {loss.item():.3f} after {steps} steps")
    return [(s["exp_avg"], s["exp_avg_sq"]) for s in optimizer.state.values()]


def round_trip(x: Tensor, number: int, name: str, rounding: str, *, signed: bool) -> Tensor:
    """Return a moment of parameter `number`, after rounding it to the format `name` and back."""
    format = moment_format(name, signed=signed)
    rows = to_rows(x, GROUP_SIZE, torch.float32)
    bits = bits_of(rows, number, "exp_avg" if signed else "exp_avg_sq")
    stored = quantize(rows, format, bits if rounding == "stochastic" else None)
    return from_rows(dequantize(stored, format), x.shape)


def bits_of(rows: Tensor, number: int, name: str) -> Tensor:
    """Return the random bits for the state `name` in the first step of an optimizer with seed 0."""
    numbers = torch.tensor([number], dtype=torch.int32, device=rows.device)
    key = keys(0, numbers, torch.ones_like(numbers))
    element = torch.arange(rows.numel(), device=rows.device).view_as(rows)
    return rotate(random_bits(key, element), ROTATIONS[name])


def error(states: list[tuple[Tensor, Tensor]], first: str, second: str, rounding: str) -> float:
    """Return the mean squared error of m / (√v + ε), over all elements."""
    total = 0.0
    for number, (m, v) in enumerate(states):
        exact = m / (v.sqrt() + EPS)
        root = round_trip(v, number, second, rounding, signed=False).sqrt()
        approximate = round_trip(m, number, first, rounding, signed=True) / (root + EPS)
        total += (approximate - exact).double().square().sum().item()
    return total / sum(m.numel() for m, _ in states)


def measure_errors(size: str, steps: int) -> dict[str, Any]:
    """Measure the error of every pair of formats and rounding. Add COAT's, for nearest rounding."""
    states = trained_states(size, steps)
    results: list[dict[str, Any]] = [
        {
            "first": first,
            "second": second,
            "rounding": rounding,
            "mse": error(states, first, second, rounding),
            "coat": theirs if rounding == "nearest" else None,
        }
        for first, row in COAT.items()
        for rounding in STATE_ROUNDINGS
        for second, theirs in zip(SECOND, row, strict=True)
    ]
    return {
        "settings": {"size": size, "steps": steps, "group_size": GROUP_SIZE},
        "expansion_gain": {
            rounding: expansion_gain(results, rounding) for rounding in STATE_ROUNDINGS
        },
        "rank_correlation": rank_correlation(results),
        "results": results,
    }


def expansion_gain(results: list[dict[str, Any]], rounding: str) -> float:
    """Return the error with both moments in E4M3, divided by the error with expanded moments."""
    found = {(r["first"], r["second"]): r["mse"] for r in results if r["rounding"] == rounding}
    return float(found["e4m3", "e4m3"] / found["e4m3+expand", "e4m3+expand"])


def rank_correlation(results: list[dict[str, Any]]) -> float:
    """Return Spearman's rank correlation of COAT's and the measured errors, rounding to nearest."""
    both = [(r["mse"], r["coat"]) for r in results if r["coat"] is not None]
    ranks = torch.tensor(both, dtype=torch.float64).argsort(0).argsort(0).double()
    return float(torch.corrcoef(ranks.T)[0, 1])


# --- sums ---------------------------------------------------------------------------------------

BF16 = "BF16 `.grad`"
SUMS = ("e4m3, to nearest", "e4m3", "e5m2", "de8", "fp16", BF16)
COUNTS = (4, 16, 64, 256)
ELEMENTS = 128 * 1024


def measure_sums() -> dict[str, Any]:
    """Measure the error of sums of equal and of random gradients."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = [
        {"gradients": gradients, "buffer": name, "count": count, "error": off, "length": length}
        for gradients in ("equal", "random")
        for name in SUMS
        for count, off, length in sum_errors(name, gradients, device)
    ]
    return {"settings": {"elements": ELEMENTS, "group_size": GROUP_SIZE}, "results": results}


def sum_errors(
    name: str, gradients: str, device: torch.device
) -> Iterator[tuple[int, float, float]]:
    """Yield each number of gradients, the relative error of their sum, and the sum's projection.

    The projection on the exact sum is relative to the length of the exact sum: 1 means unbiased.
    """
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, ELEMENTS // GROUP_SIZE, GROUP_SIZE, device=device)
    gradient = draw(generator=generator)
    exact, stored = torch.zeros_like(gradient, dtype=torch.float64), torch.zeros_like(gradient)
    for count in range(1, max(COUNTS) + 1):
        exact += gradient
        if count in COUNTS:
            last = stored + gradient  # the optimizer reads the last sum before it is rounded
            found = last.bfloat16().double() if name == BF16 else last.double()
            length = (found * exact).sum() / exact.square().sum()
            yield count, ((found - exact).norm() / exact.norm()).item(), length.item()
        stored = rounded_sum(stored + gradient, name, count)
        gradient = gradient if gradients == "equal" else draw(generator=generator)


def rounded_sum(rows: Tensor, name: str, count: int) -> Tensor:
    """Return a sum [R, G] after rounding it to the format `name`."""
    if name == BF16:
        return rows.bfloat16().float()
    format = moment_format(name.removesuffix(", to nearest"), signed=True)
    bits = None if "nearest" in name else bits_of(rows, count, "exp_avg")
    return dequantize(quantize(rows, format, bits), format)


# --- speed --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A Llama model."""

    hidden: int
    ffn: int
    layers: int
    vocabulary: int

    def parameters(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of all parameters of the model, which has no grouped-query attention."""
        yield self.vocabulary, self.hidden
        for _ in range(self.layers):
            yield from [(self.hidden, self.hidden)] * 4
            yield from [(self.ffn, self.hidden)] * 2
            yield self.hidden, self.ffn
            yield from [(self.hidden,)] * 2
        yield (self.hidden,)
        yield self.vocabulary, self.hidden


SHAPES = {"1B": Shape(2048, 5632, 22, 32000), "7B": Shape(4096, 11008, 32, 32000)}

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Result:
    """A step of one optimizer. `first_s` includes compilation; the module defines `limit_ms`."""

    shape: str
    optimizer: str
    ms: float
    first_s: float
    limit_ms: float
    state_bytes: float
    peak_bytes: int


def contenders() -> dict[str, Make]:
    """Return optimizers by name, including torchao's optimizers if torchao is installed."""
    found: dict[str, Make] = {
        "torch fused": lambda p: torch.optim.AdamW(p, fused=True),
        "fp8pass coat": lambda p: AdamW(p),
        "fp8pass e4m3": lambda p: AdamW(p, first_moment="e4m3", second_moment="e4m3"),
        "fp8pass bf16": lambda p: AdamW(p, first_moment="bf16", second_moment="bf16"),
        "fp8pass fp8-lm": lambda p: AdamW(p, preset="fp8-lm"),
    }
    try:
        from torchao.optim import AdamW8bit, AdamWFp8
    except ImportError:
        print("torchao is not installed: pip install torchao", file=sys.stderr)
        return found
    options = {"bf16_stochastic_round": True}
    return found | {
        "torchao AdamW8bit": lambda p: AdamW8bit(p, **options),
        "torchao AdamWFp8": lambda p: AdamWFp8(p, **options),
    }


def copy_bandwidth() -> float:
    """Measure the bytes per second that a copy of 4 GiB reads and writes."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (busiest_ms(lambda: target.copy_(source)) / 1e3)


def measure_step(shape: str, name: str, make: Make, bandwidth: float) -> Result:
    """Measure time and memory of one optimizer's step."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        found = (torch.randn(s, dtype=torch.bfloat16) for s in SHAPES[shape].parameters())
        params = [nn.Parameter(x * 0.02) for x in found]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    weights = sum(p.numel() * p.itemsize for p in params)
    before = torch.cuda.memory_allocated()
    optimizer = make(params)
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    state = torch.cuda.memory_allocated() - before
    optimizer.step()
    peak = torch.cuda.max_memory_allocated()  # before `busiest_ms` allocates buffers
    ms = busiest_ms(optimizer.step)
    return Result(
        shape,
        name,
        ms=ms,
        first_s=first,
        limit_ms=(3 * weights + 2 * state) / bandwidth * 1e3,
        state_bytes=state / sum(p.numel() for p in params),
        peak_bytes=peak,
    )


def measure_speed(path: Path, shapes: list[str]) -> dict[str, Any]:
    """Measure steps of all optimizers for all shapes. Write each result immediately."""
    record: dict[str, Any] = {**environment(), "bandwidth": copy_bandwidth(), "results": []}
    for shape in shapes:
        for name, make in contenders().items():
            result = measure_step(shape, name, make, record["bandwidth"])
            record["results"].append(asdict(result))
            write_json(path, record)
    return record


# --- muon ---------------------------------------------------------------------------------------

MUON_STEPS = 9
TORCH, GATHERED = "torch.optim.Muon", "fp8pass int8, gathered"
MUONS: dict[str, Make] = {
    TORCH: lambda p: torch.optim.Muon(p),
    "fp8pass int8": lambda p: Muon(p),
    "fp8pass e4m3+expand": lambda p: Muon(p, momentum_format="e4m3+expand"),
    "fp8pass fp32": lambda p: Muon(p, momentum_format="fp32"),
    GATHERED: lambda p: Muon(p),
}


@dataclass
class MuonResult:
    """A step of Muon. Bytes are bytes of each rank; `state_bytes` are per element."""

    shape: str
    ranks: int
    optimizer: str
    ms: float
    state_bytes: float
    peak_bytes: int


def gather_all(matrices: Sequence[Tensor], _: int, function: Any) -> list[Tensor]:
    """Replace `orthogonalize`: every rank gathers and orthogonalizes every matrix."""
    return [shard_of(function(x.full_tensor()), x) for x in matrices]  # type: ignore[attr-defined]


def measure_muon(ranks: int, job: tuple[str, str], device: torch.device) -> Iterator[MuonResult]:
    """Measure the steps of one variant of Muon on `ranks` GPUs, for one shape."""
    shape, name = job
    use_expandable_segments()
    vocabulary = SHAPES[shape].vocabulary
    sizes = [s for s in SHAPES[shape].parameters() if len(s) == 2 and vocabulary not in s]
    mesh = init_device_mesh(device.type, (ranks,)) if ranks > 1 else None

    def new(rows: int, columns: int) -> Tensor:
        local = torch.randn(rows // ranks, columns, dtype=torch.bfloat16, device=device) * 0.02
        return local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)])

    params = [nn.Parameter(new(*size)) for size in sizes]
    for p in params:
        p.grad = new(*p.shape)
    before = torch.cuda.memory_allocated()
    optimizer = MUONS[name](params)
    with patch.object(
        muon, "orthogonalize", gather_all if name == GATHERED else muon.orthogonalize
    ):
        optimizer.step()
        state = torch.cuda.memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(MUON_STEPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    elements = sum(math.prod(size) for size in sizes) / ranks
    peak = torch.cuda.max_memory_allocated()
    ms = statistics.median(times) * 1e3
    yield MuonResult(shape, ranks, name, ms, state / elements, peak)
    del optimizer, params
    free_memory()


def measure_muons(path: Path, shapes: list[str]) -> dict[str, Any]:
    """Measure Muon on one GPU and on all GPUs. Write each result immediately."""
    record: dict[str, Any] = {**environment(), "results": []}
    for ranks in sorted({1, torch.cuda.device_count()}):
        jobs = [(s, name) for s in shapes for name in MUONS if ranks > 1 or name != GATHERED]
        for result in run_jobs(partial(measure_muon, ranks), jobs, ranks=ranks):
            record["results"].append(asdict(result))
            write_json(path, record)
    return record


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    errors = commands.add_parser("errors", help="rounding errors of all formats")
    errors.add_argument("--size", choices=SIZES, default="small")
    errors.add_argument("--steps", type=int, default=200)
    sums = commands.add_parser("sums", help="errors of sums of gradients")
    speed = commands.add_parser("speed", help="time and memory of a step")
    speed.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    muons = commands.add_parser("muon", help="time and memory of a step of Muon")
    muons.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    for command in (errors, sums, speed, muons):
        command.add_argument("--out", type=Path, help="default: benchmarks/results/")
    args = parser.parse_args()
    out = args.out or RESULTS / f"optimizer_{args.command}.json"
    if args.command == "errors":
        data = {**environment(), **measure_errors(args.size, args.steps)}
        print_rows("MSE of m/√v in 10⁻⁵ (COAT's)", optimizer_errors_table(data))
        for rounding, gain in data["expansion_gain"].items():
            print(f"error without / with expansion, {rounding}: {gain:.2f} (COAT, nearest: 1.63)")
        print(f"rank correlation with COAT's tables: {data['rank_correlation']:.3f}")
    elif args.command == "sums":
        data = {**environment(), **measure_sums()}
        print_rows("errors of sums of gradients", optimizer_sums_table(data))
    elif not torch.cuda.is_available():
        sys.exit(f"{args.command} needs an NVIDIA GPU.")
    elif args.command == "speed":
        use_expandable_segments()
        data = measure_speed(out, args.shapes)
        print_rows("a step", optimizer_speed_table(data))
    else:
        data = measure_muons(out, args.shapes)
        print_rows("a step of Muon", optimizer_muon_table(data))
    write_json(out, data)


if __name__ == "__main__":
    main()
