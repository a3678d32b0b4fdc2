"""One compilation of a graph: its inputs, its hooks and its cache key."""

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
from fp8pass.graph.names import matching_pattern, pattern_text
from fp8pass.graph.output_heads import has_head_name
from fp8pass.hooks import CompiledGraph, Hooks
from fp8pass.passes import LOWERING_PASSES, Context, Requests
from fp8pass.passes.added import cache_keys
from fp8pass.passes.runner import disabled_passes, run_passes
from fp8pass.plan import Plan


@dataclass(frozen=True)
class Inputs:
    """Kinds of inputs of a Dynamo graph, by index.

    Attributes:
        weights: each `nn.Parameter`, trained or frozen, but no buffers or other tensors of modules.
        held: leaves that require a gradient. Their gradient accumulator keeps a reference until
            the backward, so that using them there costs no memory.
        activations: outputs of other graphs that require a gradient. Saving them may keep them
            alive.
        moving: parameters with another address in every step, for CUDA graphs.
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
        """Classify the inputs that Dynamo traced with. Its guards do not cover `is_leaf`."""
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


def match_names(gm: fx.GraphModule, config: Config) -> tuple[object, ...]:
    """Return the patterns that match the module path of each operator, for the cache key.

    Caches compare graphs without module paths. The key contains the matches instead of the paths,
    so that equal layers share compiled code. Names of single values depend on the whole paths.
    """
    subgraphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    paths = [graph.module_path(n) for g in subgraphs for n in g.nodes]
    names_values = any(VALUE_SEPARATOR in pattern for pattern in config.exact_patterns)
    whole = bool(config.calibration) or names_values
    patterns = config.skip_patterns, config.exact_patterns
    return tuple(
        (
            path if whole else has_head_name(path),
            *(matching_pattern(path, given) for given in patterns),
        )
        for path in paths
    )


def describe_config(config: Config) -> str:
    """Return a text of the configuration that is the same in every process.

    A function in `skip` counts with its name; `match_names` contains what it matches.
    """
    names = tuple(map(pattern_text, config.skip_patterns))
    return repr((replace(config, passes=(), skip=names), cache_keys(config.passes)))


@dataclass
class Compilation:
    """The compilation of one Dynamo graph.

    Attributes:
        config: the user's choices.
        inputs: the kinds of inputs.
        hooks: called while the graph is compiled.
        requests: additional content of the plan, for `explain`.
        by_name: the patterns that match, see `match_names`.
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
        """Store the graph after the joint passes. The passes on forward and backward follow."""
        self.compiled = compiled
        for hook in self.hooks if self.is_main else ():
            hook.after_passes(compiled)

    def rewrite_half(self, gm: fx.GraphModule, half: str) -> None:
        """Run the passes on the forward or backward graph, and record them with the joint ones."""
        ctx = Context(self.config, plan=self.compiled.plan if self.compiled else Plan())
        # PyTorch may compile a backward when it first runs, without the tracing context of its
        # forward. Composite operators would then specialize on dynamic sizes.
        with compat.enable_dynamic_shapes():
            records = run_passes(LOWERING_PASSES, gm, ctx, of=half, record=self.records)
        if self.compiled:
            self.compiled.passes.extend(records)

    @property
    def shows_halves(self) -> bool:
        """Whether forward and backward are rewritten only to be recorded, and not compiled."""
        return self.records and self.config.compiler == "eager"

    @property
    def records(self) -> bool:
        """Whether a hook needs the graphs of all passes, and the figures that only reports show."""
        return self.is_main and any(hook.records for hook in self.hooks)

    @contextmanager
    def while_compiling(self, what: str) -> Iterator[None]:
        """Enter the hooks' contexts while Inductor compiles `what`, which may take minutes."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.while_compiling(what))
            yield

    def cache_key(self) -> str:
        """Return a hash of everything except the graph that the result depends on."""
        key = (
            source_hash(),
            describe_config(self.config),
            torch.__version__,
            repr(self.inputs),
            self.by_name,
            disabled_passes(),
        )
        return hashlib.sha256(repr(key).encode()).hexdigest()


# Folders that compiled code does not depend on. Caches stay valid after an edit there.
INDEPENDENT = frozenset(
    ("demo", "distributed", "integrations", "optim", "progress", "stability", "testing", "tools")
)


def hashed_files() -> list[Path]:
    """List the files of the compiler's folders, and the modules outside of folders."""
    root = Path(__file__).parent
    files = sorted(root.rglob("*.py"))
    return [p for p in files if p.relative_to(root).parts[0] not in INDEPENDENT]


@cache
def source_hash() -> str:
    """Return a hash of the compiler's source."""
    digest = hashlib.sha256()
    for path in hashed_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()
