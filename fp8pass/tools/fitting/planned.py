"""What a configuration makes of a region: the plan, and memory and work of both halves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from fp8pass import compat, graph
from fp8pass.config import Config
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.hardware import Work
from fp8pass.partition import cut
from fp8pass.passes import JOINT_PASSES, Context
from fp8pass.passes.runner import run_passes
from fp8pass.plan import Plan
from fp8pass.tools.fitting.events import Region
from fp8pass.tools.fitting.liveness import HalfMemory, backward_memory, forward_memory
from fp8pass.tools.fitting.work import work_of


@dataclass(frozen=True)
class Planned:
    """A region as it would be compiled.

    Attributes:
        plan: the decisions.
        forward, backward: bytes alive while it runs.
        kept: bytes that it keeps from forward to backward, apart from inputs and results.
        held_inputs, held_outputs: positions of the inputs and results that it keeps alive.
        work: of both halves.
    """

    plan: Plan
    forward: HalfMemory
    backward: HalfMemory
    kept: float
    held_inputs: list[int]
    held_outputs: list[int]
    forward_work: Work
    backward_work: Work


def planned(region: Region, config: Config) -> Planned:
    """Run the passes on a region.

    Raises:
        ConfigError: the configuration's memory budget cannot be met.
    """
    assert region.gm is not None
    assert region.ctx is not None
    copies: dict[fx.Node, fx.Node] = {}
    gm = graph.copy_of(region.gm, copies)
    facts = region.ctx.facts.of_copy(copies)
    ctx = Context(replace(config, compiler="inductor"), facts)
    run_passes(JOINT_PASSES, gm, ctx)
    forward, backward = cut(gm, ctx)
    results = graph.outputs(gm.graph)
    own = results[: facts.num_fwd_outputs]
    mutated = len(own) - len(region.outputs)
    crossing = [n for n in ctx.saved if not graph.is_no_tensor(n) and not facts.is_free(n)]
    outputs = {graph.root(n): i - mutated for i, n in enumerate(own) if isinstance(n, fx.Node)}
    kept = [n for n in crossing if not is_input(n) and graph.root(n) not in outputs]
    inputs = (compat.input_index(graph.root(n)) for n in crossing if is_input(n))
    names = {n.name for n in kept}
    return Planned(
        ctx.plan,
        forward_memory(forward.graph, _named(forward.graph, names)),
        backward_memory(
            backward.graph, _named(backward.graph, names), _gradients(backward.graph, gm.graph, ctx)
        ),
        sum(map(graph.nbytes, kept)),
        [i for i in inputs if i is not None],
        [outputs[graph.root(n)] for n in crossing if graph.root(n) in outputs],
        work_of(forward.graph),
        work_of(backward.graph),
    )


def is_input(node: fx.Node) -> bool:
    """Whether a value has the memory of an input."""
    return graph.root(node).op == "placeholder"


def _named(g: fx.Graph, names: set[str]) -> set[fx.Node]:
    return {n for n in g.nodes if n.name in names}


def _gradients(backward: fx.Graph, joint: fx.Graph, ctx: Context) -> set[fx.Node]:
    """The gradients of parameters, as nodes of the backward."""
    primals = [n for n in joint.nodes if compat.is_primal(n)]
    results = zip(primals, graph.outputs(backward), strict=False)
    found: Iterable[fx.Node] = (
        graph.root(g) for p, g in results if p in ctx.facts.parameters and isinstance(g, fx.Node)
    )
    return set(found)
