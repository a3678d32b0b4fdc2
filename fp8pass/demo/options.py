"""The demo's options. This module does not import PyTorch, so `--help` works without it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from fp8pass.config import RECIPES
from fp8pass.demo.sizes import SIZES
from fp8pass.tools.cli.parsing import check_device, check_name

DESCRIPTION = "Train the same small language model with and without fp8pass, and compare."


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, help="file or folder of text (default: Python's standard library)")
    add("--out", type=Path, default=Path("demo-output"), help="folder for the plot and the report")
    add("--steps", type=_steps, help="training steps of each variant")
    add("--seed", type=int, default=0, help="seed of weights and batches")
    add("--recipe", default="coat", help=f"recipe of fp8pass: {', '.join(RECIPES)}")
    add("--device", type=check_device, help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add(
        "--size",
        type=partial(check_name, "size", choices=SIZES),
        help=f"size of the model: {', '.join(SIZES)} (default: depends on the device)",
    )


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        message = f"must be at least 2, because the first step compiles, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)
