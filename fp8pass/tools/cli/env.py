"""`fp8pass env`: facts for a bug report. Missing or broken parts are reported, never raised."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import fp8pass
from fp8pass.tools.cli.parsing import Command
from fp8pass.tools.cli.tasks import cause

if TYPE_CHECKING:
    import torch

VARIABLES = ("FP8PASS_", "TORCHINDUCTOR_", "TORCH_LOGS", "TORCH_TRACE")

# The largest relative error of a correct product: rounding both operands to E4M3 gives about 4%.
LARGEST_ERROR = 0.1


def environment() -> dict[str, dict[str, Any]]:
    """Versions, devices and their capabilities, and environment variables, as text."""
    found = variables()  # first: Inductor sets some itself
    return {"versions": versions(), "devices": devices(), "variables": found}


def versions() -> dict[str, str]:
    """Versions of the packages and tools that compiled code depends on."""
    return {
        "fp8pass": fp8pass.__version__,
        "python": platform.python_version(),
        "torch": _installed("torch"),
        "torch_supported": _answer(_torch_supported),
        "cuda_runtime": _answer(_cuda_runtime),
        "cuda_driver": _answer(_cuda_driver),
        **{name: _installed(name) for name in ("triton", "transformers", "torchao")},
        "os": platform.platform(),
        "cpp_compiler": _answer(_cpp_compiler),
    }


def devices() -> dict[str, dict[str, str]]:
    """The CPU and each GPU, with the paths of fp8pass that they support, or why they do not."""
    try:
        import torch
    except Exception as error:
        return {"cpu": {"name": platform.machine(), "fp8_product": cause(error)}}
    found = {"cpu": {"name": platform.machine(), **_paths(torch.device("cpu"))}}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found[str(device)] = {
            "name": _answer(torch.cuda.get_device_name, device),
            "capability": _answer(_capability, device),
            "memory": _answer(_memory, device),
            **_paths(device),
        }
    if not torch.cuda.device_count():
        found["cuda"] = {"name": _answer(_why_no_gpu) if torch.version.cuda else "no GPU"}
    return found


def variables() -> dict[str, str]:
    """Environment variables that change the behaviour of fp8pass or Inductor."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}


def _answer(question: Callable[..., str], *about: Any) -> str:
    """The answer, or the error in finding it."""
    try:
        return question(*about)
    except Exception as error:
        return cause(error)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch_supported() -> str:
    from fp8pass import compat

    return compat.SUPPORTED


def _cuda_runtime() -> str:
    import torch

    return torch.version.cuda or "none: PyTorch was built without CUDA"


def _cuda_driver() -> str:
    from torch.utils import collect_env

    return collect_env.get_nvidia_driver_version(collect_env.run) or "none found"


def _cpp_compiler() -> str:
    """The compiler that Inductor uses for the CPU."""
    from fp8pass import compat

    path = compat.get_cpp_compiler()
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    return f"{path}: {(done.stdout or done.stderr).splitlines()[0]}"


def _why_no_gpu() -> str:
    import torch

    torch.cuda.init()
    return "no GPU"


def _capability(device: torch.device) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def _memory(device: torch.device) -> str:
    import torch

    return f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"


def _paths(device: torch.device) -> dict[str, str]:
    """The paths of fp8pass on a device, each `yes` or why not, and the result of a product."""
    from fp8pass import hardware

    def fp8_gemms() -> str:
        return hardware.why_no_fp8_gemm(device) or "yes"

    def fp8_casts() -> str:
        return (
            "yes"
            if hardware.has_fp8_casts(device)
            else "no: by integer arithmetic, which is slower"
        )

    def triton_kernels() -> str:
        return hardware.why_no_triton_kernels(device) or "yes"

    questions = (fp8_gemms, fp8_casts, triton_kernels)
    answers = {question.__name__: _answer(question) for question in questions}
    return answers | {"fp8_product": _answer(_fp8_product, device)}


def _fp8_product(device: torch.device) -> str:
    """The result of an FP8 product as compiled graphs compute it: `ok`, or the error."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    from fp8pass import hardware
    from fp8pass.dialect import ops as ops  # defines the operators

    if reason := hardware.why_no_fp8_gemm(device):
        return f"not run: {reason}"

    from fp8pass.codegen.lowering import lower  # after the operators, which it looks up

    fp8 = torch.ops.fp8pass

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        how = "e4m3 tensor"
        scales = [fp8.scale(fp8.amax(x), how) for x in (a, b)]
        codes = [fp8.quantize(x, s, how) for x, s in zip((a, b), scales, strict=True)]
        operands = codes[0], scales[0], codes[1], scales[1]
        return fp8.scaled_mm(*operands, None, a.dtype, False, how, how)

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    lowered = make_fx(product, tracing_mode="fake")(a, b)
    lower(lowered)
    wrong, right = lowered(a, b).double(), a.double() @ b.double().t()
    error = float((wrong - right).norm() / right.norm())
    return "ok" if error < LARGEST_ERROR else f"wrong by {error:.0%}: please report it"


def _text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The environment as lines to paste into a report."""
    groups = {"versions": found["versions"], **found["devices"], "variables": found["variables"]}
    blocks = ("\n".join([f"{name}:", *_lines(entries)]) for name, entries in groups.items())
    return "\n\n".join(blocks)


def _lines(entries: Mapping[str, str]) -> list[str]:
    return [f"  {name:16} {value}" for name, value in entries.items()] or ["  none"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fp8pass env`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> None:
    """Print the environment."""
    found = environment()
    print(json.dumps(found, indent=1) if options.json else _text(found))


COMMAND = Command(
    "env",
    "versions, devices and their capabilities, for bug reports",
    "Print the facts for a bug report: versions, devices, the paths of fp8pass that each supports\n"
    "or why not, the result of one FP8 product there, and environment variables that matter.",
    ("fp8pass env", "fp8pass env --json"),
    add_options,
    run,
)
