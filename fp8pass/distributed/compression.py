"""`compress`: DDP and FSDP2 send gradients and weights in FP8."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8pass.compat.data_parallel import (
    GradientBuffer,
    Replicated,
    find_factor,
    find_replicas,
    fsdp_has_run,
    has_all_reduce_hook,
    replace_all_reduce,
    replicas_have_begun,
)
from fp8pass.distributed.gradient_sums import GradientSums, Traffic
from fp8pass.distributed.local_sums import LocalSums
from fp8pass.distributed.weight_gather import gather_quantized_weights
from fp8pass.optim.backward import BUFFERS
from fp8pass.optim.state_formats import moment_format
from fp8pass.option_checks import ConfigError, check_choice, checked_patterns
from fp8pass.stability.monitor import Monitor

log = logging.getLogger("fp8pass")

PATIENCE_S = 30  # seconds after which a rank warns that it waits
TOO_LATE = "the model has run already: call compress before its first forward."
_COMPRESSED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class Compression:
    """Changes that `compress` made to a model, and the bytes that this rank has sent since then."""

    modules: tuple[str, ...] = ()  # modules that reduce compressed gradients; '' is the model
    layers: tuple[str, ...] = ()  # linear layers with weights that are gathered in FP8
    gradients: Traffic = field(default_factory=Traffic)
    weights: Traffic = field(default_factory=Traffic)  # the weights of `layers`
    # Sums of gradients that are not reduced yet; None without `sums`.
    sums: LocalSums | None = None


def compress(
    model: nn.Module,
    gradients: str = "groups",
    weights: str = "row",
    skip: str | Sequence[str] = (),
    monitor: Monitor | None = None,
    sums: str = "none",
) -> Compression:
    """Make the ranks that train `model` send gradients and weights in FP8.

        fully_shard(model)                     # or DistributedDataParallel(model)
        fp8pass.distributed.compress(model)

    Call `compress` once on every rank, after the whole model is distributed and before the first
    forward. With one rank the call changes nothing.

    Gradients are quantized to E4M3 in groups of 128 that share a scale, and added up in fp32
    (section 5 of the paper AGoQ). With hybrid sharding, replicas exchange their sums in E4M3, too.
    FSDP2 gathers the weights of linear layers in E4M3 with a scale for each row, and all other
    parameters in high precision. A copy of a DistributedDataParallel uses PyTorch's reduction,
    unless the copy is passed to `compress`, too.

    Args:
        model: a DistributedDataParallel, or a module to which `replicate` or `fully_shard` was
            applied. `fully_shard` may also have been applied to its submodules only.
        gradients: `groups`, or `none` for PyTorch's own reduction.
        weights: `row`, or `none` for PyTorch's own gathers. DDP does not gather weights.
        skip: paths or patterns, as in `Config.skip`, of layers whose weights are gathered in high
            precision. Name the layers that the compiled model runs in high precision.
        monitor: measures the gradients that this rank sends, in the steps that the monitor samples.
        sums: format of the sums of gradients that are not reduced, under DDP's `no_sync()` or
            FSDP2's `set_requires_gradient_sync(False)`: `e4m3`, `e5m2`, `de8`, `fp16`, or `none`
            for PyTorch's own sums. Formats of 8 bits are for sums of up to 8 gradients, as in
            `step_in_backward`. `zero_grad` does not drop these sums; `sums.drop()` of the returned
            object does.

    Raises:
        ConfigError: the model is not distributed in one of these ways, is compressed already, or
            has another custom reduction of gradients; or ranks pass different arguments.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "compress takes a distributed module (DistributedDataParallel, fully_shard or "
            f"replicate), got {type(model).__name__}."
        )
    kinds = (DistributedDataParallel, Replicated, FSDPModule)
    reducers: dict[str, Any] = {p: m for p, m in model.named_modules() if isinstance(m, kinds)}
    if not reducers:
        raise ConfigError(_why_nothing_reduces(model))
    groups = _find_groups(reducers.values())
    alone = bool(groups) and all(group.size() == 1 for group in groups)
    try:
        check_choice("gradients", gradients, ("groups", "none"))
        check_choice("weights", weights, ("row", "none"))
        check_choice("sums", sums, (*BUFFERS, "none"))
        _check_sums(reducers, sums, gradients)
        _check_model(reducers, gradients != "none" and not alone, weights != "none")
        if monitor is not None and not isinstance(monitor, Monitor):
            raise ConfigError(f"monitor must be a fp8pass.Monitor, got {type(monitor).__name__}.")
        skip = checked_patterns("skip", skip)
    except ConfigError as error:
        _check_ranks_agree(groups, f"refused: {error}")
        raise
    arguments = f"gradients={gradients!r}, weights={weights!r}, skip={skip!r}, sums={sums!r}"
    _check_ranks_agree(groups, arguments)
    if alone:
        log.info("compress has no effect, because there is only one rank.")
        return Compression()
    of_gradients, of_weights = Traffic(), Traffic()
    local = None if sums == "none" else LocalSums(moment_format(sums, signed=True))
    modules = tuple(reducers) if gradients != "none" else ()
    for path in modules:  # before weights are changed: this may raise an error
        _replace_reduction(path, reducers[path], GradientSums(of_gradients, monitor, path), local)
    layers = gather_quantized_weights(model, skip, of_weights) if weights != "none" else ()
    _COMPRESSED.update(reducers.values())
    return Compression(modules, layers, of_gradients, of_weights, local)


def _check_sums(reducers: dict[str, nn.Module], sums: str, gradients: str) -> None:
    if sums == "none":
        return
    if gradients == "none":
        raise ConfigError("sums needs compressed gradients: leave out gradients='none'.")
    if any(isinstance(module, Replicated) for module in reducers.values()):
        raise ConfigError("sums supports DistributedDataParallel and fully_shard, not replicate.")


def _check_model(reducers: dict[str, nn.Module], gradients: bool, weights: bool) -> None:
    if done := [path for path, module in reducers.items() if module in _COMPRESSED]:
        raise ConfigError(
            f"{done[0] or 'The model'} is compressed already: call compress only once, with the "
            "outermost module."
        )
    for path, module in reducers.items():
        if gradients and (reason := _why_not(module)):
            raise ConfigError(f"Gradients of {path or 'the model'} cannot be compressed: {reason}")
    shards = [module for module in reducers.values() if isinstance(module, FSDPModule)]
    if weights and any(map(fsdp_has_run, shards)):
        raise ConfigError(f"Weights cannot be compressed: {TOO_LATE}")


def _check_ranks_agree(groups: Iterable[dist.ProcessGroup], arguments: str) -> None:
    """Raise ConfigError on all ranks if their arguments differ, because training would block.

    A rank with invalid arguments also calls this function, because the other ranks wait for it.
    """
    found = {arguments}
    with _warn_after_waiting():
        for group in groups:  # each gather also sends the arguments that earlier gathers received
            received: list[set[str]] = [set()] * group.size()
            dist.all_gather_object(received, found, group=group)
            found = set().union(*received)
    if len(found) > 1:
        raise ConfigError(
            f"Ranks called compress with different arguments: {' and '.join(sorted(found))}. Pass "
            "the same arguments on every rank."
        )


@contextmanager
def _warn_after_waiting() -> Iterator[None]:
    """Warn if the code in this context waits long, because PyTorch's timeout takes minutes."""
    text = "compress has waited %d s for other ranks: call it on every rank."
    timer = threading.Timer(PATIENCE_S, log.warning, (text, PATIENCE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _find_groups(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """Return the process groups of the first distributed module, one for each mesh dimension."""
    for module in modules:
        if isinstance(module, DistributedDataParallel | Replicated):
            return [_find_group(module)]
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                return [mesh.get_group(i) for i in range(mesh.ndim)]
    return []


def _find_group(module: DistributedDataParallel | Replicated) -> dist.ProcessGroup:
    return find_replicas(module) if isinstance(module, Replicated) else module.process_group


def _why_nothing_reduces(model: nn.Module) -> str:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return (
            "compress does not support FullyShardedDataParallel (FSDP1), which wraps this model: "
            "shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead."
        )
    return (
        f"No module of this {type(model).__name__} reduces gradients over ranks. Apply "
        "DistributedDataParallel or torch.distributed.fsdp.fully_shard first, and pass the result "
        "to compress (with a Trainer its model_wrapped, with Lightning trainer.model, with "
        "accelerate the result of prepare)."
    )


def _why_not(module: nn.Module) -> str | None:
    """Return why a module's reduction cannot be replaced, and what to do."""
    if isinstance(module, Replicated) and replicas_have_begun(module):
        return TOO_LATE
    if isinstance(module, FSDPModule) and has_all_reduce_hook(module):
        return (
            "set_all_reduce_hook was called, and compress uses this hook. Remove the call, or pass "
            "gradients='none'."
        )
    if any(getattr(each, "sparse", False) for each in module.modules()):
        return "an embedding has sparse gradients: create it with sparse=False."
    return None


def _replace_reduction(
    path: str, module: nn.Module, sums: GradientSums, local: LocalSums | None
) -> None:
    try:
        if isinstance(module, DistributedDataParallel | Replicated):
            module.register_comm_hook(DDPReduction(_find_group(module), sums, local), _reduce)
            if local is not None:
                assert isinstance(module, DistributedDataParallel)
                local.watch_ddp(module)
        else:
            assert isinstance(module, FSDPModule)
            scatter: Any = FSDPReduceScatter(sums)
            module.set_custom_reduce_scatter(scatter)
            replace_all_reduce(module, sums.all_reduce)
            if local is not None:
                local.watch_fsdp(module)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Gradients of {path or 'the model'} cannot be compressed, because PyTorch raised an "
            f"error ({error}). Remove other reductions (register_comm_hook, DDP's "
            "mixed_precision), and call fully_shard for the parameters of each device mesh "
            "separately."
        ) from error


class FSDPReduceScatter:
    """FSDP2's reduce-scatter of gradients, in FP8, on the stream that FSDP2 chooses."""

    def __init__(self, sums: GradientSums) -> None:
        self.sums = sums

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer to which FSDP2 copies gradients."""
        return GradientBuffer.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        assert isinstance(input_tensor, GradientBuffer)
        assert isinstance(output_tensor, GradientBuffer)
        output_tensor.shapes = input_tensor.shapes
        sizes, terms = input_tensor.compute_sizes(group.size()), input_tensor.plain()
        factor = find_factor(op, group.size())
        if factor is None:
            raise RuntimeError(
                f"Compressed gradients cannot be reduced by {op}. Use a sum or a mean, or "
                "compress(model, gradients='none')."
            )
        self.sums.reduce_scatter(output_tensor.plain(), terms, sizes, group, factor)


# The hook has no annotations: DDP compares them with classes, but annotations in this module are
# strings. The hook is a module-level function, because a copied DDP finds the hook by its name.
def _reduce(state, bucket):  # type: ignore[no-untyped-def]
    return state.reduce(bucket)


class DDPReduction:
    """DDP's all-reduce of a bucket of gradients, in FP8, concurrently with the backward.

    Copies and pickles of a DDP contain an empty instance, and use PyTorch's own reduction.
    """

    def __init__(self, group: Any, sums: GradientSums, local: LocalSums | None = None) -> None:
        self.group, self.sums, self.local = group, sums, local
        self.stream: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out process groups and streams, which belong to this process."""
        return {"group": None, "sums": None, "local": None, "stream": None}

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        x = bucket.buffer()
        devices = [x.device] if x.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        if self.local is not None:
            self.local.add_to_bucket(bucket)
        with self._use_side_stream(x):
            sizes = tuple(gradient.numel() for gradient in bucket.gradients())
            self.sums.all_reduce(x, sizes, self.group, 1 / self.group.size())
            future.set_result(x)
        return future

    def _use_side_stream(self, x: Tensor) -> AbstractContextManager[Any]:
        if not x.is_cuda:
            return nullcontext()
        if self.stream is None:
            self.stream = torch.cuda.Stream(x.device)
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        x.record_stream(self.stream)
        return torch.cuda.stream(self.stream)
