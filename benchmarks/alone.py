"""Measure each variant of a benchmark in a separate process, so that variants share no state.

A script calls `measure_each`, which starts the script again for each variant, with `--child
VARIANT`. In the child process, the script calls `print_result`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from report import add_result, use_expandable_segments


def print_result(measure: Callable[[torch.device], dict[str, Any]]) -> None:
    """Measure in the child process, and print the result or the error."""
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found: dict[str, Any] = measure(device) | {"error": None}
    except Exception as error:  # for example out of memory; the next variants still run
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(found))


def measure_each(
    record: dict[str, Any], path: Path, variants: Iterable[str], command: list[str]
) -> None:
    """Measure the variants that a record lacks, and write the file after each of them.

    Args:
        record: the record that `resume` returns; results are added to it.
        path: the file to write the record to.
        variants: names of variants of the script.
        command: the script and its options; `--child VARIANT` is appended.
    """
    done = {r["variant"] for r in record["results"] if not r["error"]}
    for variant in variants:
        if variant in done:
            continue
        result = {"variant": variant, **_child([*command, "--child", variant])}
        add_result(path, record, result, ("variant",))


def _child(command: list[str]) -> dict[str, Any]:
    ended = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        return {"error": f"ended with code {ended.returncode}"}
    return json.loads(ended.stdout.splitlines()[-1])
