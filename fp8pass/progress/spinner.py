"""What is being done for minutes, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.text import Text


@contextmanager
def shown(doing: str) -> Iterator[None]:
    """Show a line with a spinner on stderr meanwhile; nothing where that is no terminal.

    In distributed training the first rank shows it for all.
    """
    console = Console(stderr=True)
    if not console.is_terminal or is_later_rank():
        yield
        return
    with console.status(Text(f"fp8pass: {doing} …")):
        yield


def is_later_rank() -> bool:
    """Whether another rank of distributed training speaks for this one."""
    distributed = torch.distributed
    return (
        distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    )
