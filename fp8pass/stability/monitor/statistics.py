"""The statistics of a quantized tensor: sums on its device, and the row computed from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fp8pass import graph
from fp8pass.dialect.coding import decode, encode
from fp8pass.dialect.formats import Format

# Elements measured at once. On a GPU this limits the extra memory of a sampled step, about ten
# bytes an element; on a CPU the temporaries fit into the caches.
CHUNK = 1 << 24
CPU_CHUNK = 1 << 17

LANDSCAPE = "loss landscape"  # what a row of the whole model is about


@dataclass(frozen=True, slots=True)
class TensorName:
    """The name of a tensor that a graph quantizes, and how it is quantized.

    Attributes:
        module: path of the module in the graph.
        tensor: `input`, `weight` or `gradient` of a linear layer, or `saved` and the operator whose
            result is kept for the backward.
        scales: the elements that share a scale: `tensor`, `row`, or groups of a row, `1×128`.
        format: name of the format.
        dtype: dtype of the values before quantization.
    """

    module: str
    tensor: str
    scales: str
    format: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Row:
    """The statistics of one quantized tensor in one sampled step.

    Attributes:
        step: number of the optimizer step, from 0.
        module: path of the module in the model.
        tensor, scales, format, dtype: as in `TensorName`.
        elements: number of elements, over all uses in the step (micro-batches, repeated calls).
        amax: largest finite magnitude before quantization.
        saturated: share of the elements whose code is the format's largest. Scales are made just in
            time, so that the largest of a tensor, row or group is within a factor of two of it.
        underflow: share of the elements other than zero whose code is zero.
        sqnr_db: signal to quantization noise, 10 log₁₀(Σx² / Σ(x - dequantized)²), over finite
            elements. Infinite without noise; NaN where an Inf or NaN spoilt the scale of others.
        nonfinite: number of elements that are Inf or NaN.
        mu: FP8-LM's µ, the share of the format that the largest element is scaled to: 1, but for
            gradients that are added up in FP8.
        sharpness: of the model's loss landscape in percent, in a row of its own: `tensor` is `loss
            landscape` there, and what is measured of tensors is NaN.
    """

    step: int
    module: str
    tensor: str
    scales: str
    format: str
    dtype: str
    elements: int
    amax: float
    saturated: float
    underflow: float
    sqnr_db: float
    nonfinite: int
    mu: float = 1.0
    sharpness: float = math.nan


COLUMNS = tuple(f.name for f in fields(Row))


def measure(x: Tensor, scale: Tensor, fmt: Format, group: int, mu: Tensor | None = None) -> Tensor:
    """Statistics of `x` quantized in groups.

    Args:
        x: any shape; `group` divides its last dimension.
        scale: one for each group in order, or one for all.
        fmt: the format, not a lossless one.
        group: number of consecutive elements that share a scale.
        mu: FP8-LM's µ, [1], if the scales have it in them.

    Returns:
        float64 [9] on the device of `x`, without waiting for it: amax and µ; the numbers of
        elements, of nonzero elements, of largest codes, of elements flushed to zero and of
        nonfinite elements; the energies of signal and noise.
    """
    groups = x.detach().reshape(-1, group)
    scales = scale.detach().float().reshape(-1, 1).expand(groups.shape[0], 1)
    size = max(1, (CPU_CHUNK if x.device.type == "cpu" else CHUNK) // group)
    chunks = zip(groups.split(size), scales.split(size), strict=True)
    totals = torch.zeros(9, dtype=torch.float64, device=x.device)
    totals[1] = 1.0 if mu is None else mu[0]
    for values, its_scales in chunks if x.numel() else ():
        totals = merged(totals, _measure_chunk(values, its_scales, fmt))
    return totals


def _measure_chunk(x: Tensor, scale: Tensor, fmt: Format) -> Tensor:
    finite = x.isfinite()
    # In units of the scale fp32 holds the squares of all values that matter.
    scaled = (x.float() * scale.reciprocal()).where(finite, 0.0)
    codes = decode(encode(scaled, fmt), fmt)
    nonzero = finite & (x != 0)
    counts = (
        nonzero,
        codes.abs() >= fmt.max,
        nonzero & (codes == 0),
        ~finite,
    )
    unit = scale.double().square()
    energies = (
        (part.square().sum(-1, keepdim=True) * unit).sum() for part in (scaled, scaled - codes)
    )
    amax = x.abs().where(finite, 0.0).amax().double()
    elements = torch.full_like(amax, x.numel())
    no_mu = torch.zeros_like(amax)
    return torch.stack(
        [amax, no_mu, elements, *(c.count_nonzero().double() for c in counts), *energies]
    )


def merged(a: Tensor, b: Tensor) -> Tensor:
    """The statistics of two tensors together: the larger amax and µ, and the sums of the others."""
    return torch.cat([torch.maximum(a[:2], b[:2]), a[2:] + b[2:]])


def row_of(step: int, module: str, name: TensorName, totals: list[float]) -> Row:
    """The row of a tensor, with shares and decibels computed from its sums."""
    amax, mu, elements, nonzero, saturated, flushed, nonfinite, signal, noise = totals
    return Row(
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
        sqnr_db=_decibels(signal, noise),
        nonfinite=int(nonfinite),
        mu=mu,
    )


def landscape_row(step: int, sharpness: float) -> Row:
    """The row of the model as a whole."""
    return Row(
        *(step, "", LANDSCAPE, "", "", ""),
        elements=0,
        amax=math.nan,
        saturated=math.nan,
        underflow=math.nan,
        sqnr_db=math.nan,
        nonfinite=0,
        sharpness=sharpness,
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio else -math.inf
