"""`AdamW` and `Muon`: like PyTorch's optimizers, but with states of one byte per element.

    optimizer.py     `Optimizer`, the base class: step, states, checkpoints
    adamw.py         AdamW
    muon.py          Muon, and the choice of the parameters that it trains
    newton_schulz.py orthogonalization of matrices, spread over ranks
    group_options.py options of a parameter group, and presets
    state_formats.py formats of states, quantization with Dynamic Range Expansion
    rounding.py      stochastic rounding
    slots.py         keys and tensors of a parameter's states
    shards.py        local shards of distributed parameters
    checkpoint.py    conversion of checkpoints, also during loads by torch.distributed.checkpoint
    update.py        updates in vectorized PyTorch
    kernel.py        the update as Triton source
    fused.py         launches of the kernel, also with offloaded states
    offload.py       host memory, staging buffers, and `offload_weights`
    backward.py      `step_in_backward`: updates within the backward
    captured_step.py `capture_step`: a training step as one CUDA graph
    sums.py          sums of the gradients of several backwards, and their norm
    sum_kernel.py    Triton kernels for sums of gradients

Sources: section 4 of the paper COAT, section 2.2 of FP8-LM, section 3 of LLMQ.
"""

from __future__ import annotations

from fp8pass.optim.adamw import AdamW
from fp8pass.optim.backward import step_in_backward
from fp8pass.optim.captured_step import capture_step
from fp8pass.optim.group_options import PRESETS
from fp8pass.optim.muon import Muon, split_parameters
from fp8pass.optim.offload import offload_weights

__all__ = [
    "PRESETS",
    "AdamW",
    "Muon",
    "capture_step",
    "offload_weights",
    "split_parameters",
    "step_in_backward",
]
