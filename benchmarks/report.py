"""Shared code of all benchmarks: options, environment, printed tables, JSON records, divergence."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def use_expandable_segments() -> None:
    """Allocate memory without gaps, as torchtitan does: a tensor of 11 MiB takes 11 MiB, not 12.

    Call this before the first allocation on the GPU.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def environment() -> dict[str, Any]:
    """Return GPU, versions and date, which every results file contains."""
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


def record_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of scripts that add results to a record."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--again", action="store_true", help="discard the results in the file")
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--out", type=Path, help="record to add results to")
    return parser


def resume(path: Path, settings: dict[str, Any], *, again: bool = False) -> dict[str, Any]:
    """Return the record in `path`; an empty record if `again` is set or the file does not exist.

    Exit if the record comes from another GPU, other versions or other settings.
    """
    record = {**environment(), "settings": settings, "results": []}
    if again or not path.exists():
        return record
    found = json.loads(path.read_text())
    for key in ("gpu", "versions", "settings"):
        if found[key] != record[key]:
            sys.exit(
                f"{path} was measured with other {key}: {found[key]}. "
                "Pass another --out, or discard its results with --again."
            )
    return record | {key: found[key] for key in ("note", "results") if key in found}


def merge(record: dict[str, Any], result: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Add a result to a record. It replaces the result that has the same values of `keys`."""
    record["results"] = [r for r in record["results"] if any(r[k] != result[k] for k in keys)]
    record["results"].append(result)


def add_result(
    path: Path, record: dict[str, Any], result: dict[str, Any], keys: tuple[str, ...]
) -> None:
    """Add a result to a record, write the record, and print the result without its curves."""
    merge(record, result, keys)
    write_json(path, record)
    shown = {key: value for key, value in result.items() if not isinstance(value, list)}
    print(shown, file=sys.stderr, flush=True)


def print_rows(title: str, rows: list[list[str]]) -> None:
    """Print rows as a table. The first row is the header."""
    header, *body = rows
    table = Table(*header, title=title)
    for row in body:
        table.add_row(*row)
    Console(width=180).print(table)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {path}")


RISE = 0.5  # nats: a larger rise of the loss is divergence


def first_divergence(losses: list[float | None]) -> int | None:
    """Return the index of the first loss that is not finite, or `RISE` above an earlier loss."""
    lowest = math.inf
    for i, loss in enumerate(losses):
        if loss is None or loss > lowest + RISE:
            return i
        lowest = min(lowest, loss)
    return None


def finite(value: Any) -> float | None:
    """Return a number, or None if it is not finite."""
    return float(value) if math.isfinite(value) else None
