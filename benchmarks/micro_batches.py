"""Many micro-batches of few tokens: codes of weights made once a step, against once a micro-batch.

    python benchmarks/micro_batches.py                    all that is not in the results yet
    python benchmarks/micro_batches.py --tiny --out x.json  small models, on the CPU too

A Llama of 7B, in BF16 with `fp8pass.optim.AdamW`; its layers are compiled one by one, head and loss
as one module. A step is 16 micro-batches of one sequence of 1,024 tokens: so few that the CPU takes
longer to launch a hundred kernels for each layer than the GPU to run them, but for CUDA graphs.
Every variant is a process of its own, and sees the same tokens. Measured: tokens a second by the
median of the steps after the first two; the peak of memory in these, which CUDA graphs hide;
the loss of the last micro-batch.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from alone import arguments, measure_each, print_result
from layer import CUDA_GRAPHS, with_fp8pass
from model import (
    LEARNING_RATE,
    MODELS,
    TINY,
    LossOnly,
    Size,
    new_llama,
    step_seconds,
)
from report import print_rows, resume
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


def measure(size: Size, device: torch.device, **options: Any) -> dict[str, Any]:
    """Train in this process; what a result says of it."""
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
        # What graphs hold counts as free.
        "peak_bytes": None if graphed else meter.read()[1],
        "loss": losses[-1].item(),
    }


def main() -> None:
    """Command line."""
    args = arguments(__doc__, VARIANTS, "micro_batches")
    size = replace(TINY["7B"], batch=1) if args.tiny else LLAMA
    if args.child:
        print_result(partial(measure, size, **VARIANTS[args.child]))
        return
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("A model of 7B needs an NVIDIA GPU; --tiny runs on the CPU.")
    record = resume(
        args.out, {"model": asdict(size), "count": COUNT, "timed": TIMED}, again=args.again
    )
    command = [__file__, *(["--tiny"] if args.tiny else [])]
    measure_each(record, args.out, args.variants, command)
    print_rows("micro-batches", micro_batches_table(record))


if __name__ == "__main__":
    main()
