"""The state of one compilation: the kinds of the graph's inputs, the hooks, and the cache key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import fx, nn

from fp8pass import compat, graph, hardware
from fp8pass.activation_memory.format_choices import VALUE_SEPARATOR
from fp8pass.activation_memory.stock import StockPartition
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
    """The indices of a Dynamo graph's inputs, by kind. An input may have several kinds."""

    # Inputs that are an `nn.Parameter`, trained or frozen.
    weights: frozenset[int] = frozenset()
    # Leaves that require a gradient. Autograd keeps leaves alive until the backward.
    held: frozenset[int] = frozenset()
    # Inputs that require a gradient and are not leaves, such as outputs of other graphs.
    activations: frozenset[int] = frozenset()
    # Parameters whose address changes in every step (FSDP2). Empty without CUDA graphs.
    moving: frozenset[int] = frozenset()
    # Names of the GPU models that hold the inputs. The models decide which GEMMs run in FP8.
    gpus: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        example_inputs: Sequence[object],
        moving: frozenset[int] = frozenset(),
    ) -> Inputs:
        """Classify example inputs.

        Dynamo does not guard on `is_leaf`, so later inputs may be of other kinds.
        """
        differentiable = {
            i: x.is_leaf
            for i, x in enumerate(example_inputs)
            if isinstance(x, torch.Tensor) and x.requires_grad
        }
        devices = {x.device for x in example_inputs if isinstance(x, torch.Tensor)}
        parameters = (i for i, x in enumerate(example_inputs) if isinstance(x, nn.Parameter))
        return cls(
            weights=frozenset(parameters),
            held=frozenset(i for i, leaf in differentiable.items() if leaf),
            activations=frozenset(i for i, leaf in differentiable.items() if not leaf),
            moving=moving,
            gpus=tuple(sorted(set(map(hardware.name_of, devices)))),
        )


def match_names(gm: fx.GraphModule, config: Config) -> tuple[object, ...]:
    """Return, for each operator, the patterns that match its module path, for the cache key.

    Equal layers should share compiled code, so the key contains matches instead of paths, unless
    options refer to single values, e.g. `h.0.mlp:gelu:0`.
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
    """Return a text for the cache key, which is the same in every process.

    The text contains only the names of functions in `skip`. `match_names` returns their matches.
    """
    names = tuple(map(pattern_text, config.skip_patterns))
    return repr((replace(config, passes=(), skip=names), cache_keys(config.passes)))


@dataclass
class Compilation:
    """The compilation of one Dynamo graph."""

    config: Config
    inputs: Inputs = field(default_factory=Inputs)
    hooks: tuple[Hooks, ...] = ()
    requests: Requests = field(default_factory=Requests)
    by_name: tuple[object, ...] = ()  # the result of `match_names`
    # The inputs' names in the model. They are not in the cache key, so that equal layers share
    # compiled code.
    input_names: tuple[str, ...] = ()
    # Whether this is the normal version of the graph. Other versions run only in the steps for
    # which `Monitor` selects them.
    is_main: bool = True
    # The graph after its joint or inference passes; None before.
    compiled: CompiledGraph | None = None

    def finish(self, compiled: CompiledGraph) -> None:
        """Store a graph whose joint or inference passes have run, and call the hooks."""
        self.compiled = compiled
        for hook in self.hooks if self.is_main else ():
            hook.after_passes(compiled)

    def rewrite_half(self, gm: fx.GraphModule, half: str) -> None:
        """Run the lowering passes. `half` is the kind of `gm`: forward, backward or inference."""
        plan = self.compiled.plan if self.compiled else Plan()
        ctx = Context(self.config, plan=plan, stock=self.stock)
        # PyTorch may compile a backward only when it first runs. The forward's tracing context is
        # not active then, and without it composite operators turn dynamic sizes into constants.
        with compat.enable_dynamic_shapes():
            records = run_passes(LOWERING_PASSES, gm, ctx, of=half, record=self.records)
        if self.compiled:
            self.compiled.passes.extend(records)

    @property
    def stock(self) -> StockPartition | None:
        """PyTorch's partition of the graph if fp8pass uses PyTorch's plan, else None."""
        return self.compiled.ctx.stock if self.compiled else None

    @property
    def shows_halves(self) -> bool:
        """Whether to run the lowering passes on copies of the graphs, for a report.

        This is needed if the compiler is `eager`, which does not lower graphs.
        """
        return self.records and self.config.compiler == "eager"

    @property
    def records(self) -> bool:
        """Whether a hook needs records of passes, and numbers for reports."""
        return self.is_main and any(hook.records for hook in self.hooks)

    @contextmanager
    def while_compiling(self, what: str) -> Iterator[None]:
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.while_compiling(what))
            yield

    def cache_key(self) -> str:
        """Hash everything that determines the compiled code, except the graph."""
        key = (
            source_hash(),
            describe_config(self.config),
            torch.__version__,
            repr(self.inputs),
            self.by_name,
            disabled_passes(),
            hardware.launches_at_once(),
        )
        return hashlib.sha256(repr(key).encode()).hexdigest()


# Compiled code does not depend on these folders and files.
INDEPENDENT = frozenset(
    ("demo", "distributed", "integrations", "optim", "stability", "testing", "tools")
) | {"compile_log.py"}


def hashed_files() -> list[Path]:
    """List the files that compiled code may depend on."""
    root = Path(__file__).parent
    files = sorted(root.rglob("*.py"))
    return [p for p in files if p.relative_to(root).parts[0] not in INDEPENDENT]


@cache
def source_hash() -> str:
    digest = hashlib.sha256()
    for path in hashed_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()
