"""`capture_step`: replay a whole training step as one CUDA graph.

A replay is one launch, so the CPU does not limit the step. The first calls run as usual, because
they compile the model and create the states of the optimizer. The next call is captured, if the
shapes of the batch and the options of the optimizer have not changed since.

A capture records addresses and numbers. So the batch and the learning rates are copied into tensors
that the graph reads. If another number changes, or an address of a parameter, or if a checkpoint is
loaded, steps run as usual until they can be captured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from fp8pass import compat, hardware
from fp8pass.optim.optimizer import Optimizer
from fp8pass.option_checks import ConfigError

log = logging.getLogger("fp8pass")

# Equal calls before a capture, as PyTorch recommends for code with a backward.
WARM_UP = 3
# A warning appears after this number of calls that could not be captured.
PATIENCE = 20
NUMBERS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Graph:
    """A captured step: what it was captured for, and its static inputs and results."""

    key: Any
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Any

    def replay(self, tensors: list[Tensor]) -> Any:
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given, non_blocking=True)
        self.graph.replay()
        return tree_map_only(Tensor, Tensor.clone, self.results)


def capture_step(
    step: Callable[..., Any], *optimizers: torch.optim.Optimizer
) -> Callable[..., Any]:
    """Return a function that runs a training step as one CUDA graph.

        def step(ids, labels):  # [micro-batches, batch, sequence]
            for x, y in zip(ids, labels):
                loss = model(x, labels=y).loss / len(ids)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = fp8pass.optim.capture_step(step, optimizer)

    Forward, backward, clipping, optimizer steps and `zero_grad` must be inside `step`. Its tensor
    arguments must be on the GPU. It must not read values of tensors (`.item()`), and its Python
    code runs only in calls that are not replayed. The returned function takes the same arguments
    and returns copies of the same results, detached from autograd.

    The first three calls run as usual, and calls with other shapes, too. Call it before the model
    has run, so that fp8pass does not count launches when it selects GEMMs for FP8. Learning rates
    become tensors: schedulers and assignments to `group["lr"]` work as before.

    Args:
        step: a training step on one GPU. On a CPU, it always runs as usual.
        optimizers: all optimizers that `step` uses. PyTorch's AdamW needs `capturable=True`.

    Raises:
        ConfigError: a feature runs code on the CPU in each step: a Guard, `step_in_backward`,
            offloaded states, several processes; or an optimizer is missing or not capturable.
        RuntimeError: `step` leaves gradients, or has an operation that cannot be captured.
    """
    return CapturedStep(step, optimizers)


class CapturedStep:
    """The function that `capture_step` returns."""

    def __init__(self, step: Callable[..., Any], optimizers: tuple[Any, ...]) -> None:
        self._step, self._optimizers = step, optimizers
        self._parameters = [p for x in optimizers for g in x.param_groups for p in g["params"]]
        if not self._parameters:
            raise ConfigError("Pass all optimizers of the step: capture_step(step, optimizer).")
        self._device = self._parameters[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._rates: dict[tuple[int, int], Tensor] = {}
        self._graph: _Graph | None = None
        self._key: Any = None
        self._equal = self._waited = 0
        for optimizer in optimizers:
            optimizer.register_load_state_dict_post_hook(self._forget)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step: as usual, or as a replay."""
        leaves, structure = tree_flatten((args, kwargs))
        self._check(leaves)
        self._copy_rates()
        if self._stream is None:
            return self._run(args, kwargs)
        key = self._key_of(leaves, structure)
        if self._graph is None or self._graph.key != key:
            if not self._is_warm(key):
                return self._run(args, kwargs)
            self._graph = self._capture(self._stream, key, args, kwargs)
        return self._graph.replay([x for x in leaves if isinstance(x, Tensor)])

    def _is_warm(self, key: Any) -> bool:
        """Count a call, and return whether enough calls before it had the same key."""
        self._equal = self._equal + 1 if key == self._key else 0
        self._key = key
        self._waited = 0 if self._equal >= WARM_UP else self._waited + 1
        if self._waited == PATIENCE:
            log.warning(
                "capture_step has captured none of the last %d calls, because shapes of the batch, "
                "numbers among the arguments, or options of the optimizer change. Pass numbers "
                "that change as tensors on the GPU, and pad batches to one shape.",
                PATIENCE,
            )
        return self._equal >= WARM_UP

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Run a step without a graph, on the stream of the capture.

        The last call before a capture fails where a capture would fail, but with a clear error. A
        failed capture leaves PyTorch's random generator unusable.
        """
        is_last = self._stream is not None and self._equal == WARM_UP - 1
        with self._on_stream(), hardware.launching_at_once(), _refuse_waits(is_last):
            results = _detach(self._step(*args, **kwargs))
        if any(p.grad is not None for p in self._parameters):
            raise RuntimeError(
                "The step leaves gradients. Call optimizer.zero_grad() at the end of the step that "
                "capture_step captures, without set_to_none=False."
            )
        return results

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def _capture(self, stream: torch.cuda.Stream, key: Any, args: Any, kwargs: Any) -> _Graph:
        self._graph = None  # frees the memory of the graph before it
        inputs: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            inputs.append(x.clone())
            return inputs[-1]

        args, kwargs = tree_map_only(Tensor, keep, (args, kwargs))
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, stream=stream)
        with _explain_errors(), capture, hardware.launching_at_once():
            results = _detach(self._step(*args, **kwargs))
        return _Graph(key, graph, inputs, results)

    def _key_of(self, leaves: list[Any], structure: Any) -> Any:
        """Return everything that a capture records, except for the batch and learning rates."""
        described = [(x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in leaves]
        options = [_constants(g) for x in self._optimizers for g in x.param_groups]
        trained = [p.data_ptr() if p.requires_grad else None for p in self._parameters]
        return described, structure, options, trained

    def _copy_rates(self) -> None:
        """Write the learning rates into the tensors that the graph reads."""
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if not _reads_rate(optimizer, group):
                    continue
                given, rate = group["lr"], self._rates.get((i, j))
                if rate is None:
                    rate = torch.as_tensor(given, dtype=torch.float32, device=self._device)
                    self._rates[i, j] = rate
                elif given is not rate:
                    rate.copy_(given) if isinstance(given, Tensor) else rate.fill_(given)
                group["lr"] = rate

    def _check(self, leaves: list[Any]) -> None:
        """Raise ConfigError if a replay would leave something out."""
        for x in leaves:
            if not isinstance(x, (Tensor, *NUMBERS)):
                raise ConfigError(
                    "Arguments of a captured step must be tensors, numbers, strings, and lists, "
                    f"tuples and dicts of these; got {type(x).__name__}."
                )
            if isinstance(x, Tensor) and x.device != self._device:
                raise ConfigError(
                    f"A tensor of shape {tuple(x.shape)} is on {x.device}: move the batch to "
                    f"{self._device} before the step, which capture_step captures."
                )
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ConfigError("capture_step captures steps of one process, and not collectives.")
        for optimizer in self._optimizers:
            name = type(optimizer).__name__
            if compat.has_step_hooks(optimizer):
                raise ConfigError(
                    f"Hooks of {name}.step(), such as a Guard's or step_in_backward's, run on the "
                    "CPU in each step, and a CUDA graph would leave them out: do not use "
                    "capture_step with them."
                )
            for group in optimizer.param_groups:
                if group.get("capturable") is False and self._stream:
                    raise ConfigError(f"Create {name} with capturable=True for capture_step.")
                if group.get("offload"):
                    raise ConfigError(
                        f"capture_step cannot capture offload={group['offload']} of {name}, which "
                        "copies through host memory: remove one of the two."
                    )

    def _forget(self, *_: Any) -> None:
        """Capture again, because a checkpoint replaces states and options."""
        self._graph = self._key = None


@contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"The step cannot be captured in a CUDA graph: {error}\nA captured step must not read "
            "values of GPU tensors (.item(), .cpu(), print) or copy tensors from the CPU."
        ) from error


@contextmanager
def _refuse_waits(active: bool) -> Iterator[None]:
    """Raise RuntimeError if the CPU waits for the GPU, if `active` is set."""
    if not active:
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with _explain_errors():
            yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _reads_rate(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether the optimizer accepts a tensor as learning rate, and reads it on the GPU."""
    return isinstance(optimizer, Optimizer) or bool(group.get("capturable"))


def _constants(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Describe the options of a group: a capture records numbers, and addresses of tensors."""
    return [
        (name, value.data_ptr() if isinstance(value, Tensor) else repr(value))
        for name, value in group.items()
        if name != "params"
    ]


def _detach(results: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, results)
