"""Seeing what the passes do: environment variables, logs, graphs before and after.

TORCH_LOGS="+fp8pass"          every pass: time, nodes, what changed in numbers
FP8PASS_CHECK=1                verify the graph between passes (always on in the tests)
FP8PASS_DUMP=DIR               write the graph before and after each pass to DIR
FP8PASS_DISABLE_PASSES=a,b     leave out passes by exact name
FP8PASS_DISABLE_KERNELS=a,b    leave to Inductor what these kernels do: rows, tiles
TORCH_TRACE=DIR                the same graphs as artifacts for tlparse
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from fp8pass import compat, spec
from fp8pass.config import ConfigError, unknown
from fp8pass.passes import INFERENCE_PASSES, JOINT_PASSES, Context, Pass
from fp8pass.passes.materialize import materialize_plan
from fp8pass.plan import Plan

log = logging.getLogger("fp8pass")
_graph_numbers = itertools.count()


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph: its code before and after, and how long it took in seconds."""

    name: str
    before: str
    after: str
    seconds: float

    @property
    def diff(self) -> str:
        """What changed, as a unified diff of the graph's code."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm="", n=2
        )
        return "\n".join(lines)


def run_passes(
    passes: Sequence[Pass], gm: fx.GraphModule, ctx: Context, *, record: bool = False
) -> list[PassRecord]:
    """Run `passes` in order, with whatever debugging is asked for.

    With `record`, or `FP8PASS_DUMP`, the graphs are kept as text, which takes longer than most
    passes do.
    """
    folder = os.environ.get("FP8PASS_DUMP")
    record = record or bool(folder)
    number = next(_graph_numbers)
    records = []
    check = os.environ.get("FP8PASS_CHECK", "0") != "0"
    for index, pass_ in enumerate(_enabled(passes)):
        before = _code(gm) if record else ""
        nodes, start = len(gm.graph.nodes), time.perf_counter()
        pass_(gm, ctx)
        seconds = time.perf_counter() - start
        log.debug(
            "graph %d: %s took %.1f ms, %d -> %d nodes",
            *(number, pass_.__name__, seconds * 1e3, nodes, len(gm.graph.nodes)),
        )
        if check:
            spec.verify(gm.graph)
        entry = PassRecord(pass_.__name__, before, _code(gm) if record else "", seconds)
        records.append(entry)
        _trace(number, entry)
        if folder:
            _dump(Path(folder), number, index, entry)
    return records


def report(plan: Plan) -> None:
    """Log one line about a graph; a warning if layers stay in high precision unasked."""
    unexpected = plan.unexpected
    if not unexpected:
        log.info("%s", plan.summary())
        return
    first = unexpected[0]
    log.warning(
        "%s. Not asked for: %d, such as %s: %s. fp8pass.explain(model, ...) lists them.",
        *(plan.summary(), len(unexpected), first.module or "top level", first.reason),
    )


def disabled_passes() -> list[str]:
    """The passes that `FP8PASS_DISABLE_PASSES` leaves out."""
    return _names_in("FP8PASS_DISABLE_PASSES")


def disabled_kernels(known: Iterable[str]) -> list[str]:
    """The kernels that `FP8PASS_DISABLE_KERNELS` leaves out, which must be among `known`."""
    disabled = kernels_to_disable()
    for name in disabled:
        if name not in known:
            raise ConfigError(unknown("kernel in FP8PASS_DISABLE_KERNELS", name, sorted(known)))
    return disabled


def kernels_to_disable() -> list[str]:
    """The names in `FP8PASS_DISABLE_KERNELS`."""
    return _names_in("FP8PASS_DISABLE_KERNELS")


def _names_in(variable: str) -> list[str]:
    return sorted(n for n in os.environ.get(variable, "").split(",") if n)


def _enabled(passes: Sequence[Pass]) -> list[Pass]:
    known = {p.__name__ for p in (*JOINT_PASSES, *INFERENCE_PASSES)}
    disabled = disabled_passes()
    for name in disabled:
        if name not in known:
            raise ConfigError(unknown("pass in FP8PASS_DISABLE_PASSES", name, sorted(known)))
        if name == materialize_plan.__name__:
            raise ConfigError(f"{name} cuts forward from backward and cannot be left out.")
    return [p for p in passes if p.__name__ not in disabled]


def _code(gm: fx.GraphModule) -> str:
    return gm.graph.python_code("self", verbose=False).src


def _trace(number: int, entry: PassRecord) -> None:
    if entry.after:
        compat.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"fp8pass_{number}_{entry.name}", "encoding": "string"},
            payload_fn=lambda: entry.after,
        )


def _dump(folder: Path, number: int, index: int, entry: PassRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"graph{number}_{index}_{entry.name}"
    (folder / f"{stem}_before.py").write_text(entry.before)
    (folder / f"{stem}_after.py").write_text(entry.after)
