"""Runs the passes of a list, and lets people see what they do.

TORCH_LOGS="+fp8pass"          every pass: its time, and the nodes before and after
FP8PASS_CHECK=1                verify the graph between passes (always on in the tests)
FP8PASS_DUMP=DIR               write the graph before and after each pass to DIR
TORCH_TRACE=DIR                the same as artifacts, for tlparse to show
FP8PASS_DISABLE_PASSES=a,b     leave out passes by exact name
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
from typing import Protocol

from torch import fx

from fp8pass import compat, graph
from fp8pass.config import AddedPass, ConfigError, checks_are_on, unknown
from fp8pass.graph import spec
from fp8pass.graph.chunks import chunks_of
from fp8pass.passes import ALL_PASSES, CONTRACTS, GUARDING, INDISPENSABLE, Context, Pass
from fp8pass.passes.added import with_added

log = logging.getLogger("fp8pass")
_graph_numbers = itertools.count()

# Begins a comment that names the module that the following lines of a graph's code come from.
MODULE_COMMENT = "# module "


@dataclass(frozen=True)
class PassRecord:
    """One pass over one graph.

    Attributes:
        name: of the pass.
        graph: `joint`, `inference`, or the half of a joint graph: `forward`, `backward`.
        before, after: the graph's code, '' unless it was recorded; a comment names each module.
        seconds: how long it took.
        nodes_before, nodes_after: how many nodes the graph had.
    """

    name: str
    graph: str
    before: str
    after: str
    seconds: float
    nodes_before: int
    nodes_after: int

    @property
    def diff(self) -> str:
        """What changed, as a unified diff of the graph's code."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm="", n=2
        )
        return "\n".join(lines)


class Watcher(Protocol):
    """Sees a graph before and after each pass."""

    def before(self, pass_: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        """`pass_` is about to run."""

    def after(self, pass_: Pass, gm: fx.GraphModule, ctx: Context) -> None:
        """`pass_` has run."""


def run_passes(
    passes: Sequence[Pass],
    gm: fx.GraphModule,
    ctx: Context,
    *,
    of: str = "joint",
    record: bool = False,
    watcher: Watcher | None = None,
) -> list[PassRecord]:
    """Run `passes` in order, with whatever debugging is asked for.

    With `record`, `FP8PASS_DUMP` or `TORCH_TRACE`, the graphs are kept as text, which takes longer
    than most passes do. `of` says which graph it is.
    """
    folder = os.environ.get("FP8PASS_DUMP")
    record = record or bool(folder) or bool(os.environ.get("TORCH_TRACE"))
    check = checks_are_on()
    number, added = next(_graph_numbers), ctx.config.passes
    records: list[PassRecord] = []
    before = _code(gm) if record else ""
    for index, pass_ in enumerate(_enabled(with_added(passes, added), added)):
        nodes = len(gm.graph.nodes)
        guards = compat.guard_count(gm.graph) if check else 0
        seconds = _run(pass_, gm, ctx, watcher)
        if check:
            for g in (gm.graph, *(chunks.body.graph for chunks in chunks_of(gm.graph))):
                spec.verify(g)
            if pass_ not in GUARDING:
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
        _trace(number, entry)
        if folder:
            _dump(Path(folder), number, index, entry)
    if check and (contract := CONTRACTS.get(tuple(passes))):
        contract(gm.graph)
    gm.recompile()  # once: its code is only for those who call it
    return records


def _run(pass_: Pass, gm: fx.GraphModule, ctx: Context, watcher: Watcher | None) -> float:
    """Run one pass; the seconds that it took."""
    if watcher:
        watcher.before(pass_, gm, ctx)
    start = time.perf_counter()
    pass_(gm, ctx)
    seconds = time.perf_counter() - start
    if watcher:
        watcher.after(pass_, gm, ctx)
    return seconds


@cache
def warn_about_checkpointing() -> None:
    """Log, once in a process, that checkpointing leaves little to keep in low bits."""
    log.warning(
        "torch.utils.checkpoint is on (gradient_checkpointing of Trainers): the backward computes "
        "all of its regions again, and nothing in them is kept in low bits. Without it fp8pass "
        "keeps less than PyTorch does, and memory_budget computes again no more than has to be. "
        "fp8pass.explain(model, ...) says how much that takes. This is said once."
    )


def disabled_passes() -> list[str]:
    """The passes that `FP8PASS_DISABLE_PASSES` leaves out."""
    return sorted(n for n in os.environ.get("FP8PASS_DISABLE_PASSES", "").split(",") if n)


def _enabled(passes: Sequence[Pass], added: Sequence[AddedPass]) -> list[Pass]:
    ours = (*ALL_PASSES, *passes, *(function for *_, function in added))
    known = {p.__name__ for p in ours}
    disabled = disabled_passes()
    for name in disabled:
        if name not in known:
            raise ConfigError(unknown("pass in FP8PASS_DISABLE_PASSES", name, sorted(known)))
        if name in {p.__name__ for p in INDISPENSABLE}:
            raise ConfigError(
                f"FP8PASS_DISABLE_PASSES names {name!r}, which cannot be left out: without it "
                "there is nothing to compile."
            )
    return [p for p in passes if p.__name__ not in disabled]


def _code(gm: fx.GraphModule) -> str:
    """A graph as Python, with a comment wherever another module begins.

    Without FX's `x = None` behind the last use of each value, which would make every pass look as
    if it had changed what it only uses.
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
    """Leave both graphs to `TORCH_TRACE`."""
    for when, code in (("before", entry.before), ("after", entry.after)) if entry.after else ():
        about = {
            "name": f"fp8pass_{number}_{entry.graph}_{entry.name}_{when}",
            "encoding": "string",
        }
        compat.trace_structured(
            "artifact", metadata_fn=partial(dict, about), payload_fn=partial(str, code)
        )


def _dump(folder: Path, number: int, index: int, entry: PassRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"graph{number:03}_{entry.graph}_{index:02}_{entry.name}"
    (folder / f"{stem}_before.py").write_text(entry.before)
    (folder / f"{stem}_after.py").write_text(entry.after)
