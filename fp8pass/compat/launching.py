"""Make Inductor's generated code launch fp8pass's kernels and use its buffers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import sympy
from torch import fx
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import ir as inductor_ir
from torch._inductor.async_compile import shutdown_compile_workers
from torch._inductor.codecache import PyCodeCache
from torch._inductor.lowering import empty_strided, fallback_handler, register_lowering
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import CeilDiv

from fp8pass.compat.attributes import set_attributes

__all__ = [
    "STATIC_LAUNCHES", "ceil_div", "launch_statically", "load_source", "lower_to_buffer",
    "lower_to_parts", "lower_to_triton",
]  # fmt: skip

# Inductor's option to launch user-defined kernels at the low cost of generated kernels.
STATIC_LAUNCHES = "static_launch_user_defined_triton_kernels"


def launch_statically() -> None:
    """Turn `STATIC_LAUNCHES` on in the processes that compile kernels.

    Inductor passes its other options to these processes. They read this option from the environment
    when they start. So running processes are stopped, and Inductor starts new processes.
    """
    name = f"TORCHINDUCTOR_{STATIC_LAUNCHES.upper()}"
    if name not in os.environ:
        os.environ[name] = "1"
        shutdown_compile_workers()


def lower_to_buffer(op: Any) -> None:
    """Lower `op(x, order)` to a buffer with dimensions `order`, from the largest stride to the
    smallest.

    A tensor that is already stored in this order is not copied.
    """

    @register_lowering(op, type_promotion_kind=None)
    def lowering(x: Any, order: Sequence[int]) -> Any:
        ranks = [len(order) - 1 - list(order).index(dim) for dim in range(len(order))]
        return inductor_ir.ExternKernel.require_stride_order(x, ranks)


def lower_to_parts(op: Any) -> None:
    """Lower `op(parts, dim)` to a concatenation in one buffer, to which kernels write the parts."""

    @register_lowering(op, type_promotion_kind=None)
    def lowering(parts: Sequence[Any], dim: int) -> Any:
        dim %= len(parts[0].get_size())
        return inductor_ir.TensorBox(inductor_ir.ConcatKernel.create(parts, dim))


def lower_to_triton(
    op: Any,
    prepare: Callable[[Sequence[Any], str], Iterable[Any]],
    overwritten: Callable[[fx.Node], dict[int, int]],
) -> None:
    """Lower `op(inputs, programs)` on a GPU to the launches that `prepare` returns.

    `overwritten` returns which results may overwrite inputs that nothing else reads: a map from the
    index of a result to the index of an input.
    """
    fallback = fallback_handler(op, add_to_fallback_set=False)

    @register_lowering(op, type_promotion_kind=None)
    def lowering(inputs: Sequence[Any], programs: str) -> Any:
        node = V.graph.current_node
        results, replaced = node.meta["val"], overwritten(node)
        if results[0].device.type != "cuda":
            return fallback(inputs, programs)
        tensors = [inductor_ir.ExternKernel.require_contiguous(x) for x in inputs]
        outputs = []
        for i, x in enumerate(results):
            output = _take_memory(tensors[replaced[i]]) if i in replaced else None
            if output is None:
                shape = convert_shape_to_inductor(x.shape)
                output = empty_strided(shape, None, dtype=x.dtype, device=x.device)
            else:
                tensors[replaced[i]] = output
            outputs.append(output)
        for launch in prepare(tensors, programs):
            _launch(launch, tensors, outputs)
        return outputs


def _take_memory(x: Any) -> Any:
    """Return a tensor in the memory of `x`, which only the next kernel reads; None if impossible.

    A graph input can be overwritten if it is saved for this backward alone. If kernels write to a
    graph input, Inductor keeps it until the graph returns. So the result has a new name.
    """
    source: Any = V.graph.graph_inputs.get(x.get_name())
    if source is None:
        return x
    if V.graph.cpp_wrapper or not isinstance(source.data.data, inductor_ir.DonatedBuffer):
        return None
    size = x.get_size()
    strides = inductor_ir.FlexibleLayout.contiguous_strides(size)
    layout = inductor_ir.FixedLayout(x.get_device(), x.get_dtype(), size, strides)
    # A kernel without a name: Inductor writes `buf1 = (buf0)`, and `del buf0` after its last use.
    renamed = inductor_ir.ExternKernelAlloc(layout, [x], python_kernel_name="")
    return inductor_ir.TensorBox.create(renamed)


def _launch(launch: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    pointers = {f"in{i}": inputs[number] for i, number in enumerate(launch.inputs)}
    pointers |= {f"out{i}": outputs[number] for i, number in enumerate(launch.outputs)}
    kernel = _set_warps(launch.kernel, launch.num_warps)
    with _cache_kernel_analyses():
        inductor_ir.UserDefinedTritonKernel(
            kernel_idx=triton_kernel_wrap.kernel_side_table.add_kernel(kernel),
            grid=[(launch.grid, 1, 1)],
            tma_descriptor_metadata={},
            kernel_args={**pointers, **launch.sizes},
        )


@cache
def _set_warps(kernel: Any, num_warps: int) -> Any:
    import triton

    return triton.autotune(configs=[triton.Config({}, num_warps=num_warps)], key=[])(kernel)


def _cache_kernel_analyses() -> AbstractContextManager[None]:
    """Cache Inductor's slow analysis of the arguments to which a kernel writes.

    PyTorch 2.13 renamed the analysis, so both names are tried.
    """
    names = ("identify_mutated_tensors", "identify_accessed_tensors")
    found = {name: f for name in names if (f := getattr(triton_kernel_wrap, name, None))}
    return set_attributes(
        [(triton_kernel_wrap, name, _cache_analysis(f)) for name, f in found.items()]
    )


_analysed: dict[Any, Any] = {}


def _cache_analysis(analyse: Any) -> Any:
    def cached(kernel: Any, *args: Any) -> Any:
        if kernel not in _analysed:
            _analysed[kernel] = analyse(kernel, *args)
        return _analysed[kernel]

    return cached


def ceil_div(a: Any, b: int) -> Any:
    """Return ⌈a / b⌉ for an integer, a symbolic size or an Inductor expression `a`."""
    return CeilDiv(a, b) if isinstance(a, sympy.Expr) else -(-a // b)


def load_source(source: str) -> Any:
    """Import source text from a file, which Triton requires."""
    return PyCodeCache.load(source)
