"""Run a list of passes: record, time, check, log and dump each pass.

TORCH_LOGS="+fp8pass"          log the time of each pass, and the nodes before and after
FP8PASS_CHECK=1                verify the graph between passes (always on in the tests)
FP8PASS_DUMP=DIR               write the graph before and after each pass to DIR
TORCH_TRACE=DIR                write the same graphs as artifacts for tlparse
FP8PASS_DISABLE_PASSES=a,b     skip the passes with the exact names a and b
"""

from __future__ import annotations

import difflib
import itertools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.config import checks_are_on
from fp8pass.graph import spec
from fp8pass.graph.chunks import chunks_of
from fp8pass.option_checks import ConfigError, unknown
from fp8pass.passes import ALL_PASSES, CONTRACTS, ENTRIES, Context, Entry, Pass
from fp8pass.passes.added import insert_passes

log = logging.getLogger("fp8pass")
_graph_numbers = itertools.count()

MODULE_COMMENT = "# module "


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph."""

    name: str
    graph: str  # `joint`, `inference`, `forward` or `backward`
    # The graph's code, with comments that name modules; '' unless recorded.
    before: str
    after: str
    seconds: float
    nodes_before: int
    nodes_after: int

    @property
    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm="", n=2
        )
        return "\n".join(lines)


def run_passes(
    passes: Sequence[Pass],
    gm: fx.GraphModule,
    ctx: Context,
    *,
    of: str = "joint",
    record: bool = False,
) -> list[PassRecord]:
    """Run `passes` in order; `of` is the kind of graph, as in `PassRecord.graph`.

    Without `record`, `FP8PASS_DUMP` and `TORCH_TRACE`, the records lack the graph's code, because
    printing a graph takes longer than most passes.
    """
    folder = os.environ.get("FP8PASS_DUMP")
    record = record or bool(folder) or bool(os.environ.get("TORCH_TRACE"))
    check = checks_are_on()
    number = next(_graph_numbers)
    records: list[PassRecord] = []
    before = _code(gm) if record else ""
    for index, pass_ in enumerate(_select_enabled(passes, ctx)):
        nodes = len(gm.graph.nodes)
        guards = compat.guard_count(gm.graph) if check else 0
        start = time.perf_counter()
        pass_(gm, ctx)
        seconds = time.perf_counter() - start
        if check:
            for g in (gm.graph, *(chunks.body.graph for chunks in chunks_of(gm.graph))):
                spec.verify(g)
            if not ENTRIES.get(pass_, Entry(pass_)).adds_guards:
                spec.verify_guards(gm.graph, guards)
        after = _code(gm) if record else ""
        sizes = nodes, len(gm.graph.nodes)
        entry = PassRecord(pass_.__name__, of, before, after, seconds, *sizes)
        log.debug(
            "graph %d, %s: %s took %.1f ms, %d -> %d nodes",
            *(number, of, entry.name, seconds * 1e3, *sizes),
        )
        records.append(entry)
        before = after
        if record:
            _trace(number, entry)
        if folder:
            _dump(Path(folder), number, index, entry)
    if check and (contract := CONTRACTS.get(tuple(passes))):
        contract(gm.graph)
    gm.recompile()  # only once, because passes read the graph and not its code
    return records


@cache
def warn_about_checkpointing() -> None:
    log.warning(
        "torch.utils.checkpoint is on (gradient_checkpointing of Trainers), so fp8pass saves no "
        "tensors of the checkpointed regions in low-bit formats. To save memory at a lower cost in "
        "time, turn checkpointing off and set memory_budget: fp8pass.explain(model, ...) compares "
        "the memory."
    )


def disabled_passes() -> list[str]:
    return sorted(n for n in os.environ.get("FP8PASS_DISABLE_PASSES", "").split(",") if n)


def _select_enabled(passes: Sequence[Pass], ctx: Context) -> list[Pass]:
    added = ctx.config.passes
    known = {p.__name__ for p in (*ALL_PASSES, *passes, *(function for *_, function in added))}
    disabled = disabled_passes()
    for name in disabled:
        if name not in known:
            raise ConfigError(unknown("pass in FP8PASS_DISABLE_PASSES", name, sorted(known)))
    for entry in ENTRIES.values():
        if entry.required and entry.run.__name__ in disabled:
            raise ConfigError(
                f"FP8PASS_DISABLE_PASSES contains {entry.run.__name__!r}, but graphs cannot be "
                "compiled without this pass. Remove it from the list."
            )
    if ctx.stock is not None:
        disabled += [e.run.__name__ for e in ENTRIES.values() if e.rewrites_stock]
    return [p for p in insert_passes(passes, added) if p.__name__ not in disabled]


def _code(gm: fx.GraphModule) -> str:
    """Return a graph as Python, with a comment at the first line of each module.

    FX's `x = None` after the last use of each value is left out, because it would clutter diffs.
    """
    nodes = {n.name: n for n in gm.graph.nodes}
    lines, current = [], ""
    for line in gm.graph.python_code("self", verbose=False).src.splitlines():
        statement = line.split(";  ")[0]
        name = statement.split(" = ")[0].strip()
        node = graph.output_node(gm.graph) if name.startswith("return ") else nodes.get(name)
        if node and (path := graph.module_path(node)) != current:
            lines.append(f"    {MODULE_COMMENT}{path}".rstrip())
            current = path
        lines.append(statement)
    for chunks in chunks_of(gm.graph):
        lines += ["", f"    # each of {chunks.count} chunks", _code(chunks.body)]
    return "\n".join(lines)


def _trace(number: int, entry: PassRecord) -> None:
    for when, code in (("before", entry.before), ("after", entry.after)):
        name = f"fp8pass_{number}_{entry.graph}_{entry.name}_{when}"
        metadata: Any = partial(dict, name=name, encoding="string")
        compat.trace_structured("artifact", metadata_fn=metadata, payload_fn=partial(str, code))


def _dump(folder: Path, number: int, index: int, entry: PassRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"graph{number:03}_{entry.graph}_{index:02}_{entry.name}"
    (folder / f"{stem}_before.py").write_text(entry.before)
    (folder / f"{stem}_after.py").write_text(entry.after)
