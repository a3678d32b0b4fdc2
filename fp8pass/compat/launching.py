"""Our kernels and buffers among those that Inductor generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import sympy
import torch
import torch._inductor.inductor_prims
from torch._dynamo.utils import counters as counters
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import ir as inductor_ir
from torch._inductor.codecache import PyCodeCache
from torch._inductor.lowering import empty_strided as inductor_empty_strided
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.utils._sympy.functions import CeilDiv


def lower_to_buffer(op: Any) -> None:
    """Have Inductor realize `op(x, order)` as `x` in memory, outermost dimension first in `order`.

    A tensor that is in such memory already is not copied.
    """

    def lowering(x: Any, order: Sequence[int]) -> Any:
        ranks = [len(order) - 1 - list(order).index(dim) for dim in range(len(order))]
        return inductor_ir.ExternKernel.require_stride_order(x, ranks)

    register_lowering(op, type_promotion_kind=None)(lowering)


def lower_to_parts(op: Any) -> None:
    """Have Inductor store each of `op(parts, dim)` in its place in one buffer."""

    def lowering(parts: Sequence[Any], dim: int) -> Any:
        dim %= len(parts[0].get_size())
        return inductor_ir.TensorBox(inductor_ir.ConcatKernel.create(parts, dim))

    register_lowering(op, type_promotion_kind=None)(lowering)


def lower_to_triton(op: Any, prepare: Callable[[Sequence[Any], str], Iterable[Any]]) -> None:
    """Have Inductor run `op(inputs, programs)` on a GPU as the launches that `prepare` gives."""
    fallback = fallback_handler(op, add_to_fallback_set=False)

    def lowering(inputs: Sequence[Any], programs: str) -> Any:
        results = V.graph.current_node.meta["val"]
        if results[0].device.type != "cuda":
            return fallback(inputs, programs)
        tensors = [inductor_ir.ExternKernel.require_contiguous(x) for x in inputs]
        outputs = [_empty(convert_shape_to_inductor(x.shape), x) for x in results]
        for launch in prepare(tensors, programs):
            _launch(launch, tensors, outputs)
        return outputs

    register_lowering(op, type_promotion_kind=None)(lowering)


def _launch(launch: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Add a launch to the graph that Inductor compiles."""
    pointers = {f"in{i}": inputs[number] for i, number in enumerate(launch.inputs)}
    pointers |= {f"out{i}": outputs[number] for i, number in enumerate(launch.outputs)}
    kernel = _with_warps(launch.kernel, launch.num_warps)
    with _each_kernel_analysed_once():
        inductor_ir.UserDefinedTritonKernel(
            kernel_idx=triton_kernel_wrap.kernel_side_table.add_kernel(kernel),
            grid=[(launch.grid, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args={**pointers, **launch.sizes},
        )


def _empty(size: Sequence[Any], like: torch.Tensor) -> Any:
    return inductor_empty_strided(size, None, dtype=like.dtype, device=like.device)


@cache
def _with_warps(kernel: Any, num_warps: int) -> Any:
    """A Triton function with its launch options, as Inductor takes them."""
    import triton

    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps)], key=[])(kernel)


@contextmanager
def _each_kernel_analysed_once() -> Iterator[None]:
    """Remember which arguments a kernel writes: Inductor would compile it for that every time.

    It looks the analysis up in its module, under another name in PyTorch 2.13 than before.
    """
    names = ("identify_mutated_tensors", "identify_accessed_tensors")
    originals = {name: f for name in names if (f := getattr(triton_kernel_wrap, name, None))}
    try:
        for name, analyse in originals.items():
            setattr(triton_kernel_wrap, name, _remembered(analyse))
        yield
    finally:
        for name, analyse in originals.items():
            setattr(triton_kernel_wrap, name, analyse)


_analysed: dict[Any, Any] = {}


def _remembered(analyse: Any) -> Any:
    def remembered(kernel: Any, *args: Any) -> Any:
        if kernel not in _analysed:
            _analysed[kernel] = analyse(kernel, *args)
        return _analysed[kernel]

    return remembered


def ceil_div(a: Any, b: int) -> Any:
    """⌈a / b⌉ of numbers, sizes or Inductor's sizes."""
    return CeilDiv(a, b) if isinstance(a, sympy.Expr) else -(-a // b)


def load_source(source: str) -> Any:
    """The module of a source text, kept in a file that Triton can read it from."""
    return PyCodeCache.load(source)
