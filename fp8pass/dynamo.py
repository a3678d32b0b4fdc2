"""The Dynamo backend: from `torch.compile`'s arguments to Inductor with our passes in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor, fx

from fp8pass import compat, graph
from fp8pass.compilation import (
    Compilation,
    CompiledGraph,
    Inputs,
    Observer,
    decided_by_name,
)
from fp8pass.config import Config, ConfigError, split_options, unknown
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.graph.flops import total_flops
from fp8pass.graph.joint import JointFacts, UnusedCodes, codes_among, inputs_among
from fp8pass.graph.regions import inline_regions
from fp8pass.partition import Partitioner
from fp8pass.passes import INFERENCE_PASSES, Context
from fp8pass.passes.runner import report, run_passes, warn_about_checkpointing
from fp8pass.progress.settled import told
from fp8pass.progress.spinner import shown
from fp8pass.runtime.bandwidth import bandwidth
from fp8pass.runtime.cuda_graph_gradients import protect_gradients
from fp8pass.runtime.cuda_graph_inputs import compile_for_moving, moving_weights
from fp8pass.stability.monitor import Monitor
from fp8pass.stability.monitor.sampler import Sampler
from fp8pass.weights.graph_inputs import choose_codes, examples, giving_codes, with_codes


@dataclass(frozen=True)
class Backend:
    """A `torch.compile` backend with its configuration; equal ones share compiled code.

    Attributes:
        config: the user's choices.
        observer: called with each graph's plan (see `explain`).
        extras: more that plans should say, see `Context`.
        monitor: samples quantized tensors in training.
    """

    config: Config = field(default_factory=Config)
    observer: Observer | None = None
    extras: frozenset[str] = frozenset()
    monitor: Monitor | None = None

    __name__ = "fp8pass"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph captured by Dynamo."""
        compat.rename_self(gm)
        inline_regions(gm)
        config = self.config
        inductor_options = dict(_mode_options(mode))
        if options:
            if self.config != Config():
                raise ConfigError(
                    "Pass the configuration either to fp8pass.backend(Config(...)) or as "
                    "options={...}, not both."
                )
            config, given = split_options(options, compat.list_options())
            _check_types(given)
            inductor_options.update(given)
        _warn_about_activation_quantization(inductor_options)
        config = _with_bandwidth(config, example_inputs)
        patches = {**inductor_defaults(config, example_inputs), **inductor_options}
        has_tensors = any(isinstance(x, Tensor) for x in example_inputs)
        if config.compiler == "inductor" and has_tensors and _on_cpu(example_inputs):
            _check_cpp_compiler()
        if torch.is_grad_enabled():
            _check_has_memory(example_inputs)
        if compat.is_checkpointing() and not self.observer:
            warn_about_checkpointing()
        if config.offload and compat.uses_cuda_graphs(patches):
            raise ConfigError(
                "offload=True runs without CUDA graphs, whose memory is theirs from one replay to "
                "the next: leave out mode='reduce-overhead' (or triton.cudagraphs), or offload."
            )
        monitor = self.monitor if torch.is_grad_enabled() else None
        # First: the compilers then tell Dynamo about the version that runs in most steps.
        sampled = monitor and _compile_sampled(gm, example_inputs, config, monitor, patches)
        careful = sampled and _compile_careful(gm, example_inputs, config, monitor, patches)
        compilation, compiled = self._compiled(gm, example_inputs, config, patches)
        compiled = (
            compilation.counted(compiled, gm) if self.observer else told(compiled, compilation)
        )
        if not (monitor and sampled):
            return compiled
        return _chosen(monitor, sampled, careful or compiled, compiled)

    def _compiled(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        config: Config,
        patches: Mapping[str, Any],
    ) -> tuple[Compilation, Callable[..., Any]]:
        """The version of a graph that most steps run, with the codes of weights that it takes.

        A graph that has others is not finished, so that caches have none of them.
        """
        unused = frozenset[int]()
        graphed = compat.uses_cuda_graphs(patches)
        moving = moving_weights(gm, example_inputs) if graphed else frozenset[int]()
        while True:
            codes = choose_codes(gm, example_inputs, config, unused)
            compilation = Compilation(
                config,
                Inputs.of(example_inputs, codes, moving),
                self.observer,
                self.extras,
                decided_by_name(gm, config),
            )
            try:
                return compilation, _compiled(gm, example_inputs, compilation, patches)
            except UnusedCodes as error:
                unused |= error.of


@dataclass(frozen=True)
class InnerCompile:
    """Compiles one graph of aten and dialect operators, forward, backward or inference."""

    compilation: Compilation

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The compiled graph, a callable on a list of inputs."""
        half = compat.half_of(kwargs)
        if half == "inference":
            rewrite_inference(gm, self.compilation, compat.static_inputs(kwargs))
            if self.compilation.shows_halves:
                self.compilation.rewrite_half(graph.copy_of(gm), half)
        if self.compilation.config.compiler == "eager":
            return compat.interpret(gm)
        self.compilation.rewrite_half(gm, half)
        with shown(f"Inductor compiles the {half}, {len(gm.graph.nodes):,} operators"):
            if moving := self.compilation.inputs.moving:
                return compile_for_moving(gm, inputs, moving, **kwargs)
            return compat.compile_fx_inner(gm, inputs, **kwargs)


def rewrite_inference(
    gm: fx.GraphModule, compilation: Compilation, parameters: frozenset[int]
) -> None:
    """Run the passes on a graph without a backward.

    A backward that compiled autograd captured is left as it is: no layer has its forward there.
    """
    if compat.captures_backward():
        return
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = compilation.inputs.codes
    static = frozenset(placeholders[i] for i in parameters)
    static -= inputs_among(placeholders, given.made)
    facts = JointFacts(
        static,
        inputs_among(static, compilation.inputs.weights),
        **codes_among(placeholders, given.of, given.left_out),
    )
    ctx = Context(compilation.config, facts)
    observed = compilation.observer is not None
    records = run_passes(INFERENCE_PASSES, gm, ctx, of="inference", record=observed)
    ctx.plan.inference = True
    report(ctx.plan)
    if observed:
        ctx.plan.flops, ctx.plan.fp8_flops = total_flops(gm.graph)
    compilation.finish(CompiledGraph(records, gm, ctx))


def _compile_sampled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    monitor: Monitor,
    patches: Mapping[str, Any],
) -> Callable[..., Any] | None:
    """The version of a graph that a sampled step runs; None if the graph has no backward."""
    sampler = Sampler(monitor)
    compilation = Compilation(config, Inputs.of(example_inputs), reports=False)
    with compat.uncached():
        compiled: Any = compat.compile_fx(
            compat.copy_captured(gm),
            list(example_inputs),
            inner_compile=sampler,
            config_patches={**patches, "custom_partitioner_fn": Partitioner(compilation)},
        )
    return compiled if sampler.trains else None


def _compile_careful(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    monitor: Monitor | None,
    patches: Mapping[str, Any],
) -> Callable[..., Any] | None:
    """The version of a graph that a guard falls back on; None if the monitor has none."""
    if not (monitor and monitor.fallback):
        return None
    config = replace(config, skip=(*config.skip, *monitor.fallback))
    compilation = Compilation(
        config, Inputs.of(example_inputs), by_name=decided_by_name(gm, config), reports=False
    )
    return _compiled(compat.copy_captured(gm), example_inputs, compilation, patches)


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """A graph compiled as `compilation` says."""
    codes, graphed = compilation.inputs.codes, compat.uses_cuda_graphs(patches)
    compiled: Any = compat.compile_fx(
        with_codes(gm, codes, in_place=graphed) if codes.of else gm,
        examples(example_inputs, codes),
        inner_compile=InnerCompile(compilation),
        config_patches={**patches, "custom_partitioner_fn": Partitioner(compilation)},
    )
    if graphed:
        compiled = protect_gradients(compiled)
    return giving_codes(compiled, codes, in_place=graphed) if codes.of else compiled


def _chosen(
    monitor: Monitor,
    sampled: Callable[..., Any],
    careful: Callable[..., Any],
    normal: Callable[..., Any],
) -> Callable[..., Any]:
    """A function that runs the version of a graph that the step is to run."""

    def run(*args: Any) -> Any:
        if monitor.falls_back:
            return careful(*args)
        return sampled(*args) if monitor.sampling else normal(*args)

    return run


P = ParamSpec("P")


def _needs_call(make: Callable[P, Backend]) -> Callable[P, Backend]:
    """A function that makes a backend; given a graph, as if it were one, it says how to call it."""

    @wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Backend:
        if args and isinstance(args[0], fx.GraphModule):
            raise TypeError(
                "fp8pass.backend makes a backend, and is none: write torch.compile(model, "
                "backend=fp8pass.backend(fp8pass.Config())), or backend='fp8pass'."
            )
        return make(*args, **kwargs)

    return checked


@_needs_call
def backend(config: Config, *, monitor: Monitor | None = None) -> Backend:
    """A backend for `torch.compile(model, backend=fp8pass.backend(config))`.

    Args:
        config: the choices.
        monitor: samples the health of quantized tensors in training.

    Raises:
        TypeError: `config` is not a `Config`, or `monitor` not a `Monitor`.
    """
    if not isinstance(config, Config):
        raise TypeError(
            f"fp8pass.backend takes a fp8pass.Config, got {type(config).__name__}. "
            "For options as a dict, or a recipe by its name, use "
            "torch.compile(model, backend='fp8pass', options={'recipe': 'coat'})."
        )
    if monitor is not None and not isinstance(monitor, Monitor):
        raise TypeError(f"monitor must be a fp8pass.Monitor, got {type(monitor).__name__}.")
    return Backend(config, monitor=monitor)


def fp8pass(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="fp8pass")`, recipe `coat`."""
    return Backend()(gm, example_inputs, **kwargs)


def inductor_defaults(config: Config, example_inputs: Sequence[Any]) -> dict[str, Any]:
    """Options of Inductor that suit graphs with low-bit saves; the user's own come after them.

    All of them are measured on GPUs. Generated code for the CPU, which is there to try things out,
    is what most tests of Inductor cover: with its own options.
    """
    if _on_cpu(example_inputs):
        return {}
    options: dict[str, Any] = {
        # Its estimate of peak memory is wrong for nodes that materialize_plan placed well.
        "reorder_for_peak_memory": False,
        # A buffer that is to be used again is not freed until then, which may be a layer later.
        # The allocator reuses memory as well: four layers of hidden 4096 peak 0.6 GiB lower.
        "allow_buffer_reuse": False,
        # Else an expression of more than four tensors is stored if two kernels use it. Gradients of
        # gated activations cost more to write and read, in 16 bits, than to compute again.
        "realize_reads_threshold": 8,
        # Launch the dialect's kernels as Inductor does its own, without the Python of Triton: a
        # layer of hidden 2048 takes the CPU 8% less.
        "static_launch_user_defined_triton_kernels": True,
    }
    if config.packs:
        # Unpacking a code takes some 15 operators. With Inductor's limit of 30 an expression of two
        # such values ends in a buffer, in fp32 for SwiGLU's backward: 0.55 GiB a layer.
        options["realize_opcount_threshold"] = 64
    return options


def _check_has_memory(example_inputs: Sequence[Any]) -> None:
    """Raise ConfigError if a graph would train on the meta device: no value there has a price."""
    if any(isinstance(x, Tensor) and x.is_meta for x in example_inputs):
        raise ConfigError(
            "Tensors are on the meta device, where nothing can be trained. Give a model memory "
            "with model.to_empty(device='cuda'), or plan for it with fp8pass.fit."
        )


def _on_cpu(example_inputs: Sequence[Any]) -> bool:
    return all(x.device.type == "cpu" for x in example_inputs if isinstance(x, Tensor))


def _check_cpp_compiler() -> None:
    """Say in a sentence what Inductor says in a hundred lines."""
    if not compat.has_cpp_compiler():
        raise RuntimeError(
            "No working C++ compiler was found, which PyTorch's Inductor needs on a CPU. Install "
            "one (apt install g++), name it in the environment variable CXX, or run op by op, with "
            "options={'compiler': 'eager'}."
        )


def _with_bandwidth(config: Config, example_inputs: Sequence[Any]) -> Config:
    """The configuration with the link's bandwidth, of which the plan and so its key depend."""
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
    """Raise ConfigError if Inductor would take an option's value for something else."""
    for name, value in options.items():
        wanted = compat.type_of_option(name)
        if wanted is not None and not isinstance(value, wanted):
            raise ConfigError(
                f"{name} must be a {wanted.__name__}, as in torch._inductor.config, got {value!r}."
            )


def _warn_about_activation_quantization(options: Mapping[str, Any]) -> None:
    if compat.activation_quantization_is_on(options):
        warnings.warn(
            "activation_quantization_aten_pass is on: PyTorch would quantize what fp8pass has "
            "already planned. Remove it from post_grad_fusion_options.",
            stacklevel=2,
        )
