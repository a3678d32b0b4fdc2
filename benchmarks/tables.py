"""Write the measured tables into README.md and docs/, from benchmarks/results/*.json.

    python benchmarks/tables.py            rewrite the tables
    python benchmarks/tables.py --check    fail if they are not up to date

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCUMENTS = (HERE.parent / "README.md", HERE.parent / "docs/formats.md")
BASELINE = "torchao tensorwise"


def layer_table(data: dict[str, Any]) -> list[list[str]]:
    """Decoder layers: time, memory and errors, beside torchao tensorwise."""
    rows = [["", "ms", "× torchao", "activations MiB", "× torchao", "x-grad err", "w-grad err"]]
    for case in dict.fromkeys(r["case"] for r in data["results"]):
        results = [r for r in data["results"] if r["case"] == case]
        base = next(r for r in results if r["variant"] == BASELINE)
        rows.append([f"**{case}**", *[""] * 6])
        for r in results:
            rows.append(
                [
                    r["variant"],
                    f"{r['ms']:.2f}",
                    f"{r['ms'] / base['ms']:.3f}",
                    f"{r['activation_bytes'] / 2**20:.0f}",
                    f"{r['activation_bytes'] / base['activation_bytes']:.3f}",
                    f"{r['x_grad_error']:.4f}",
                    f"{r['worst_weight_grad_error']:.4f}",
                ]
            )
    return rows


def compile_time_table(data: dict[str, Any]) -> list[list[str]]:
    """Seconds to the end of the first step, cold and in a second process."""
    rows = [["four layers, hidden 4096", "cold s", "warm s", "of which passes, cold"]]
    for variant in dict.fromkeys(r["variant"] for r in data["results"]):
        found = {r["cache"]: r for r in data["results"] if r["variant"] == variant}
        cold, warm = found["cold"], found["warm"]
        passes = f"{cold['passes']:.2f}" if cold["passes"] else ""
        rows.append([variant, f"{cold['seconds']:.1f}", f"{warm['seconds']:.1f}", passes])
    return rows


def model_table(data: dict[str, Any]) -> list[list[str]]:
    """A whole model: speed and peak memory."""
    rows = [["", "tokens/s", "× torchao", "peak GiB", "× torchao", "loss after 12 steps"]]
    base = next(r for r in data["results"] if r["variant"] == BASELINE)
    for r in data["results"]:
        rows.append(
            [
                r["variant"],
                f"{r['tokens_per_second']:,.0f}",
                f"{r['tokens_per_second'] / base['tokens_per_second']:.3f}",
                f"{r['peak_bytes'] / 2**30:.1f}",
                f"{r['peak_bytes'] / base['peak_bytes']:.3f}",
                f"{r['loss']:.4f}",
            ]
        )
    return rows


def formats_table(data: dict[str, Any]) -> list[list[str]]:
    """Rounding errors: every choice with G = 128, and those that cost E2M1's bits with G = 64."""
    names = list(data["results"][0]["errors"])
    rows = [["format", "scales", "G", "bits", *names]]
    for r in data["results"]:
        if r["group"] == 128 or (r["format"] == "e2m1" and r["bits"] == 4.25):
            errors = [f"{r['errors'][name]:.4f}" for name in names]
            rows.append([r["format"], r["scale"], str(r["group"]), f"{r['bits']:.3f}", *errors])
    return rows


TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "layer": layer_table,
    "model": model_table,
    "compile_time": compile_time_table,
    "formats": formats_table,
}


def markdown(rows: list[list[str]]) -> str:
    """Rows as a Markdown table; the first is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def caption(data: dict[str, Any]) -> str:
    """Where and when a result was measured."""
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items() if k != "fp8pass")
    device = "CPU" if data["gpu"] == "none" else data["gpu"]
    return f"*{device}, {versions}, {data['date']}*"


def filled(text: str) -> str:
    """`text` with every table made anew."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        data = json.loads((HERE / f"results/{name}.json").read_text())
        body = markdown(TABLES[name](data))
        return f"<!-- table: {name} -->\n{body}\n\n{caption(data)}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args()
    for document in DOCUMENTS:
        text = document.read_text()
        new = filled(text)
        if args.check and new != text:
            sys.exit(f"{document} is not what benchmarks/results say; run {__file__}")
        document.write_text(new)


if __name__ == "__main__":
    main()
