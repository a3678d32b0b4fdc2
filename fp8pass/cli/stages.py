"""The stages of a command: shown while they last, and named when they fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

from fp8pass.cli.parsing import Failure, UsageError


@contextmanager
def stage(doing: str, fix: str) -> Iterator[None]:
    """Show on a terminal's stderr what is being done; stdout is kept for results.

    Raises:
        Failure: something went wrong meanwhile; the message names it and ends in `fix`.
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
        raise Failure(f"{doing} failed: {cause(error)} {fix}") from error


def cause(error: BaseException) -> str:
    """The first line of what went wrong, as a sentence."""
    error = getattr(error, "inner_exception", error)  # what Dynamo wraps a backend's errors in
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]]).rstrip(".") + "."
