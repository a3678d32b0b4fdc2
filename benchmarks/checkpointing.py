"""Gradient checkpointing against a memory budget: time and peak memory of a Llama of 7B.

    python benchmarks/checkpointing.py                       all that is not in the results yet
    python benchmarks/checkpointing.py --tiny --out x.json   small models, on the CPU too

Whole steps with `fp8pass.optim.AdamW`, layers compiled one by one, as in `model.py`, with head and
loss by fp8pass for all: what differs is what layers keep. Checkpointing
is Hugging Face's `gradient_checkpointing_enable`, of each decoder layer; a budget is the share of
what a layer would keep in low bits. Every variant is a process of its own. Measured: tokens a
second by the median of the steps after the first few; the peak of memory in these; the loss of the
last one.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from alone import arguments, measure_each, print_result
from layer import with_fp8pass
from model import (
    MODELS,
    TIMED,
    TINY,
    WARM_UP,
    LossOnly,
    Size,
    fp8pass_adamw,
    new_llama,
    train,
)
from report import print_rows, resume
from tables_models import checkpointing_table

SIZE = MODELS["7B"]
BF16, FP8, CHECKPOINTED = "BF16", "fp8pass", ", checkpointing"
BUDGETS = (0.75, 0.5, 0.3, 0.15)
# Options of fp8pass.
VARIANTS: dict[str, dict[str, Any]] = {
    BF16: {},
    BF16 + CHECKPOINTED: {},
    FP8: {},
    FP8 + CHECKPOINTED: {},
    **{f"{FP8}, budget {share}": {"memory_budget": share} for share in BUDGETS},
}


def measure(variant: str, size: Size, device: torch.device, **options: Any) -> dict[str, Any]:
    """Train in this process; what a result says of it."""
    torch.manual_seed(0)
    llama = new_llama(size, device)
    if variant.endswith(CHECKPOINTED):
        llama.gradient_checkpointing_enable({"use_reentrant": False})
    head = with_fp8pass()  # the same for all
    in_bf16: Any = torch.compile
    layers = in_bf16 if variant.startswith(BF16) else with_fp8pass(**options)
    model = LossOnly(llama, layers, head)
    ids = torch.randint(size.vocabulary, (size.batch, size.seq), device=device)
    return train(model, fp8pass_adamw(model), ids)


def main() -> None:
    """Command line."""
    args = arguments(__doc__, VARIANTS, "checkpointing")
    size = TINY["7B"] if args.tiny else SIZE
    if args.child:
        # A budget for large layers is too small for what these cannot do without.
        options = {} if args.tiny else VARIANTS[args.child]
        print_result(partial(measure, args.child, size, **options))
        return
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("A model of 7B needs an NVIDIA GPU; --tiny runs on the CPU.")
    settings = {"model": asdict(size), "warm_up": WARM_UP, "timed": TIMED}
    record = resume(args.out, settings, again=args.again)
    command = [__file__, *(["--tiny"] if args.tiny else [])]
    measure_each(record, args.out, args.variants, command)
    print_rows("checkpointing and budgets, 7B", checkpointing_table(record))


if __name__ == "__main__":
    main()
