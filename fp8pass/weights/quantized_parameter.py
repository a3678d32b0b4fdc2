"""Weights in codes, as they enter a graph: E4M3, a scale for each row (LLMQ 3.2).

Compiled code takes the codes as they are for the forward's GEMM, which would code a BF16 weight by
row into the same bits. The backward decodes them.

Modules move them as other weights: to another device, to another dtype of their values, as copies
and through pickles.

A weight with a `source` is that tensor, which is exact, and its FP8 data are a cache of it. Outside
of compiled graphs operators read the source. Operators that write to the weight write to the
source, which is quantized again before the next use of the FP8 data. Where the FP8 data are all
that is left (`is_all`), only a copy changes the weight, and is quantized. FSDP2 gathers its weights
anew each time: they cannot be changed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat, hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.quantization import BY_ROW

aten = torch.ops.aten
fp8 = torch.ops.fp8pass


class CodedWeight(Tensor):
    """A matrix [M, K] as E4M3 codes and a scale for each row; its values to every operator.

    Attributes:
        source: the exact matrix [M, K] in host memory, if there is one. It may be written to.
        is_all: whether nothing else is left of the matrix; copies to the weight are only coded.
    """

    source: Tensor | None = None
    is_all: bool = False

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedWeight:
        return compat.wrapper(cls, codes, dtype)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._codes, self._scales = codes, scales
        self._quantized = -1  # of the source, when it was quantized

    def __repr__(self) -> str:  # type: ignore[override]
        """Without numbers: compilers print weights that have none."""
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def codes(self) -> Tensor:
        """The quantized matrix, float8_e4m3fn [M, K]."""
        self._follow_source()
        return self._codes

    @property
    def scales(self) -> Tensor:
        """The scales of its rows, fp32 [M, 1]."""
        self._follow_source()
        return self._scales

    def _follow_source(self) -> None:
        """Quantize the source again if it was written to."""
        if self.source is not None and self._quantized != compat.version_of(self.source):
            self.mark_quantized()
            self.code_again()

    def mark_quantized(self) -> None:
        """Record that the FP8 data match the present version of the source."""
        assert self.source is not None
        self._quantized = compat.version_of(self.source)

    @property
    def data(self) -> Tensor:
        """The weight itself, without a gradient; to assign is to change it.

        Raises:
            RuntimeError: a tensor is assigned that has another shape, or another dtype than the
                source.
        """
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        other_dtype = self.source is not None and values.dtype != self.dtype
        if values.shape != self.shape or other_dtype:
            raise RuntimeError(
                f"A tensor {tuple(values.shape)} of {values.dtype} cannot be the data of a "
                f"quantized weight {tuple(self.shape)} of {self.dtype}: convert the tensor, or "
                "write to the weight with copy_."
            )
        if values is not self:
            self.change(values)

    def __setitem__(self, index: Any, values: Any) -> None:
        """Raise RuntimeError: only the whole weight can be changed, and a part would be a copy."""
        raise RuntimeError(_cannot(aten.index_put_.default, self))

    def share_memory_(self) -> CodedWeight:
        """Move codes and scales to memory that processes share; the weight itself has none."""
        self.codes.share_memory_()
        self.scales.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether processes share it."""
        return self.codes.is_shared()

    def exact(self) -> Tensor:
        """The source in a plain tensor on the device of the weight; without one, the FP8 values."""
        if self.source is None:
            return self.decoded()
        self.wait_for_source()
        return self.source.to(self.device, copy=True)

    def wait_for_source(self) -> None:
        """Wait until the source can be read or written to on the CPU."""
        if self.is_cuda:  # an optimizer may be copying to it
            torch.cuda.synchronize(self.device)

    def decoded(self) -> Tensor:
        """The values, in a plain tensor."""
        return fp8.dequantize.default([self.codes], self.scales, BY_ROW, self.dtype)

    def like_this(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedWeight:
        """The same weight with its codes elsewhere, or with values of another dtype."""
        found = CodedWeight(codes, scales, dtype)
        found.source, found.is_all, found._quantized = self.source, self.is_all, self._quantized
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Quantize the source first, if it was written to: versions do not survive a pickle."""
        self._follow_source()
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedWeight:
        """With a copy of its source; a parameter if this is one."""
        if id(self) not in memo:
            found = self.like_this(*copy.deepcopy((self.codes, self.scales), memo), self.dtype)
            if self.source is not None:
                self.wait_for_source()
                found.source = copy.deepcopy(self.source, memo)
                found.mark_quantized()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(found, self.requires_grad) if is_parameter else found
        return memo[id(self)]

    def change(self, values: Tensor) -> None:
        """Make `values` the weight, which broadcast to it, of any dtype and on any device.

        Raises:
            RuntimeError: the weight is not there to be changed.
        """
        if self.source is not None:
            values = values.exact() if isinstance(values, CodedWeight) else values
            self.wait_for_source()
            self.source.copy_(values)
            self.code_again()  # operators within __torch_dispatch__ leave no trace in versions
        elif not self.is_all:
            raise RuntimeError(_cannot(aten.copy_.default, self))
        elif isinstance(values, CodedWeight):
            self.codes.copy_(values.codes)
            self.scales.copy_(values.scales)
        else:
            # Rounded as autocast rounds weights in FP32.
            rows = values.to(self.device, torch.bfloat16)
            self.code_again(0, rows.expand(self.shape))

    def code_again(self, first: int = 0, rows: Tensor | None = None) -> None:
        """Make codes of the source anew, or of `rows` [R, K] of it, from row `first` on."""
        if rows is None:
            assert self.source is not None
            self.wait_for_source()
            rows = self.source.to(self.device)
        part = slice(first, first + len(rows))
        into = self._codes[part], self._scales[part]
        coded([rows], rows.dtype, Room(into[0].view(-1), into[1].view(-1), [into]))

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> CodedWeight:
        return CodedWeight(inner["codes"], inner["scales"], dtype)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for its cache."""
        return f"CodedWeight {tuple(self.shape)} {self.dtype} {self.requires_grad}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # FSDP2 and nn.Parameter look at a weight in these ways, which change nothing of it.
        if func is aten.detach.default or (
            func is aten.as_strided.default and tuple(args[1]) == tuple(args[0].shape)
        ):
            return args[0].like_this(args[0].codes, args[0].scales, args[0].dtype)
        kwargs = kwargs or {}
        if func is aten._to_copy.default and (moved := _moved(args[0], **kwargs)) is not None:
            return moved
        if written := _written(func, args, kwargs, CodedWeight):
            return _write(func, args, kwargs, written)
        is_owned = any(
            isinstance(x, CodedWeight) and (x.source is not None or x.is_all)
            for x in compat.tree_leaves((args, kwargs))
        )
        args, kwargs = compat.tree_map_only(CodedWeight, CodedWeight.exact, (args, kwargs))
        found = func(*args, **kwargs)
        return _protect_views(func, found) if is_owned else found


class WeightView(Tensor):
    """A view of a `CodedWeight`, or of a view of one, which cannot be written to.

    It is a copy of the values: what is written to it would be lost.
    """

    @staticmethod
    def __new__(cls, values: Tensor) -> WeightView:
        return compat.wrapper(cls, values, values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values_of_weight = values

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.values_of_weight)

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor: collectives that scatter views read their memory without dispatch."""
        return self.values_of_weight.contiguous(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if written := _written(func, args, kwargs, WeightView):
            raise RuntimeError(
                f"{func} would change a part or a view {tuple(written[0].shape)} of a quantized "
                "weight, and be lost: write to all of the weight, with weight.copy_(values)."
            )
        args, kwargs = compat.tree_map_only(
            WeightView, lambda x: x.values_of_weight, (args, kwargs)
        )
        return _protect_views(func, func(*args, **kwargs))


def _protect_views(func: Any, found: Any) -> Any:
    """Return the result of an operator, as `WeightView` if the operator makes views."""
    if not any(x.alias_info for x in compat.schema_of(func).returns):
        return found
    return compat.tree_map_only(Tensor, WeightView, found)


def _write(func: Any, args: Any, kwargs: Any, written: Sequence[CodedWeight]) -> Any:
    """Run an operator that writes to weights on their exact values, and make these the weights.

    Raises:
        RuntimeError: a weight cannot be changed, or not by this operator.
    """
    if func is aten.copy_.default:
        written[0].change(args[1])
        return written[0]
    changes_values = func.namespace == "aten" and torch.Tag.inplace_view not in func.tags
    for weight in written:
        if weight.source is None or not changes_values:
            raise RuntimeError(_cannot(func, weight))
    values: dict[int, Tensor] = {}

    def exact(weight: CodedWeight) -> Tensor:
        if id(weight) not in values:
            values[id(weight)] = weight.exact()
        return values[id(weight)]

    args, kwargs = compat.tree_map_only(CodedWeight, exact, (args, kwargs))
    found = func(*args, **kwargs)
    for weight in written:
        weight.change(values[id(weight)])
    weights = {id(values[id(weight)]): weight for weight in written}
    return compat.tree_map_only(Tensor, lambda x: weights.get(id(x), x), found)


def _moved(
    weight: CodedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,  # layouts, of which matrices of codes have one
) -> CodedWeight | None:
    """A weight on another device, or with another dtype; None if that cannot be in codes."""
    dtype = dtype or weight.dtype
    if not dtype.is_floating_point:
        return None
    if weight.source is None:
        codes, scales = weight.codes, weight.scales
        codes, scales = (x.to(device, non_blocking=non_blocking) for x in (codes, scales))
        return weight.like_this(codes, scales, dtype)
    codes, scales = (torch.empty_like(x, device=device) for x in (weight._codes, weight._scales))
    moved = CodedWeight(codes, scales, dtype)
    weight.wait_for_source()
    moved.source = weight.source.to(dtype, copy=True)  # a write to the copy is its own
    return moved


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any], kind: type) -> list[Any]:
    """The tensors of a kind that an operator writes to."""
    schema = compat.schema_of(func)
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    written = [
        given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    if func.namespace == "c10d" and schema.name.endswith("_"):  # schemas without alias annotations
        written = list(args[:1])
    return [x for x in compat.tree_leaves(written) if isinstance(x, kind)]


def _cannot(func: Any, weight: CodedWeight) -> str:
    changes = f"{func} would change a weight whose exact values are lost: it is quantized to FP8."
    if weight.is_all:
        return (
            f"{changes} To merge an adapter, as merge_and_unload() of PEFT, merge before "
            "fp8pass.quantize_frozen, or load the base model again and merge the saved adapter; to "
            "train the layer, pass it in skip= of quantize_frozen; to replace its values, use "
            "load_state_dict."
        )
    if weight.source is not None:
        return (
            f"{func} cannot change a quantized weight, whose exact values are in host memory: run "
            "it on a copy, weight.clone(), and write that back with weight.copy_(values)."
        )
    return f"{changes} Change the shard it was made of, or name its layer in skip= of compress."


@dataclass(frozen=True)
class Room:
    """Memory for the codes of some matrices [M, K], which may be written again and again.

    Attributes:
        codes: float8_e4m3fn [sum of M·K].
        scales: fp32 [sum of M].
        parts: those of each matrix: codes [M, K] and scales [M, 1].
    """

    codes: Tensor
    scales: Tensor
    parts: Sequence[tuple[Tensor, Tensor]]


def room_for(shapes: Sequence[torch.Size], device: torch.device) -> Room:
    """New memory for the codes of matrices of these shapes."""
    elements, rows = sum(m * k for m, k in shapes), sum(m for m, _ in shapes)
    codes = torch.empty(elements, dtype=torch.float8_e4m3fn, device=device)
    return divided(codes, torch.empty(rows, dtype=torch.float32, device=device), shapes)


def divided(codes: Tensor, scales: Tensor, shapes: Sequence[torch.Size]) -> Room:
    """Memory for the codes [sum of M·K] and scales [sum of M] of matrices of these shapes."""
    matrices = codes.split([m * k for m, k in shapes])
    rows = scales.view(-1, 1).split([m for m, _ in shapes])
    views = (x.view(shape) for x, shape in zip(matrices, shapes, strict=True))
    return Room(codes, scales, list(zip(views, rows, strict=True)))


def coded(
    matrices: Sequence[Tensor], dtype: torch.dtype, room: Room | None = None
) -> Sequence[tuple[Tensor, Tensor]]:
    """Codes and scales of matrices [M, K], rounded to `dtype` before, as `quantize` gives them.

    They are written to `room`, if it is given.
    """
    room = room or room_for([x.shape for x in matrices], matrices[0].device)
    if hardware.why_no_triton_kernels(matrices[0].device) is None:
        _kernel().code_rows([x.contiguous() for x in matrices], dtype, room.codes, room.scales)
        return room.parts
    with torch.no_grad():
        for x, (codes, scales) in zip(matrices, room.parts, strict=True):
            scales.copy_(fp8.scale.default(fp8.amax.default(x.to(dtype), "row"), BY_ROW))
            codes.copy_(fp8.quantize.default(x.to(dtype), scales, BY_ROW))
    return room.parts


@functools.cache
def _kernel() -> Any:
    """The kernel, which can only be imported where there is Triton."""
    from fp8pass.weights import quantization_kernel as coding_kernel

    return coding_kernel
