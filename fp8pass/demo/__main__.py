"""The demo's command line: `python -m fp8pass.demo --help`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

import fp8pass
from fp8pass.config import unknown
from fp8pass.demo.data import Data, DemoError, read_text
from fp8pass.demo.model import SIZES, Decoder, Size, new_model
from fp8pass.demo.show import notes, progress_bar, results_table, write_plot
from fp8pass.demo.train import Compile, Run, free_memory, run_variant


def main(argv: list[str] | None = None) -> list[Run]:
    """Run the demo with the given command line, by default that of the process."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        parser.error(unknown("option", rest[0], [f"--{name}" for name in vars(args)]))
    device = args.device
    size = SIZES[args.size or ("large" if device.type == "cuda" else "small")]
    size = replace(size, steps=args.steps or size.steps)
    try:
        config = fp8pass.Config.recipe(args.recipe)
        data = Data.of(read_text(args.data), size, device)
        args.out.mkdir(parents=True, exist_ok=True)
    except (DemoError, fp8pass.ConfigError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}.")

    console = Console()
    free_memory()
    model = new_model(size, args.seed, device)
    console.print(summary(model, size), highlight=False)
    runs = compare(args.recipe, data, size, args.seed, console)
    console.print("", results_table(runs), *notes(device), sep="\n", highlight=False)
    print(write_plot(runs, args.out))
    batch = next(data.train_batches(size, args.seed))
    print(f"\nfp8pass.explain(model):\n\n{fp8pass.explain(model, *batch, config=config)}")
    return runs


def compare(recipe: str, data: Data, size: Size, seed: int, console: Console) -> list[Run]:
    """Run stock `torch.compile`, then fp8pass."""
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
    """What is about to be trained."""
    parameters = sum(p.numel() for p in model.parameters())
    device = model.lm_head.weight.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return (
        f"{parameters / 1e6:,.1f}M parameters, {size.steps} steps of "
        f"{size.batch}×{size.seq} bytes, on {name}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fp8pass.demo",
        description="Train the same small language model with and without fp8pass, and compare.",
        allow_abbrev=False,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--data", type=Path, help="file or folder of text (default: Python's standard library)")
    add("--out", type=Path, default=Path("demo-output"), help="folder for the plot")
    add("--steps", type=_steps, help="training steps of each variant")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--recipe", default="coat", help=f"of fp8pass: {', '.join(fp8pass.RECIPES)}")
    add("--device", type=_device, default=default_device, help="cpu, cuda or cuda:N")
    add("--size", type=_size, help=f"of the model: {', '.join(SIZES)} (default: by the device)")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        message = f"a whole number from 2 up is needed, got {text!r}; the first step compiles"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _size(text: str) -> str:
    if text not in SIZES:
        message = f"{unknown('size', text, SIZES)} size is one of {', '.join(SIZES)}."
        raise argparse.ArgumentTypeError(message)
    return text


def _device(text: str) -> torch.device:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        message = f"{unknown('device', text, ('cpu', 'cuda'))} device is one of cpu, cuda, cuda:N."
        raise argparse.ArgumentTypeError(message)
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"no such GPU: PyTorch sees {count} here. Try cpu.")
    return device


if __name__ == "__main__":
    main()
