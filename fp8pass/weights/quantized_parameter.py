"""Weights that are already quantized to E4M3 when a graph reads them.

With a scale for each row, the FP8 data have the same bits as if the graph quantized a BF16 weight
by row (section 3.2 of the LLMQ paper). Weights of FP8 checkpoints may have scales for blocks.
Quantized weights can be moved, converted, copied and pickled. There are three kinds:

- A weight with a `source` is exact, and the FP8 data are a cache. Operators outside of compiled
  graphs read and write the source. After a write, the source is quantized again before the FP8 data
  are used.
- If the FP8 data are the only copy (`is_only_copy`), the weight can only be replaced as a whole.
- A weight that FSDP2 gathered cannot be changed. Its shards can be changed instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat, hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.quantization import BY_ROW, block_text, parse
from fp8pass.weights.layout import Layout

aten = torch.ops.aten
fp8 = torch.ops.fp8pass

WITH_SCALES = "Load dequantized weights, or also load scales (weight_scale_inv or weight_scale)."


class QuantizedWeight(Tensor):
    """A matrix [M, K], or a stack of experts [E, N, K], as E4M3 data with scales.

    The data of experts are a matrix, too, with M = E·N. `quantization` describes the scales.

    Operators outside of compiled graphs read the source, which is the exact weight. Without a
    source, they read the dequantized data.
    """

    experts: int  # number of experts, 0 for a single matrix
    quantization: str
    # The exact weight [M, K], in host memory. Optimizers may write to it.
    source: Tensor | None = None
    is_only_copy: bool = False
    # How the checkpoint stores the scales, if the FP8 data come from a checkpoint.
    checkpoint: Layout | None = None
    _fp8_data: Tensor
    _scales: Tensor
    _version_of_source = -1  # version of the source when it was last quantized

    @staticmethod
    def __new__(
        cls,
        fp8_data: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        quantization: str = BY_ROW,
        experts: int = 0,
    ) -> QuantizedWeight:
        found = compat.wrapper(cls, _stack(fp8_data, experts), dtype)
        found._fp8_data, found._scales = fp8_data, scales
        found.quantization, found.experts = quantization, experts
        return found

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text without values, because compilers print fake weights."""
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def fp8_data(self) -> Tensor:
        """float8_e4m3fn [M, K]."""
        self._follow_source()
        return self._fp8_data

    @property
    def scales(self) -> Tensor:
        """fp32 [M, 1], or one scale for each block, such as [M / 128, K / 128]."""
        self._follow_source()
        return self._scales

    def _follow_source(self) -> None:
        """Quantize the source again if it was written to."""
        if self.source is not None and self._version_of_source != compat.version_of(self.source):
            self.mark_quantized()
            self.requantize()

    def mark_quantized(self) -> None:
        assert self.source is not None
        self._version_of_source = compat.version_of(self.source)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        other_dtype = self.source is not None and values.dtype != self.dtype
        if values.shape != self.shape or other_dtype:
            raise RuntimeError(
                f".data of a quantized weight has shape {tuple(self.shape)} and dtype "
                f"{self.dtype}, but the assigned tensor has {tuple(values.shape)} and "
                f"{values.dtype}. Convert the tensor, or write to the weight with copy_."
            )
        if values is not self:
            self.change(values)

    def __setitem__(self, index: Any, values: Any) -> None:
        """Raise RuntimeError: indexing returns a copy, so the assignment would be lost."""
        raise RuntimeError(_explain_refusal(aten.index_put_.default, self))

    def share_memory_(self) -> QuantizedWeight:
        """Share data and scales, because the wrapper tensor itself has no memory."""
        self.fp8_data.share_memory_()
        self.scales.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.fp8_data.is_shared()

    def exact(self) -> Tensor:
        """Return a copy of the source on the weight's device, or the dequantized FP8 data."""
        if self.source is None:
            return self.dequantize()
        self.wait_for_source()
        return self.source.to(self.device, copy=True)

    def values_on_host(self) -> Tensor:
        """Return the source itself, or a copy of the dequantized FP8 data in host memory."""
        if self.source is None:
            return self.dequantize().cpu()
        self.wait_for_source()
        return self.source

    def wait_for_source(self) -> None:
        """Wait until the CPU can read or write the source."""
        if self.is_cuda:  # an optimizer may still be copying to the source
            torch.cuda.synchronize(self.device)

    def dequantize(self) -> Tensor:
        return _stack(self._dequantize(self.fp8_data, self.scales), self.experts)

    def _dequantize(self, data: Tensor, scales: Tensor) -> Tensor:
        return fp8.dequantize.default([data], scales, self.quantization, self.dtype)

    def dequantize_expert(self, index: int) -> Tensor:
        data, scales = (_stack(x, self.experts)[index] for x in (self.fp8_data, self.scales))
        return self._dequantize(data, scales)

    def copy_with(self, fp8_data: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantizedWeight:
        """Return a weight with the given data, scales and dtype, and the same source."""
        found = QuantizedWeight(fp8_data, scales, dtype, self.quantization, self.experts)
        found.source, found.is_only_copy = self.source, self.is_only_copy
        found.checkpoint = self.checkpoint
        found._version_of_source = self._version_of_source
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Quantize a changed source first, because a pickle does not record the change."""
        self._follow_source()
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        """Copy the data and the source. The copy of an `nn.Parameter` is an `nn.Parameter`."""
        if id(self) not in memo:
            parts = copy.deepcopy((self.fp8_data, self.scales), memo)
            found = self.copy_with(*parts, self.dtype)
            if self.source is not None:
                self.wait_for_source()
                found.source = copy.deepcopy(self.source, memo)
                found.mark_quantized()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(found, self.requires_grad) if is_parameter else found
        return memo[id(self)]

    def change(self, values: Tensor) -> None:
        """Write `values` of any dtype and device to the weight. They are broadcast to its shape."""
        if self.source is not None:
            values = values.exact() if isinstance(values, QuantizedWeight) else values
            self.wait_for_source()
            self.source.copy_(values)
            self.requantize()  # a write inside __torch_dispatch__ does not change the version
        elif not self.is_only_copy:
            raise RuntimeError(_explain_refusal(aten.copy_.default, self))
        elif isinstance(values, QuantizedWeight) and self._has_form_of(values):
            self.fp8_data.copy_(values.fp8_data)
            self.scales.copy_(values.scales)
            if self.checkpoint and values.checkpoint:
                self.checkpoint = replace(values.checkpoint, name=self.checkpoint.name)
        elif values.dtype is torch.float8_e4m3fn:
            raise RuntimeError(
                f"FP8 data without scales cannot replace a quantized weight. {WITH_SCALES}"
            )
        else:
            values = values.exact() if isinstance(values, QuantizedWeight) else values
            # FP32 weights are rounded to BF16, as under autocast.
            rows = values.to(self.device, torch.bfloat16).expand(self.shape)
            # DistributedDataParallel writes a weight to itself. Quantizing these values again would
            # change the scales.
            if not torch.equal(rows, self.dequantize().bfloat16()):
                self.requantize(0, rows.reshape(self._fp8_data.shape))

    def _has_form_of(self, other: QuantizedWeight) -> bool:
        """Whether this weight can take the data and scales of `other`, and can then be saved."""
        is_same = other.quantization == self.quantization
        return is_same and (self.checkpoint is None or other.checkpoint is not None)

    def requantize(self, first: int = 0, rows: Tensor | None = None) -> None:
        """Quantize the source, or replace FP8 rows from `first` on by quantized `rows` [R, K]."""
        if rows is None:
            assert self.source is not None
            self.wait_for_source()
            rows = self.source.to(self.device)
        if self.checkpoint is not None:
            amax = fp8.amax.default(rows, block_text(parse(self.quantization).block))
            scales = fp8.scale.default(amax, self.quantization)
            self._scales.copy_(self.checkpoint.share(scales))
            self._fp8_data.copy_(fp8.quantize.default(rows, self._scales, self.quantization))
            return
        part = slice(first, first + len(rows))
        data, scales = self._fp8_data[part].view(-1), self._scales[part].view(-1)
        quantize_rows_into([rows], rows.dtype, data, scales)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, str, int]]:
        return ["fp8_data", "scales"], (self.dtype, self.quantization, self.experts)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], how: tuple[torch.dtype, str, int], size: Any, stride: Any
    ) -> QuantizedWeight:
        return QuantizedWeight(inner["fp8_data"], inner["scales"], *how)

    def _stable_hash_for_caching(self) -> str:
        """Return the properties that compiled code depends on."""
        properties = tuple(self.shape), self.dtype, self.quantization, self.requires_grad
        return f"QuantizedWeight {properties}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # FSDP2, nn.Parameter and `DTensor.to_local` create views of a whole weight, which share the
        # FP8 data.
        if func is aten.detach.default or (
            func in (aten.as_strided.default, aten.view.default)
            and tuple(args[1]) == tuple(args[0].shape)
        ):
            return args[0].copy_with(args[0].fp8_data, args[0].scales, args[0].dtype)
        kwargs = kwargs or {}
        if func is aten._to_copy.default and (moved := _move(args[0], **kwargs)) is not None:
            return moved
        if written := _find_written(func, args, kwargs, QuantizedWeight):
            return _write(func, args, kwargs, written)
        if func is aten.select.int and args[0].experts and args[1] == 0:
            return _protect_views(func, args[0].dequantize_expert(args[2]))
        is_owned = any(
            isinstance(x, QuantizedWeight) and (x.source is not None or x.is_only_copy)
            for x in compat.tree_leaves((args, kwargs))
        )
        if is_owned and _returns_views(func) and not _find_written(func, args, kwargs, Tensor):
            return _view_when_read(func, args, kwargs)
        args, kwargs = compat.tree_map_only(QuantizedWeight, QuantizedWeight.exact, (args, kwargs))
        found = func(*args, **kwargs)
        return _protect_views(func, found) if is_owned else found


class WeightView(Tensor):
    """A read-only view of a `QuantizedWeight`.

    The first read copies the values. Later changes of the weight do not change this copy.
    """

    _compute_values: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, like: Tensor, device: torch.device, compute_values: Callable[[], Tensor]
    ) -> WeightView:
        found = compat.wrapper(cls, like, like.dtype, device)
        found._compute_values = compute_values
        return found

    @cached_property
    def values_of_weight(self) -> Tensor:
        return self._compute_values()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.values_of_weight)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save a plain tensor."""
        return self.values_of_weight.__reduce_ex__(protocol)

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a plain tensor for collectives that read memory without calling operators."""
        return self.values_of_weight.contiguous(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if written := _find_written(func, args, kwargs, WeightView):
            raise RuntimeError(
                f"{func} writes to a part or a view of shape {tuple(written[0].shape)} of a "
                "quantized weight, but this would not change the weight. Write to the whole weight "
                "with weight.copy_(values)."
            )
        args, kwargs = compat.tree_map_only(
            WeightView, lambda x: x.values_of_weight, (args, kwargs)
        )
        return _protect_views(func, func(*args, **kwargs))


def _stack(matrix: Tensor, experts: int) -> Tensor:
    return matrix.unflatten(0, (experts, -1)) if experts else matrix


def _returns_views(func: Any) -> bool:
    """Whether results may share memory with arguments, also if the operator writes to them."""
    return any(x.alias_info for x in compat.schema_of(func).returns)


def _protect_views(func: Any, found: Any) -> Any:
    """Make the results of an operator read-only if it returns views."""
    if not _returns_views(func):
        return found
    return compat.tree_map_only(Tensor, lambda x: WeightView(x, x.device, lambda: x), found)


def _view_when_read(func: Any, args: Any, kwargs: Any) -> Any:
    """Return views that copy the values of the weight when they are read.

    FSDP2 keeps a view of each shard, and does not read it if the shard has an extension.
    """

    @cache
    def compute() -> list[Tensor]:
        exact = compat.tree_map_only(QuantizedWeight, QuantizedWeight.exact, (args, kwargs))
        return compat.tree_leaves(func(*exact[0], **exact[1]))

    def without_values(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    device = next(x.device for x in compat.tree_leaves(args) if isinstance(x, QuantizedWeight))
    shapes = compat.tree_map_only(Tensor, without_values, (args, kwargs))
    number = count()
    return compat.tree_map_only(
        Tensor,
        lambda x: WeightView(x, device, partial(lambda i: compute()[i], next(number))),
        func(*shapes[0], **shapes[1]),
    )


def _write(func: Any, args: Any, kwargs: Any, written: Sequence[QuantizedWeight]) -> Any:
    """Apply the operator to copies of the exact values. Write these copies back to the weights."""
    if func is aten.copy_.default:
        written[0].change(args[1])
        return written[0]
    changes_values = func.namespace == "aten" and torch.Tag.inplace_view not in func.tags
    for weight in written:
        if weight.source is None or not changes_values:
            raise RuntimeError(_explain_refusal(func, weight))
    used = [x for x in compat.tree_leaves((args, kwargs)) if isinstance(x, QuantizedWeight)]
    values = {id(weight): weight.exact() for weight in dict.fromkeys(used)}
    args, kwargs = compat.tree_map_only(QuantizedWeight, lambda x: values[id(x)], (args, kwargs))
    found = func(*args, **kwargs)
    for weight in written:
        weight.change(values[id(weight)])
    weights = {id(values[id(weight)]): weight for weight in written}
    return compat.tree_map_only(Tensor, lambda x: weights.get(id(x), x), found)


def _move(
    weight: QuantizedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,  # such as `memory_format`; the layout of FP8 matrices is fixed
) -> QuantizedWeight | None:
    """Return the weight with another dtype or device, or None if the dtype is not a float."""
    dtype = dtype or weight.dtype
    if not dtype.is_floating_point:
        return None
    if weight.source is None:
        parts = weight.fp8_data, weight.scales
        data, scales = (x.to(device, non_blocking=non_blocking) for x in parts)
        return weight.copy_with(data, scales, dtype)
    parts = weight._fp8_data, weight._scales
    data, scales = (torch.empty_like(x, device=device) for x in parts)
    moved = QuantizedWeight(data, scales, dtype)
    weight.wait_for_source()
    moved.source = weight.source.to(dtype, copy=True)  # writes to a copy do not change the original
    return moved


def _find_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: type) -> list[Any]:
    """Return the tensors of type `kind` that an operator writes to."""
    schema = compat.schema_of(func)
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    written = [
        given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    if func.namespace == "c10d" and schema.name.endswith("_"):  # its schema lacks alias annotations
        written = list(args[:1])
    return [x for x in compat.tree_leaves(written) if isinstance(x, kind)]


def _explain_refusal(func: Any, weight: QuantizedWeight) -> str:
    if weight.source is not None:
        return (
            f"{func} cannot change a quantized weight in place, because its exact values are in "
            "host memory. Apply the operator to a copy, weight.clone(), and write the result back "
            "with weight.copy_(values)."
        )
    fix = "Change the shard of the weight instead, or name the layer in skip= of compress."
    if weight.checkpoint is not None:
        fix = (
            "To merge adapters, load the checkpoint in 16 bits (dequantize=True), and merge there."
        )
    elif weight.is_only_copy:
        fix = (
            "To merge adapters, load the model in 16 bits again, and merge there. Name layers to "
            "train in skip= of fp8pass.quantize_frozen, and replace values with load_state_dict."
        )
    return (
        f"{func} cannot change a quantized weight, because its exact values no longer exist. {fix}"
    )


def save_weights(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Hook of `state_dict`: save the quantized weights of a module, in host memory.

    A weight from an FP8 checkpoint is saved as this checkpoint stores it. Otherwise the state gets
    the values of the weight.
    """
    for name, weight in module.named_parameters(recurse=False):
        if not isinstance(weight, QuantizedWeight) or prefix + name not in state:
            continue
        if weight.checkpoint is None:
            state[prefix + name] = weight.values_on_host()
        else:
            state[prefix + name] = _stack(weight.fp8_data, weight.experts).cpu()
            state[prefix + weight.checkpoint.name] = weight.checkpoint.collapse(weight.scales).cpu()


def quantize_rows(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round a matrix [M, K] to `dtype`, and quantize each row, as `dialect.ops.quantize` does.

    Returns FP8 data [M, K] and scales fp32 [M, 1].
    """
    data = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(len(matrix), 1, dtype=torch.float32, device=matrix.device)
    quantize_rows_into([matrix], dtype, data.view(-1), scales.view(-1))
    return data, scales


def quantize_rows_into(
    matrices: Sequence[Tensor], dtype: torch.dtype, data: Tensor, scales: Tensor
) -> None:
    """Write the results of `quantize_rows` for all matrices to `data` [ΣM·K] and `scales` [ΣM]."""
    if hardware.why_no_triton_kernels(matrices[0].device) is None:
        from fp8pass.weights import quantization_kernel  # imports Triton

        contiguous = [x.contiguous() for x in matrices]
        quantization_kernel.quantize_rows(contiguous, dtype, data, scales)
        return
    parts = split_rows(data, scales, [x.shape for x in matrices])
    with torch.no_grad():
        for x, (data, scales) in zip(matrices, parts, strict=True):
            scales.copy_(fp8.scale.default(fp8.amax.default(x.to(dtype), "row"), BY_ROW))
            data.copy_(fp8.quantize.default(x.to(dtype), scales, BY_ROW))


def split_rows(
    data: Tensor, scales: Tensor, shapes: Sequence[torch.Size]
) -> list[tuple[Tensor, Tensor]]:
    """Return views of each matrix's data [M, K] and scales [M, 1]."""
    matrices = data.split([m * k for m, k in shapes])
    rows = scales.view(-1, 1).split([m for m, _ in shapes])
    return [(x.view(shape), y) for x, y, shape in zip(matrices, rows, shapes, strict=True)]
