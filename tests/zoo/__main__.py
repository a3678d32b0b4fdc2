"""Record results of all architectures for docs/supported.md: `python -m tests.zoo`.

Each architecture takes one step with the default recipe, which is compared with noise as in the
tests. Graphs run op by op after all passes, because Inductor would take most of the time. A second
run continues an interrupted run; `--again` starts over. `python benchmarks/tables.py` writes the
tables.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from helpers import Spy
from torch import fx

from benchmarks.report import merge, resume
from fp8pass.graph.classify import kind
from fp8pass.graph.nodes import aten

from . import huggingface, modules
from .test_zoo import check

RESULTS = Path(__file__).parents[2] / "benchmarks/results/zoo.json"
RECIPE = "coat"
FAMILIES = {
    "language models": huggingface.LANGUAGE,
    "mixtures of experts": huggingface.EXPERTS,
    "state space models": huggingface.STATE_SPACE,
    "encoders and decoders": huggingface.ENCODER_DECODER,
    "vision": huggingface.VISION_MODELS,
    "speech": huggingface.SPEECH_MODELS,
    "others of transformers": huggingface.OTHERS,
    "torch.nn, blocks of timm and diffusion models": modules.ARCHITECTURES,
}


def row(family: str, name: str) -> dict[str, Any]:
    """Return the result of an architecture: layers, saved bytes, and whether its step is right."""
    result: dict[str, Any] = {"family": family, "name": name, "error": "", "complaints": []}
    try:
        verdict, spy = check(name, RECIPE, "lowered")
    except AssertionError as error:  # the message includes the result of stock Inductor
        return result | {"error": str(error)}
    layers = [layer for plan in spy.plans for layer in plan.linears]
    return result | {
        "complaints": verdict.complaints,
        "layers": len(layers),
        "fp8": sum(bool(layer.fp8) for layer in layers),
        "asked_for": sum(layer.chosen for layer in layers),
        "reasons": sorted({layer.reason for layer in layers if layer.reason and not layer.chosen}),
        "saved_bytes": sum(plan.saved_bytes for plan in spy.plans),
        "stock_bytes": sum(plan.stock_bytes or 0 for plan in spy.plans),
        "operators": operators(spy),
    }


def operators(spy: Spy) -> dict[str, str]:
    """Return the names of the aten operators in the graphs before any pass, by kind."""
    code = "\n".join(records[0].before for records in spy.passes if records)
    found: dict[str, set[str]] = {}
    for name, overload in set(re.findall(r"\baten\.(\w+)\.(\w+)", code)):
        node = fx.Graph().call_function(getattr(getattr(aten, name), overload))
        found.setdefault(kind(node).value, set()).add(name)
    return {of: " ".join(sorted(names)) for of, names in sorted(found.items())}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="forget earlier results")
    args = parser.parse_args()
    settings = {"recipe": RECIPE, "device": "cpu", "dtype": "float32"}
    record = resume(args.out, settings, again=args.again)
    done = {r["name"] for r in record["results"]}
    for family, architectures in FAMILIES.items():
        for name in architectures:
            if name not in done:
                merge(record, row(family, name), ("name",))
                args.out.write_text(json.dumps(record, indent=1) + "\n")
                print(family, name, flush=True)


if __name__ == "__main__":
    main()
