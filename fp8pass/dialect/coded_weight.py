"""Weights in codes, as they enter a graph: E4M3, a scale for each row (LLMQ 3.2).

Compiled code takes the codes as they are for the forward's GEMM, which would code a BF16 weight by
row into the same bits. The backward decodes them.

Modules move them as other weights: to another device, to another dtype of their values, as copies
and through pickles. A copy to one is a new weight, of which codes are made, where the weight is
somebody's to change: where what was coded is elsewhere (`source`), or gone (`is_all`). Those that
others make anew, FSDP2's, cannot be changed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat
from fp8pass.dialect import hardware
from fp8pass.dialect import ops as ops  # defines the dialect
from fp8pass.dialect.formats import E4M3

aten = torch.ops.aten
fp8 = torch.ops.fp8pass


class CodedWeight(Tensor):
    """A matrix [M, K] as E4M3 codes and a scale for each row; its values to every operator.

    Attributes:
        codes: float8_e4m3fn [M, K].
        scales: fp32 [M, 1].
        source: the matrix that was coded, if it is elsewhere; copies to the weight go there.
        is_all: whether nothing else is left of the matrix; copies to the weight are only coded.
    """

    codes: Tensor
    scales: Tensor
    source: Tensor | None = None
    is_all: bool = False

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedWeight:
        return compat.wrapper(cls, codes, dtype)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    def __repr__(self) -> str:  # type: ignore[override]
        """Without numbers: compilers print weights that have none."""
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, {self.device})"

    @property
    def data(self) -> Tensor:
        """The weight itself, without a gradient; to assign is to change it."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
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

    def decoded(self) -> Tensor:
        """The values, in a plain tensor."""
        return fp8.dequantize.default(self.codes, self.scales, self.dtype)

    def like_this(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> CodedWeight:
        """The same weight with its codes elsewhere, or with values of another dtype."""
        found = CodedWeight(codes, scales, dtype)
        found.source, found.is_all = self.source, self.is_all
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedWeight:
        """With a copy of its source; a parameter if this is one."""
        if id(self) not in memo:
            found = self.like_this(*copy.deepcopy((self.codes, self.scales), memo), self.dtype)
            found.source = copy.deepcopy(self.source, memo)
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(found, self.requires_grad) if is_parameter else found
        return memo[id(self)]

    def change(self, values: Tensor) -> None:
        """Make `values` the weight, which broadcast to it, of any dtype and on any device.

        Raises:
            RuntimeError: the weight is not there to be changed.
        """
        if self.source is not None:
            self.source.copy_(_decoded(values))
            self.code_again()
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
            rows = self.source.to(self.codes.device)
        part = slice(first, first + len(rows))
        into = self.codes[part], self.scales[part]
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
        if (changed := _changed(func, args, kwargs)) is not None:
            if func is not aten.copy_.default:
                raise RuntimeError(_cannot(func, changed))
            args[0].change(args[1])
            return args[0]
        args, kwargs = compat.tree_map_only(CodedWeight, CodedWeight.decoded, (args, kwargs))
        return func(*args, **kwargs)


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
    codes, scales = (x.to(device, non_blocking=non_blocking) for x in (weight.codes, weight.scales))
    return weight.like_this(codes, scales, dtype)


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> CodedWeight | None:
    """The weight in codes that an operator writes to, the first of them; None if there is none."""
    schema = compat.schema_of(func)
    if not schema.is_mutable:
        return None
    given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
    written = [
        given.get(a.name) for a in schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    return next((x for x in compat.tree_leaves(written) if isinstance(x, CodedWeight)), None)


def _cannot(func: Any, weight: CodedWeight) -> str:
    changes = f"{func} would change a weight whose values are lost: it is in codes."
    if weight.is_all:
        return (
            f"{changes} fp8pass.freeze made them, of a layer that is not trained: leave its weight "
            "out of the optimizer, with requires_grad_(False), or the layer out of freeze, with "
            "skip=. load_state_dict gives it new values."
        )
    return (
        f"{changes} Change what it was made of, a shard or a matrix on the host, or name its layer "
        "in `skip` of compress or offload_weights."
    )


def _decoded(values: Tensor) -> Tensor:
    return values.decoded() if isinstance(values, CodedWeight) else values


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
            scales.copy_(fp8.scale.default(fp8.row_amax.default(x.to(dtype)), E4M3.name))
            codes.copy_(fp8.quantize.default(x.to(dtype), scales, E4M3.name))
    return room.parts


@functools.cache
def _kernel() -> Any:
    """The kernel, which can only be imported where there is Triton."""
    from fp8pass.dialect import coding_kernel

    return coding_kernel
