"""Codes of trained weights, made once for all micro-batches of a step (TE's `is_first_microbatch`).

    with fp8pass.same_weights():
        for batch in micro_batches:
            (loss(model, batch) / len(micro_batches)).backward()
    optimizer.step()

Nobody can tell whether a weight has changed: `p.data.add_(...)` and kernels of one's own leave no
trace. So codes are kept where somebody says that weights stay the same, and nowhere else; and even
there not beyond what leaves a trace: an in-place operator, other memory, an optimizer's step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8pass import compat
from fp8pass.weights.quantized_parameter import coded


class Trace(NamedTuple):
    """What is another after any change of a weight that leaves a trace."""

    memory: compat.StorageWeakRef
    version: int
    dtype: torch.dtype
    layout: Hashable


class Kept(NamedTuple):
    """Codes [M, K] and scales [M, 1] of a weight, and what tells whether they are still its."""

    trace: Trace
    codes: Tensor
    scales: Tensor


@dataclass
class _Kept:
    """The codes that are kept, by the identity of their weights.

    Attributes:
        contexts: how many are open that say that weights stay the same.
        in_place: what was last written where CUDA graphs read a weight's codes.
    """

    contexts: int = 0
    by_weight: dict[int, Kept] = field(default_factory=dict)
    in_place: dict[int, Kept] = field(default_factory=dict)


_kept = _Kept()


@contextmanager
def same_weights() -> Iterator[None]:
    """A context in which weights stay the same, so that their codes are made once.

        model.compile(backend="fp8pass", options={"weight_codes": "8GiB"})
        ...
        with fp8pass.same_weights():
            for batch in micro_batches:
                (model(**batch).loss / len(micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    The forwards and backwards in it take the same codes, in all graphs that are compiled with the
    option `weight_codes`; no number changes by that. At its end they are freed, but for those that
    CUDA graphs read (`mode="reduce-overhead"`), which need them in one place. Outside of it codes
    are made in every run of a graph.

    Weights that change all the same are coded anew if PyTorch can know: by in-place operators
    (`optimizer.step()`, `load_state_dict`, `weight.copy_`), or because their memory is another one
    (`model.to`, `weight.data = ...`). After `weight.data.copy_(...)`, or a kernel that writes to a
    weight, leave the context before the next forward. Codes of weights that FSDP gathers are made
    in every run: a gather leaves no trace.
    """
    hook = register_optimizer_step_post_hook(forget)
    _kept.contexts += 1
    try:
        yield
    finally:
        hook.remove()
        _kept.contexts -= 1
        if not _kept.contexts:
            forget()


def forget(*_: Any) -> None:
    """Have codes made anew: weights have changed, which may have left no trace in these."""
    _kept.by_weight.clear()


def codes_of(weights: Sequence[Tensor], *, in_place: bool = False) -> list[Tensor]:
    """Codes and scales of weights, one after the other; those that are not kept made at once.

    With `in_place` those of a weight are always in the same memory.
    """
    found = [_still_kept(w, in_place=in_place) for w in weights]
    missing = [i for i, kept in enumerate(found) if kept is None]
    for i, new in zip(missing, _new([weights[i] for i in missing]), strict=True):
        found[i] = made = _written_in_place(weights[i], new) if in_place else new
        if _kept.contexts:
            _kept.by_weight[id(weights[i])] = made
    if missing:  # the new ones may take the place of weights that have been freed
        _drop_freed(_kept.by_weight)
    return [x for kept in found if kept for x in (kept.codes, kept.scales)]


def _still_kept(weight: Tensor, *, in_place: bool) -> Kept | None:
    kept = _kept.by_weight.get(id(weight))
    if in_place and kept is not _kept.in_place.get(id(weight)):
        return None  # a graph that takes them anywhere had them made
    return kept if kept and kept.trace == _trace(weight) else None


def _trace(weight: Tensor) -> Trace:
    layout = weight.storage_offset(), weight.shape, weight.stride()
    return Trace(compat.weak_storage(weight), compat.version_of(weight), weight.dtype, layout)


def _new(weights: Sequence[Tensor]) -> list[Kept]:
    """New codes, by one launch for all weights of a dtype on a device."""
    found: dict[int, Kept] = {}
    together: dict[Hashable, list[int]] = {}
    for i, weight in enumerate(weights):
        together.setdefault((weight.device, weight.dtype), []).append(i)
    with torch.inference_mode(False):  # they outlive it
        for some in together.values():
            parts = coded([weights[i].detach() for i in some], torch.bfloat16)
            for i, (codes, scales) in zip(some, parts, strict=True):
                found[i] = Kept(_trace(weights[i]), codes, scales)
    return [found[i] for i in range(len(weights))]


def _written_in_place(weight: Tensor, new: Kept) -> Kept:
    """New codes of a weight, where its codes were before."""
    place = _kept.in_place.get(id(weight))
    if place is None or _differ(place.codes, new.codes):
        written = _in_own_memory(new)
    else:
        same = place.trace == new.trace
        for old, data in ((place.codes, new.codes), (place.scales, new.scales)):
            # A backward that waits for codes of the same weights may go on; one that waits for
            # codes of others is told, as it is where PyTorch keeps a weight.
            (old.data if same else old).copy_(data)
        written = Kept(new.trace, place.codes, place.scales)
    _kept.in_place[id(weight)] = written
    return written


def _drop_freed(kept: dict[int, Kept]) -> None:
    """Drop the codes of weights that are no more."""
    for i, codes in [*kept.items()]:
        if codes.trace.memory.expired():
            del kept[i]


def _differ(codes: Tensor, others: Tensor) -> bool:
    return (codes.shape, codes.device) != (others.shape, others.device)


def _in_own_memory(new: Kept) -> Kept:
    """A copy of what one launch wrote beside others' codes, which count their versions together."""
    _drop_freed(_kept.in_place)
    with torch.inference_mode(False):  # it outlives it
        return Kept(new.trace, new.codes.clone(), new.scales.clone())
