"""`fp8pass env`: print facts for a bug report, even if parts of the installation are broken."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import fp8pass
from fp8pass.tools.cli.parsing import Command, Failure, describe_error

if TYPE_CHECKING:
    import torch

VARIABLES = ("FP8PASS_", "TORCHINDUCTOR_", "TORCH_LOGS", "TORCH_TRACE")

NO_DRIVER = "none found"
# Rounding both operands to E4M3 causes an error of about 4%.
LARGEST_ERROR = 0.1


def collect() -> dict[str, dict[str, Any]]:
    # Read the variables first, because importing Inductor sets some of them.
    variables = {
        name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)
    }
    return {"versions": _list_versions(), "devices": _list_devices(), "variables": variables}


def _list_versions() -> dict[str, str]:
    def find_compiler() -> str:
        path = import_module("fp8pass.compat").get_cpp_compiler()
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
        return f"{path}: {(done.stdout or done.stderr).splitlines()[0]}"

    no_cuda = "none: PyTorch was built without CUDA"
    return {
        "fp8pass": fp8pass.__version__,
        "python": platform.python_version(),
        "torch": _find_version("torch"),
        "torch_supported": _try(lambda: import_module("fp8pass.compat").SUPPORTED),
        "cuda_runtime": _try(lambda: import_module("torch").version.cuda or no_cuda),
        "cuda_driver": _try(_find_driver),
        **{name: _find_version(name) for name in ("triton", "transformers", "torchao")},
        "os": platform.platform(),
        "cpp_compiler": _try(find_compiler),
    }


def _list_devices() -> dict[str, dict[str, str]]:
    try:
        import torch
    except Exception as error:
        return {"cpu": {"name": platform.machine(), "fp8_product": describe_error(error)}}
    found = {"cpu": {"name": platform.machine(), **_list_paths(torch.device("cpu"))}}

    def find_capability(device: torch.device) -> str:
        return "sm{}{}".format(*torch.cuda.get_device_capability(device))

    def find_memory(device: torch.device) -> str:
        return f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"

    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found[str(device)] = {
            "name": _try(torch.cuda.get_device_name, device),
            "capability": _try(find_capability, device),
            "memory": _try(find_memory, device),
            **_list_paths(device),
        }
    if len(found) == 1:
        has_driver = torch.version.cuda and _try(_find_driver) != NO_DRIVER
        why = _try(lambda: torch.cuda.init() or "no GPU") if has_driver else "no GPU"
        found["cuda"] = {"name": why}
    return found


def _find_driver() -> str:
    collect_env = import_module("torch.utils.collect_env")
    return collect_env.get_nvidia_driver_version(collect_env.run) or NO_DRIVER


def _try(find: Callable[..., str], *about: Any) -> str:
    try:
        return find(*about)
    except Exception as error:
        return describe_error(error)


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _list_paths(device: torch.device) -> dict[str, str]:
    """Return `yes`, or why not, for each FP8 code path, and the outcome of one FP8 GEMM."""
    from fp8pass import hardware

    no_casts = "no: uses integer arithmetic, which is slower"
    return {
        "fp8_gemms": _try(lambda: hardware.why_no_fp8_gemm(device) or "yes"),
        "fp8_casts": _try(lambda: "yes" if hardware.has_fp8_casts(device) else no_casts),
        "row_scales": _try(lambda: hardware.why_no_row_scales(device) or "yes"),
        "mx_gemms": _try(lambda: _describe_mx(device)),
        "triton_kernels": _try(lambda: hardware.why_no_triton_kernels(device) or "yes"),
        "fp8_product": _try(_check_product, device),
    }


def _describe_mx(device: torch.device) -> str:
    from fp8pass import hardware

    if lacking := hardware.why_no_fp8_gemm(device):
        return lacking
    emulated = hardware.why_emulated(device, "e8m0")
    return f"emulated: {emulated}" if emulated else "yes"


def _check_product(device: torch.device) -> str:
    import torch

    from fp8pass import hardware
    from fp8pass.error_analysis.samples import relative_change
    from fp8pass.tools.self_check import quantize, trace_and_lower

    if reason := hardware.why_no_fp8_gemm(device):
        return f"not run: {reason}"

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        how = "e4m3 tensor"
        operands = *quantize(a, how), *quantize(b, how)
        return torch.ops.fp8pass.scaled_mm(*operands, None, a.dtype, False, how, how)

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    exact = a.double() @ b.double().t()
    error = relative_change(exact, trace_and_lower(multiply, a, b)(a, b))
    return "ok" if error < LARGEST_ERROR else f"wrong by {error:.0%}: please report it"


def _format(found: Mapping[str, Mapping[str, Any]]) -> str:
    groups = {"versions": found["versions"], **found["devices"], "variables": found["variables"]}
    blocks = []
    for title, facts in groups.items():
        lines = [f"  {name:16} {value}" for name, value in facts.items()] or ["  none"]
        blocks.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(blocks)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--check",
        action="store_true",
        help="run every kernel and FP8 GEMM on each GPU, and compare with the reference",
    )


def run(options: argparse.Namespace) -> None:
    if options.check:
        _check_gpus()
        return
    found = collect()
    print(json.dumps(found, indent=1) if options.json else _format(found))


def _check_gpus() -> None:
    """Print a line for each check. Raise Failure if one fails, or if there is no GPU."""
    import torch

    from fp8pass.tools.self_check import check_device

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if not devices:
        raise Failure("No GPU was found, so nothing was checked. fp8pass env shows the driver.")
    failed = 0
    for device in devices:
        print(f"{torch.cuda.get_device_name(device)} ({device}):")
        for outcome in check_device(device):
            result = outcome.problem or (f"not run: {outcome.skipped}" if outcome.skipped else "ok")
            print(f"  {outcome.name:22} {outcome.case:38} {result}", flush=True)
            failed += bool(outcome.problem)
    if failed:
        raise Failure(f"{failed} checks failed. Please report this output.")
    print("All checks passed.")


COMMAND = Command(
    "env",
    "print versions, devices and their capabilities, for bug reports",
    "Print the facts for a bug report: versions, devices, the FP8 code paths that each device\n"
    "supports or why not, the result of one FP8 GEMM on each device, and environment variables.\n"
    "With --check, run every kernel and FP8 GEMM on each GPU instead, in about a minute.",
    ("fp8pass env", "fp8pass env --json", "fp8pass env --check"),
    add_options,
    run,
)
