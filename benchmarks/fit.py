"""Predictions of `fp8pass.fit` beside what was measured: peak memory and speed of whole Llamas.

    python benchmarks/fit.py               all cases, on the GPU that they are predicted for
    python benchmarks/fit.py --recorded    those that model.py and small_gpu.py have measured
    python benchmarks/fit.py --timelines   memory over a step, predicted, for plots.py
    python benchmarks/fit.py --tiny --out x.json     small models, on the CPU too

A case is a model of `model.py`, how it is compiled, and a `Setup`: the options of a way to train.
The prediction sees the model on the meta device. What is measured runs the lines that `fit` gives
to paste, each case in a process of its own: peak of what is allocated (expandable segments), and
tokens per second by the median, over the steps after the first two. model.py's own loops differ in
one point: its layers' models compile the loss with PyTorch's Inductor, where here head and loss
are one block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from model import MODELS, TINY, LossOnly, Size, new_llama, step_seconds
from report import environment, merge, print_rows, resume, use_expandable_segments, write_json
from small_gpu import drawn_llama
from tables_models import fit_table
from torch import nn

import fp8pass
from fp8pass import Config
from fp8pass.demo.train import Meter
from fp8pass.inspect.fitting.candidates import Candidates
from fp8pass.inspect.fitting.deep import trace
from fp8pass.inspect.fitting.gpu import find_gpu
from fp8pass.inspect.fitting.parameters import Parameters
from fp8pass.inspect.fitting.replay import KINDS
from fp8pass.inspect.fitting.setup import Setup
from fp8pass.inspect.fitting.step import own_loss

HERE = Path(__file__).parent
WARM_UP, TIMED = 2, 4
GPU = "H200"
LAYERS = ("head", "model.layers.*")


@dataclass(frozen=True)
class Case:
    """A model and a way to train it.

    Attributes:
        model: of `model.py`.
        blocks: what is compiled one by one; nothing if the model is as a whole.
        setup: the options.
        accumulate: micro-batches of a step.
        batch: sequences of a micro-batch, by default those of `model.py`.
        recorded: the file of a result of the same case, and what it has there.
        gpu: that of the result.
    """

    model: str
    blocks: tuple[str, ...]
    setup: Setup
    accumulate: int = 1
    batch: int | None = None
    recorded: tuple[str, dict[str, str]] | None = None
    gpu: str = GPU

    @property
    def name(self) -> str:
        """What the command line calls it."""
        how = "by layers" if self.blocks else "whole"
        times = f" × {self.accumulate}" if self.accumulate > 1 else ""
        sequences = f", {self.batch} sequences" if self.batch else ""
        on = f", {self.gpu}" if self.gpu != GPU else ""
        return f"{self.model} {how}{sequences}{times}{on} · {self.setup}"

    def size(self, sizes: Mapping[str, Size]) -> Size:
        """The model's sizes, and the batch."""
        size = sizes[self.model]
        return replace(size, batch=self.batch or size.batch)


def _recorded(variant: str, optimizer: str, file: str = "model") -> tuple[str, dict[str, str]]:
    """A result of model.py."""
    return file, {"variant": variant, "optimizer": optimizer}


def _small(setup: Setup, batch: int, limit: str) -> Case:
    """A case of small_gpu.py: 65,536 tokens a step."""
    recorded = "small_gpu", {"setup": f"7B fp8pass {limit}"}
    return Case("7B", LAYERS, setup, 32 // batch, batch, recorded, "H100")


HEAD_WHOLE, HEAD_IN_CHUNKS = Config(head_chunks=1), Config(head_chunks=4)
EVERYTHING = ("states", "gradients", "weights")
MOST = replace(HEAD_IN_CHUNKS, memory_budget=0.2)
LESS = replace(HEAD_IN_CHUNKS, memory_budget=0.45)
CASES = (
    _small(Setup(HEAD_IN_CHUNKS), 4, "no limit"),
    _small(Setup(LESS, attach=True, offload=EVERYTHING), 8, "24 GiB"),
    _small(Setup(MOST, attach=True, offload=EVERYTHING), 8, "16 GiB"),
    Case("1B", (), Setup(preset=None), recorded=_recorded("fp8pass coat", "AdamW")),
    Case("1B", LAYERS, Setup(HEAD_WHOLE)),
    Case("1B", LAYERS, Setup(HEAD_WHOLE, attach=True, offload=("states",))),
    Case(
        "7B",
        LAYERS,
        Setup(HEAD_WHOLE, preset=None),
        recorded=_recorded("fp8pass coat", "AdamW"),
    ),
    Case("7B", LAYERS, Setup(HEAD_WHOLE), recorded=_recorded("fp8pass coat", "fp8pass AdamW")),
    Case(
        "7B",
        LAYERS,
        Setup(HEAD_WHOLE, attach=True),
        recorded=_recorded("fp8pass coat", "fp8pass attach"),
    ),
    Case("7B", LAYERS, Setup(HEAD_WHOLE, offload=("states",))),
    Case("7B", LAYERS, Setup(HEAD_WHOLE, attach=True, offload=("states",))),
    Case("7B", LAYERS, Setup(replace(HEAD_WHOLE, memory_budget=0.5), attach=True)),
    Case("7B", LAYERS, Setup(HEAD_IN_CHUNKS, attach=True, offload=EVERYTHING), accumulate=4),
    Case(
        "8B",
        LAYERS,
        Setup(HEAD_WHOLE),
        recorded=_recorded("fp8pass coat, head and loss whole", "fp8pass AdamW", "model_8b"),
    ),
    Case(
        "8B",
        LAYERS,
        Setup(HEAD_IN_CHUNKS),
        recorded=_recorded("fp8pass coat, head and loss in chunks", "fp8pass AdamW", "model_8b"),
    ),
)


# What docs/memory.md draws: memory of a micro-batch of 4 × 2048 tokens of the 7B, of eight.
SHOWN = (
    Setup(HEAD_IN_CHUNKS),
    Setup(HEAD_IN_CHUNKS, attach=True, offload=("states", "gradients")),
    Setup(replace(HEAD_IN_CHUNKS, memory_budget=0.45), attach=True, offload=EVERYTHING),
)
SHOWN_BATCH, SHOWN_ACCUMULATE = 4, 8
POINTS = 250


@dataclass
class Result:
    """One case; see the module's docstring."""

    case: str
    predicted_bytes: float
    predicted_tokens_per_second: float
    peak: str
    peak_bytes: int | None = None
    tokens_per_second: float | None = None
    error: str | None = None


def as_trained(llama: Any, case: Case) -> nn.Module:
    """The model of a case, not compiled yet."""
    return LossOnly(llama, lambda m: m, lambda m: m) if "head" in case.blocks else llama


def paths(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """The paths of blocks, those in lists one by one."""
    found = []
    for path in blocks:
        members = model.get_submodule(path.removesuffix(".*")).named_children()
        found += [path.replace("*", n) for n, _ in members] if path.endswith(".*") else [path]
    return found


def ways(case: Case, size: Size, gpu: str) -> Candidates:
    """The ways to train a model; nothing is allocated."""
    llama = new_llama(size, torch.device("meta"))
    with torch.device("meta"):
        ids = torch.empty(size.batch, size.seq, dtype=torch.long)
    model = as_trained(llama, case)
    values = ((), {"input_ids": ids, "labels": ids, "use_cache": False})
    step = trace(model, paths(model, case.blocks), values, own_loss)
    return Candidates(step, Parameters(model), case.setup.config, case.accumulate, find_gpu(gpu))


def predict(case: Case, size: Size, gpu: str) -> Result:
    """What `fit` says of a case."""
    found = ways(case, size, gpu).candidate(case.setup)
    tokens = case.accumulate * size.batch * size.seq / found.seconds.total
    return Result(case.name, found.allocated, tokens, found.peak)


def timelines(size: Size) -> list[dict[str, Any]]:
    """Bytes by kind over a forward and backward, the largest of each of `POINTS` stretches."""
    case = Case("7B", LAYERS, SHOWN[0], SHOWN_ACCUMULATE)
    candidates, found = ways(case, size, GPU), []
    for setup in SHOWN:
        fate = candidates.parameters.fate_of_gradients(setup, SHOWN_ACCUMULATE)
        moments = candidates.traced.moments(setup.config, fate)
        here, host = candidates.parameters.place(setup, SHOWN_ACCUMULATE)
        length = -(-len(moments) // POINTS)
        stretches = (moments[i : i + length] for i in range(0, len(moments), length))
        largest = [max(part, key=lambda m: m.total) for part in stretches]
        found.append(
            {
                "setup": str(setup),
                "standing": vars(here),
                "host_bytes": host.total,
                "backward": [m.backward for m in largest],
                **{kind: [int(getattr(m, kind)) for m in largest] for kind in KINDS},
            }
        )
    return found


def measure(case: Case, size: Size, device: torch.device) -> tuple[int | None, float]:
    """Train as the lines to paste say; the peak of what is allocated, and tokens per second."""
    model = as_trained(drawn_llama(size, device), case)
    names: dict[str, Any] = {"fp8pass": fp8pass, "torch": torch, "model": model}
    lines = case.setup.lines(case.accumulate, case.blocks)
    exec(lines.replace('"cuda"', repr(device.type)).replace(", fused=True", ""), names)
    shape = case.accumulate, size.batch, size.seq
    ids = torch.randint(size.vocabulary, shape, device=device)

    def step() -> None:
        for part in ids:
            loss = names["model"](input_ids=part, labels=part, use_cache=False).loss
            (loss / case.accumulate).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    step_seconds(step, WARM_UP, device)
    meter = Meter(device)
    seconds = statistics.median(step_seconds(step, TIMED, device))
    return meter.read()[1], ids.numel() / seconds


def with_recorded(result: Result, case: Case) -> Result:
    """A prediction beside what `model.py` or `small_gpu.py` has measured."""
    assert case.recorded is not None
    file, others = case.recorded
    wanted = {"model": case.model, **others}
    results = json.loads((HERE / f"results/{file}.json").read_text())["results"]
    found = next(r for r in results if wanted.items() <= r.items())
    peak = found.get("peak_bytes") or found["allocated_bytes"]
    return replace(result, peak_bytes=peak, tokens_per_second=found["tokens_per_second"])


def attempt(case: Case, result: Result, *, tiny: bool) -> Result:
    """A prediction beside what a process of its own has measured."""
    command = [sys.executable, __file__, "--child", case.name, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return replace(result, error=done.stderr.strip().splitlines()[-1])
    peak, tokens = json.loads(done.stdout.splitlines()[-1])
    return replace(result, peak_bytes=peak, tokens_per_second=tokens)


def main() -> None:
    """Command line."""
    by_name = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(by_name), choices=by_name)
    parser.add_argument("--recorded", action="store_true", help="measure nothing")
    parser.add_argument("--timelines", action="store_true", help="write results/memory.json")
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--child", choices=by_name, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results/fit.json")
    args = parser.parse_args()
    sizes = {
        name: replace(TINY["7B"], hidden=256, vocabulary=512) if args.tiny else size
        for name, size in MODELS.items()
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.child:
        use_expandable_segments()
        case = by_name[args.child]
        print(json.dumps(measure(case, case.size(sizes), device)))
        return
    if args.timelines:
        size = replace(MODELS["7B"], batch=SHOWN_BATCH)
        record = {**environment(), "results": timelines(size)}
        write_json(HERE / "results/memory.json", record)
        return
    if device.type != "cuda" and not args.tiny and not args.recorded:
        sys.exit("These models need an NVIDIA GPU; --recorded compares with results there are.")
    settings = {"models": {name: asdict(size) for name, size in sizes.items()}, "timed": TIMED}
    if args.recorded:
        recorded = json.loads((HERE / "results/model.json").read_text())
        record = {**recorded, "settings": settings, "results": []}
    else:
        record = resume(args.out, settings, again=args.again)
    done = {r["case"] for r in record["results"] if not r["error"]}
    for name in args.cases:
        case = by_name[name]
        if name in done or (args.recorded and not case.recorded):
            continue
        here = device.type == "cuda" and not args.recorded
        gpu = torch.cuda.get_device_name() if here else case.gpu
        result = predict(case, case.size(sizes), gpu)
        if args.recorded:
            result = with_recorded(result, case)
        else:
            result = attempt(case, result, tiny=args.tiny)
        print(result, file=sys.stderr, flush=True)
        merge(record, asdict(result), ("case",))
        write_json(args.out, record)
    print_rows("predicted and measured", fit_table(record))


if __name__ == "__main__":
    main()
