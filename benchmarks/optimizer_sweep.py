"""What chose the constants of the fused AdamW: a step of `coat` with each of them changed.

    python benchmarks/optimizer_sweep.py        needs an NVIDIA GPU

Parameters, and what the limit is, are those of `optimizer.py speed`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from optimizer import SHAPES, copy_bandwidth, measure_step
from report import environment, print_rows, use_expandable_segments, write_json
from tables_kernels import optimizer_sweep_table

from fp8pass.optim import AdamW, fused, kernel


@dataclass(frozen=True)
class Setting:
    """Constants of the kernel; see `fp8pass/optim/kernel.py`."""

    tile: int = kernel.TILE
    parts: int = kernel.MAX_PARTS
    registers: int = kernel.LAUNCH["maxnreg"]
    warps: int = kernel.LAUNCH["num_warps"]
    stages: int = kernel.STAGES
    chunk: int = kernel.CHUNK

    @property
    def changes(self) -> str:
        """What is not as fp8pass has it."""
        default = Setting()
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


CHANGES: tuple[dict[str, int], ...] = (
    {},
    {"tile": 512},
    {"tile": 512, "parts": 2},
    {"tile": 512, "parts": 2, "registers": 128},
    {"parts": 2},
    {"parts": 8},
    {"registers": 128},
    {"registers": 144},
    {"registers": 200},
    {"tile": 2048, "warps": 2},
    {"tile": 2048, "warps": 2, "registers": 128},
    {"stages": 2},
    {"stages": 4},
    {"chunk": 4096},
    {"chunk": 8192},
    {"chunk": 32768},
    {"chunk": 65536},
)


@contextmanager
def used(setting: Setting) -> Iterator[None]:
    """Kernels with these constants."""
    launch = {"num_warps": setting.warps, "maxnreg": setting.registers}
    constants = {"TILE": setting.tile, "MAX_PARTS": setting.parts, "STAGES": setting.stages}
    kernel.kernel.cache_clear()
    with ExitStack() as stack:
        for name, value in constants.items():
            stack.enter_context(patch.object(kernel, name, value))
        for module in (kernel, fused):
            stack.enter_context(patch.object(module, "CHUNK", setting.chunk))
            stack.enter_context(patch.object(module, "LAUNCH", launch))
        yield
    kernel.kernel.cache_clear()


def sweep(shape: str) -> dict[str, Any]:
    """A step with each setting."""
    bandwidth = copy_bandwidth()
    results = []
    for changes in CHANGES:
        setting = replace(Setting(), **changes)
        with used(setting):
            step = measure_step(shape, "fp8pass coat", AdamW, bandwidth)
        results.append({"setting": setting.changes, "ms": step.ms, "limit_ms": step.limit_ms})
    settings = {"shape": shape, "shipped": asdict(Setting())}
    return {**environment(), "settings": settings, "bandwidth": bandwidth, "results": results}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    default = Path(__file__).parent / "results/optimizer_sweep.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a GPU, and there is none")
    use_expandable_segments()
    data = sweep(args.shape)
    print_rows(f"a step of AdamW, {args.shape}", optimizer_sweep_table(data))
    write_json(args.out, data)


if __name__ == "__main__":
    main()
