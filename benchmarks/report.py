"""What every benchmark shares: its environment, tables for people, JSON for the record."""

from __future__ import annotations

import datetime
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def environment() -> dict[str, Any]:
    """GPU, versions and date, as benchmark files carry them."""
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "date": datetime.date.today().isoformat(),
        "versions": {
            name: found
            for name in ("torch", "triton", "torchao", "transformers", "fp8pass")
            if (found := _version(name))
        },
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def print_table(title: str, rows: list[dict[str, str]]) -> None:
    """Print rows of the same keys."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*row.values())
    Console(width=180).print(table)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {path}")
