"""Check what a device can run (FP8 GEMMs, FP8 casts, Triton kernels); estimate times on GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

FP8_CAPABILITY = (8, 9)
# The major compute capability that `_scaled_grouped_mm` with row scales requires.
GROUPED_CAPABILITY = 9
# The major compute capabilities with tensor cores for MX formats.
MX_CAPABILITIES = 10, 12

# The measured rates of one GPU, in operations and bytes per second. The planner for a memory budget
# uses these rates on every GPU: only the ratios of the rates matter, and the ratios differ little
# between GPUs.
RATES_OF = "NVIDIA H200"
FP8_FLOPS = 1300e12
BF16_FLOPS = 680e12
ATTENTION_FLOPS = 530e12
BANDWIDTH = 4.27e12

# Seconds that one more kernel launch adds to a step. A launch adds 2 µs if the GPU limits the step,
# and 10 to 30 µs if the CPU limits the step (GPT-2 124M with 1,643 instead of 1,305 launches).
LAUNCH = 10e-6

# Seconds in which the CPU launches a kernel of Inductor's code, and allocates its results: the
# median of 21 measurements on four hosts, which range from 22 to 57 µs.
CPU_LAUNCH = 40e-6
# Whether a CUDA graph launches all kernels of a step at once.
_launches_at_once: ContextVar[bool] = ContextVar("launches_at_once", default=False)

# The GPU that CPU tensors stand for inside `planning_for`; None outside.
_planned_gpu: ContextVar[Gpu | None] = ContextVar("planned_gpu", default=None)


@contextmanager
def planning_for(gpu: Gpu) -> Iterator[None]:
    """Within the context, treat the CPU as `gpu`, so that `fit` can plan with fake CPU tensors."""
    token = _planned_gpu.set(gpu)
    try:
        yield
    finally:
        _planned_gpu.reset(token)


@contextmanager
def launching_at_once() -> Iterator[None]:
    """Within the context, compile for a step that is captured in one CUDA graph."""
    token = _launches_at_once.set(True)
    try:
        yield
    finally:
        _launches_at_once.reset(token)


def launches_at_once() -> bool:
    """Whether `launching_at_once` is active."""
    return _launches_at_once.get()


def why_no_fp8_gemm(device: torch.device) -> str | None:
    """Return why `device` cannot run FP8 GEMMs, or None if it can.

    A CPU runs a reference implementation of FP8 GEMMs. It multiplies the same FP8 data as tensor
    cores, but accumulates in FP32.
    """
    if _is_reference(device):
        return None
    if device.type not in ("cpu", "cuda") or torch.version.hip is not None:
        return f"FP8 GEMMs need an NVIDIA GPU or a CPU, not a {device.type} device"
    if capability_of(device) < FP8_CAPABILITY:
        return f"{_describe(device)} has no FP8 tensor cores: FP8 needs sm89 or newer"
    return None


def _is_reference(device: torch.device) -> bool:
    """Whether `device` is a real CPU, and does not stand for the GPU of `planning_for`."""
    return device.type == "cpu" and _planned_gpu.get() is None


def _describe(device: torch.device) -> str:
    """Return the name and the compute capability of a GPU, for example `NVIDIA L4 (sm89)`."""
    major, minor = capability_of(device)
    return f"{name_of(device)} (sm{major}{minor})"


def name_of(device: torch.device) -> str:
    """Return the GPU model that a device is, or that a CPU stands for; '' for other devices."""
    planned = _planned_gpu.get() if device.type == "cpu" else None
    if planned:
        return planned.name
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. The driver is queried only once."""
    planned = _planned_gpu.get() if device.type == "cpu" else None
    if planned:
        return planned.capability
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def why_no_grouped_gemm(device: torch.device) -> str | None:
    """Return why `device` cannot run FP8 GEMMs of experts, or None if it can."""
    lacking = why_no_fp8_gemm(device)
    if lacking or _is_reference(device):
        return lacking
    if capability_of(device)[0] != GROUPED_CAPABILITY:
        return f"{_describe(device)}: FP8 GEMMs of experts need sm90"
    return None


def why_no_row_scales(device: torch.device) -> str | None:
    """Return why GEMMs on `device` need one scale per tensor, or None if rows may have scales.

    The caller has checked that the device can run FP8 GEMMs.
    """
    if _is_reference(device):
        return None
    capability = capability_of(device)
    if capability[0] == 12:
        return f"{_describe(device)}: PyTorch has no FP8 GEMM with row scales for this GPU"
    if capability == (8, 9) and torch.__version__ < "2.12":
        return (
            f"{_describe(device)}: before PyTorch 2.12, GEMMs with row scales ignore CUDA streams"
        )
    return None


def why_emulated(device: torch.device, scales: str) -> str | None:
    """Return why GEMMs multiply dequantized operands on `device`, or None if they do not.

    Args:
        device: a device that can run FP8 GEMMs.
        scales: the form of the operands' scales, a key of `SCALE_FORMS` in
            `dialect/quantization.py`.
    """
    if scales != "e8m0" or _is_reference(device):
        return None
    if capability_of(device)[0] in MX_CAPABILITIES:
        return None
    return f"{_describe(device)} has no tensor cores for MX formats: they need sm100 or sm120"


def why_no_triton_kernels(device: torch.device) -> str | None:
    """Return why the Triton kernels of `codegen/` do not run on `device`, or None if they run."""
    if device.type != "cuda":
        return "Triton kernels run on NVIDIA GPUs only"
    return why_no_fp8_gemm(device)


def has_fp8_casts(device: torch.device) -> bool:
    """Whether generated code can convert to and from `torch.float8_e4m3fn` on `device`."""
    return _is_reference(device) or why_no_fp8_gemm(device) is None


GIB = 1 << 30

# Shares of the datasheet's operations and bytes per second that an H200 reaches in a training step.
FP8_SHARE = FP8_FLOPS / 1979e12
BF16_SHARE = BF16_FLOPS / 989e12
ATTENTION_SHARE = ATTENTION_FLOPS / 989e12
BANDWIDTH_SHARE = BANDWIDTH / 4.8e12


@dataclass(frozen=True)
class Work:
    """An amount of work for a GPU: floating-point operations and memory traffic.

    Attributes:
        fp8_flops, bf16_flops: floating-point operations of GEMMs in FP8 and in BF16.
        attention_flops: floating-point operations of attention.
        bytes: bytes that generated code reads from GPU memory and writes to it.
    """

    fp8_flops: float = 0.0
    bf16_flops: float = 0.0
    attention_flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(a + b for a, b in pairs))

    def times(self, count: float) -> Work:
        """Return `count` times this work."""
        return Work(*(count * x for x in vars(self).values()))


# Where the rates of a GPU come from. For an unknown GPU the rates of `REFERENCE` are `assumed`.
Rates = Literal["measured", "datasheet", "given", "assumed"]


@dataclass(frozen=True)
class Gpu:
    """A GPU to plan for.

    Attributes:
        name: name of the GPU model.
        memory: size of the GPU's memory in bytes.
        fp8_flops, bf16_flops, attention_flops: operations per second that GEMMs and attention
            reach.
        bandwidth: bytes per second between the GPU's memory and its processors.
        link: bytes per second of copies to the host while copies from the host run at the same
            rate.
        capability: compute capability, which decides whether linear layers and experts run in FP8.
        rates: where the rates come from: `measured`, `datasheet`, `given`, or `assumed`.
    """

    name: str
    memory: float
    fp8_flops: float
    bf16_flops: float
    attention_flops: float
    bandwidth: float
    link: float
    capability: tuple[int, int] = (9, 0)
    rates: Rates = "given"

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU has FP8 tensor cores. On other GPUs linear layers stay in 16 bits."""
        return self.capability >= FP8_CAPABILITY

    def seconds(self, work: Work) -> float:
        """Estimate the time of `work` by the roofline, in seconds."""
        return (
            work.fp8_flops / self.fp8_flops
            + work.bf16_flops / self.bf16_flops
            + work.attention_flops / self.attention_flops
            + work.bytes / self.bandwidth
        )


def _gpu(
    name: str,
    gib: float,
    capability: tuple[int, int],
    fp8: float | None,
    bf16: float,
    terabytes: float,
    link: float,
) -> tuple[str, Gpu]:
    """Return an entry of `GPUS`: a name, and the GPU with rates from its datasheet.

    Args:
        name: name of the GPU model.
        gib: memory that CUDA reports, in GiB.
        capability: compute capability.
        fp8: dense FP8 TFLOP/s with FP32 accumulation; None if the GPU has no FP8 tensor cores.
        bf16: dense BF16 TFLOP/s with FP32 accumulation.
        terabytes: bandwidth of the memory in TB/s.
        link: bandwidth of the link to the host in GB/s, in each direction.
    """
    return name, Gpu(
        name,
        gib * GIB,
        fp8 * 1e12 * FP8_SHARE if fp8 else bf16 * 1e12 * BF16_SHARE,
        bf16 * 1e12 * BF16_SHARE,
        bf16 * 1e12 * ATTENTION_SHARE,
        terabytes * 1e12 * BANDWIDTH_SHARE,
        link * 1e9,
        capability,
        "measured" if name == REFERENCE else "datasheet",
    )


# The rates of the H200 are measured; the link was measured with copies in both directions at once.
# Other GPUs are assumed to reach the same share of the rates in their datasheets.
REFERENCE = "H200"
GPUS = dict(
    (
        _gpu("H200", 140, (9, 0), 1979, 989, 4.8, 42),
        _gpu("H100", 79, (9, 0), 1979, 989, 3.35, 42),
        _gpu("B200", 178, (10, 0), 4500, 2250, 8.0, 42),
        _gpu("A100", 79, (8, 0), None, 312, 2.039, 20),
        _gpu("A100 40GB", 39, (8, 0), None, 312, 1.555, 20),
        _gpu("L40S", 44, (8, 9), 733, 362, 0.864, 20),
        _gpu("L4", 22, (8, 9), 242, 121, 0.3, 20),
        _gpu("RTX 5090", 31.5, (12, 0), 419, 209.5, 1.79, 42),
        _gpu("RTX 4090", 23.5, (8, 9), 330, 165, 1.008, 20),
        _gpu("RTX 3090", 23.5, (8, 6), None, 71, 0.936, 20),
        _gpu("RTX 5060 Ti", 15.5, (12, 0), 95, 47.4, 0.448, 21),
    )
)


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU for a device name such as `NVIDIA H100 80GB HBM3`; None if no GPU fits.

    The device name must contain all words of a key of `GPUS`, so an `L40S` is not an `L4`. If
    several keys fit, the longest is taken: `A100 40GB` before `A100`. Slower variants, such as
    laptop GPUs and MIG slices, are unknown.
    """
    words = set(re.split(r"[\s-]+", name.lower()))
    if words & {"laptop", "max", "mig", "nvl"} or words >= {"h100", "pcie"}:
        return None
    found = [gpu for known, gpu in GPUS.items() if words >= set(known.lower().split())]
    return max(found, key=lambda gpu: len(gpu.name), default=None)


def rates_of(device: torch.device) -> Gpu | None:
    """Return the rates of a GPU, or of the GPU that a CPU stands for; None if they are unknown."""
    return known_gpu(name_of(device))


def normalize(name: str) -> str:
    """Return a GPU's name without the parts that users may omit, e.g. `rtx4090`."""
    return re.sub(r"nvidia|geforce|[\s-]", "", name.lower())
