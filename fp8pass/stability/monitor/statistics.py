"""Statistics of a quantized tensor: the device computes totals, the host derives statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fp8pass import graph
from fp8pass.dialect.encoding import decode, encode
from fp8pass.dialect.formats import Format

# Elements of a chunk. On a GPU, temporaries take about ten bytes per element. On a CPU, they fit
# into the caches.
GPU_CHUNK = 1 << 24
CPU_CHUNK = 1 << 17

LANDSCAPE = "loss landscape"  # `TensorStatistics.tensor` in the row of the whole model


@dataclass(frozen=True, slots=True)
class TensorName:
    """The name of a tensor that a graph quantizes, and its quantization."""

    module: str  # path of the module in the graph
    # `input`, `weight` or `gradient` of a linear layer; or `saved`, followed by the name of the
    # operator whose result is saved for the backward.
    tensor: str
    scales: str  # which elements share a scale: `tensor`, `row`, or a group in a row (`1×128`)
    format: str  # name of the format
    dtype: torch.dtype  # dtype of the values before quantization


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """The statistics of one quantized tensor in one sampled step.

    Attributes:
        step: number of the optimizer step, from 0.
        module: path of the module in the model.
        tensor, scales, format, dtype: as in `TensorName`.
        elements: number of elements, summed over all uses of the layer in the step (micro-batches,
            repeated calls).
        amax: largest finite magnitude before quantization.
        saturated: share of elements that become the largest value of the format. Scales are
            computed from the current amax, so amax / scale is within a factor of two of this value.
        underflow: share of nonzero elements that become zero.
        sqnr_db: signal to quantization noise ratio, 10 log₁₀(Σx² / Σ(x - dequantized)²), over
            finite elements. Infinite if the noise is zero; NaN if an Inf or NaN made a scale NaN.
        nonfinite: number of elements that are Inf or NaN.
        sharpness: sharpness of the model's loss landscape in percent, in a separate row whose
            `tensor` is `loss landscape`. All other statistics in that row are NaN or 0.
    """

    step: int
    module: str
    tensor: str
    scales: str = ""
    format: str = ""
    dtype: str = ""
    elements: int = 0
    amax: float = math.nan
    saturated: float = math.nan
    underflow: float = math.nan
    sqnr_db: float = math.nan
    nonfinite: int = 0
    sharpness: float = math.nan


COLUMNS = tuple(f.name for f in fields(TensorStatistics))


def measure(x: Tensor, scale: Tensor, fmt: Format, group: int) -> Tensor:
    """Measure the quantization of `x` on its device, without waiting for the device.

    `group` consecutive elements share a `scale`, or all elements share one scale. Return float64
    [8]: amax; counts of elements, nonzero elements, saturated elements, elements rounded to zero,
    and nonfinite elements; the energies of signal and noise.
    """
    groups = x.detach().reshape(-1, group)
    scales = scale.detach().float().reshape(-1, 1).expand(groups.shape[0], 1)
    size = max(1, (CPU_CHUNK if x.device.type == "cpu" else GPU_CHUNK) // group)
    chunks = zip(groups.split(size), scales.split(size), strict=True)
    totals = torch.zeros(8, dtype=torch.float64, device=x.device)
    for values, value_scales in chunks if x.numel() else ():
        totals = merge(totals, _measure_chunk(values, value_scales, fmt))
    return totals


def _measure_chunk(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    finite = x.isfinite()
    # fp32 can then represent the squares of all values that matter.
    scaled = (x.float() * scale.reciprocal()).where(finite, 0.0)
    rounded = decode(encode(scaled, fmt), fmt)
    nonzero = finite & (x != 0)
    counts = nonzero, rounded.abs() >= fmt.max, nonzero & (rounded == 0), ~finite
    unit = scale.double().square()
    energies = (
        (part.square().sum(-1, keepdim=True) * unit).sum() for part in (scaled, scaled - rounded)
    )
    amax = x.abs().where(finite, 0.0).amax().double()
    elements = torch.full_like(amax, x.numel())
    return torch.stack([amax, elements, *(c.count_nonzero().double() for c in counts), *energies])


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Merge the totals of two measurements: take the larger amax, and add the other numbers."""
    return torch.cat([torch.maximum(a[:1], b[:1]), a[1:] + b[1:]])


def make_row(step: int, module: str, name: TensorName, totals: list[float]) -> TensorStatistics:
    amax, elements, nonzero, saturated, flushed, nonfinite, signal, noise = totals
    return TensorStatistics(
        step=step,
        module=module,
        tensor=name.tensor,
        scales=name.scales,
        format=name.format,
        dtype=graph.dtype_text(name.dtype),
        elements=int(elements),
        amax=amax,
        saturated=saturated / elements if elements else 0.0,
        underflow=flushed / nonzero if nonzero else 0.0,
        sqnr_db=_to_decibels(signal, noise),
        nonfinite=int(nonfinite),
    )


def _to_decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio else -math.inf
