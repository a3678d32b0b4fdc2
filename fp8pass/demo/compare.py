"""Trains both variants, and shows the comparison."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console

import fp8pass
from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import Decoder, new_model
from fp8pass.demo.show import make_notes, make_table, progress_bar, write_plot
from fp8pass.demo.sizes import SIZES, Size
from fp8pass.demo.train import Compile, Run, free_memory, run_variant
from fp8pass.tools.cli.parsing import UsageError, find_device


def run_demo(options: argparse.Namespace) -> list[Run]:
    """Train with and without fp8pass by the options of `options.py`, and print the results.

    Raises:
        UsageError: the recipe or device does not exist, or the text is too short.
    """
    device = find_device(options.device)
    size = SIZES[options.size or ("large" if device.type == "cuda" else "small")]
    size = replace(size, steps=options.steps or size.steps)
    try:
        config = fp8pass.Config.recipe(options.recipe)
        data = Data.of(read_text(options.data), size, device)
        options.out.mkdir(parents=True, exist_ok=True)
    except fp8pass.ConfigError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}.") from error

    console = Console()
    free_memory()
    model = new_model(size, options.seed, device)
    console.print(summary(model, size), highlight=False)
    runs = compare(options.recipe, data, size, options.seed, console)
    console.print("", make_table(runs), *make_notes(device), sep="\n", highlight=False)
    print(write_plot(runs, options.out))
    batch = next(data.train_batches(size, options.seed))
    explanation = fp8pass.explain(model, *batch, config=config)
    explanation.save(options.out / "report.html")
    print(f"Report: {options.out / 'report.html'}")
    print(f"\nfp8pass.explain(model):\n\n{explanation}")
    return runs


def compare(recipe: str, data: Data, size: Size, seed: int, console: Console) -> list[Run]:
    """Train with stock `torch.compile`, then with fp8pass."""
    with_fp8pass = partial(torch.compile, backend="fp8pass", options={"recipe": recipe})
    variants: dict[str, Compile] = {
        "torch.compile": torch.compile,
        f"fp8pass {recipe}": with_fp8pass,
    }
    runs = []
    with progress_bar(console, list(variants), size.steps) as update:
        for name, compile_model in variants.items():
            update(name, 0)
            runs.append(run_variant(name, compile_model, data, size, seed, partial(update, name)))
            free_memory()
    return runs


def summary(model: Decoder, size: Size) -> str:
    """Return a line about the model, the training and the device."""
    parameters = sum(p.numel() for p in model.parameters())
    weight = model.lm_head.weight
    device, dtype = weight.device, "BF16" if weight.dtype is torch.bfloat16 else "FP32"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return (
        f"{parameters / 1e6:,.1f}M parameters in {dtype}, {size.steps} steps of "
        f"{size.batch}×{size.seq} bytes, on {name}"
    )
