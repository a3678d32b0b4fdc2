"""Which devices support FP8 GEMMs, FP8 casts and Triton kernels; rates of GPUs for a roofline."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

FP8_CAPABILITY = (8, 9)
# The major compute capability of `_scaled_grouped_mm` with a scale for each row.
GROUPED_CAPABILITY = 9

# The measured rates of one GPU, in operations and bytes per second. A memory budget compares
# operators by these rates on every GPU: only their ratios matter, which differ little.
RATES_OF = "NVIDIA H200"
FP8_FLOPS = 1300e12
BF16_FLOPS = 680e12
ATTENTION_FLOPS = 530e12
BANDWIDTH = 4.27e12


def why_no_fp8_gemm(device: torch.device) -> str | None:
    """Return why `device` cannot run FP8 GEMMs, or None if it can.

    The CPU can: its reference kernels compute what tensor cores compute.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no FP8 GEMMs on {device.type} devices yet; needs an NVIDIA GPU or the CPU"
    capability = capability_of(device)
    if capability < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm{capability[0]}{capability[1]}) has no FP8 tensor cores; needs sm89"
    return None


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. The driver is called once for each GPU."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def why_no_grouped_gemm(device: torch.device) -> str | None:
    """Return why `device` cannot run FP8 GEMMs of experts, or None if it can."""
    reason = why_no_fp8_gemm(device)
    if reason or device.type == "cpu":
        return reason
    major, minor = capability_of(device)
    if major != GROUPED_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm{major}{minor}): PyTorch has FP8 GEMMs of experts for sm90 only"
    return None


def why_no_triton_kernels(device: torch.device) -> str | None:
    """Return why the Triton kernels of `codegen/` do not run on `device`, or None if they do."""
    if device.type != "cuda":
        return "Triton kernels run on NVIDIA GPUs only"
    return why_no_fp8_gemm(device)


def has_fp8_casts(device: torch.device) -> bool:
    """Whether generated code can convert to and from `torch.float8_e4m3fn` on `device`."""
    return device.type == "cpu" or why_no_fp8_gemm(device) is None


GIB = 1 << 30

# The share of the datasheet's rates that an H200 reaches in a training step.
FP8_SHARE = FP8_FLOPS / 1979e12
BF16_SHARE = BF16_FLOPS / 989e12
ATTENTION_SHARE = ATTENTION_FLOPS / 989e12
BANDWIDTH_SHARE = BANDWIDTH / 4.8e12


@dataclass(frozen=True)
class Work:
    """An amount of work for a GPU.

    Attributes:
        fp8_flops, bf16_flops: operations of GEMMs.
        attention_flops: operations of attention.
        bytes: bytes that generated code reads and writes.
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


@dataclass(frozen=True)
class Gpu:
    """A GPU with FP8 tensor cores.

    Attributes:
        name: the name of the model.
        memory: the bytes of its memory.
        fp8_flops, bf16_flops, attention_flops: operations per second of GEMMs and of attention.
        bandwidth: bytes per second of its memory.
        link: bytes per second to the host, with as many from the host at the same time.
    """

    name: str
    memory: float
    fp8_flops: float
    bf16_flops: float
    attention_flops: float
    bandwidth: float
    link: float

    def seconds(self, work: Work) -> float:
        """Return the time of some work by the roofline."""
        return (
            work.fp8_flops / self.fp8_flops
            + work.bf16_flops / self.bf16_flops
            + work.attention_flops / self.attention_flops
            + work.bytes / self.bandwidth
        )


def _gpu(
    name: str, gib: float, fp8: float, bf16: float, terabytes: float, link: float
) -> tuple[str, Gpu]:
    """Make a GPU from its datasheet: dense TFLOP/s with FP32 sums, TB/s, GB/s of the link."""
    return name, Gpu(
        name,
        gib * GIB,
        fp8 * 1e12 * FP8_SHARE,
        bf16 * 1e12 * BF16_SHARE,
        bf16 * 1e12 * ATTENTION_SHARE,
        terabytes * 1e12 * BANDWIDTH_SHARE,
        link * 1e9,
    )


# The rates of the H200 are measured, and its link with both directions in use. The other GPUs are
# assumed to reach the same share of their datasheets.
GPUS = dict(
    (
        _gpu("H200", 140, 1979, 989, 4.8, 42),
        _gpu("H100", 79, 1979, 989, 3.35, 42),
        _gpu("L40S", 44, 733, 362, 0.864, 20),
        _gpu("RTX 5090", 31.5, 419, 209.5, 1.79, 42),
        _gpu("RTX 4090", 23.5, 330, 165, 1.008, 20),
        _gpu("RTX 5060 Ti", 15.5, 95, 47.4, 0.448, 21),
    )
)
REFERENCE = "H200"


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU of a device name, for example `NVIDIA H100 80GB HBM3`."""
    return next((gpu for key, gpu in GPUS.items() if normalize(key) in normalize(name)), None)


def normalize(name: str) -> str:
    """Remove the parts of a GPU's name that users may omit."""
    return re.sub(r"nvidia|geforce|[\s-]", "", name.lower())
