"""The Dynamo backend: from `torch.compile`'s arguments to Inductor with our passes in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8pass import compat
from fp8pass import ops as ops  # defines the dialect
from fp8pass.codegen.buffers import buffer_residual_sums
from fp8pass.codegen.kernels import use_kernels
from fp8pass.codegen.lowering import lower_dialect
from fp8pass.config import Config, ConfigError, split_options, unknown
from fp8pass.monitor import Monitor
from fp8pass.monitor.sampler import Sampler
from fp8pass.partition import Inputs, Observer, Partitioner, rewrite_inference


@dataclass(frozen=True)
class Backend:
    """A `torch.compile` backend with its configuration; equal ones share compiled code.

    Attributes:
        config: what fp8pass does.
        observer: called with each graph's plan (see `explain`).
        extras: what plans should say besides, see `Context`.
        monitor: samples what is quantized in training.
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
        config = self.config
        inductor_options = dict(_mode_options(mode))
        if options:
            if self.config != Config():
                raise ConfigError(
                    "Pass the configuration either to fp8pass.backend(Config(...)) or as "
                    "options={...}, not both."
                )
            config, given = split_options(options, compat.list_options())
            inductor_options.update(given)
        _warn_about_activation_quantization()
        patches = {**inductor_defaults(config), **inductor_options}
        monitor = self.monitor if torch.is_grad_enabled() else None
        # First, so that what the compilers tell Dynamo is about the other version.
        sampled = monitor and _compile_sampled(gm, example_inputs, config, monitor, patches)
        partitioner = Partitioner(config, Inputs.of(example_inputs), self.observer, self.extras)
        compiled: Any = compat.compile_fx(
            gm,
            list(example_inputs),
            inner_compile=InnerCompile(config, self.observer),
            config_patches={**patches, "custom_partitioner_fn": partitioner},
        )
        return _either(monitor, sampled, compiled) if monitor and sampled else compiled


@dataclass(frozen=True)
class InnerCompile:
    """Compiles one graph of aten and dialect operators, forward, backward or inference."""

    config: Config
    observer: Observer | None = None

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """The compiled graph, a callable on a list of inputs."""
        if compat.is_inference_compile(kwargs):
            rewrite_inference(gm, self.config, compat.static_inputs(kwargs), self.observer)
        if self.config.compiler == "eager":
            return compat.interpret(gm)
        if self.config.quantizes_linears:
            use_kernels(gm)
        lower_dialect(gm)
        buffer_residual_sums(gm)
        return compat.compile_fx_inner(gm, inputs, **kwargs)


def _compile_sampled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    monitor: Monitor,
    patches: Mapping[str, Any],
) -> Callable[..., Any] | None:
    """The version of a graph that a sampled step runs; None if the graph has no backward."""
    sampler = Sampler(monitor)
    partitioner = Partitioner(config, Inputs.of(example_inputs), reports=False)
    with compat.uncached():
        compiled: Any = compat.compile_fx(
            compat.copy_captured(gm),
            list(example_inputs),
            inner_compile=sampler,
            config_patches={**patches, "custom_partitioner_fn": partitioner},
        )
    return compiled if sampler.trains else None


def _either(
    monitor: Monitor, sampled: Callable[..., Any], normal: Callable[..., Any]
) -> Callable[..., Any]:
    """What runs `sampled` in steps that are sampled, and `normal` in all others."""

    def run(*args: Any) -> Any:
        return sampled(*args) if monitor.sampling else normal(*args)

    return run


def backend(config: Config, *, monitor: Monitor | None = None) -> Backend:
    """A backend for `torch.compile(model, backend=fp8pass.backend(config))`.

    Args:
        config: what to do.
        monitor: samples the health of what is quantized in training.

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
        raise TypeError(f"monitor is a fp8pass.Monitor, got {type(monitor).__name__}.")
    return Backend(config, monitor=monitor)


def fp8pass(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="fp8pass")`, recipe `coat`."""
    return Backend()(gm, example_inputs, **kwargs)


def inductor_defaults(config: Config) -> dict[str, Any]:
    """Options of Inductor that suit graphs with low-bit saves; the user's own come after them."""
    options: dict[str, Any] = {
        # Its estimate of peak memory misses what materialize.py placed well.
        "reorder_for_peak_memory": False,
        # A buffer that is to be used again is not freed until then, which may be a layer later.
        # The allocator reuses memory as well: four layers of hidden 4096 peak 0.6 GiB lower.
        "allow_buffer_reuse": False,
        # What reads more than four tensors is stored if two kernels use it: gradients of gated
        # activations, in 16 bits, which cost more to write and read than to compute again.
        "realize_reads_threshold": 8,
    }
    if config.packs:
        # Unpacking a code takes some 15 operators. With Inductor's limit of 30 an expression of two
        # such values ends in a buffer, in fp32 for SwiGLU's backward: 0.55 GiB a layer.
        options["realize_opcount_threshold"] = 64
    return options


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode in (None, "default"):
        return {}
    modes = compat.list_mode_options()
    if mode not in modes:
        raise ConfigError(
            f"{unknown('mode', mode, modes)} mode is one of {', '.join(map(repr, modes))}."
        )
    return modes[mode]


def _warn_about_activation_quantization() -> None:
    if compat.activation_quantization_is_on():
        warnings.warn(
            "activation_quantization_aten_pass is on: PyTorch would quantize what fp8pass has "
            "already planned. Remove it from post_grad_fusion_options.",
            stacklevel=2,
        )
