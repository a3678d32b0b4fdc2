"""Optimizers whose states take a byte an element: `fp8pass.optim.AdamW` for `torch.optim.AdamW`.

    formats.py     how a moment or a master weight is stored
    groups.py      1×G groups of values to codes and back, with Dynamic Range Expansion
    rounding.py    weights and second moments rounded stochastically
    options.py     what a user chooses, checked
    slots.py       a parameter's stored states
    update.py      the update, in vectorized PyTorch
    kernel.py      the same as Triton source, one kernel for all parameters
    fused.py       what the kernel is launched with
    adamw.py       the optimizer
    checkpoint.py  states of other formats and of torch.optim.AdamW
    backward.py    `attach`: updates within the backward

COAT section 4, FP8-LM section 2.2, LLMQ section 3.
"""

from __future__ import annotations

from fp8pass.optim.adamw import AdamW
from fp8pass.optim.backward import attach
from fp8pass.optim.options import PRESETS

__all__ = ["PRESETS", "AdamW", "attach"]
