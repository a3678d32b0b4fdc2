"""Plan a compiled region for a configuration, and estimate its memory and work.

Only nodes with a buffer take memory (`activation_memory/backward_memory.py`). Other pointwise
operators are assumed to be fused into the kernels that read their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.backward_memory import find_uses, is_buffered, reads_memory
from fp8pass.activation_memory.costs import runs_in_fp8
from fp8pass.config import Config
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.graph.chunks import Chunks, chunks_of, in_chunks
from fp8pass.graph.classify import Kind, argument_of, kind
from fp8pass.graph.flops import flops, is_expensive
from fp8pass.hardware import Work
from fp8pass.partition import cut
from fp8pass.passes import JOINT_PASSES, Context
from fp8pass.passes.runner import run_passes
from fp8pass.plan import Plan
from fp8pass.tools.fitting.step import CompiledRegion

fp8 = torch.ops.fp8pass

# Generated code dequantizes values while it reads them.
DEQUANTIZERS = {fp8.dequantize.default}
# CUDA's backward of attention accumulates the gradient of the queries in a buffer in FP32.
BYTES_PER_QUERY = 4
# Share of the floating point operations of attention that remain under a causal mask.
CAUSAL_SHARE = 0.5

REGION_KINDS = ("saved", "activations", "gradients", "workspace")


@dataclass(frozen=True)
class Moment:
    """Bytes alive at one time of a step, by kind (`REGION_KINDS`)."""

    module: str = ""  # path of the module that runs; '' outside of compiled graphs
    backward: bool = False  # whether the backward has begun
    saved: float = 0.0  # saved by compiled graphs
    activations: float = 0.0  # forward allocations outside of graphs, and results of graphs
    gradients: float = 0.0  # gradients of parameters
    workspace: float = 0.0  # all other bytes

    @property
    def total(self) -> float:
        return self.saved + self.activations + self.gradients + self.workspace


@dataclass(frozen=True)
class Planned:
    """The predicted result of compiling a region, and its memory and work."""

    plan: Plan
    # The memory after each operator of the graph.
    forward: list[Moment]
    backward: list[Moment]
    kept: float  # bytes saved, except inputs and results of the region
    # Indices of the inputs and results that the backward reads.
    held_inputs: list[int]
    held_outputs: list[int]
    forward_work: Work
    backward_work: Work


def plan_region(region: CompiledRegion, config: Config) -> Planned:
    """Run the joint passes on a copy of a region, and estimate memory and work of the result.

    Raises:
        ConfigError: the configuration's memory budget cannot be met.
    """
    assert region.gm is not None
    assert region.ctx is not None
    copies: dict[fx.Node, fx.Node] = {}
    gm = graph.copy_module(region.gm, copies)
    facts = region.ctx.facts.map_to_copy(copies)
    ctx = Context(replace(config, compiler="inductor"), facts)
    run_passes(JOINT_PASSES, gm, ctx)
    forward, backward = (half.graph for half in cut(gm, ctx))
    own = graph.outputs(gm.graph)[: facts.num_fwd_outputs]
    mutated = len(own) - len(region.outputs)
    crossing = [n for n in ctx.saved if not graph.is_non_tensor(n) and not facts.is_free(n)]
    outputs = {
        graph.skip_reshapes(n): i - mutated for i, n in enumerate(own) if isinstance(n, fx.Node)
    }
    of_inputs = [n for n in crossing if graph.skip_reshapes(n).op == "placeholder"]
    kept = [n for n in crossing if n not in of_inputs and graph.skip_reshapes(n) not in outputs]
    inputs = (compat.input_index(graph.skip_reshapes(n)) for n in of_inputs)
    names = {n.name for n in kept}
    saved, saved_inputs = (
        {n: "saved" for n in g.nodes if n.name in names} for g in (forward, backward)
    )
    gradients = _find_gradients(backward, gm.graph, ctx)
    return Planned(
        ctx.plan,
        measure_memory(forward, saved),
        measure_memory(backward, saved_inputs | gradients, saved_inputs),
        sum(map(graph.nbytes, kept)),
        [i for i in inputs if i is not None],
        [outputs[graph.skip_reshapes(n)] for n in crossing if graph.skip_reshapes(n) in outputs],
        estimate_work(forward),
        estimate_work(backward),
    )


def _find_gradients(backward: fx.Graph, joint: fx.Graph, ctx: Context) -> dict[fx.Node, str]:
    primals = [n for n in joint.nodes if compat.is_primal(n)]
    results = zip(primals, graph.outputs(backward), strict=False)
    found = (g for p, g in results if p in ctx.facts.parameters and isinstance(g, fx.Node))
    return {graph.skip_reshapes(g): "gradients" for g in found}


def measure_memory(
    g: fx.Graph, kinds: Mapping[fx.Node, str], inputs: Iterable[fx.Node] = ()
) -> list[Moment]:
    """Return the bytes alive after each operator of a graph.

    Args:
        g: a forward or a backward graph. Its results stay alive until its end.
        kinds: kind of memory of some nodes. All other nodes are workspace.
        inputs: placeholders that the graph owns. They are freed after their last use.
    """
    nodes = [n for n in g.nodes if n.op != "output"]
    position = {n: i for i, n in enumerate(nodes)}
    uses = find_uses(nodes, has_buffer)
    changes = {name: [0.0] * (len(nodes) + 1) for name in REGION_KINDS}

    def add(name: str, size: float, start: int, end: int) -> None:
        changes[name][start] += size
        changes[name][end + 1] -= size

    owned = set(inputs)
    for node in nodes:
        # The kernel that quantizes a matrix also allocates the transposed FP8 data.
        source = node.args[0] if graph.is_call(node, fp8.transpose.default) else node
        at = position.get(source, position[node])
        if node in owned or (node.op == "call_function" and has_buffer(node)):
            end = int(min(max(position[node], uses[node].last), len(nodes) - 1))
            start = 0 if node in owned else at
            add(kinds.get(node, "workspace"), graph.nbytes(node), start, end)
        add("workspace", _measure_workspace(node), at, at)
    alive = {name: list(accumulate(x)) for name, x in changes.items()}
    return [
        Moment(graph.module_path(n), False, *(alive[name][i] for name in REGION_KINDS))
        for i, n in enumerate(nodes)
    ]


def has_buffer(node: fx.Node) -> bool:
    if node.target in DEQUANTIZERS:
        return any(reads_memory(user) for user in node.users)
    if graph.is_getitem(node) and graph.is_call(node.args[0], in_chunks):  # type: ignore[arg-type]
        return True
    return is_buffered(node)


def _measure_workspace(node: fx.Node) -> float:
    """Return the bytes that an operator allocates, apart from its results."""
    if graph.is_call(node, in_chunks):
        moments = measure_memory(Chunks.of(node).body.graph, {})
        return max((m.total for m in moments), default=0.0)
    is_attention = kind(node) is Kind.ATTENTION and not graph.is_getitem(node)
    if is_attention and "backward" in str(node.target):
        return BYTES_PER_QUERY * graph.numel(graph.tensor(node.args[1]))  # type: ignore[arg-type]
    return 0.0


def estimate_work(g: fx.Graph) -> Work:
    """Estimate the work of a graph.

    Each generated kernel is assumed to write one buffer, and to read each of its operands once.
    """
    total = Work()
    for node in g.nodes:
        if node.op == "call_function" and is_expensive(node):
            total += _count_flops(node)
        elif node.op == "call_function" and has_buffer(node) and not graph.is_getitem(node):
            total += Work(bytes=graph.nbytes(node) + sum(map(graph.nbytes, _find_reads(node))))
    for chunks in chunks_of(g):
        total += estimate_work(chunks.body.graph).times(chunks.count)
    return total


def _count_flops(node: fx.Node) -> Work:
    if kind(node) is not Kind.ATTENTION:
        return Work(fp8_flops=flops(node)) if runs_in_fp8(node) else Work(bf16_flops=flops(node))
    causal = compat.is_operator(node.target) and argument_of(node, "is_causal") is True
    return Work(attention_flops=flops(node) * (CAUSAL_SHARE if causal else 1.0))


def _find_reads(node: fx.Node) -> set[fx.Node]:
    """Return the buffers that the kernel of a node reads, also through fused operators."""

    def is_stored(operand: fx.Node) -> bool:
        return operand.op == "placeholder" or has_buffer(operand)

    found = graph.ancestors(node.all_input_nodes, passes=lambda n: not is_stored(n))
    return set(filter(is_stored, found))
