"""The abilities of a device: FP8 GEMMs, FP8 casts, Triton kernels; its rates."""

from __future__ import annotations

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
