"""One compilation of a graph: its inputs, its hooks and its key in caches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import fx, nn

from fp8pass import compat, graph
from fp8pass.activation_memory.format_choices import VALUE_SEPARATOR
from fp8pass.config import Config
from fp8pass.graph.names import matching_pattern
from fp8pass.graph.output_heads import has_head_name
from fp8pass.hooks import CompiledGraph, Hooks
from fp8pass.passes import LOWERING_PASSES, Context, Requests
from fp8pass.passes.added import cache_keys
from fp8pass.passes.runner import disabled_passes, run_passes
from fp8pass.plan import Plan


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
        moving: parameters that CUDA graphs find elsewhere in every step.
    """

    weights: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    activations: frozenset[int] = frozenset()
    moving: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        example_inputs: Sequence[object],
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
            moving=moving,
        )


def decided_by_name(gm: fx.GraphModule, config: Config) -> tuple[object, ...]:
    """All that module paths decide about a Dynamo graph, operator by operator.

    Caches compare graphs without their paths. Which patterns match says enough, so that equal
    layers share compiled code; only names of single values number what a module computes.
    """
    subgraphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    paths = [graph.module_path(n) for g in subgraphs for n in g.nodes]
    if config.calibration or any(VALUE_SEPARATOR in pattern for pattern in config.exact_patterns):
        return tuple(paths)
    patterns = config.skip_patterns, config.exact_patterns
    return tuple(
        (has_head_name(path), *(matching_pattern(path, given) for given in patterns))
        for path in paths
    )


@dataclass
class Compilation:
    """One Dynamo graph on its way through the compilers.

    Attributes:
        config: the user's choices.
        inputs: how long the inputs live.
        hooks: called while the graph is compiled.
        requests: more that the plan should contain, for `explain`.
        by_name: what module paths decide, see `decided_by_name`.
        is_main: whether this is the version of the graph that runs in most steps.
        compiled: the result so far.
    """

    config: Config
    inputs: Inputs = field(default_factory=Inputs)
    hooks: tuple[Hooks, ...] = ()
    requests: Requests = field(default_factory=Requests)
    by_name: tuple[object, ...] = ()
    is_main: bool = True
    compiled: CompiledGraph | None = None

    def finish(self, compiled: CompiledGraph) -> None:
        """Take the graph after its own passes. The passes on its halves follow."""
        self.compiled = compiled
        for hook in self.hooks if self.is_main else ():
            hook.after_passes(compiled)

    def rewrite_half(self, gm: fx.GraphModule, half: str) -> None:
        """Run the passes on a half; they are recorded beside those on the whole graph."""
        ctx = Context(self.config, plan=self.compiled.plan if self.compiled else Plan())
        # A backward that PyTorch compiles when it first runs comes without what traced its forward:
        # operators made of others would take sizes for numbers.
        with compat.enable_dynamic_shapes():
            records = run_passes(LOWERING_PASSES, gm, ctx, of=half, record=self.records)
        if self.compiled:
            self.compiled.passes.extend(records)

    @property
    def shows_halves(self) -> bool:
        """Whether halves are rewritten to be looked at, since no code is generated from them."""
        return self.records and self.config.compiler == "eager"

    @property
    def records(self) -> bool:
        """Whether a hook wants graphs recorded, and the figures that only reports show."""
        return self.is_main and any(hook.records for hook in self.hooks)

    @contextmanager
    def while_compiling(self, what: str) -> Iterator[None]:
        """Enter the contexts that the hooks have for the minutes that Inductor may take."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.while_compiling(what))
            yield

    def cache_key(self) -> str:
        """A hash of all that the result depends on besides the graph."""
        key = (
            source_hash(),
            repr(replace(self.config, passes=())),
            cache_keys(self.config.passes),
            torch.__version__,
            repr(self.inputs),
            self.by_name,
            disabled_passes(),
        )
        return hashlib.sha256(repr(key).encode()).hexdigest()


# Rooms that compiled code does not depend on. Caches stay valid after an edit there.
OUTSIDE = frozenset(
    ("demo", "distributed", "integrations", "optim", "progress", "stability", "testing", "tools")
)


def hashed_files() -> list[Path]:
    """List the files of the compiler's rooms, and the modules outside of rooms."""
    root = Path(__file__).parent
    return [p for p in sorted(root.rglob("*.py")) if p.relative_to(root).parts[0] not in OUTSIDE]


@cache
def source_hash() -> str:
    """Return a hash of the compiler's source."""
    digest = hashlib.sha256()
    for path in hashed_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()
