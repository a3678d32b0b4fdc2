"""Where fp8pass meets Inductor: the partitioner that runs the passes and cuts the joint graph."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fp8pass import compat, debug, graph
from fp8pass.codegen.kernels import kernel_use
from fp8pass.config import Config
from fp8pass.passes import INFERENCE_PASSES, JOINT_PASSES, Context
from fp8pass.passes.costs import total_flops
from fp8pass.plan import Plan


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph, for those who observe.

    Attributes:
        plan: what was decided.
        passes: the graph before and after each pass.
        gm: the graph after all passes, the joint one where there is a backward.
        ctx: what the passes were told, and decided about the nodes of `gm`.
    """

    plan: Plan
    passes: list[debug.PassRecord]
    gm: fx.GraphModule
    ctx: Context


Observer = Callable[[CompiledGraph], None]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a Dynamo graph, by index, as far as memory is concerned.

    Attributes:
        held: leaves that require a gradient. Their gradient accumulator keeps a reference until
            the backward, so that using them there costs no memory.
        activations: other inputs that require a gradient: outputs of other graphs, which nobody
            may be holding but us.
    """

    held: frozenset[int]
    activations: frozenset[int]

    @classmethod
    def of(cls, example_inputs: Sequence[object]) -> Inputs:
        """Read off the inputs that Dynamo traced with; its guards do not cover leaves."""
        differentiable = {
            i: x.is_leaf
            for i, x in enumerate(example_inputs)
            if isinstance(x, torch.Tensor) and x.requires_grad
        }
        return cls(
            held=frozenset(i for i, leaf in differentiable.items() if leaf),
            activations=frozenset(i for i, leaf in differentiable.items() if not leaf),
        )


class Partitioner(compat.CustomPartitionerFn):
    """Runs the passes on a joint graph and cuts it where the plan says.

    Args:
        config: the user's choices.
        inputs: what is known about the inputs of the Dynamo graph.
        observer: called with what came of it, for `explain`.
        extras: what the plan should say besides, see `Context`.
        reports: whether to log what was decided.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        observer: Observer | None = None,
        extras: frozenset[str] = frozenset(),
        reports: bool = True,
    ) -> None:
        self.reports = reports
        self.extras = extras
        self.config = config
        self.inputs = inputs
        self.observer = observer

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward module."""
        ctx = self.context(gm, **kwargs)
        if self.observer:
            held = self.inputs.held
            static = list(kwargs.get("static_lifetime_input_indices") or ())
            ctx.plan.stock_bytes = stock_saved_bytes(
                gm, joint_inputs, ctx.num_fwd_outputs, static, held
            )
        records = debug.run_passes(JOINT_PASSES, gm, ctx, record=self.observer is not None)
        if self.reports:
            debug.report(ctx.plan)
        forward, backward = cut(gm, ctx)
        if self.observer:
            if self.config.quantizes_linears:
                ctx.plan.kernels = [kernel_use(copy_of(half)) for half in (forward, backward)]
            ctx.plan.flops, ctx.plan.fp8_flops = total_flops(gm.graph)
            self.observer(CompiledGraph(ctx.plan, records, gm, ctx))
        return forward, backward

    def context(self, gm: fx.GraphModule, **kwargs: Any) -> Context:
        """What the passes are told about a joint graph, which is brought into normal form."""
        compat.normalize_joint_graph(gm)
        primals = [n for n in gm.graph.nodes if compat.is_primal(n)]
        static = kwargs.get("static_lifetime_input_indices") or ()
        return Context(
            self.config,
            parameters=frozenset(primals[i] for i in static),
            held=nodes_of(primals, self.inputs.held),
            activations=nodes_of(primals, self.inputs.activations),
            num_fwd_outputs=kwargs["num_fwd_outputs"],
            extras=self.extras,
        )

    def uuid(self) -> str:
        """Cache key: source, configuration, PyTorch, and what is known about the inputs."""
        key = (
            source_hash(),
            repr(self.config),
            torch.__version__,
            repr(self.inputs),
            debug.disabled_passes(),
            debug.kernels_to_disable(),
        )
        return hashlib.sha256(repr(key).encode()).hexdigest()


def cut(gm: fx.GraphModule, ctx: Context) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split the joint graph at `ctx.saved`, and check that nothing else crosses."""
    symbols = [n for n in ctx.saved if compat.is_sym_node(n)]
    tensors = [n for n in ctx.saved if not compat.is_sym_node(n)]
    planned = [n.name for n in tensors]
    forward, backward = compat.extract_forward_backward(
        gm, tensors, symbols, num_fwd_outputs=ctx.num_fwd_outputs
    )
    crossing = {n.name for n in tensors}
    if crossing != set(planned):
        raise AssertionError(f"planned to save {planned}, saved {sorted(crossing)}")
    return forward, backward


def rewrite_inference(
    gm: fx.GraphModule, config: Config, parameters: frozenset[int], observer: Observer | None
) -> None:
    """Run the passes on a graph without a backward."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    ctx = Context(
        config,
        parameters=frozenset(placeholders[i] for i in parameters),
        held=frozenset(),
        activations=frozenset(),
        num_fwd_outputs=0,
    )
    records = debug.run_passes(INFERENCE_PASSES, gm, ctx, record=observer is not None)
    ctx.plan.note = "inference"
    debug.report(ctx.plan)
    if observer:
        ctx.plan.kernels = [kernel_use(copy_of(gm))] if config.quantizes_linears else []
        ctx.plan.flops, ctx.plan.fp8_flops = total_flops(gm.graph)
        observer(CompiledGraph(ctx.plan, records, gm, ctx))


def nodes_of(primals: list[fx.Node], indices: frozenset[int]) -> frozenset[fx.Node]:
    """The primals that are the Dynamo inputs `indices`."""
    return frozenset(n for n in primals if compat.input_index(n) in indices)


def stock_saved_bytes(
    gm: fx.GraphModule,
    joint_inputs: Sequence[object],
    num_fwd_outputs: int,
    static: list[int],
    held: frozenset[int],
) -> int:
    """Bytes that PyTorch's partitioner would keep of this graph, counted as `Plan.saved_bytes`."""
    forward, _ = compat.stock_partition(
        copy_of(gm),
        joint_inputs,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static,
    )
    primals = [n for n in forward.graph.nodes if compat.is_primal(n)]
    free = {primals[i] for i in static} | nodes_of(primals, held)
    saved = graph.outputs(forward.graph)[num_fwd_outputs:]
    return sum(graph.nbytes(n) for n in saved if isinstance(n, fx.Node) and n not in free)


def copy_of(gm: fx.GraphModule, copies: dict[fx.Node, fx.Node] | None = None) -> fx.GraphModule:
    """A module of its own graph that shares everything else with `gm`.

    `copies` is filled with the copy of every node.
    """
    copy = fx.Graph()
    output = copy.output(copy.graph_copy(gm.graph, {} if copies is None else copies))
    output.meta = dict(graph.output_node(gm.graph).meta)
    return fx.GraphModule(gm, copy)


@cache
def source_hash() -> str:
    """A hash of fp8pass's own source."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
