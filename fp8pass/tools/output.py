"""Output of results: tables as text, JSON, and matplotlib figures.

Long facts about a row go below its name, so that tables stay narrow.
"""

from __future__ import annotations

import html
import io
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Width in characters if the output is not a terminal.
DEFAULT_WIDTH = 100


class Result(ABC):
    """Result of a tool: printed as tables and sentences, or written as JSON."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the whole result as JSON-ready data."""

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON text. If `path` is given, also write the text to this file.

        NaN and infinities, which JSON does not have, become null.
        """
        text = json.dumps(self.to_dict())
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    @abstractmethod
    def _parts(self) -> Iterable[Any]:
        """Yield the tables and sentences that `print` shows."""

    @abstractmethod
    def _summary(self) -> str:
        """Return the result in one line, for `repr`."""

    def __str__(self) -> str:
        return render_text(self._parts())

    def __repr__(self) -> str:
        return f"<fp8pass.{type(self).__name__}: {self._summary()}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def render_text(parts: Iterable[Any]) -> str:
    """Render tables and sentences as text. Lines of sentences are not wrapped."""
    text = io.StringIO()
    width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    console = Console(width=max(width, 40), file=text)
    for part in parts:
        console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return text.getvalue()


def make_table(title: str, first: str, *numbers: str) -> Table:
    """Make a table with these headings. The first column takes the width that the numbers leave."""
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    made.add_column(first, overflow="fold")
    for column in numbers:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def make_name(name: str, *facts: str) -> Group:
    """Make the first cell of a row: a name, and each fact in a line below the name."""
    lines = (Padding(Text(line), (0, 0, 0, 2)) for line in facts if line)
    return Group(Text(name or "(top level)"), *lines)


def pick_unit(count: float, units: Mapping[str, float]) -> tuple[float, str]:
    """Convert a number to the first of `units` in which it is at least 1, or else to the last."""
    unit = next((unit for unit, size in units.items() if abs(count) >= size), [*units][-1])
    return count / units[unit], unit


def make_figure(function: str, **options: Any) -> Any:
    """Make a matplotlib figure. `function` is the caller's name, for the ImportError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"{function} needs matplotlib: pip install matplotlib"
        raise ImportError(message, name="matplotlib") from error
    return Figure(layout="constrained", **options)
