"""Abilities of devices and rates of GPU models, and the time of some work by a roofline.

Abilities are FP8 GEMMs, FP8 casts and Triton kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

FP8_CAPABILITY = (8, 9)
# Of `_scaled_grouped_mm` with scales by row.
GROUPED_CAPABILITY = 9

# The rates of one GPU, in operations and bytes a second. A memory budget weighs operators against
# each other with these: only their ratios matter, which differ little between GPUs.
RATES_OF = "NVIDIA H200"
FP8_FLOPS = 1300e12
BF16_FLOPS = 680e12
ATTENTION_FLOPS = 530e12
BANDWIDTH = 4.27e12


def why_no_fp8_gemm(device: torch.device) -> str | None:
    """The reason why `device` cannot run FP8 GEMMs, or None where it can.

    The CPU can: its reference kernels compute the same as tensor cores.
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
    """The compute capability of a GPU, for which the driver is asked once."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def why_no_grouped_gemm(device: torch.device) -> str | None:
    """The reason why `device` cannot run FP8 GEMMs of experts, or None where it can."""
    lacking = why_no_fp8_gemm(device)
    if lacking or device.type == "cpu":
        return lacking
    major, minor = capability_of(device)
    if major != GROUPED_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm{major}{minor}): PyTorch has FP8 GEMMs of experts for sm90 only"
    return None


def why_no_triton_kernels(device: torch.device) -> str | None:
    """The reason why the Triton kernels of `codegen/` do not run on `device`, None if they do."""
    if device.type != "cuda":
        return "Triton kernels run on NVIDIA GPUs only"
    return why_no_fp8_gemm(device)


def has_fp8_casts(device: torch.device) -> bool:
    """Whether generated code can convert to and from `torch.float8_e4m3fn` on `device`."""
    return device.type == "cpu" or why_no_fp8_gemm(device) is None


GIB = 1 << 30

# What of a datasheet's operations and bytes a second an H200 reaches in a step of training.
FP8_SHARE = FP8_FLOPS / 1979e12
BF16_SHARE = BF16_FLOPS / 989e12
ATTENTION_SHARE = ATTENTION_FLOPS / 989e12
BANDWIDTH_SHARE = BANDWIDTH / 4.8e12


@dataclass(frozen=True)
class Work:
    """What a GPU does.

    Attributes:
        fp8_flops, bf16_flops: operations of GEMMs.
        attention_flops: of attention.
        bytes: moved by generated code between memory and the GPU.
    """

    fp8_flops: float = 0.0
    bf16_flops: float = 0.0
    attention_flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Work(*(a + b for a, b in pairs))

    def times(self, count: float) -> Work:
        """The same, `count` times."""
        return Work(*(count * x for x in vars(self).values()))


@dataclass(frozen=True)
class Gpu:
    """A GPU with FP8 tensor cores.

    Attributes:
        name: of the model.
        memory: bytes.
        fp8_flops, bf16_flops, attention_flops: operations a second that GEMMs and attention reach.
        bandwidth: bytes a second between its memory and its processors.
        link: bytes a second to the host, and as many from it at the same time.
    """

    name: str
    memory: float
    fp8_flops: float
    bf16_flops: float
    attention_flops: float
    bandwidth: float
    link: float

    def seconds(self, work: Work) -> float:
        """The time that some work takes by the roofline."""
        return (
            work.fp8_flops / self.fp8_flops
            + work.bf16_flops / self.bf16_flops
            + work.attention_flops / self.attention_flops
            + work.bytes / self.bandwidth
        )


def _gpu(
    name: str, gib: float, fp8: float, bf16: float, terabytes: float, link: float
) -> tuple[str, Gpu]:
    """A GPU by its datasheet: dense TFLOP/s with FP32 sums, TB/s; GB/s of the link each way."""
    return name, Gpu(
        name,
        gib * GIB,
        fp8 * 1e12 * FP8_SHARE,
        bf16 * 1e12 * BF16_SHARE,
        bf16 * 1e12 * ATTENTION_SHARE,
        terabytes * 1e12 * BANDWIDTH_SHARE,
        link * 1e9,
    )


# The rates of the H200, and its link with both ways in use, are measured; those of the others are
# the same share of theirs.
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
    """The GPU that a device's name, such as `NVIDIA H100 80GB HBM3`, has in its own."""
    return next((g for known, g in GPUS.items() if plain(known) in plain(name)), None)


def plain(name: str) -> str:
    """A name of a GPU without what is left out at times."""
    return re.sub(r"nvidia|geforce|[\s-]", "", name.lower())
