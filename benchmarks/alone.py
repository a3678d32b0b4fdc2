"""Measure each variant of a benchmark in a separate process, so that variants share no state.

A script calls `measure_each`, which starts the script again for each variant, with `--child
VARIANT`. In the child process, the script calls `print_result`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from report import merge, use_expandable_segments, write_json


def arguments(doc: str | None, variants: Iterable[str], name: str) -> argparse.Namespace:
    """Parse the command line of a script. Results go to `results/<name>.json` by default."""
    names = list(variants)
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=names, choices=names)
    parser.add_argument("--again", action="store_true", help="discard the results in the file")
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    default = Path(__file__).parent / f"results/{name}.json"
    parser.add_argument("--out", type=Path, default=default, help="results to add to")
    return parser.parse_args()


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
        command: the script and its options; `--child` is added.
    """
    done = {r["variant"] for r in record["results"] if not r["error"]}
    for variant in variants:
        if variant in done:
            continue
        result = {"variant": variant, **_child([*command, "--child", variant])}
        print(result, file=sys.stderr, flush=True)
        merge(record, result, ("variant",))
        write_json(path, record)


def _child(command: list[str]) -> dict[str, Any]:
    ended = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        return {"error": f"ended with code {ended.returncode}"}
    return json.loads(ended.stdout.splitlines()[-1])
