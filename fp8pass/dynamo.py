"""The backend for `torch.compile`: the compiler with its default hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

from torch import fx

from fp8pass.compile_log import CompileLog
from fp8pass.compiler import Backend as Backend
from fp8pass.config import Config
from fp8pass.hooks import Hooks
from fp8pass.passes.added import check_positions
from fp8pass.stability.monitor import Monitor
from fp8pass.stability.monitor.sampler import Versions

HOOKS: tuple[Hooks, ...] = (CompileLog(),)

P = ParamSpec("P")


def _needs_call(make: Callable[P, Backend]) -> Callable[P, Backend]:
    """Raise TypeError if the user passes `make` as a backend instead of calling it."""

    @wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Backend:
        if args and isinstance(args[0], fx.GraphModule):
            raise TypeError(
                "fp8pass.backend is a factory. Call it: torch.compile(model, "
                "backend=fp8pass.backend(fp8pass.Config())), or write backend='fp8pass'."
            )
        return make(*args, **kwargs)

    return checked


@_needs_call
def backend(config: Config, *, monitor: Monitor | None = None) -> Backend:
    """Return a backend, for `torch.compile(model, backend=fp8pass.backend(config))`.

    Args:
        config: the options.
        monitor: measures the quantized tensors in sampled training steps.

    Raises:
        TypeError: `config` is not a `Config`, or `monitor` not a `Monitor`.
        ConfigError: an added pass is to run before or after a pass that does not exist.
    """
    if not isinstance(config, Config):
        raise TypeError(
            f"fp8pass.backend takes a fp8pass.Config, got {type(config).__name__}. "
            "For options as a dict, or a recipe by its name, use "
            "torch.compile(model, backend='fp8pass', options={'recipe': 'coat'})."
        )
    if monitor is not None and not isinstance(monitor, Monitor):
        raise TypeError(f"monitor must be a fp8pass.Monitor, got {type(monitor).__name__}.")
    check_positions(config)
    return Backend(config, hooks=(*HOOKS, Versions(monitor)) if monitor else HOOKS)


def fp8pass(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(model, backend="fp8pass")`."""
    return Backend(hooks=HOOKS)(gm, example_inputs, **kwargs)
