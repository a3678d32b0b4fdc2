"""Estimate whether FP8 makes a model faster: the time that GEMMs save, minus the time of casts.

Both times come from the roofline that `fit` uses (`hardware.py`), as if each cast were a kernel.
This overestimates the time of casts, because fused kernels move fewer bytes. It also overestimates
the time that small GEMMs save, because small GEMMs do not reach their peak rate. In the measured
models the two errors cancel. Milliseconds that FP8 saves in a forward and backward, as estimated
and as measured with three recipes:

                             estimated    coat    agoq    linear
    GPT-2 124M, H200               1.0     0.7    -0.1      -1.0     benchmarks/results/gpt2.json
    a layer of 2048, H200          1.0     1.4     0.8               benchmarks/results/layer.json
    a layer of 4096, H200         11.3    13.2    11.9

For GPT-2 the estimate is 8% of the time that linear layers take in BF16, but the measured gain is
about zero. For the layer of size 2048 the estimate is 28% of that time, and the whole layer runs
more than a quarter faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8pass.hardware import Gpu, Work, known_gpu
from fp8pass.plan import Linear, Plan

# If FP8 is estimated to save a smaller share of the GEMMs' BF16 time, it may be slower than BF16.
# The limit is between the 8% and 28% in the module's docstring.
CLEAR_SHARE = 0.15


@dataclass(frozen=True)
class Gain:
    """The time that quantized linear layers take on a GPU, in seconds for a forward and backward.

    Attributes:
        bf16: the time of their GEMMs in BF16.
        fp8: the time of their GEMMs in FP8, plus the time of all casts.
    """

    bf16: float
    fp8: float

    @property
    def saved(self) -> float:
        """The time that FP8 saves; negative if FP8 is slower."""
        return self.bf16 - self.fp8

    @property
    def is_clear(self) -> bool:
        """Whether FP8 is certainly faster, or no layer runs in FP8."""
        return not self.bf16 or self.saved >= CLEAR_SHARE * self.bf16


def estimate_gain(plans: Sequence[Plan], gpu: Gpu) -> Gain:
    """Estimate the gain of several graphs together, which run one after another."""
    work = sum((plan.fp8_work for plan in plans), Work())
    return Gain(gpu.seconds(Work(bf16_flops=work.fp8_flops)), gpu.seconds(work))


def slowdown_warning(plans: Sequence[Plan], device: torch.device | None) -> str:
    """Return a warning if FP8 makes a model slower or hardly faster, else ''.

    Args:
        plans: the plans of all graphs. The plan of a graph that runs n times appears n times.
        device: the device of the model. GPUs with unknown rates get no warning.
    """
    if device is None or device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    rates = known_gpu(name)
    if rates is None or (gain := estimate_gain(plans, rates)).is_clear:
        return ""
    bf16, saved = 1e3 * gain.bf16, 1e3 * gain.saved
    layers = [y for plan in plans for y in plan.linears if y.fp8]
    expected = f"saves only {saved:.2g} ms of" if saved > 0 else f"adds {-saved:.2g} ms to"
    return (
        f"A roofline estimates that FP8 {expected} the {bf16:.3g} ms that {len(layers)} linear "
        f"layers take in BF16 on {name}, because the layers are too small{_example_of(layers)}, or "
        "have too few rows. FP8 still saves memory: see 'Small models' in docs/recipes.md."
    )


def _example_of(layers: Sequence[Linear]) -> str:
    y = min(layers, key=lambda y: y.in_features * y.out_features)
    return f", such as {y.module or 'the top level'} ({y.in_features} → {y.out_features})"
