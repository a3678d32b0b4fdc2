"""Weights, optimizer states and sums of gradients in host memory, and staging buffers.

`offload_weights` moves weights of linear layers to host memory. The device has only their FP8 data,
which graphs take as inputs (`weights/quantized_parameter.py`). The optimizer requantizes the
weights once a step (paper LLMQ, section 3).

Pieces of offloaded tensors pass through staging buffers on the GPU, on separate streams (double
buffering; LLMQ, section 3.1). Kernels that read host memory directly are not implemented: in LLMQ's
measurements they are slower on an RTX 5060 Ti and an RTX 4090, but faster on an L40S.

The computations of a piece have a high priority. Otherwise they would not start before a GEMM of
the model ends. The second kernel of a piece (requantization) has its own stream.

    copies in    | piece 0 | piece 1 | piece 2 |         |
    computation            | piece 0 | piece 1 | piece 2 |
    second kernel               | piece 0 | piece 1 | piece 2 |
    copies out                       | piece 0 | piece 1 | piece 2 |

The CPU never waits for copies. If too many bytes of gradients wait for their update, the model's
stream waits until the oldest gradients have been used.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.config import Pattern
from fp8pass.graph.names import common_reasons
from fp8pass.optim.group_options import state_bytes
from fp8pass.optim.kernel import CHUNK
from fp8pass.optim.shards import (
    assign_sharded,
    find_quantized,
    gather_extension,
    is_sharded,
    local,
    set_gather_extension,
    with_local,
)
from fp8pass.option_checks import ConfigError, checked_patterns
from fp8pass.runtime.arena import Arena, available
from fp8pass.weights.choice import choose_layers, why_not_plain
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows, save_weights

log = logging.getLogger("fp8pass")

# Number of elements. Models have many smaller parameters, such as norms and biases, but these need
# little memory.
SMALLEST_OFFLOADED = 1 << 16
# Number of staging buffers: one is filled, the second is updated, and the third is emptied.
DEPTH = 3
# Size of a staging buffer. It fits a weight of 4096 × 4096 elements with its states. Launching a
# piece takes the CPU a fifth of the time that the link needs to copy the piece.
STAGED_BYTES = 96 << 20
# Alignment of the tensors in a staging buffer, in bytes.
STAGING_ALIGNMENT = 512
# A weight is not offloaded if its smallest possible piece, which has whole rows and whole chunks,
# has more elements than this number.
LARGEST_PIECE = STAGED_BYTES // 16
# Priorities of the streams for copies in, first kernels, second kernels, and copies out. Streams
# with smaller numbers run first.
PRIORITIES = (0, -1, -1, 0)

Copies = Sequence[tuple[Tensor, Tensor]]  # (source, target)


def is_offloaded(group: Mapping[str, Any], name: str, parameter: Tensor) -> bool:
    """Whether a parameter's states or sums of gradients are in host memory.

    `name` selects "states" or "gradients".
    """
    if (weight := find_quantized(parameter)) is not None:
        if weight.source is None:  # a frozen weight that exists only in FP8
            return False
        if name == "states":  # states are in host memory, like the weight
            return True
    elif not group["offload"]:
        return False
    values = local(parameter)
    has_slices = name != "states" or values.is_contiguous()  # pieces are views of the weights
    return name in group["offload"] and values.numel() >= SMALLEST_OFFLOADED and has_slices


def check_host_memory(groups: Iterable[Mapping[str, Any]]) -> None:
    offloaded = [(g, p) for g in groups for p in g["params"] if is_offloaded(g, "states", p)]
    needed, found = sum(state_bytes(g, local(p)) for g, p in offloaded), available()
    if found is not None and needed > found:
        raise ConfigError(
            f"The optimizer's states need {needed / 2**30:.1f} GiB of host memory, but only "
            f"{found / 2**30:.1f} GiB are available. Choose smaller states (preset, first_moment, "
            "second_moment, weights), or offload the states of fewer parameter groups."
        )


@dataclass
class InUse:
    """Tensors that updates read. Their memory must not be reused before the event `used`."""

    tensors: list[Tensor]
    gradient_bytes: int
    used: Any = None  # None while more updates that read these tensors may be launched


class Staging:
    """The staging buffers of a device, and the streams that fill, use and empty them.

    At most `most_waiting` bytes of gradients wait for their update. Optimizers set this limit to
    about the gradients of two decoder layers. If the gradients of one layer exceeded the limit, the
    GPU would wait for the CPU.
    """

    def __init__(self, device: torch.device, most_waiting: int) -> None:
        self.device, self.most_waiting = device, most_waiting
        sizes = [STAGED_BYTES] * DEPTH
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        on_gpu = device.type == "cuda"
        self._streams: list[Any] = [
            torch.cuda.Stream(device, priority) if on_gpu else None for priority in PRIORITIES
        ]
        self._into, self._compute, self._finish, self._out = self._streams
        for buffer in self.buffers if on_gpu else ():  # work on the streams may outlive this object
            for stream in self._streams:
                buffer.record_stream(stream)
        self._emptied: list[Any] = [None] * DEPTH
        self._in_use: deque[InUse] = deque()

    def allocate(self, buffer: int, like: Iterable[Tensor]) -> list[Tensor]:
        """Return views of a buffer, shaped like the tensors in `like`."""
        found, used = [], 0
        for x in like:
            size = x.numel() * x.itemsize
            part = self.buffers[buffer][used : used + size]
            found.append(part.view(x.dtype).view(x.shape))
            used += -(-size // STAGING_ALIGNMENT) * STAGING_ALIGNMENT
        return found

    def begin(self, values: Sequence[Tensor], gradients: Sequence[Tensor] = ()) -> None:
        """Make an update that reads `values` and `gradients` wait for the current stream.

        If more than `most_waiting` bytes of gradients wait for their update, the current stream
        waits for the earlier updates.
        """
        if self._compute is None:
            return
        size = sum(x.numel() * x.itemsize for x in gradients)
        stream = torch.cuda.current_stream(self.device)
        if self._in_use:
            self._in_use[-1].used = self._compute.record_event()
        total = size + sum(each.gradient_bytes for each in self._in_use)
        # The current stream can then reuse the memory of the oldest gradients at once. With
        # record_stream, the memory would be free only after the CPU has observed the end of the
        # computation.
        while total > self.most_waiting and self._in_use:
            oldest = self._in_use.popleft()
            stream.wait_event(oldest.used)
            total -= oldest.gradient_bytes
        self._compute.wait_stream(stream)
        self._in_use.append(InUse([x for x in (*values, *gradients) if x.is_cuda], size))

    def release(self) -> None:
        """Drop references to tensors in use. Their memory stays valid for pending computations."""
        while self._in_use:
            for x in self._in_use.popleft().tensors:
                x.record_stream(self._compute)

    def on_compute_stream(self) -> AbstractContextManager[Any]:
        return _on(self._compute)

    def run(
        self,
        buffer: int,
        into: Copies,
        compute: Callable[[], object],
        out: Copies,
        finish: Callable[[], object] | None = None,
    ) -> None:
        """Launch copies into a buffer, a computation, and copies out of the buffer.

        `finish` launches a second kernel, which overlaps the computation of the next piece.
        """
        if self._emptied[buffer] is not None:
            self._into.wait_event(self._emptied[buffer])
        _copy(into, self._into)
        last = self._into
        for stream, launch in ((self._compute, compute), (self._finish, finish)):
            if launch is not None:
                _wait(stream, last)
                with _on(stream):
                    launch()
                last = stream
        _wait(self._out, last)
        _copy(out, self._out)
        self._emptied[buffer] = None if self._out is None else self._out.record_event()

    def join(self) -> None:
        if self._compute is not None:
            for stream in (self._compute, self._finish):
                torch.cuda.current_stream(self.device).wait_stream(stream)
            self.release()

    def abandon(self) -> None:
        """Block the CPU until all streams are idle, and drop references to the tensors in use."""
        for stream in self._streams:
            if stream is not None:
                stream.synchronize()
        self._in_use.clear()

    def synchronize(self) -> None:
        """Block the CPU until all copies to the host have ended."""
        if self._out is not None:
            self._out.synchronize()


def _copy(pairs: Copies, stream: Any) -> None:
    with _on(stream):
        for source, target in pairs:
            target.copy_(source, non_blocking=stream is not None)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(later: Any, earlier: Any) -> None:
    if later is not None:
        later.wait_stream(earlier)


def largest_piece(bytes_per_element: float, multiple: int) -> int:
    """Return the largest multiple of `multiple` elements that fits into a staging buffer."""
    room = STAGED_BYTES - 16 * STAGING_ALIGNMENT
    return max(1, math.floor(room / bytes_per_element) // multiple) * multiple


def offload_weights(
    model: nn.Module, device: torch.device | str, *, skip: str | Sequence[str] = ()
) -> nn.Module:
    """Move a model to a device, except the weights of its linear layers, which stay in host memory.

        model = LlamaForCausalLM(config).bfloat16()         # in host memory
        fp8pass.optim.offload_weights(model, "cuda")
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=3e-4, offload=("states",))
        model.compile(backend="fp8pass")

    The device has FP8 data of the weights, which the GEMMs of compiled code read. All other
    operators read and write the exact weights. Writes to a part or to a view of a weight raise
    RuntimeError. Call `offload_weights` before creating the optimizer and before compiling.

    Under FSDP2, call `offload_weights` after `fully_shard` and `fp8pass.distributed.compress`. Each
    rank then has the exact values of its shards in host memory, and FSDP2 gathers the FP8 data.

    Args:
        model: a module with BF16 weights, in host memory or on the device; or on the `meta` device,
            if FSDP2 has sharded it. Linear weights on `meta` become zeros. Other parameters and
            buffers on `meta` are not initialized.
        device: the device on which the model trains.
        skip: paths, or patterns with *, of linear layers whose weights move to the device. The
            weights of output heads and of layers that cannot run in FP8 always move to the device.

    Raises:
        ConfigError: no weight can be offloaded, or the device does not exist.
    """
    try:
        device = torch.empty(0, device=device).device  # adds an index, as in cuda:0
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(
            "The second argument of offload_weights must be the device that the model trains on, "
            f"such as 'cuda', got {device!r}: {str(error).splitlines()[0]}"
        ) from None
    layers = layers_to_code(model, checked_patterns("skip", skip))
    arena = Arena(device)
    plain: dict[nn.Linear, nn.Parameter] = {}
    sharded: dict[nn.Linear, nn.Parameter] = {}
    gathers: dict[nn.Linear, dict[str, Any]] = {}
    while layers:  # free each original weight before the next weight is copied
        weight, users = layers.popitem()
        parameter = _quantize_weight(weight, device, arena)
        for layer in users:
            if is_sharded(weight):
                sharded[layer], gathers[layer] = parameter, gather_extension(weight)
                layer.register_state_dict_post_hook(_save_shard)
            else:
                plain[layer] = parameter
                layer.register_state_dict_post_hook(save_weights)
            layer.weight = None  # type: ignore[assignment]
        del weight
    # `_apply` would copy plain weights, but FSDP2 needs its weights there.
    assign_sharded(model, sharded)
    model._apply(partial(_move, device=device))
    for layer, parameter in plain.items():
        layer.weight = parameter
    for layer, extension in gathers.items():  # `_apply` creates new shards
        set_gather_extension(layer.weight, extension)
    return model


def _save_shard(layer: nn.Linear, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook of `state_dict`: save the exact values of an offloaded shard, in host memory."""
    weight = state.get(f"{prefix}weight")
    if weight is not None and find_quantized(weight) is not None:
        read = cast(Callable[[Tensor], Tensor], QuantizedWeight.values_on_host)
        state[f"{prefix}weight"] = with_local(weight, read)


def _move(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device) if x.is_meta else x.to(device)


def layers_to_code(model: nn.Module, skip: tuple[Pattern, ...]) -> dict[Tensor, list[nn.Linear]]:
    """Return the weights that can be offloaded, and the layers that share each weight."""
    layers, reasons = choose_layers(model, skip, _why_not_offloaded)
    for path, why in reasons.items():
        log.info("offload_weights moves the weight of %s to the device: %s.", path, why)
    if not layers:
        listed = "; ".join(common_reasons(reasons))
        raise ConfigError(
            "offload_weights cannot offload any weight: "
            f"{listed or 'the model has no linear layer'}."
        )
    return layers


def _why_not_offloaded(weight: Tensor) -> str:
    if find_quantized(weight) is not None:
        return "it is already quantized or offloaded"
    if is_sharded(weight):
        if not gather_extension(weight):
            return (
                "it is sharded, and FSDP2 does not gather it in FP8; call "
                "fp8pass.distributed.compress(model) before offload_weights. If you did, the log "
                "of compress gives the reason"
            )
    elif why := why_not_plain(weight):
        return why
    elif weight.is_meta:
        return "it is on the meta device; call model.to_empty(device='cpu') first"
    if weight.dtype is not torch.bfloat16:
        return f"it is in {graph.dtype_text(weight.dtype)}; call model.bfloat16() first"
    if math.lcm(CHUNK, weight.shape[-1]) > LARGEST_PIECE:
        return f"its rows of {weight.shape[-1]} elements do not fit into staging buffers"
    return "it is too small" if local(weight).numel() < SMALLEST_OFFLOADED else ""


@torch.no_grad()
def _quantize_weight(weight: Tensor, device: torch.device, arena: Arena) -> nn.Parameter:
    def quantize(values: Tensor) -> Tensor:
        if values.is_meta:
            values = torch.zeros(values.shape, dtype=values.dtype)
        data, scales = quantize_rows(values.to(device), values.dtype)
        quantized = QuantizedWeight(data, scales, values.dtype)
        quantized.source = arena.take(values)
        quantized.mark_quantized()
        return quantized

    found = with_local(weight.detach(), quantize)
    return nn.Parameter(found, requires_grad=weight.requires_grad)
