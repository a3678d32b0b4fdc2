"""Weights that FSDP2 gathers in codes: E4M3, a scale for each row (LLMQ 3.2, FP8 weight gather).

A shard holds whole rows, so that each rank codes its own, without asking others for the largest
magnitude. What FSDP2 gathers stays in codes on every rank: compiled code takes them as they are for
the forward's GEMM, which would code a BF16 weight by row into the same bits. The backward decodes
them. Shards, their gradients and state dicts are the plain tensors that they were.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8pass import compat, hardware
from fp8pass.compat.fsdp import (
    fsdp_has_run,
    gathered_parameters,
    shard_of,
    writing_to_what_autograd_saved,
)
from fp8pass.distributed.coded_layers import reasons_against_codes
from fp8pass.distributed.collectives import Traffic
from fp8pass.graph.names import clean_path, first_reasons
from fp8pass.weights.quantized_parameter import CodedWeight, coded, divided

log = logging.getLogger("fp8pass")


class Parcel:
    """Codes and scales of matrices [M, K] in one tensor, so that they cross the wire as one.

    Attributes:
        memory: uint8 [sum of M·K + sum of 4 M]: the codes of all, then the scales of all.
        sizes: bytes of the codes of each, and of the scales of each, in their order.
        room: codes and scales in it.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        codes, scales = [m * k for m, k in shapes], [4 * m for m, _ in shapes]
        self.sizes = (*codes, *scales)
        self.memory = torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)
        of_codes, of_scales = self.memory.split([sum(codes), sum(scales)])
        self.room = divided(
            of_codes.view(torch.float8_e4m3fn), of_scales.view(torch.float32), shapes
        )


class Layout(NamedTuple):
    """What shards that share memory have in common.

    Their dtype, too: modules code weights of several one after the other, but gather them together.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(shards: Sequence[Tensor]) -> Layout:
        """That of these."""
        return Layout(shards[0].device, shards[0].dtype, tuple(x.shape for x in shards))


class Parcels:
    """What modules with weights of the same sizes send, one after the other, from one memory.

    That saves the CPU what it takes to allocate memory and to divide it up, for every layer.
    """

    def __init__(self) -> None:
        self._users: Counter[Layout] = Counter()
        self._parcels: dict[tuple[Layout, int], Parcel] = {}

    def expect(self, layout: Layout) -> None:
        """Announce a module with such shards."""
        self._users[layout] += 1

    def of(self, layout: Layout) -> Parcel:
        """Memory that the current stream may write the codes of such shards to.

        What it has read of codes there before stays right: a stream does one thing after the other.
        """
        key = layout, compat.stream_of(layout.device)
        if (found := self._parcels.get(key)) is None:
            found = Parcel(layout.shapes, layout.device)
            if self._users[layout] > 1:  # else it would only hold memory between gathers
                self._parcels[key] = found
        return found


class Gathering:
    """How FSDP2 gathers the weights of one of its modules: its extension for each of them.

    The first, for which FSDP2 asks before the others, sends the codes of all and takes apart what
    came in. The others send nothing: FSDP2 takes the CPU as long for each tensor as a kernel.

    Attributes:
        layers: whose weights they are, in FSDP2's order.
        traffic: counts what is sent.
        parcels: has what is sent.
        whole: the gathered codes of all, in memory that FSDP2 frees and allocates; None before the
            first time.
    """

    def __init__(self, layers: list[nn.Linear], traffic: Traffic, parcels: Parcels) -> None:
        self.layers, self.traffic, self.parcels = layers, traffic, parcels
        self.whole: Parcel | None = None
        self._shapes = [y.weight.shape for y in layers]
        layout = Layout.of(self._shards())
        self._ranks = self._shapes[0][0] // layout.shapes[0][0]
        parcels.expect(layout)
        self._layout: Layout | None = None

    def _shards(self) -> list[Tensor]:
        return [shard_of(cast(Any, y.weight)) for y in self.layers]

    def attach(self) -> None:
        """Answer for the shards, unless FSDP2 has put whole weights in their place."""
        for i, layer in enumerate(self.layers):
            weight: Any = layer.weight
            shard: Any = shard_of(weight) if isinstance(weight, DTensor) else None
            if shard is not None and not hasattr(shard, "fsdp_pre_all_gather"):
                shard.fsdp_pre_all_gather = self._before(i)
                shard.fsdp_post_all_gather = self._after(i)
                self._layout = None

    def _before(self, i: int) -> Any:
        """What gives what this rank sends for weight `i`, and the dtype of its values."""

        def before(
            mesh: Any, size: Any, stride: Any, module: nn.Linear, mp_policy: Any
        ) -> tuple[tuple[Tensor, ...], torch.dtype]:
            dtype = mp_policy.param_dtype or module.weight.dtype
            return self._sent(dtype, mesh.size() - 1) if i == 0 else (), dtype

        # FSDP2 asks for it each time, which takes longer than all of the rest.
        before.__signature__ = inspect.signature(before)  # type: ignore[attr-defined]
        return before

    def _sent(self, dtype: torch.dtype, copies: int) -> tuple[Tensor]:
        shards = self._shards()
        if self._layout is None:  # whoever moved the model gave it other shards
            self._layout = Layout.of(shards)
        parcel = self.parcels.of(self._layout)
        self.traffic.add(parcel.room.codes.numel(), parcel.memory.numel(), copies)
        coded(shards, dtype, parcel.room)
        return (parcel.memory,)

    def _after(self, i: int) -> Any:
        """What makes weight `i` of what all ranks sent, in the same memory every time."""

        def after(
            gathered: tuple[Tensor, ...], dtype: torch.dtype, _: Any, *, out: Any = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            if i == 0:
                self._take_apart(gathered[0])
            if out is not None:
                return None
            assert self.whole is not None
            owned = (self.whole.memory,) if i == 0 else ()
            return CodedWeight(*self.whole.room.parts[i], dtype), owned

        return after

    def _take_apart(self, gathered: Tensor) -> None:
        """Fill `whole` with what all ranks sent, uint8 [ranks · B], and free that.

        FSDP2 allocates it again, as it has for the matrices.
        """
        if self.whole is None:
            self.whole = Parcel(self._shapes, gathered.device)
        take_apart(gathered.view(self._ranks, -1), self.whole)
        gathered.untyped_storage().resize_(0)


def take_apart(gathered: Tensor, whole: Parcel) -> None:
    """Copy the parcels of all ranks, uint8 [ranks, B], to the memory of a whole one."""
    if hardware.why_no_triton_kernels(gathered.device) is None:
        return _kernels().take_apart(gathered, whole.memory, whole.sizes)
    ranks = len(gathered)
    pieces = [x.view(ranks, -1) for x in whole.memory.split(whole.sizes)]
    with torch.no_grad(), writing_to_what_autograd_saved(pieces):
        sizes = [x.shape[1] for x in pieces]
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=pieces)


def gather_codes(model: nn.Module, skip: tuple[str, ...], traffic: Traffic) -> tuple[str, ...]:
    """Have FSDP2 gather the weights of linear layers in codes; the paths of these layers.

    Those that `reasons_against_codes` has nothing against.
    """
    reasons = reasons_against_codes(model, skip)
    gatherings: dict[nn.Module, list[Gathering]] = {}
    parcels = Parcels()
    # Modules that are sharded together, fully_shard([a, b]), are gathered together.
    made: dict[tuple[int, torch.dtype], Gathering] = {}
    for module in model.modules():
        together: dict[tuple[int, torch.dtype], list[nn.Linear]] = {}
        for each in gathered_parameters(module) if isinstance(module, FSDPModule) else ():
            layer = each.module
            if isinstance(layer, nn.Linear) and each.name == "weight" and not reasons[layer]:
                together.setdefault((each.group, layer.weight.dtype), []).append(layer)
        for key, layers in together.items():
            if key not in made:
                made[key] = Gathering(layers, traffic, parcels)
            gatherings.setdefault(module, []).append(made[key])
    # FSDP2 begins to gather where a forward enters it: at the whole model, or at one of its parts.
    if gatherings and isinstance(model, FSDPModule):
        gatherings[model] = [each for group in gatherings.values() for each in group]
    for module, group in gatherings.items():
        _attach_to_new_shards(module, group)
    return _said(model, reasons)


def _said(model: nn.Module, reasons: dict[nn.Linear, str]) -> tuple[str, ...]:
    """The paths of layers that nothing is said against, after a line about them and the others."""
    paths = {m: clean_path(path) for path, m in model.named_modules() if m in reasons}
    coded = tuple(path for layer, path in paths.items() if not reasons[layer])
    others = {path: reasons[layer] for layer, path in paths.items() if reasons[layer]}
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        log.info(
            "compress: FSDP2 gathers the weights of %d of %d linear layers in codes%s",
            *(len(coded), len(reasons)),
            "".join(f"; {line}" for line in first_reasons(others, " does not: ")),
        )
    return coded


def _attach_to_new_shards(module: nn.Module, gatherings: list[Gathering]) -> None:
    """Attach now, when other shards are loaded, and before FSDP2 gathers: whoever moves a model
    gives it others, too.
    """

    def attach(*_: Any) -> None:
        for gathering in gatherings:
            gathering.attach()

    attach()
    module.register_load_state_dict_post_hook(attach)
    module.register_forward_pre_hook(torch.compiler.disable(attach), prepend=True)


@functools.cache
def _kernels() -> Any:
    """The kernels, which can only be imported where there is Triton."""
    from fp8pass.distributed import wire_kernels

    return wire_kernels


def why_too_late(modules: Iterable[nn.Module]) -> str:
    """Why weights cannot be gathered in codes any more; '' if they can."""
    shards = (m for m in modules if isinstance(m, FSDPModule))
    has_run = any(map(fsdp_has_run, shards))
    return "the model has run already: call compress before its first forward." if has_run else ""
