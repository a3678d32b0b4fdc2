"""Train all variants, and print the comparison."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console

import fp8pass
from fp8pass import compat
from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import Decoder, new_model
from fp8pass.demo.show import list_conclusions, make_table, show_progress, write_plot
from fp8pass.demo.sizes import SIZES, Size
from fp8pass.demo.train import Compile, Run, free_memory, run_variant
from fp8pass.tools.cli.parsing import Failure, UsageError, find_device


def run_demo(options: argparse.Namespace) -> list[Run]:
    """Train with and without fp8pass, and print the results.

    `options` are the command-line options that `options.py` defines.

    Raises:
        ConfigError: the recipe does not exist.
        UsageError: the device does not exist, or the text is too short.
        Failure: no C++ compiler was found.
    """
    device = find_device(options.device)
    check_compiler(device)
    size = SIZES[options.size or ("large" if device.type == "cuda" else "small")]
    size = replace(size, steps=options.steps or size.steps)
    config = fp8pass.Config.recipe(options.recipe)
    try:
        data = Data.of(read_text(options.data), size, device)
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}.") from error

    console = Console(highlight=False)
    free_memory()
    model = new_model(size, options.seed, device)
    console.print(summarize(model, size))
    with hide_compile_log():
        runs = compare(options.recipe, data, size, options.seed, console)
    batch = next(data.train_batches(size, options.seed))
    report = options.out / "report.html"
    fp8pass.explain(model, *batch, config=config).save(report)
    console.print("", make_table(runs), *list_conclusions(runs, device), sep="\n")
    print(write_plot(runs, options.out))
    print(f"Report: {report}")
    return runs


def check_compiler(device: torch.device) -> None:
    if device.type == "cpu" and not compat.has_cpp_compiler():
        raise Failure(
            "torch.compile needs a C++ compiler on a CPU, but did not find a compiler. Install one "
            "(apt install g++), or set CXX to its path."
        )


@contextmanager
def hide_compile_log() -> Iterator[None]:
    log = logging.getLogger("fp8pass")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


def compare(recipe: str, data: Data, size: Size, seed: int, console: Console) -> list[Run]:
    """Train three variants: stock `torch.compile`, fp8pass, and stock with another seed."""
    with_fp8pass = partial(torch.compile, backend="fp8pass", options={"recipe": recipe})
    variants: list[tuple[str, Compile, int]] = [
        ("torch.compile", torch.compile, seed),
        (f"fp8pass {recipe}", with_fp8pass, seed),
        (f"torch.compile, seed {seed + 1}", torch.compile, seed + 1),
    ]
    runs = []
    with show_progress(console, [name for name, *_ in variants], size.steps) as update:
        for name, compile_model, own_seed in variants:
            update(name, 0)
            on_step = partial(update, name)
            runs.append(run_variant(name, compile_model, data, size, own_seed, on_step))
            free_memory()
    return runs


def summarize(model: Decoder, size: Size) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    weight = model.lm_head.weight
    device, dtype = weight.device, "BF16" if weight.dtype is torch.bfloat16 else "FP32"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return (
        f"{parameters / 1e6:,.1f}M parameters in {dtype}, {size.steps} steps of "
        f"{size.batch}×{size.seq} bytes, on {name}"
    )
