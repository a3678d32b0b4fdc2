"""`capture_step`: replay a whole training step as one CUDA graph.

A replay is one launch, so the CPU does not limit the step. The first calls run as usual, because
they compile the model and create the states of the optimizers. A later call is captured.

A capture records addresses and numbers. So the batch and the learning rates are copied into tensors
that the graph reads. If another option of an optimizer changes, or if a parameter or a state is
replaced, steps run as usual until they can be captured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8pass import compat, hardware
from fp8pass.optim.optimizer import Optimizer
from fp8pass.optim.shards import is_distributed
from fp8pass.option_checks import ConfigError

log = logging.getLogger("fp8pass")

# Number of calls, with existing optimizer states, that run without a graph before a capture. The
# last of these calls raises an error for operations that wait for the GPU.
WARM_UP = 2
# A warning appears after this number of calls in a row without a capture.
PATIENCE = 20
NUMBERS = (bool, int, float, str, type(None))


class Key(NamedTuple):
    """Values that a capture records. If `state` changes, the captured graph is invalid."""

    inputs: Any  # shapes, dtypes, layouts; numbers among the arguments; autocast
    state: Any  # options of optimizers; addresses of parameters; identities of states


@dataclass(frozen=True)
class _Graph:
    key: Key
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    results: Any
    # The states that the graph updates. These references prevent new states with the same ids.
    states: list[Any]


def capture_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a training step on one GPU as one CUDA graph.

        def step(ids, labels):  # [micro-batches, batch, sequence]
            for x, y in zip(ids, labels):
                loss = model(x, labels=y).loss / len(ids)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = fp8pass.optim.capture_step(step)

    The first three calls run as usual, the fourth call is captured, and later calls replay it.
    Calls with other shapes, and all calls on a CPU, run as usual. Use the returned function for all
    steps of a model, from the first step on. fp8pass then ignores the time of kernel launches when
    it selects GEMMs for FP8.

    `step` contains forward, backward, clipping, optimizer steps, and at the end `zero_grad()`.
    Every trained weight must be in one of its optimizers; optimizers of PyTorch need
    `capturable=True`. `step` must not read values of tensors (`.item()`) or change its arguments.
    Its Python code does not run in replays. So call learning rate schedulers and random decisions
    outside of `step`. Learning rates may change in each step. Change buffers, and weights that are
    in no optimizer, only in place. `train()` and `eval()` do not affect replays.

    Args:
        step: a function of tensors on the GPU, numbers, strings, and containers of these. It
            returns tensors and constants.

    Returns:
        A function with the same arguments and results. Results are copies, without autograd.

    Raises:
        ConfigError: an argument has another type or is not on the GPU; a feature needs the CPU in
            each step (a Guard or Monitor, `step_in_backward`, offloaded states, several
            processes); an optimizer cannot be captured; or the step does not call an optimizer.
        RuntimeError: `step` leaves gradients, changes learning rates, or waits for the GPU.
    """
    return CapturedStep(step)


class CapturedStep:
    """The function that `capture_step` returns."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._optimizers: list[torch.optim.Optimizer] = []  # used by `step` so far
        self._rates: dict[tuple[int, int], Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._graph: _Graph | None = None
        self._reset()

    def _reset(self) -> None:
        self._key: Key | None = None
        self._inputs: list[Tensor] = []
        self._equal = self._waited = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step: as usual, or as a replay."""
        leaves, structure = compat.tree_flatten((args, kwargs))
        device = self._find_device(leaves)
        _check_arguments(leaves, device)
        if not _captures(device):
            with self._observe_optimizers(device):
                return _detach(self._step(*args, **kwargs))
        key = self._make_key(leaves, structure)
        if self._graph is not None and self._graph.key.state != key.state:
            self._graph = None
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if self._graph is None or self._graph.key != key:
            is_warm = self._is_warm(key, tensors)
            _copy(tensors, self._inputs)
            remaining = iter(self._inputs)
            static = [next(remaining) if isinstance(x, Tensor) else x for x in leaves]
            args, kwargs = compat.tree_unflatten(static, structure)
            if not is_warm:
                return self._run(device, args, kwargs)
            self._capture(device, key, args, kwargs)
        assert self._graph is not None
        self._reset()
        _copy(tensors, self._graph.inputs)
        self._copy_rates()
        self._graph.graph.replay()
        return compat.tree_map_only(Tensor, Tensor.clone, self._graph.results)

    def _find_device(self, leaves: list[Any]) -> torch.device:
        """Return the device of the optimizers' parameters, or of the batch in the first step."""
        tensors = (*self._parameters(), *(x for x in leaves if isinstance(x, Tensor)))
        return next((x.device for x in tensors), torch.device("cpu"))

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _states(self) -> list[Any]:
        states = [compat.tree_flatten(dict(x.state))[0] for x in self._optimizers]
        return [value for each in states for value in each]

    def _make_key(self, leaves: list[Any], structure: Any) -> Key:
        inputs = [
            (x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves
        ]
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        options = [
            (name, _describe(value))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for name, value in group.items()
            if name != "params" and not (name == "lr" and _reads_rate(optimizer, group))
        ]
        parameters = [(p.requires_grad, _address(p)) for p in self._parameters()]
        states = list(map(id, self._states()))
        return Key((inputs, structure, autocast), (options, parameters, states))

    def _is_warm(self, key: Key, tensors: list[Tensor]) -> bool:
        """Count a call, and return whether enough calls before it had the same key."""
        self._equal = self._equal + 1 if key == self._key else 0
        self._waited += 1
        if self._key is None or key.inputs != self._key.inputs:
            # Calls before the capture already read the tensors of the captured call, so that the
            # capture does not recompile.
            self._inputs = [torch.empty_like(x, requires_grad=x.requires_grad) for x in tensors]
        self._key = key
        if self._waited == PATIENCE:
            log.warning(
                "capture_step has captured none of the last %d calls, because something changes "
                "between calls: shapes of the batch, numbers among the arguments, or options of an "
                "optimizer (except learning rates). Pass numbers that change as tensors on the "
                "GPU, and pad batches to one shape.",
                PATIENCE,
            )
        return self._equal >= WARM_UP

    def _run(self, device: torch.device, args: Any, kwargs: Any) -> Any:
        """Run a step without a graph, on the stream of the capture.

        The last call before a capture fails where a capture would fail, but with a clear error. A
        failed capture leaves PyTorch's random generator unusable.
        """
        waits = _refuse_waits() if self._equal == WARM_UP - 1 else nullcontext()
        with self._on_stream(device), self._observe_optimizers(device), waits:
            results = _detach(self._step(*args, **kwargs))
        if any(p.grad is not None for p in self._parameters()):
            raise RuntimeError(
                "The step leaves gradients. Call optimizer.zero_grad() at the end of the step that "
                "capture_step captures, without set_to_none=False."
            )
        return results

    def _capture(self, device: torch.device, key: Key, args: Any, kwargs: Any) -> None:
        for value in self._states():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.is_cuda):
                raise ConfigError(
                    "capture_step cannot capture an optimizer with numbers or CPU tensors among "
                    "its states, which do not change in replays: use an optimizer with "
                    "capturable=True, or one of fp8pass.optim."
                )
        graph, states = torch.cuda.CUDAGraph(), self._states()
        # With "thread_local", threads that load data may use the GPU during the capture.
        capture = torch.cuda.graph(
            graph, stream=self._streams[device], capture_error_mode="thread_local"
        )
        caller = torch.cuda.stream(torch.cuda.current_stream(device))  # restored after errors, too
        try:
            with caller, self._observe_optimizers(device), capture:
                results = _detach(self._step(*args, **kwargs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"The step cannot be captured in a CUDA graph: {error}") from (
                error.__context__ or error
            )
        self._graph = _Graph(key, graph, self._inputs, results, states)

    @contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        caller = torch.cuda.current_stream(device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)

    @contextmanager
    def _observe_optimizers(self, device: torch.device) -> Iterator[None]:
        """Find and check the optimizers that the step in this context uses.

        If the step can be captured, it reads the learning rates from tensors on the GPU.
        """

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            _check_optimizer(optimizer, device)
            if not any(optimizer is x for x in self._optimizers):
                self._optimizers.append(optimizer)

        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(check).remove)
            stack.enter_context(hardware.launching_at_once())
            if _captures(device):
                stack.enter_context(self._rates_in_groups())
            yield
        if not self._optimizers:
            raise ConfigError(
                "The step does not call step() of any optimizer. capture_step captures whole "
                "training steps. With step_in_backward, call the function without capture_step."
            )

    def _copy_rates(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Copy the learning rates to the GPU.

        Return pairs of a group and the GPU copy of its learning rate.
        """
        copies = []
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if _reads_rate(optimizer, group) and group["params"]:
                    rate = group["lr"]
                    if (i, j) not in self._rates:
                        device = group["params"][0].device
                        self._rates[i, j] = torch.empty((), dtype=torch.float32, device=device)
                    mine = self._rates[i, j]
                    mine.copy_(rate.reshape(())) if isinstance(rate, Tensor) else mine.fill_(rate)
                    copies.append((group, mine))
        return copies

    @contextmanager
    def _rates_in_groups(self) -> Iterator[None]:
        """Within the context, replace the learning rates in optimizers' groups by their GPU copies.

        Raises RuntimeError if the step changes a copy, because replays overwrite the copies.
        """
        copies = self._copy_rates()
        given = [group["lr"] for group, _ in copies]
        versions = [compat.version_of(mine) for _, mine in copies]
        try:
            for group, mine in copies:
                group["lr"] = mine
            yield
            after = [(group["lr"], compat.version_of(mine)) for group, mine in copies]
        finally:
            for (group, _), rate in zip(copies, given, strict=True):
                group["lr"] = rate
        for (rate, version), before, (_, mine) in zip(after, versions, copies, strict=True):
            if rate is not mine or version != before:
                raise RuntimeError(
                    "The step changes a learning rate, which a replay would not repeat: call "
                    "scheduler.step() after the function that capture_step captures."
                )


def _captures(device: torch.device) -> bool:
    return device.type == "cuda"


def _check_arguments(leaves: list[Any], device: torch.device) -> None:
    if is_distributed() and torch.distributed.get_world_size() > 1:
        raise ConfigError("capture_step captures steps of one process, without collectives.")
    for x in leaves:
        if not isinstance(x, (Tensor, *NUMBERS)):
            raise ConfigError(
                "Arguments of a captured step must be tensors, numbers, strings, and lists, tuples "
                f"and dicts of these; got {type(x).__name__}."
            )
        if isinstance(x, Tensor) and x.device != device:
            raise ConfigError(
                f"A tensor of shape {tuple(x.shape)} is on {x.device}: move the batch to {device} "
                "before the step that capture_step captures."
            )


def _check_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise ConfigError if a replay would leave out a part of an optimizer's step."""
    name = type(optimizer).__name__
    if compat.has_step_hooks(optimizer):
        raise ConfigError(
            f"Hooks of {name}.step(), such as a Guard's or step_in_backward's, run on the CPU in "
            "each step, and a CUDA graph would leave them out: do not use capture_step with them."
        )
    for group in optimizer.param_groups:
        if group.get("offload"):
            raise ConfigError(
                f"capture_step cannot capture {name} with offload={group['offload']}, which copies "
                "tensors through host memory. Remove the offload, or do not use capture_step."
            )
        if any(p.device != device for p in group["params"]):
            raise ConfigError(
                f"{name} updates parameters that are not on {device}, where the batch is: "
                "capture_step needs the batch and all parameters on one GPU."
            )
        if _captures(device) and group.get("capturable") is False:
            raise ConfigError(f"Create {name} with capturable=True for capture_step.")


@contextmanager
def _refuse_waits() -> Iterator[None]:
    """Raise RuntimeError if the CPU waits for the GPU."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise RuntimeError(
            "The step waits for the GPU, which a CUDA graph cannot do. A step that capture_step "
            "captures must not read values of GPU tensors (.item(), .cpu(), print) or copy "
            f"tensors from the CPU: {error}"
        ) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _reads_rate(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether the optimizer accepts a tensor as learning rate, and reads it on the GPU."""
    return isinstance(optimizer, Optimizer) or bool(group.get("capturable"))


def _describe(value: Any) -> Any:
    """Return what a capture records of an option: a number, or the address of a tensor."""
    if isinstance(value, (tuple, list)):
        return [_describe(x) for x in value]
    if isinstance(value, Tensor):
        return ("address", value.data_ptr()) if value.is_cuda else value.tolist()
    return repr(value)


def _address(parameter: Tensor) -> int:
    """Return the address of a plain parameter. A quantized weight has an id instead."""
    is_plain = type(parameter) in (Tensor, nn.Parameter)
    return parameter.data_ptr() if is_plain else id(parameter)


@torch.no_grad()
def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _detach(results: Any) -> Any:
    return compat.tree_map_only(Tensor, Tensor.detach, results)
