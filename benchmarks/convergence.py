"""Train a byte-level Llama of 51M parameters with each variant and two seeds.

    python benchmarks/convergence.py                     all runs that are not in the results yet
    python benchmarks/convergence.py --variants bf16 coat --seeds 0
    python benchmarks/convergence.py --experts --variants bf16 coat --seeds 0 1 2
    python benchmarks/convergence.py --tiny --out x.json  seconds on a CPU

The text is the source of Python's standard library; every tenth file is held out. Weights and
AdamW's states are fp32, the forward runs under BF16 autocast, and the learning rate falls to zero.
For one seed every variant starts from the same weights and sees the same batches. Measured per run:
training loss in means of 20 steps; the final loss on all held-out text, with the same compiled
forward; tokens per second and peak memory of the steps after the first five; whether any loss was
not finite. Each run is written to the results as soon as it ends. Compare a variant with `bf16` of
the same seed. The difference between two seeds of one variant is the noise.

`--experts` trains a mixture of experts of 97M parameters instead. Each layer has eight experts and
uses two of them for each token. Training adds the balancing loss of Switch Transformers, which the
final loss does not include.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import MoEDecoder
from report import finite, merge, print_rows, resume, write_json
from tables_runs import convergence_table
from torch import Tensor, nn

from fp8pass.demo.data import Data, source_files
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size
from fp8pass.demo.train import Meter, free_memory

# Options of fp8pass; None is stock torch.compile.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "linear": {"recipe": "linear"},
    "coat": {"recipe": "coat"},
    "agoq, 4 bits": {"save_format": "e2m1"},
    # 4 bits wherever possible, without the error rules.
    "uniform4": {"save_format": "e2m1", "error_tolerance": float("inf")},
}
MODEL = Size(640, 10, 10, 10, 1792, seq=1024, batch=12, steps=2000, peak_lr=1e-3)
EXPERTS = Size(512, 8, 8, 8, 896, seq=1024, batch=12, steps=1500, peak_lr=1e-3)
TINY = Size(128, 2, 2, 2, 256, seq=64, batch=4, steps=40, peak_lr=2e-3)
HELD_OUT_EVERY = 10
FIRST_STEPS = 5
WINDOW = 20


@dataclass
class Result:
    """One run; see the module's docstring. A loss that is not finite is None."""

    variant: str
    seed: int
    losses: list[float | None]
    validation_loss: float | None
    diverged: bool
    tokens_per_second: float
    first_step_s: float
    peak_bytes: int | None


def corpus(device: torch.device) -> Data:
    """Return the standard library as bytes, split by file into training and held-out text."""
    files = source_files(None)
    held_out = files[::HELD_OUT_EVERY]
    train = [f for f in files if f not in held_out]
    return Data(tokens(train, device), tokens(held_out, device))


def tokens(files: Iterable[Path], device: torch.device) -> Tensor:
    """Concatenate the bytes of files."""
    text = bytearray().join(file.read_bytes() for file in files)
    return torch.frombuffer(text, dtype=torch.uint8).to(device)


def run(kind: type[Decoder], variant: str, seed: int, size: Size, data: Data) -> Result:
    """Train a model of class `kind` from scratch in one variant, and validate it."""
    device = data.train.device
    torch.manual_seed(seed)
    model = kind(size).to(device)
    options = VARIANTS[variant]
    compiled: Any = (
        torch.compile(model)
        if options is None
        else torch.compile(model, backend="fp8pass", options=options)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.peak_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    return train(variant, seed, compiled, optimizer, size, data)


def train(
    variant: str, seed: int, compiled: Any, optimizer: torch.optim.Optimizer, size: Size, data: Data
) -> Result:
    """Train a compiled model and validate it."""
    device = data.train.device
    autocast = partial(torch.autocast, device.type, torch.bfloat16)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, steps=size.steps))
    start = time.perf_counter()
    losses = []
    for step, batch in enumerate(data.train_batches(size, seed)):
        if step == FIRST_STEPS:
            meter = Meter(device)
        with autocast():
            loss = compiled(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 0:
            loss.item()  # waits for the GPU
            first_step_s = time.perf_counter() - start
    seconds, peak_bytes = meter.read()

    # Gradients stay enabled, so that validation runs the compiled graph of the training.
    count = (len(data.held_out) - 1) // size.tokens
    with autocast():
        held_out = [compiled(*batch).detach() for batch in data.held_out_batches(size, count)]
    validation_loss = torch.stack(held_out).mean()
    speed = (size.steps - FIRST_STEPS) * size.tokens / seconds
    found = torch.stack(losses), validation_loss
    return summary(variant, seed, *found, speed, first_step_s, peak_bytes)


def summary(
    variant: str,
    seed: int,
    losses: Tensor,
    validation_loss: Tensor,
    tokens_per_second: float,
    first_step_s: float,
    peak_bytes: int | None,
) -> Result:
    """Return the result of a run, given the losses of its steps."""
    return Result(
        variant,
        seed,
        losses=[finite(window.mean()) for window in losses.split(WINDOW)],
        validation_loss=finite(validation_loss),
        diverged=not all(x.isfinite() for x in (*losses.cpu(), validation_loss)),
        tokens_per_second=tokens_per_second,
        first_step_s=first_step_s,
        peak_bytes=peak_bytes,
    )


def rate(step: int, steps: int) -> float:
    """Return a share of the peak learning rate: warm-up in a tenth of the steps, then a cosine."""
    warm_up = steps // 10
    progress = max(0, step - warm_up) / (steps - warm_up)
    return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * progress))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--experts", action="store_true", help="train a mixture of experts")
    parser.add_argument("--steps", type=int, help="instead of the model's own")
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU too")
    parser.add_argument("--out", type=Path, help="results to add to")
    args = parser.parse_args()
    kind, name, size = Decoder, "convergence", MODEL
    if args.experts:
        kind, name, size = MoEDecoder, "moe_convergence", EXPERTS
    args.out = args.out or Path(__file__).parent / f"results/{name}.json"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = TINY if args.tiny else size
    size = replace(size, steps=args.steps or size.steps)
    data = corpus(device)
    record = resume(
        args.out,
        {**asdict(size), "train_bytes": len(data.train), "held_out_bytes": len(data.held_out)},
        again=args.again,
    )
    done = {(r["variant"], r["seed"]) for r in record["results"]}
    # All variants of a seed run before the next seed, so that variants can be compared even if the
    # script is interrupted.
    for variant, seed in [(v, s) for s in args.seeds for v in args.variants]:
        if (variant, seed) in done:
            continue
        free_memory()
        result = asdict(run(kind, variant, seed, size, data))
        merge(record, result, ("variant", "seed"))
        write_json(args.out, record)
        print({**result, "losses": "..."}, file=sys.stderr, flush=True)
    print_rows("training a byte-level model", convergence_table(record))


if __name__ == "__main__":
    main()
