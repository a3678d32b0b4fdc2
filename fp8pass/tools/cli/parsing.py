"""Arguments, tasks and errors of all commands. PyTorch is imported only where it is needed."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fp8pass.option_checks import ConfigError, unknown

if TYPE_CHECKING:
    import torch


class UsageError(ValueError):
    """An argument is invalid. The message explains the fix. Exit code 2."""


class Failure(Exception):
    """The model or fp8pass failed. The message is one line with the cause. Exit code 1."""


@dataclass(frozen=True)
class Command:
    name: str
    summary: str  # one line for `fp8pass --help`
    description: str  # for the help of the command
    examples: tuple[str, ...]
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]  # prints the result to stdout


class Parser(argparse.ArgumentParser):
    """Argument parser that preserves line breaks in help, and suggests the nearest valid option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **settings, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Exit with code 2, without printing the usage."""
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Treat unknown arguments as errors."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            kind = "option" if rest[0].startswith("-") else "argument"
            names = [name for action in self._actions for name in action.option_strings]
            self.error(unknown(kind, rest[0], names))
        return found, rest


def check_name(what: str, text: str, choices: Iterable[str]) -> str:
    """Check that an argument is one of `choices`."""
    if text not in choices:
        message = f"{unknown(what, text, choices)} {what} is one of {', '.join(choices)}."
        raise argparse.ArgumentTypeError(message)
    return text


def check_device(text: str) -> str:
    """Check the form of a device's name. The device need not exist on this machine."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        message = f"{unknown('device', text, ('cpu', 'cuda'))} device is one of cpu, cuda, cuda:N."
        raise argparse.ArgumentTypeError(message)
    return text


def find_device(name: str | None) -> torch.device:
    """Return the device `name`. Default: a GPU if PyTorch sees a GPU, else the CPU."""
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(
            f"--device {name} does not exist: PyTorch finds {count} GPUs here. Try --device cpu."
        )
    return device


def check_output_file(text: str) -> Path:
    """Check the path of a file to write, before the command runs."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"the folder {str(path.parent)!r} does not exist: create it, or choose another folder"
        )
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    return path


def check_plot(options: argparse.Namespace) -> None:
    """Check that matplotlib can write the file of `--plot`, if any, before the command runs."""
    path: Path | None = getattr(options, "plot", None)
    if path is None:
        return
    if not importlib.util.find_spec("matplotlib"):
        raise Failure("--plot needs matplotlib: pip install 'fp8pass[demo]'.")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise UsageError(
            f"--plot {path}: the name must end in one of matplotlib's formats, {', '.join(known)}."
        )


@contextmanager
def task(doing: str, fix: str) -> Iterator[None]:
    """Show the task `doing` on stderr if it is a terminal. Append `fix` to the task's errors.

    The task's stdout goes to stderr, because stdout is for the command's result.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    status = console.status(Text(f"{doing} …")) if console.is_terminal else nullcontext()
    try:
        with redirect_stdout(sys.stderr), status:
            yield
    except (UsageError, Failure):
        raise
    except Exception as error:
        inner = getattr(error, "inner_exception", error)  # Dynamo wraps errors of backends
        if isinstance(inner, ConfigError):
            raise UsageError(str(inner)) from error
        raise Failure(f"{doing} failed: {describe_error(inner)} {fix}") from error


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    error = getattr(error, "inner_exception", error)
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]]).rstrip(".") + "."
