"""Where fp8pass meets AOTAutograd: runs the passes on a joint graph and cuts it where they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.stock import partition_stock
from fp8pass.compilation import Compilation
from fp8pass.config import BUG
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import remove_unused
from fp8pass.graph.flops import total_flops
from fp8pass.graph.joint import JointFacts, inputs_among, overwritten_inputs
from fp8pass.hooks import CompiledGraph
from fp8pass.passes import JOINT_PASSES, Context, Requests
from fp8pass.passes.runner import Watcher, run_passes, warn_about_checkpointing
from fp8pass.plan import Checkpointing


class Partitioner(compat.CustomPartitionerFn):
    """Runs the passes on a joint graph and cuts it where the plan says.

    Args:
        compilation: the compilation that this is a part of.
        watcher: sees the graph before and after each pass.
    """

    def __init__(self, compilation: Compilation, watcher: Watcher | None = None) -> None:
        self.compilation = compilation
        self.watcher = watcher

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward module."""
        ctx = self.context(gm, **kwargs)
        observed = self.compilation.records
        stock = None
        ctx.plan.checkpointing = checkpointing_of(gm)
        if observed:
            stock = partition_stock(gm, joint_inputs, ctx.facts)
            ctx.plan.stock_bytes = stock.bytes
            if ctx.plan.checkpointing:
                ctx.plan.checkpointing = without_checkpointing(gm, ctx)
        records = run_passes(JOINT_PASSES, gm, ctx, record=observed, watcher=self.watcher)
        if self.compilation.is_main and ctx.plan.checkpointing and not observed:
            warn_about_checkpointing()
        forward, backward = cut(gm, ctx)
        if observed:
            ctx.plan.flops, ctx.plan.fp8_flops = total_flops(gm.graph)
        self.compilation.finish(CompiledGraph(records, gm, ctx, stock=stock))
        if self.compilation.shows_halves:
            self.compilation.rewrite_half(graph.copy_of(forward), "forward")
            self.compilation.rewrite_half(graph.copy_of(backward), "backward")
        return forward, backward

    def context(self, gm: fx.GraphModule, **kwargs: Any) -> Context:
        """The context for the passes on a joint graph, which is brought into normal form."""
        compat.normalize_joint_graph(gm)
        primals = [n for n in gm.graph.nodes if compat.is_primal(n) and not compat.is_opaque(n)]
        # Counted before tensor subclasses are taken apart, as inputs of the Dynamo graph are.
        inputs = self.compilation.inputs
        static = frozenset(kwargs.get("static_lifetime_input_indices") or ())
        parameters = inputs_among(primals, static)
        facts = JointFacts(
            parameters=parameters,
            weights=inputs_among(parameters, inputs.weights),
            held=inputs_among(primals, inputs.held),
            activations=inputs_among(primals, inputs.activations),
            overwritten=overwritten_inputs(gm.graph),
            num_fwd_outputs=kwargs["num_fwd_outputs"],
        )
        return Context(self.compilation.config, facts, self.compilation.requests)

    def uuid(self) -> str:
        """A key of the partitioner's results, for Inductor's caches."""
        return self.compilation.cache_key()

    # Inductor copies its options, this one among them, and pickles them for the keys of its caches.
    # Neither must take a compiled graph along.

    def __deepcopy__(self, memo: object) -> Partitioner:
        return self

    def __getstate__(self) -> str:
        return self.uuid()


def checkpointing_of(gm: fx.GraphModule) -> Checkpointing | None:
    """What the user has the backward of a joint graph compute again, before any pass."""
    products = (Kind.GEMM, Kind.ATTENTION)
    count = sum(compat.must_recompute(n) and kind(n) in products for n in gm.graph.nodes)
    return Checkpointing(count) if count else None


def without_checkpointing(gm: fx.GraphModule, ctx: Context) -> Checkpointing:
    """What a joint graph would keep without checkpointing, by a plan for a copy of it."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = graph.copy_of(gm, copies)
    compat.forget_checkpointing(copy.graph)
    config = replace(ctx.config, memory_budget=None)
    plan = Context(config, ctx.facts.of_copy(copies), Requests(least=True))
    run_passes(JOINT_PASSES, copy, plan, of="without checkpointing")
    assert ctx.plan.checkpointing is not None
    kept, least = plan.plan.saved_bytes, plan.plan.least_bytes
    return replace(ctx.plan.checkpointing, bytes_without=kept, least_without=least)


def cut(gm: fx.GraphModule, ctx: Context) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split the joint graph at `ctx.saved`, and check that nothing else crosses."""
    symbols = [n for n in ctx.saved if compat.is_sym_node(n)]
    objects = [n for n in ctx.saved if compat.is_opaque(n)]
    tensors = [n for n in ctx.saved if not graph.is_no_tensor(n)]
    planned = [n.name for n in tensors]
    forward, backward = compat.extract_forward_backward(
        gm, tensors, symbols, objects, num_fwd_outputs=ctx.facts.num_fwd_outputs
    )
    crossing = {n.name for n in tensors}
    if crossing != set(planned):
        raise AssertionError(
            f"The backward reads {sorted(crossing)}, and {planned} were planned to be kept for "
            f"it. {BUG}"
        )
    for half in (forward, backward):  # each has been given all that it could wait for
        remove_unused(half.graph)
        half.recompile()
    return forward, backward
