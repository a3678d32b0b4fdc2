"""An optimizer whose states take a byte an element: `AdamW` in place of `torch.optim.AdamW`.

    state_formats.py  formats of moments and master weights
    groups.py         1×G groups of values to codes and back, with Dynamic Range Expansion
    rounding.py       stochastic rounding of weights, states and sums of gradients
    options.py        the options of a parameter group, checked, and presets
    slots.py          the stored states of a parameter
    host.py           what is on the host, and whether there is room
    staging.py        buffers on a GPU through which values of the host are computed with
    streamed.py       the update of parameters with states on the host
    weights.py        weights on the host with their codes on the GPU
    shards.py         parameters that are distributed over ranks
    update.py         the update, in vectorized PyTorch
    functions.py      Triton functions of the fused update
    kernel.py         the fused update as Triton source, one kernel for all parameters
    fused.py          the launch of the kernel: its tables and arguments
    adamw.py          the optimizer
    checkpoint.py     states in other formats, or of torch.optim.AdamW, converted
    distributed_checkpoint.py  the same while torch.distributed.checkpoint loads
    sums.py           sums of gradients of several backwards
    sum_kernel.py     the same as Triton kernels
    backward.py       `attach`: updates within the backward
    microbatches.py   gradients of a pipeline's stage, divided by the number of micro-batches
    endings.py        what it does when a backward ends, or fails

COAT section 4, FP8-LM section 2.2, LLMQ section 3.
"""

from __future__ import annotations

from fp8pass.optim.adamw import AdamW
from fp8pass.optim.backward import attach
from fp8pass.optim.options import PRESETS
from fp8pass.optim.weights import offload_weights

__all__ = ["PRESETS", "AdamW", "attach", "offload_weights"]
