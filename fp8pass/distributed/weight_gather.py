"""FSDP2 all-gathers of quantized weights: E4M3 with a scale for each row (LLMQ, section 3.2).

A shard consists of whole rows, so each rank quantizes its shard without communication. The FP8 data
is the same as if gathered BF16 weights were quantized. In compiled code, the forward's GEMM reads
the FP8 data, and the backward requantizes it for dgrad. Gradients and state dicts are not
quantized. A shard is quantized for each gather. If `offload_weights` has moved its exact values to
host memory, it is quantized once after each update instead.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fp8pass import compat
from fp8pass.compat.data_parallel import (
    GatheredParameter,
    allow_writes_to_saved,
    gathered_parameters,
    get_shard,
)
from fp8pass.config import Pattern
from fp8pass.distributed.gradient_sums import Traffic
from fp8pass.distributed.wire import load_kernels
from fp8pass.graph import dtype_text
from fp8pass.graph.linear_layers import why_unsuitable_size
from fp8pass.graph.names import clean_path, first_reasons
from fp8pass.weights.choice import find_linears
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows_into, split_rows

log = logging.getLogger("fp8pass")

# Dtypes that the quantization kernel supports.
SHARD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedWeights:
    """FP8 data and scales of several matrices [M, K] in one buffer, which is sent as one tensor.

    `memory`, uint8 [ΣM·K + Σ4·M], has the FP8 data of all matrices, then all fp32 scales. `parts`
    are views of the data [M, K] and scales [M, 1] of each matrix.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        data, scales = [m * k for m, k in shapes], [4 * m for m, _ in shapes]
        self.sizes = (*data, *scales)
        self.memory = torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)
        of_data, of_scales = self.memory.split([sum(data), sum(scales)])
        self.data, self.scales = of_data.view(torch.float8_e4m3fn), of_scales.view(torch.float32)
        self.parts = split_rows(self.data, self.scales, shapes)


class ShardKey(NamedTuple):
    """Properties of the shards of a module. Modules with equal keys share a send buffer."""

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(shards: Sequence[Tensor]) -> ShardKey:
        return ShardKey(shards[0].device, shards[0].dtype, tuple(x.shape for x in shards))


class SendBuffers:
    """One buffer for each `ShardKey` and stream, shared by all modules with this key."""

    def __init__(self) -> None:
        self._users: Counter[ShardKey] = Counter()
        self._buffers: dict[tuple[ShardKey, int], PackedWeights] = {}

    def register(self, key: ShardKey) -> None:
        self._users[key] += 1

    def get(self, key: ShardKey) -> PackedWeights:
        """Return a buffer that the current stream may overwrite."""
        place = key, compat.stream_of(key.device)
        if (found := self._buffers.get(place)) is None:
            found = PackedWeights(key.shapes, key.device)
            if self._users[key] > 1:  # a buffer with one user is freed between gathers
                self._buffers[place] = found
        return found


class WeightGather:
    """FSDP2's all-gather extension for the weights of one module.

    FSDP2 calls the extension once for each weight, in order. The first call sends and unpacks all
    weights as one tensor, because FSDP2 spends as much CPU time on each tensor as a kernel launch
    takes.
    """

    def __init__(self, layers: list[nn.Linear], traffic: Traffic, buffers: SendBuffers) -> None:
        self.layers, self.traffic, self.buffers = layers, traffic, buffers
        # FSDP2 frees this memory after use, and allocates it again before a gather.
        self.received: PackedWeights | None = None
        self._shapes = [y.weight.shape for y in layers]
        key = ShardKey.of(self._shards())
        self._ranks = self._shapes[0][0] // key.shapes[0][0]
        buffers.register(key)
        self._key: ShardKey | None = None

    def _shards(self) -> list[Tensor]:
        return [get_shard(cast(Any, y.weight)) for y in self.layers]

    def attach(self) -> None:
        """Attach the extension to new shards. Skip weights that are gathered at the moment."""
        for i, layer in enumerate(self.layers):
            weight: Any = layer.weight
            shard: Any = get_shard(weight) if isinstance(weight, DTensor) else None
            if shard is not None and not hasattr(shard, "fsdp_pre_all_gather"):
                shard.fsdp_pre_all_gather = self._make_pre_all_gather(i)
                shard.fsdp_post_all_gather = self._make_post_all_gather(i)
                self._key = None

    def _make_pre_all_gather(self, i: int) -> Any:
        def pre_all_gather(
            mesh: Any, size: Any, stride: Any, module: nn.Linear, mp_policy: Any
        ) -> tuple[tuple[Tensor, ...], torch.dtype]:
            dtype = mp_policy.param_dtype or module.weight.dtype
            return self._quantize_shards(dtype, mesh.size() - 1) if i == 0 else (), dtype

        # FSDP2 inspects the signature in each gather. Without this attribute, the inspection would
        # take more CPU time than the rest of the gather.
        signature = inspect.signature(pre_all_gather)
        pre_all_gather.__signature__ = signature  # type: ignore[attr-defined]
        return pre_all_gather

    def _quantize_shards(self, dtype: torch.dtype, copies: int) -> tuple[Tensor]:
        shards = self._shards()
        if self._key is None:  # the shards were replaced
            self._key = ShardKey.of(shards)
        packed = self.buffers.get(self._key)
        self.traffic.add(packed.data.numel(), packed.memory.numel(), copies)
        if any(isinstance(x, QuantizedWeight) for x in shards):
            _copy_or_quantize(shards, dtype, packed)
        else:
            quantize_rows_into(shards, dtype, packed.data, packed.scales)
        return (packed.memory,)

    def _make_post_all_gather(self, i: int) -> Any:
        def post_all_gather(
            gathered: tuple[Tensor, ...], dtype: torch.dtype, _: Any, *, out: Any = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            if i == 0:
                self._receive(gathered[0])
            if out is not None:  # later gathers: the weight is a view of `received`
                return None
            assert self.received is not None
            owned = (self.received.memory,) if i == 0 else ()
            return QuantizedWeight(*self.received.parts[i], dtype), owned

        return post_all_gather

    def _receive(self, gathered: Tensor) -> None:
        """Unpack the buffers of all ranks, uint8 [ranks · B], and free them."""
        if self.received is None:
            self.received = PackedWeights(self._shapes, gathered.device)
        unpack(gathered.view(self._ranks, -1), self.received)
        gathered.untyped_storage().resize_(0)


@torch.no_grad()
def _copy_or_quantize(shards: list[Tensor], dtype: torch.dtype, packed: PackedWeights) -> None:
    """Write FP8 data and scales to `packed`. Offloaded shards have FP8 data on the device."""
    into: list[Tensor] = []
    found: list[Tensor] = []
    for shard, (data, scales) in zip(shards, packed.parts, strict=True):
        if isinstance(shard, QuantizedWeight):
            into += data.view(torch.uint8), scales
            found += shard.fp8_data.view(torch.uint8), shard.scales
        else:
            quantize_rows_into([shard], dtype, data.view(-1), scales.view(-1))
    compat.foreach_copy(into, found)


def unpack(gathered: Tensor, whole: PackedWeights) -> None:
    """Copy packed shards, uint8 [ranks, B], to the full weights."""
    if (kernels := load_kernels(gathered.device)) is not None:
        return kernels.unpack(gathered, whole.memory, whole.sizes)
    ranks = len(gathered)
    pieces = [x.view(ranks, -1) for x in whole.memory.split(whole.sizes)]
    with torch.no_grad(), allow_writes_to_saved(pieces):
        sizes = [x.shape[1] for x in pieces]
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=pieces)


def gather_quantized_weights(
    model: nn.Module, skip: tuple[Pattern, ...], traffic: Traffic
) -> tuple[str, ...]:
    """Make FSDP2 gather the weights of linear layers in FP8. Return the paths of these layers."""
    reasons = find_reasons_against_fp8(model, skip)
    gathers: dict[nn.Module, list[WeightGather]] = {}
    buffers = SendBuffers()
    # Modules that `fully_shard([a, b])` shards together share a gather.
    made: dict[tuple[int, torch.dtype], WeightGather] = {}
    for module in model.modules():
        together: dict[tuple[int, torch.dtype], list[nn.Linear]] = {}
        for parameter, layer in _linear_weights(module):
            if not reasons[layer]:
                together.setdefault((parameter.group, layer.weight.dtype), []).append(layer)
        for key, layers in together.items():
            if key not in made:
                made[key] = WeightGather(layers, traffic, buffers)
            gathers.setdefault(module, []).append(made[key])
    # The hooks of the model run before the hooks of its modules, so they attach all gathers.
    if gathers and isinstance(model, FSDPModule):
        gathers[model] = [each for group in gathers.values() for each in group]
    for module, group in gathers.items():
        _attach_to_new_shards(module, group)
    return _log_layers(model, reasons)


def _linear_weights(module: nn.Module) -> Iterator[tuple[GatheredParameter, nn.Linear]]:
    for each in gathered_parameters(module) if isinstance(module, FSDPModule) else ():
        if isinstance(each.module, nn.Linear) and each.name == "weight":
            yield each, each.module


def _log_layers(model: nn.Module, reasons: dict[nn.Linear, str]) -> tuple[str, ...]:
    paths = {m: clean_path(path) for path, m in model.named_modules() if m in reasons}
    quantized = tuple(path for layer, path in paths.items() if not reasons[layer])
    others = {path: reasons[layer] for layer, path in paths.items() if reasons[layer]}
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        log.info(
            "compress: FSDP2 gathers the weights of %d of %d linear layers in FP8%s",
            *(len(quantized), len(reasons)),
            "".join(f"; {line}" for line in first_reasons(others)),
        )
    return quantized


def _attach_to_new_shards(module: nn.Module, gathers: list[WeightGather]) -> None:
    """Attach `gathers` now, after each load, and before each forward, to shards that are new."""

    def attach(*_: Any) -> None:
        for gather in gathers:
            gather.attach()

    attach()
    module.register_load_state_dict_post_hook(attach)
    module.register_forward_pre_hook(torch.compiler.disable(attach), prepend=True)


def find_reasons_against_fp8(model: nn.Module, skip: tuple[Pattern, ...]) -> dict[nn.Linear, str]:
    """Return why each layer's weight is gathered in high precision; '' means FP8."""
    linears = find_linears(model, skip)
    found = dict.fromkeys(linears, "FSDP2 does not gather this weight")
    for module in model.modules():
        for parameter, layer in _linear_weights(module):
            found[layer] = linears[layer][1] or _why_not(parameter)
    return found


def _why_not(parameter: GatheredParameter) -> str:
    weight: Any = parameter.module.weight
    if not isinstance(weight, DTensor) or weight.dtype not in SHARD_DTYPES:
        return f"its weight is a {type(weight).__name__} of {dtype_text(weight.dtype)}"
    if parameter.dtype is not torch.bfloat16:
        return (
            f"it computes in {dtype_text(parameter.dtype)}: pass fully_shard "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )
    if parameter.resharded_to_fewer_ranks:
        return "reshard_after_forward is a number of ranks: use True or False"
    return why_unsuitable_size(*weight.shape) or _why_not_in_rows(weight)


def _why_not_in_rows(weight: DTensor) -> str:
    """Return why ranks do not have equal numbers of whole rows, or ''."""
    *replicas, shard = weight.placements
    ranks, rows = weight.device_mesh.size(-1), weight.shape[0]
    if weight.device.type not in (weight.device_mesh.device_type, "meta"):
        return f"its weight is on the {weight.device.type}, not on the device of the mesh"
    if shard != Shard(0) or not all(p.is_replicate() for p in replicas):
        return "tensor parallelism has already sharded its weight"
    if ranks == 1:
        return "one rank holds all of its weight"
    return f"{rows} rows are not divisible by {ranks} ranks" if rows % ranks else ""
