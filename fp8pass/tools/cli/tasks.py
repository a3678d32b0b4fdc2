"""The tasks of a command: shown while they run, and named if they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from fp8pass.config import ConfigError
from fp8pass.tools.cli.parsing import Failure, UsageError


@contextmanager
def task(doing: str, fix: str) -> Iterator[None]:
    """Show a task on stderr if that is a terminal; stdout is for results only.

    Args:
        doing: the task, such as "building models:build".
        fix: a sentence that says how to fix a failure of it.

    Raises:
        UsageError: fp8pass cannot do it with these options, as its ConfigError says.
        Failure: the task failed; the message names the cause and ends in `fix`.
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
        if isinstance(found := unwrapped(error), ConfigError):
            raise UsageError(str(found)) from error
        raise Failure(f"{doing} failed: {cause(error)} {fix}") from error


def unwrapped(error: BaseException) -> BaseException:
    """The error of a backend that Dynamo has wrapped, or the error itself."""
    return getattr(error, "inner_exception", error)


def cause(error: BaseException) -> str:
    """The type of an error and the first line of its message, as a sentence."""
    error = unwrapped(error)
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]]).rstrip(".") + "."
