"""Tables as text, as wide as the terminal: what is long goes under a row's name, not beside it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Where there is no terminal, as in a file.
DEFAULT_WIDTH = 100


def text_of(parts: Iterable[Any]) -> str:
    """Tables and sentences as they are printed; sentences are not broken into lines."""
    text = io.StringIO()
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    console = Console(width=max(width, 40), file=text)
    for part in parts:
        is_sentence = isinstance(part, str)
        console.print(part, markup=False, highlight=False, soft_wrap=is_sentence)
    return text.getvalue()


def table(title: str, first: str, *numbers: str) -> Table:
    """A table whose first column takes the room that the others leave."""
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column(first, overflow="fold")
    for column in numbers:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def named(name: str, *about: str) -> Group:
    """A row's name, with lines about it under it."""
    lines = (Padding(Text(line), (0, 0, 0, 2)) for line in about if line)
    return Group(Text(name or "(top level)"), *lines)
