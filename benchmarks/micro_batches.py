"""Many micro-batches of few tokens: codes of weights made once a step, against once a micro-batch.

    python benchmarks/micro_batches.py                    all that is not in the results yet
    python benchmarks/micro_batches.py --tiny --out x.json  small models, on the CPU too

A Llama of 7B, in BF16 with `fp8pass.optim.AdamW`; its layers are compiled one by one, head and loss
as one module. A step is 16 micro-batches of one sequence of 1,024 tokens: so few that the CPU takes
longer to launch a hundred kernels for each layer than the GPU to run them, but for CUDA graphs.
Every variant is a process of its own, and sees the same tokens. Measured: tokens a second by the
median of the steps after the first two; the peak of memory in these; the loss of the last
micro-batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from layer import CUDA_GRAPHS, with_fp8pass
from model import LEARNING_RATE, MODELS, TINY, LossOnly, Size, new_llama, step_seconds
from report import merge, print_rows, resume, use_expandable_segments, write_json
from tables_models import micro_batches_table
from torch import Tensor

import fp8pass
from fp8pass.demo.train import Meter
from fp8pass.optim import AdamW

COUNT, TIMED = 16, 6
LLAMA = replace(MODELS["7B"], batch=1, seq=1024)
EACH, ONCE = "codes made in each micro-batch", "codes made once a step"
VARIANTS: dict[str, dict[str, Any]] = {
    EACH: {},
    ONCE: {"weight_codes": "1GiB"},
    f"{EACH}, CUDA graphs": CUDA_GRAPHS,
    f"{ONCE}, CUDA graphs": {"weight_codes": "1GiB", **CUDA_GRAPHS},
}


@dataclass
class Result:
    """One variant; see the module's docstring."""

    variant: str
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    error: str | None = None


def measure(size: Size, device: torch.device, **options: Any) -> dict[str, Any]:
    """Train in this process; what a `Result` says of it."""
    torch.manual_seed(0)
    llama = new_llama(size, device)
    graphed = {name: options[name] for name in CUDA_GRAPHS if name in options}
    model = LossOnly(llama, with_fp8pass(**options), with_fp8pass(**graphed))
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    ids = torch.randint(size.vocabulary, (COUNT, size.batch, size.seq), device=device)
    losses: list[Tensor] = []

    def step() -> None:
        with fp8pass.same_weights():
            for part in ids:
                loss = model(input_ids=part, labels=part, use_cache=False).loss
                (loss / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())  # CUDA graphs write the next one to the same memory

    step_seconds(step, 2, device)
    meter = Meter(device)
    seconds = statistics.median(step_seconds(step, TIMED, device))
    return {
        "tokens_per_second": ids.numel() / seconds,
        "peak_bytes": meter.read()[1],
        "loss": losses[-1].item(),
    }


def child(variant: str, size: Size) -> Result:
    """A result, or the error in its place."""
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return Result(variant, **measure(size, device, **VARIANTS[variant]))
    except Exception as error:  # out of memory: the other goes on
        return Result(variant, error=f"{type(error).__name__}: {error}".splitlines()[0])


def attempt(variant: str, *, tiny: bool) -> Result:
    """The result of a process of its own."""
    command = [sys.executable, __file__, "--child", variant, *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return Result(variant, error=f"ended with code {done.returncode}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    default = Path(__file__).parent / "results/micro_batches.json"
    parser.add_argument("--out", type=Path, default=default, help="results to add to")
    args = parser.parse_args()
    size = replace(TINY["7B"], batch=1) if args.tiny else LLAMA
    if args.child:
        print(json.dumps(asdict(child(args.child, size))))
        return
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("A model of 7B needs an NVIDIA GPU; --tiny runs on the CPU.")
    record = resume(
        args.out, {"model": asdict(size), "count": COUNT, "timed": TIMED}, again=args.again
    )
    done = {r["variant"] for r in record["results"] if not r["error"]}
    for variant in args.variants:
        if variant not in done:
            result = attempt(variant, tiny=args.tiny)
            print(result, file=sys.stderr, flush=True)
            merge(record, asdict(result), ("variant",))
            write_json(args.out, record)
    print_rows("micro-batches", micro_batches_table(record))


if __name__ == "__main__":
    main()
