"""One compilation: what it is told, its results for observers, and its key in caches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fp8pass import compat, graph
from fp8pass.activation_memory.format_choices import VALUE_SEPARATOR
from fp8pass.config import Config
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.output_heads import has_head_name
from fp8pass.passes import LOWERING_PASSES, Context
from fp8pass.passes.runner import PassRecord, disabled_passes, run_passes
from fp8pass.plan import Plan
from fp8pass.weights.graph_inputs import NO_CODES, Given


@dataclass(frozen=True)
class Inputs:
    """What Dynamo knows about the inputs of a graph, by index.

    Attributes:
        weights: those that are an `nn.Parameter`, trained or frozen. Buffers are none, nor are
            tensors that a module merely has as attributes.
        held: leaves that require a gradient. Their gradient accumulator keeps a reference until
            the backward, so that using them there costs no memory.
        activations: other inputs that require a gradient: outputs of other graphs, which nobody
            may be holding but us.
        codes: which are codes of others.
        moving: parameters that CUDA graphs find elsewhere in every step.
    """

    weights: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    activations: frozenset[int] = frozenset()
    codes: Given = NO_CODES
    moving: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        example_inputs: Sequence[object],
        codes: Given = NO_CODES,
        moving: frozenset[int] = frozenset(),
    ) -> Inputs:
        """Read off the inputs that Dynamo traced with; its guards do not cover leaves."""
        differentiable = {
            i: x.is_leaf
            for i, x in enumerate(example_inputs)
            if isinstance(x, torch.Tensor) and x.requires_grad
        }
        parameters = (i for i, x in enumerate(example_inputs) if isinstance(x, nn.Parameter))
        return cls(
            weights=frozenset(parameters),
            held=frozenset(i for i, leaf in differentiable.items() if leaf),
            activations=frozenset(i for i, leaf in differentiable.items() if not leaf),
            codes=codes,
            moving=moving,
        )


def decided_by_name(gm: fx.GraphModule, config: Config) -> tuple[object, ...]:
    """All that module paths decide about a Dynamo graph, operator by operator.

    Caches compare graphs without their paths. Which patterns match says enough, so that equal
    layers share compiled code; only names of single values number what a module computes.
    """
    subgraphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    paths = [graph.module_path(n) for g in subgraphs for n in g.nodes]
    if config.moments or any(VALUE_SEPARATOR in pattern for pattern in config.keep_exact):
        return tuple(paths)
    patterns = config.skip, config.keep_exact
    return tuple(
        (has_head_name(path), *(matching_pattern(path, given) for given in patterns))
        for path in paths
    )


def weights_by_path(
    gm: fx.GraphModule,
) -> Callable[[Sequence[Any]], dict[str, torch.Tensor]]:
    """A function of a Dynamo graph's arguments: the parameters, by the paths of their modules."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    paths = [(i, graph.module_path(n)) for i, n in enumerate(inputs)]
    return lambda args: {path: args[i] for i, path in paths if isinstance(args[i], nn.Parameter)}


@dataclass(frozen=True)
class GraphRun:
    """One run of a compiled graph's forward.

    Attributes:
        weights: parameters that it ran with, by the paths of their modules in the graph.
        checkpointed: whether `torch.utils.checkpoint` runs it again in the backward, from outside
            of compiled code, so that nothing that it saves is kept.
    """

    weights: dict[str, torch.Tensor] = field(repr=False)
    checkpointed: bool


@dataclass
class CompiledGraph:
    """One compiled graph, for those who observe.

    Attributes:
        passes: the graph before and after each pass, and its halves as soon as they are compiled.
        gm: the graph after all its passes, the joint one where there is a backward.
        ctx: the context of the passes, with decisions about the nodes of `gm`.
        runs: of its forward: equal blocks, compiled one by one or around a graph break, share a
            graph.
    """

    passes: list[PassRecord]
    gm: fx.GraphModule
    ctx: Context
    runs: list[GraphRun] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The decisions."""
        return self.ctx.plan

    @property
    def runs_kept(self) -> int:
        """How many runs keep what the plan says until the backward."""
        return sum(not run.checkpointed for run in self.runs)


Observer = Callable[[CompiledGraph], None]


@dataclass
class Compilation:
    """One Dynamo graph on its way through the compilers.

    Attributes:
        config: the user's choices.
        inputs: how long the inputs live.
        observer: called with the compiled graph, for `explain`.
        extras: more that the plan should say, see `Context`.
        by_name: what module paths decide, see `decided_by_name`.
        reports: whether to log the decisions.
        compiled: the result so far.
    """

    config: Config
    inputs: Inputs = field(default_factory=Inputs)
    observer: Observer | None = None
    extras: frozenset[str] = frozenset()
    by_name: tuple[object, ...] = ()
    reports: bool = True
    compiled: CompiledGraph | None = None

    def finish(self, compiled: CompiledGraph) -> None:
        """The graph's own passes are done; those of its halves follow."""
        self.compiled = compiled
        if self.observer:
            self.observer(compiled)

    def rewrite_half(self, gm: fx.GraphModule, half: str) -> None:
        """Run the passes on a half; they are recorded beside those on the whole graph."""
        ctx = Context(self.config, plan=self.compiled.plan if self.compiled else Plan())
        # A backward that PyTorch compiles when it first runs comes without what traced its forward:
        # operators made of others would take sizes for numbers.
        with compat.enable_dynamic_shapes():
            records = run_passes(
                LOWERING_PASSES, gm, ctx, of=half, record=self.observer is not None
            )
        if self.compiled:
            self.compiled.passes.extend(records)

    def counted(self, program: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
        """The compiled `program` of the Dynamo graph `gm`; its runs are noted."""
        weights = weights_by_path(gm)

        def run(*args: Any) -> Any:
            if self.compiled:
                self.compiled.runs.append(GraphRun(weights(args), compat.is_checkpointing()))
            return program(*args)

        return run

    @property
    def shows_halves(self) -> bool:
        """Whether halves are rewritten to be looked at, since no code is generated from them."""
        return self.observer is not None and self.config.compiler == "eager"

    def cache_key(self) -> str:
        """A hash of all that the result depends on besides the graph."""
        key = (
            source_hash(),
            repr(self.config),
            torch.__version__,
            repr(self.inputs),
            self.by_name,
            disabled_passes(),
        )
        return hashlib.sha256(repr(key).encode()).hexdigest()


@cache
def source_hash() -> str:
    """A hash of fp8pass's own source."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
