"""Parsing of arguments, for all commands; PyTorch is imported only where it is needed."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fp8pass.config import unknown

if TYPE_CHECKING:
    import torch


class UsageError(ValueError):
    """The arguments are wrong; the message says what to do instead. Exit code 2."""


class Failure(Exception):
    """A model or fp8pass failed; the message is one line with the cause. Exit code 1."""


@dataclass(frozen=True)
class Command:
    """One command of `fp8pass`.

    Attributes:
        name: its name on the command line.
        summary: one line for `fp8pass --help`.
        description: a paragraph for the help of the command.
        examples: command lines for the help of the command.
        add_options: adds the command's arguments to a parser.
        run: runs the command, and prints the result to stdout.
    """

    name: str
    summary: str
    description: str
    examples: tuple[str, ...]
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]


class Parser(argparse.ArgumentParser):
    """An argument parser that keeps line breaks in help, and suggests the nearest valid option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and a message that is not hidden behind all of the usage."""
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments as attributes, and an empty list: unknown ones are an error."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            kind = "option" if rest[0].startswith("-") else "argument"
            self.error(unknown(kind, rest[0], [f"--{name}" for name in vars(found)]))
        return found, rest


def device_name(text: str) -> str:
    """The name of a device, whether or not it is available.

    Raises:
        argparse.ArgumentTypeError: it is no name of a CPU or CUDA device.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        message = f"{unknown('device', text, ('cpu', 'cuda'))} device is one of cpu, cuda, cuda:N."
        raise argparse.ArgumentTypeError(message)
    return text


def device_of(name: str | None) -> torch.device:
    """The device of that name; without a name a GPU if PyTorch sees one, otherwise the CPU.

    Raises:
        UsageError: there is no such GPU.
    """
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"--device {name}: no such GPU: PyTorch sees {count} here. Try cpu.")
    return device


def output_file(text: str) -> Path:
    """The path of a file to write, checked before hours of work.

    Raises:
        argparse.ArgumentTypeError: its folder does not exist, or it is a folder.
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"the folder {str(path.parent)!r} does not exist: make it, or name another"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    return path


def check_plot(path: Path) -> None:
    """Check that matplotlib can write a file, before hours of work.

    Raises:
        Failure: it is missing.
        UsageError: it writes no files of this extension.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise Failure("--plot needs matplotlib: pip install 'fp8pass[demo]'.")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(f"--plot {path}: matplotlib writes files that end in {', '.join(known)}.")
