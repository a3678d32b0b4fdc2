"""Whether FP8 makes a model faster: what its GEMMs save, against what casts of operands move.

Both by the roofline that `fit` times steps with (`hardware.py`), each cast as if it were a
kernel of its own. Fused kernels move less, and small GEMMs stay below their peak: in models that
were measured both make up for each other. Milliseconds saved of a forward and backward:

                             estimated    coat    agoq    linear
    GPT-2 124M, H200               1.0     0.7    -0.1      -1.0     benchmarks/results/gpt2.json
    a layer of 2048, H200          1.0     1.4     0.8               benchmarks/results/layer.json
    a layer of 4096, H200         11.3    13.2    11.9

So GPT-2 breaks even, where 8% of the time of these layers' GEMMs would be saved, and the layer of
2048, with 28%, is faster by more than a quarter as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8pass.hardware import Gpu, Work, known_gpu
from fp8pass.plan import Linear, Plan

# A smaller share of the time of their GEMMs may be lost elsewhere: between the cases above.
CLEAR_SHARE = 0.15


@dataclass(frozen=True)
class Gain:
    """What linear layers in FP8 take on a GPU, in seconds of a forward and backward.

    Attributes:
        before: their GEMMs, in BF16.
        after: in FP8, with all casts.
    """

    before: float
    after: float

    @property
    def saved(self) -> float:
        """What FP8 saves, if anything."""
        return self.before - self.after

    @property
    def is_clear(self) -> bool:
        """Whether FP8 is certain to be faster, or nothing is in FP8."""
        return not self.before or self.saved >= CLEAR_SHARE * self.before


def gain(plans: Sequence[Plan], gpu: Gpu) -> Gain:
    """What FP8 saves in graphs that run one after the other."""
    work = sum((plan.fp8_work for plan in plans), Work())
    return Gain(gpu.seconds(Work(bf16_flops=work.fp8_flops)), gpu.seconds(work))


def doubt(plans: Sequence[Plan], device: torch.device | None) -> str:
    """A sentence about a model that FP8 makes hardly faster, or slower; '' of any other.

    Args:
        plans: of all graphs, once for each run.
        device: of the model; only of GPUs whose rates are known something is said.
    """
    if device is None or device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    rates = known_gpu(name)
    if rates is None or (found := gain(plans, rates)).is_clear:
        return ""
    before, change = 1e3 * found.before, 1e3 * found.saved
    layers = [y for plan in plans for y in plan.linears if y.fp8]
    expected = (
        f"save {change:.2g} of the {before:.3g} ms"
        if change > 0
        else f"take {-change:.2g} ms more than the {before:.3g} ms"
    )
    return (
        f"FP8 is expected to {expected} of a forward and backward that {len(layers)} linear layers "
        f"take in BF16 on {name}, by a roofline: they are too small{_such_as(layers)}, or get too "
        "few rows, for what quantizing costs. FP8 saves memory all the same; without it a step may "
        "be as fast or faster: see 'Small models' in docs/recipes.md."
    )


def _such_as(layers: Sequence[Linear]) -> str:
    """The smallest of some layers."""
    y = min(layers, key=lambda y: y.in_features * y.out_features)
    return f", such as {y.module or 'the top level'} ({y.in_features} → {y.out_features})"
