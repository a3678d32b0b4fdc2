"""Reduce and scatter in 8 bits: send FP8 data in groups, and add the received data up in FP32.

    before   y = reduce_scatter(x, "sum")
    after    s = scale(amax(x, 1×128));  q = quantize(x, s)
             p, t = all_to_all(bytes of q and s)
             y = sum over ranks of dequantize(p, t)

The pass runs only with the option `scatter_format`. Tensor parallel layers with sharded outputs end
with a reduce-scatter (section 2.3 of the FP8-LM paper). Gradients of gathered tensors are reduced
in the same way. Each term is rounded once. The order of the sum is fixed, so results are
deterministic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from fp8pass import graph
from fp8pass.dialect.formats import E4M3, divisor_group
from fp8pass.dialect.quantization import Quantization, block_text, group
from fp8pass.graph.collectives import ALL_TO_ALL, REDUCE_SCATTER, WAIT_TENSOR, remove_unused
from fp8pass.graph.nodes import aten, emit, prims, tensor
from fp8pass.graph.tags import WHY_NOT_QUANTIZED
from fp8pass.passes.context import Context

fp8 = torch.ops.fp8pass

GROUP_SIZE = 128


def scatter_quantized(gm: fx.GraphModule, ctx: Context) -> None:
    if ctx.config.scatter_format == "exact":
        return
    for node in gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER):
        reason = why_not(node)
        if reason:
            node.meta[WHY_NOT_QUANTIZED] = reason
        else:
            _rewrite(node)
    remove_unused(gm.graph)


def why_not(scatter: fx.Node) -> str:
    x, operation = scatter.args[:2]
    val = tensor(x)  # type: ignore[arg-type]
    if operation not in ("sum", "avg") or not val.is_floating_point():
        return f"the {operation} of {graph.dtype_text(val.dtype)} is not rounded"
    if not all(isinstance(size, int) for size in val.shape):
        return "its sizes are dynamic"
    if val.ndim < 2 or divisor_group(val.shape[-1], GROUP_SIZE) is None:
        return "its rows cannot be split into groups"
    if val.numel() == 0 or val.numel() // scatter.args[2] % 2:  # type: ignore[operator]
        return "the number of elements per rank is zero or odd"  # scales have two bytes
    if len(scatter.users) != 1 or next(iter(scatter.users)).target is not WAIT_TENSOR:
        return "several operators wait for it"
    return ""


def _rewrite(scatter: fx.Node) -> None:
    x: Any
    ranks: Any
    x, operation, ranks, name = scatter.args
    (wait,) = scatter.users
    columns = tensor(x).shape[-1]
    size: Any = divisor_group(columns, GROUP_SIZE)
    how, add = Quantization(E4M3, group(size)), partial(emit, scatter.graph, like=scatter)

    def reshape(values: fx.Node, *shape: int) -> fx.Node:
        return add(aten.reshape.default, values, list(shape))

    with scatter.graph.inserting_before(wait):
        rows = reshape(x, -1, columns)
        scale = add(fp8.scale.default, add(fp8.amax.default, rows, block_text(how.block)), str(how))
        codes = add(fp8.as_bytes.default, add(fp8.quantize.default, rows, scale, str(how)))
        # Inductor of PyTorch 2.11 may store `scale` in columns, which bytes cannot view.
        scale_bytes = add(aten.view.dtype, reshape(scale, -1), torch.uint8)
        parts = [reshape(y, ranks, -1) for y in (codes, scale_bytes)]
        one_each = [1] * ranks
        sent = add(aten.cat.default, parts, 1)
        received = add(WAIT_TENSOR, add(ALL_TO_ALL, sent, one_each, one_each, name))
        end = tensor(parts[0]).shape[1]
        codes = add(aten.slice.Tensor, received, 1, 0, end)
        codes = add(fp8.as_codes.default, reshape(codes, ranks, -1, columns), how.format.name)
        scales = add(aten.view.dtype, add(aten.slice.Tensor, received, 1, end), tensor(scale).dtype)
        scales = reshape(scales, ranks, -1, columns // size)
        values = add(fp8.dequantize.default, [codes], scales, str(how), torch.float32)
        total = add(aten.sum.dim_IntList, reshape(values, ranks, *tensor(wait).shape), [0])
        if operation == "avg":
            total = add(aten.div.Scalar, total, ranks)
        result = add(prims.convert_element_type.default, total, tensor(wait).dtype)
    wait.replace_all_uses_with(result)
