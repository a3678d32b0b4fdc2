"""What a device can do with FP8, asked at compile time."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

from fp8pass import compat

FP8_CAPABILITY = (8, 9)

# What one H200 reaches, in operations and bytes a second. A memory budget weighs operators against
# each other with these: only their ratios matter, which differ little between GPUs.
FP8_FLOPS = 1300e12
BF16_FLOPS = 680e12
ATTENTION_FLOPS = 530e12
BANDWIDTH = 4.27e12


def why_no_fp8_gemm(device: torch.device) -> str | None:
    """The reason why `device` cannot run FP8 GEMMs, or None where it can.

    The CPU can: its reference kernels compute what the tensor cores would.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no FP8 GEMMs on {device.type} devices yet; needs an NVIDIA GPU or the CPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm{capability[0]}{capability[1]}) has no FP8 tensor cores; needs sm89"
    return None


@cache
def takes_every_layout(device: torch.device) -> bool:
    """Whether FP8 GEMMs on `device` read operands in any layout, so that none has to be transposed.

    Hopper's tensor cores contract the last dimension of both; what others do is tried.
    """
    if device.type != "cuda" or why_no_fp8_gemm(device):
        return False
    with compat.real_tensors():
        codes = torch.arange(32 * 32, device=device).remainder(7).float().reshape(32, 32)
        a, b = codes, codes.flip(0)
        wanted, unit = a @ b, torch.ones((), device=device)
        for by_column in product((False, True), repeat=2):
            x, y = _laid_out(a, by_column[0]), _laid_out(b, by_column[1])
            try:
                found = torch.ops.aten._scaled_mm(x, y, unit, unit, out_dtype=torch.bfloat16)
            except (RuntimeError, ValueError):
                return False
            if not torch.equal(found.float(), wanted.bfloat16().float()):
                return False
    return True


def _laid_out(x: Tensor, by_column: bool) -> Tensor:
    codes = (x.t() if by_column else x).contiguous().to(torch.float8_e4m3fn)
    return codes.t() if by_column else codes


def why_no_triton_kernels(device: torch.device) -> str | None:
    """The reason why the Triton kernels of `codegen/` do not run on `device`, None if they do."""
    if device.type != "cuda":
        return f"no Triton kernels on {device.type}"
    return why_no_fp8_gemm(device)


def has_fp8_casts(device: torch.device) -> bool:
    """Whether generated code can convert to and from `torch.float8_e4m3fn` on `device`."""
    return device.type == "cpu" or why_no_fp8_gemm(device) is None
