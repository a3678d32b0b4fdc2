"""`compress`: gradients and weights that cross the wire in 8 bits, for DDP and FSDP2."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8pass.compat.fsdp import GradientBuffer, factor_of
from fp8pass.compat.replicate import Replicated, replicas_have_begun, replicas_of
from fp8pass.config import ConfigError, check_choice, checked_patterns
from fp8pass.dialect.formats import E4M3
from fp8pass.distributed.collectives import GroupSums, Sums, Traffic
from fp8pass.distributed.scaled_sums import ScaledSums
from fp8pass.distributed.weights import gather_codes, why_too_late
from fp8pass.stability.monitor import Monitor
from fp8pass.stability.monitor.findings import SENT
from fp8pass.stability.monitor.statistics import TensorName, measure

log = logging.getLogger("fp8pass")

SUMS: dict[str, type[Sums]] = {"groups": GroupSums, "scaled": ScaledSums}
GRADIENTS = (*SUMS, "none")
WEIGHTS = ("row", "none")
PATIENCE_S = 30  # before a line says that other ranks are waited for
_COMPRESSED: WeakKeyDictionary[nn.Module, Compression] = WeakKeyDictionary()


@dataclass(frozen=True)
class Compression:
    """What `compress` has done to a model.

    Attributes:
        modules: paths of the modules that reduce compressed gradients; '' is the model itself.
        layers: paths of the linear layers whose weights are gathered in codes.
        gradients: the gradients that this rank has sent since.
        weights: of these layers, the same.
    """

    modules: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    gradients: Traffic = field(default_factory=Traffic)
    weights: Traffic = field(default_factory=Traffic)


def compress(
    model: nn.Module,
    gradients: str = "groups",
    weights: str = "row",
    skip: str | Sequence[str] = (),
    monitor: Monitor | None = None,
) -> Compression:
    """Have the ranks that train `model` send each other gradients and weights in 8 bits.

        fully_shard(model)                     # or DistributedDataParallel(model)
        fp8pass.distributed.compress(model)

    Call it once, on every rank, after all of the model is distributed and before the first
    forward. One rank alone sends nothing, and trains as before. Gradients are rounded to E4M3 in
    groups of 128 that share a scale, and added up in fp32 (AGoQ 5), with 0.51 times the bytes of
    bf16. Hybrid sharding sends sums between replicas as before. FSDP2 gathers the weights of linear
    layers in E4M3 with a scale for each row, half the bytes, on the wire and on the GPU: the bits
    that compiled code multiplies with anyway. It gathers output heads, embeddings and everything
    else as before. A copy of a DistributedDataParallel (copy.deepcopy, AveragedModel) reduces as
    PyTorch does, unless compress gets it, too.

    Args:
        model: a DistributedDataParallel, a module that `replicate` was applied to, or one that
            `fully_shard` was applied to, or to whose submodules it was.
        gradients: `groups`; `scaled`, which NCCL adds up in FP8 with a scale that all ranks share
            and a factor µ that leaves room for the sum (FP8-LM 2.1): fewer bytes still, and errors
            that grow with the number of ranks; or `none`: as they were.
        weights: `row`, or `none`. DDP gathers none.
        skip: paths or patterns of layers whose weights are gathered as they were, as in
            `Config.skip`: those that the compiled model leaves in high precision, too.
        monitor: measures what this rank sends of gradients, in the steps that it samples.

    Raises:
        ConfigError: the model is not distributed in one of these ways, is compressed already,
            reduces gradients in a way of its own, or ranks say different things.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"compress takes a distributed module, got {type(model).__name__}.")
    reducers = dict(_reducers(model.named_modules()))
    if not reducers:
        raise ConfigError(_why_nothing_reduces(model))
    groups = _groups(reducers.values())
    alone = bool(groups) and all(group.size() == 1 for group in groups)
    try:
        check_choice("gradients", gradients, GRADIENTS)
        check_choice("weights", weights, WEIGHTS)
        _check_model(reducers, gradients != "none" and not alone, weights != "none")
        if monitor is not None and not isinstance(monitor, Monitor):
            raise ConfigError(f"monitor must be a fp8pass.Monitor, got {type(monitor).__name__}.")
        skip = checked_patterns("skip", skip)
    except ConfigError as error:
        _agree(groups, f"refused: {error}")
        raise
    _agree(groups, f"gradients={gradients!r}, weights={weights!r}, skip={skip!r}")
    if alone:
        log.info("compress: there is one rank, so nothing is sent.")
        return Compression()
    of_gradients, of_weights = Traffic(), Traffic()
    modules = tuple(reducers) if gradients != "none" else ()
    for path in modules:  # before weights: PyTorch may refuse
        watch = GradientWatch(monitor, path) if monitor else None
        _compress(path, reducers[path], SUMS[gradients](of_gradients, watch))
    layers = gather_codes(model, skip, of_weights) if weights != "none" else ()
    compression = Compression(modules, layers, of_gradients, of_weights)
    _COMPRESSED.update(dict.fromkeys(reducers.values(), compression))
    return compression


def _check_model(reducers: dict[str, nn.Module], gradients: bool, weights: bool) -> None:
    """Raise ConfigError if these modules cannot send gradients, or weights, in 8 bits."""
    if done := [path for path, module in reducers.items() if module in _COMPRESSED]:
        raise ConfigError(
            f"{done[0] or 'The model'} is compressed already: call compress once, with the "
            "outermost module."
        )
    for path, module in reducers.items():
        if gradients and (reason := _why_not(module)):
            raise ConfigError(f"Gradients of {path or 'the model'} cannot be compressed: {reason}")
    if weights and (reason := why_too_late(reducers.values())):
        raise ConfigError(f"Weights cannot be compressed: {reason}")


def _agree(groups: Iterable[dist.ProcessGroup], said: str) -> None:
    """Raise ConfigError, on all ranks, if they would wait for each other's bytes in vain.

    A rank that refuses tells the others why, who would wait for it, too.
    """
    all_said = {said}
    with _said_to_wait():
        for group in groups:  # each of a mesh's dimensions hears what was said in those before
            heard: list[set[str]] = [set()] * group.size()
            dist.all_gather_object(heard, all_said, group=group)
            all_said = set().union(*heard)
    if len(all_said) > 1:
        raise ConfigError(
            f"Ranks disagree about compress: {' on some, '.join(sorted(all_said))} on others. Say "
            "the same on every rank."
        )


@contextmanager
def _said_to_wait() -> Iterator[None]:
    """One line if other ranks are long in coming: PyTorch itself waits minutes for its timeout."""
    text = "compress has waited %d s for other ranks, all of which have to call it."
    timer = threading.Timer(PATIENCE_S, log.warning, (text, PATIENCE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _groups(modules: Iterable[nn.Module]) -> list[dist.ProcessGroup]:
    """The ranks that have a copy or a part of the first module that says so, by dimension."""
    for module in modules:
        if isinstance(module, DistributedDataParallel | Replicated):
            return [_replicas(module)]
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                return [mesh.get_group(i) for i in range(mesh.ndim)]
    return []


def _replicas(module: DistributedDataParallel | Replicated) -> dist.ProcessGroup:
    """The ranks that have a copy of a module."""
    return replicas_of(module) if isinstance(module, Replicated) else module.process_group


def _reducers(modules: Iterable[tuple[str, nn.Module]]) -> Iterable[tuple[str, nn.Module]]:
    kinds = (DistributedDataParallel, Replicated, FSDPModule)
    return ((path, module) for path, module in modules if isinstance(module, kinds))


def _why_nothing_reduces(model: nn.Module) -> str:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return (
            "compress takes models sharded by torch.distributed.fsdp.fully_shard (FSDP2), and this "
            "one is wrapped in FullyShardedDataParallel: shard it with fully_shard instead."
        )
    return (
        f"No module of this {type(model).__name__} reduces gradients over ranks: apply "
        "DistributedDataParallel or torch.distributed.fsdp.fully_shard before compress. If the "
        "model is wrapped already, give compress the wrapper (Trainer's model_wrapped, Lightning's "
        "trainer.model, the result of accelerate's prepare)."
    )


def _why_not(module: nn.Module) -> str | None:
    """Why a module's reduction cannot be replaced, and what to do; None if it can."""
    if isinstance(module, Replicated) and replicas_have_begun(module):
        return "the model has run already: call compress before its first forward."
    if isinstance(module, FSDPModule) and not any(map(_is_scattered, module.parameters())):
        return (
            "none is scattered: parameters are whole on every rank (replicate of FSDP2), or on a "
            "mesh of which one dimension has copies and the other one rank. For copies use "
            "DistributedDataParallel."
        )
    if any(getattr(each, "sparse", False) for each in module.modules()):
        return "an embedding has sparse ones: make it with sparse=False."
    return None


def _is_scattered(parameter: Tensor) -> bool:
    """Whether ranks have different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return True  # nobody knows: the module is in the middle of a step
    placements = enumerate(parameter.placements)
    return any(not p.is_replicate() and parameter.device_mesh.size(i) > 1 for i, p in placements)


def _compress(path: str, module: nn.Module, sums: Sums) -> None:
    try:
        if isinstance(module, DistributedDataParallel | Replicated):
            module.register_comm_hook(Hook(_replicas(module), sums), _reduce)
        else:
            assert isinstance(module, FSDPModule)
            scatter: Any = ReduceScatter(sums)
            module.set_custom_reduce_scatter(scatter)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Gradients of {path or 'the model'} cannot be compressed, because PyTorch refused: "
            f"{error}. That is so where another reduction is set (register_comm_hook, DDP's "
            "mixed_precision: leave it out), and where parameters of one fully_shard lie on "
            "several device meshes (shard those of each mesh by themselves)."
        ) from error


@dataclass(frozen=True)
class GradientWatch:
    """Measures for a monitor what a module's gradients lose on the wire."""

    monitor: Monitor
    path: str

    @property
    def looks(self) -> bool:
        """Whether this step is sampled."""
        return self.monitor.sampling

    def __call__(self, rows: Tensor, scales: Tensor, group_size: int, mu: Tensor | None) -> None:
        """Record rows [R, K], coded in groups of `group_size` with the scales [R, K / G]."""
        name = TensorName("", SENT, f"1×{group_size}", E4M3.name, rows.dtype)
        self.monitor.record(self.path, name, measure(rows, scales, E4M3, group_size, mu))


class ReduceScatter:
    """FSDP2's reduction of gradients, in 8 bits. It runs on the stream that FSDP2 gives it."""

    def __init__(self, sums: Sums) -> None:
        self.sums = sums

    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP2's."""
        return GradientBuffer.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `input_tensor` over `group` into `output_tensor`.

        Raises:
            RuntimeError: FSDP2 filled the input in a way that shows no parameters.
        """
        assert isinstance(input_tensor, GradientBuffer)
        sizes, terms = input_tensor.sizes_of(group.size()), input_tensor.plain()
        factor = factor_of(op, group.size())
        if factor is None:
            raise RuntimeError(f"Compressed gradients are summed or averaged, not reduced by {op}.")
        self.sums.reduce_scatter(output_tensor, terms, sizes, group, factor)


# DDP compares a hook's annotations with classes, and ours are strings; by its name copies find it.
def _reduce(state, bucket):  # type: ignore[no-untyped-def]
    return state.reduce(bucket)


class Hook:
    """DDP's reduction of a bucket of gradients, in 8 bits, beside the backward on a GPU.

    Copies and pickles of a DDP have a reduction of PyTorch's own: with them go empty hooks.
    """

    def __init__(self, group: Any, sums: Sums) -> None:
        self.group, self.sums = group, sums
        self.stream: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: process groups and streams are this process's."""
        return {"group": None, "sums": None, "stream": None}

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The mean over ranks of a bucket; DDP waits for the future."""
        x = bucket.buffer()
        devices = [x.device] if x.is_cuda else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        with self._beside(x):
            sizes = tuple(gradient.numel() for gradient in bucket.gradients())
            self.sums.all_reduce(x, sizes, self.group, 1 / self.group.size(), bucket.index())
            future.set_result(x)
        return future

    def _beside(self, x: Tensor) -> AbstractContextManager[Any]:
        """A stream of its own, which begins when `x` is there."""
        if not x.is_cuda:
            return nullcontext()
        if self.stream is None:
            self.stream = torch.cuda.Stream(x.device)
        self.stream.wait_stream(torch.cuda.current_stream(x.device))
        x.record_stream(self.stream)
        return torch.cuda.stream(self.stream)
