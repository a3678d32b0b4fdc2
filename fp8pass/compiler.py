"""Compile a graph from Dynamo: run fp8pass's passes inside Inductor, and return a callable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from fp8pass import compat, graph, hardware
from fp8pass.compilation import Compilation, Inputs, match_names
from fp8pass.config import Config, split_options
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.graph.dropped_logits import drop_logits
from fp8pass.graph.flops import total_flops
from fp8pass.graph.inlined_regions import inline_regions
from fp8pass.graph.joint_facts import JointFacts, select_inputs
from fp8pass.graph.split_adapters import split_adapters
from fp8pass.hooks import CompiledGraph, Hooks, Observer, Observing, Program
from fp8pass.option_checks import ConfigError, unknown
from fp8pass.partition import Partitioner
from fp8pass.passes import INFERENCE_PASSES, Context, Requests
from fp8pass.passes.added import check_positions
from fp8pass.passes.runner import run_passes, warn_about_checkpointing
from fp8pass.runtime.copies import bandwidth
from fp8pass.runtime.cuda_graphs import compile_for_moving, moving_weights, protect_gradients


@dataclass(frozen=True)
class Backend:
    """A `torch.compile` backend. Equal backends share compiled code."""

    config: Config = field(default_factory=Config)
    observer: Observer | None = None  # called with each compiled graph
    requests: Requests = field(default_factory=Requests)
    hooks: tuple[Hooks, ...] = ()

    __name__ = "fp8pass"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Program:
        compat.rename_self(gm)
        inline_regions(gm)
        config, given = self._choices(mode, options)
        if not config.return_logits and torch.is_grad_enabled():
            drop_logits(gm)
        if config.quantizes_linears:  # recipe `exact` must not change the order of sums
            split_adapters(gm)
        config = _with_bandwidth(config, example_inputs)
        ours = inductor_defaults(config, example_inputs)
        patches = {**ours, **given}
        stock = compat.current_options(ours.keys() - given.keys() - {compat.STATIC_LAUNCHES})
        _check_can_compile(config, patches, example_inputs)
        if patches.get(compat.STATIC_LAUNCHES):
            compat.launch_statically()
        hooks = (*((Observing(self.observer),) if self.observer else ()), *self.hooks)
        if compat.is_checkpointing() and not any(hook.records for hook in hooks):
            warn_about_checkpointing()
        captured = Captured(gm, tuple(example_inputs), patches, stock, hooks)
        wraps = [hook.before_compile(gm, config, captured.compile_version) for hook in hooks]
        compilation = captured.compilation(config, requests=self.requests)
        program = captured.compile(gm, compilation)
        for wrap in wraps:
            program = wrap(program, compilation.compiled) if wrap else program
        return program

    def _choices(
        self, mode: str | None, options: Mapping[str, Any] | None
    ) -> tuple[Config, dict[str, Any]]:
        """Return the configuration, and Inductor's options, from arguments of `torch.compile`."""
        patches = dict(_mode_options(mode))
        if not options:
            return self.config, patches
        if self.config != Config():
            raise ConfigError(
                "Pass the configuration either to fp8pass.backend(Config(...)) or as "
                "options={...}, not both."
            )
        config, given = split_options(options, compat.list_options())
        _check_types(given)
        return config, patches | given


@dataclass(frozen=True)
class Captured:
    """A graph that Dynamo captured, to be compiled once or in several versions."""

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    patches: Mapping[str, Any]  # options of Inductor
    # Options that replace options in `patches` for graphs with the plan of stock `torch.compile`.
    stock: Mapping[str, Any] = field(default_factory=dict)
    hooks: tuple[Hooks, ...] = ()

    def compilation(self, config: Config, **options: Any) -> Compilation:
        """Return a new `Compilation`, without compiling the graph."""
        graphed = compat.uses_cuda_graphs(self.patches)
        moving = moving_weights(self.gm, self.example_inputs) if graphed else frozenset[int]()
        inputs = Inputs.of(self.example_inputs, moving)
        by_name = match_names(self.gm, config)
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        names = tuple(graph.clean_path(compat.source_of(n)) for n in placeholders)
        return Compilation(
            config, inputs, self.hooks, by_name=by_name, input_names=names, **options
        )

    def compile(
        self,
        gm: fx.GraphModule,
        compilation: Compilation,
        inner_compile: Callable[..., Any] | None = None,
    ) -> Program:
        """Compile `gm`, which is `self.gm` or a copy.

        If `inner_compile` is given, it is called instead of Inductor.
        """
        patches = {**self.patches, "custom_partitioner_fn": Partitioner(compilation, self.stock)}
        program: Any = compat.compile_fx(
            gm,
            list(self.example_inputs),
            inner_compile=inner_compile or InnerCompile(compilation, self.stock),
            config_patches=patches,
        )
        graphed = compat.uses_cuda_graphs(self.patches) and inner_compile is None
        return protect_gradients(program) if graphed else program

    def compile_version(
        self,
        config: Config,
        inner_compile: Callable[..., Any] | None = None,
        requests: Requests | None = None,
    ) -> Program:
        """Compile a copy of the graph, as `hooks.CompileVersion` defines."""
        compilation = self.compilation(config, requests=requests or Requests(), is_main=False)
        # Cache keys do not contain `inner_compile`.
        with compat.uncached() if inner_compile else nullcontext():
            return self.compile(compat.copy_captured(self.gm), compilation, inner_compile)


@dataclass(frozen=True)
class InnerCompile:
    """Compiles one forward, backward or inference graph of aten and dialect operators."""

    compilation: Compilation
    stock: Mapping[str, Any] = field(default_factory=dict)  # as in `Captured`

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Return the compiled graph, as a function of a list of inputs."""
        half = compat.half_of(kwargs)
        if half == "inference":
            rewrite_inference(gm, self.compilation, compat.static_inputs(kwargs))
            if self.compilation.shows_halves:
                self.compilation.rewrite_half(graph.copy_module(gm), half)
        if self.compilation.config.compiler == "eager":
            return compat.interpret(gm)
        self.compilation.rewrite_half(gm, half)
        what = f"Inductor compiles the {half}, {len(gm.graph.nodes):,} operators"
        with self.compilation.while_compiling(what), self._choices():
            if moving := self.compilation.inputs.moving:
                return compile_for_moving(gm, inputs, moving, **kwargs)
            return compat.compile_fx_inner(gm, inputs, **kwargs)

    @contextmanager
    def _choices(self) -> Iterator[None]:
        """Change Inductor's choices within the context.

        For a graph with the plan of stock `torch.compile`, restore the options in `self.stock`.
        """
        with ExitStack() as stack:
            if self.compilation.stock:
                stack.enter_context(compat.patch_options(self.stock))
            else:
                stack.enter_context(compat.hold_dequantized_rows())
                if "allow_buffer_reuse" in self.stock:
                    stack.enter_context(compat.reuse_small_buffers())
            yield


def rewrite_inference(
    gm: fx.GraphModule, compilation: Compilation, parameters: frozenset[int]
) -> None:
    """Run the inference passes on a graph without a backward.

    A graph that compiled autograd captured is a backward, and is left unchanged. `parameters` are
    the indices of inputs with fixed addresses.
    """
    if compat.compiles_backward():
        return
    placeholders = gm.graph.find_nodes(op="placeholder")
    graph.tag_inputs(placeholders, compilation.input_names)
    static = frozenset(placeholders[i] for i in parameters)
    facts = JointFacts(static, select_inputs(static, compilation.inputs.weights))
    ctx = Context(compilation.config, facts)
    records = run_passes(INFERENCE_PASSES, gm, ctx, of="inference", record=compilation.records)
    ctx.plan.inference = True
    if compilation.records:
        ctx.plan.flops, ctx.plan.fp8_flops = total_flops(gm.graph)
    compilation.finish(CompiledGraph(records, gm, ctx))


def inductor_defaults(config: Config, example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Return options of Inductor that suit graphs with low-bit saved tensors.

    The options were measured on GPUs. The user's options override them. On a CPU, Inductor keeps
    its defaults, which are better tested.
    """
    if _on_cpu(example_inputs):
        return {}
    options: dict[str, Any] = {
        # Inductor estimates the memory peak wrongly, and would move nodes that materialize_plan
        # placed well.
        "reorder_for_peak_memory": False,
        # With reuse, Inductor holds unused buffers until another result needs them. Without reuse,
        # the peak of four layers of hidden size 4096 is 0.6 GiB lower.
        "allow_buffer_reuse": False,
        # Gradients of gated activations are faster to compute twice than to store.
        "realize_reads_threshold": 8,
        # With static launches, a layer of hidden size 2048 takes 8% less CPU time.
        compat.STATIC_LAUNCHES: True,
    }
    if config.packs:
        # Unpacking an element takes about 15 operators. By default, Inductor would store each
        # expression of two unpacked values, 0.55 GiB of FP32 per layer in SwiGLU's backward.
        options["realize_opcount_threshold"] = 64
    return options


def _check_can_compile(
    config: Config, patches: Mapping[str, Any], example_inputs: Sequence[Any]
) -> None:
    """Raise an error, or warn, if options conflict with each other or with the environment."""
    check_positions(config)
    _warn_about_activation_quantization(patches)
    has_tensors = any(isinstance(x, Tensor) for x in example_inputs)
    if config.compiler == "inductor" and has_tensors and _on_cpu(example_inputs):
        _check_cpp_compiler()
    if torch.is_grad_enabled():
        _check_has_memory(example_inputs)
    graphed = compat.uses_cuda_graphs(patches)
    if config.offload and (graphed or hardware.launches_at_once()):
        raise ConfigError(
            "offload=True is incompatible with CUDA graphs, which own their memory across replays. "
            "Remove offload=True, or the setting that turns CUDA graphs on: "
            "mode='reduce-overhead', triton.cudagraphs, or capture_step."
        )
    if graphed and hardware.launches_at_once():
        raise ConfigError(
            "capture_step captures the whole step in one CUDA graph: compile the model without "
            "mode='reduce-overhead' and triton.cudagraphs."
        )


def _check_has_memory(example_inputs: Sequence[Any]) -> None:
    """Raise ConfigError for tensors on the meta device, which have no data."""
    if any(isinstance(x, Tensor) and x.is_meta for x in example_inputs):
        raise ConfigError(
            "The model or its inputs are on the meta device and have no memory. Allocate memory "
            "with model.to_empty(device='cuda'), or plan the training with fp8pass.fit."
        )


def _on_cpu(example_inputs: Sequence[Any]) -> bool:
    return all(x.device.type == "cpu" for x in example_inputs if isinstance(x, Tensor))


def _check_cpp_compiler() -> None:
    """Raise RuntimeError if there is no C++ compiler. Inductor's own error has a hundred lines."""
    if not compat.has_cpp_compiler():
        raise RuntimeError(
            "No working C++ compiler was found. On a CPU, PyTorch's Inductor needs a C++ compiler. "
            "Install one (apt install g++), set the environment variable CXX to its path, or run "
            "without Inductor: options={'compiler': 'eager'}."
        )


def _with_bandwidth(config: Config, example_inputs: Sequence[Any]) -> Config:
    """Add the measured host bandwidth, on which the plan and its cache key depend."""
    if not config.offload or config.host_bandwidth is not None:
        return config
    devices = (x.device for x in example_inputs if isinstance(x, Tensor) and x.is_cuda)
    return replace(config, host_bandwidth=bandwidth(next(devices, torch.device("cpu"))))


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode in (None, "default"):
        return {}
    modes = compat.list_mode_options()
    if mode not in modes:
        raise ConfigError(
            f"{unknown('mode', mode, modes)} mode is one of {', '.join(map(repr, modes))}."
        )
    return modes[mode]


def _check_types(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        wanted = compat.type_of_option(name)
        if wanted is not None and not isinstance(value, wanted):
            raise ConfigError(
                f"The Inductor option {name} must be a {wanted.__name__}, got {value!r}."
            )


def _warn_about_activation_quantization(options: Mapping[str, Any]) -> None:
    if compat.activation_quantization_is_on(options):
        warnings.warn(
            "fp8pass: activation_quantization_aten_pass is on, so PyTorch would quantize saved "
            "tensors whose formats fp8pass has already chosen. Remove the pass from "
            "post_grad_fusion_options.",
            stacklevel=2,
        )
