"""The partitioner for AOTAutograd: runs the passes on a joint graph and splits it by the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.stock import partition_stock
from fp8pass.compilation import Compilation
from fp8pass.config import BUG
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import remove_unused
from fp8pass.graph.flops import total_flops
from fp8pass.graph.joint_facts import JointFacts, overwritten_inputs, select_inputs
from fp8pass.hooks import CompiledGraph
from fp8pass.passes import JOINT_PASSES, Context, Requests
from fp8pass.passes.runner import run_passes, warn_about_checkpointing
from fp8pass.plan import Checkpointing


class Partitioner(compat.CustomPartitionerFn):
    """Runs the passes on a joint graph and splits the graph into a forward and a backward graph."""

    def __init__(self, compilation: Compilation, stock_options: Iterable[str] = ()) -> None:
        """`stock_options` are the names of the options in `Captured.stock`, for the cache key."""
        self.compilation, self.stock_options = compilation, sorted(stock_options)

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        ctx = self.context(gm, **kwargs)
        observed = self.compilation.records
        stock = None
        ctx.plan.checkpointing = find_checkpointing(gm)
        if observed:
            stock = partition_stock(gm, joint_inputs, ctx.facts)
            ctx.plan.stock_bytes = stock.bytes
            if ctx.plan.checkpointing:
                ctx.plan.checkpointing = plan_without_checkpointing(gm, ctx)
        records = run_passes(JOINT_PASSES, gm, ctx, record=observed)
        if self.compilation.is_main and ctx.plan.checkpointing and not observed:
            warn_about_checkpointing()
        forward, backward = cut(gm, ctx)
        if observed:
            ctx.plan.flops, ctx.plan.fp8_flops = total_flops(gm.graph)
        self.compilation.finish(CompiledGraph(records, gm, ctx, stock=stock))
        if self.compilation.shows_halves:
            self.compilation.rewrite_half(graph.copy_module(forward), "forward")
            self.compilation.rewrite_half(graph.copy_module(backward), "backward")
        return forward, backward

    def context(self, gm: fx.GraphModule, **kwargs: Any) -> Context:
        """Normalize a joint graph and return the context for its passes."""
        compat.normalize_joint_graph(gm)
        primals = [n for n in gm.graph.nodes if compat.is_primal(n) and not compat.is_opaque(n)]
        graph.tag_inputs(primals, self.compilation.input_names)
        # A tensor subclass, such as a DTensor, is one input of the Dynamo graph, but several
        # primals. `select_inputs` finds the primals for indices of inputs.
        inputs = self.compilation.inputs
        static = frozenset(kwargs.get("static_lifetime_input_indices") or ())
        parameters = select_inputs(primals, static)
        facts = JointFacts(
            parameters=parameters,
            weights=select_inputs(parameters, inputs.weights),
            leaves=select_inputs(primals, inputs.held),
            activations=select_inputs(primals, inputs.activations),
            overwritten=overwritten_inputs(gm.graph),
            num_fwd_outputs=kwargs["num_fwd_outputs"],
        )
        return Context(self.compilation.config, facts, self.compilation.requests)

    def uuid(self) -> str:
        """Return the key for Inductor's caches."""
        return f"{self.compilation.cache_key()} {self.stock_options}"

    # Inductor copies and pickles its options, which must not include a compiled graph.

    def __deepcopy__(self, memo: object) -> Partitioner:
        return self

    def __getstate__(self) -> str:
        return self.uuid()


def find_checkpointing(gm: fx.GraphModule) -> Checkpointing | None:
    """Count the GEMMs and attentions in checkpointed regions of a graph before its passes."""
    products = (Kind.GEMM, Kind.ATTENTION)
    count = sum(compat.must_recompute(n) and kind(n) in products for n in gm.graph.nodes)
    return Checkpointing(count) if count else None


def plan_without_checkpointing(gm: fx.GraphModule, ctx: Context) -> Checkpointing:
    """Complete the plan's `Checkpointing`: plan a copy of the graph without checkpointing tags."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = graph.copy_module(gm, copies)
    compat.forget_checkpointing(copy.graph)
    config = replace(ctx.config, memory_budget=None)
    without = Context(config, ctx.facts.map_to_copy(copies), Requests(least=True))
    run_passes(JOINT_PASSES, copy, without, of="without checkpointing")
    assert ctx.plan.checkpointing is not None
    saved, least = without.plan.saved_bytes, without.plan.least_bytes
    return replace(ctx.plan.checkpointing, bytes_without=saved, least_without=least)


def cut(gm: fx.GraphModule, ctx: Context) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph after its passes into a forward and a backward.

    If the plan is PyTorch's plan, return PyTorch's own partition, because Inductor's fusions depend
    on the order of nodes. PyTorch's partition lacks the changes by the user's passes, so it is not
    used if there are such passes.
    """
    planned = {n.name for n in ctx.saved}
    if ctx.stock is not None and ctx.stock.crossing == planned and not ctx.config.passes:
        forward, backward = ctx.stock.halves
    else:
        forward, backward = _extract(gm, ctx)
    for half in (forward, backward):
        remove_unused(half.graph)  # for example collectives with unused results
        half.recompile()
    share_storages(forward.graph)
    return forward, backward


def _extract(gm: fx.GraphModule, ctx: Context) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a graph, and check that the backward reads only the tensors in `ctx.saved`."""
    symbols = [n for n in ctx.saved if compat.is_sym_node(n)]
    objects = [n for n in ctx.saved if compat.is_opaque(n)]
    tensors = [n for n in ctx.saved if not graph.is_non_tensor(n)]
    planned = [n.name for n in tensors]
    forward, backward = compat.extract_forward_backward(
        gm, tensors, symbols, objects, num_fwd_outputs=ctx.facts.num_fwd_outputs
    )
    crossing = {n.name for n in tensors}  # `extract_forward_backward` extends `tensors`
    if crossing != set(planned):
        raise AssertionError(
            f"The backward reads {sorted(crossing)}, but the plan saves {planned}. {BUG}"
        )
    return forward, backward


def share_storages(g: fx.Graph) -> None:
    """Make the fake value of each view share the storage of the viewed tensor's fake value.

    When a pass replaces an operator, views of the result still have the old result's storage.
    AOTAutograd would then let the backward overwrite an output through a saved view.
    """
    for node in g.nodes:
        x = graph.value(node)
        if x is None or kind(node) is not Kind.VIEW or graph.is_getitem(node):
            continue
        base = graph.value(node.args[0])
        if base is not None and compat.weak_storage(x) != compat.weak_storage(base):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
