"""FX graphs: reading them, naming what is in them, and one way to change them.

nodes.py           create a node, read its value, copy a graph
tags.py            every key that fp8pass sets in `node.meta`
names.py           names of modules, values and operators, and the patterns that match them
patterns.py        looking through views, casts and transposes; sums of a residual stream
order.py           which nodes come before which
joint.py           what is known about a joint graph before any pass
pointwise.py       pointwise operators: one row for each, in sympy and in Triton
regions.py         inlines regions of nested_compile_region into Dynamo's graph
symbols.py         the sympy that these rows are written in
classify.py        the class of an operator: GEMM, view, reduction, ...
collectives.py     what ranks send each other; gathers, and what they gather
origins.py         which values depend on the data, which on parameters or constants alone
output_heads.py    which layers compute logits, and which are routers
called_graphs.py   linear layers in graphs that torch.cond and its like call
linear_layers.py   the GEMMs of linear layers, forward and backward
chunks.py          parts that run on some rows after others
by_rows.py         such a part, written for any number of rows, operator by operator
row_values.py      what has rows in it, its inputs, and shifts of rows
multiples.py       which gradients are multiples of the one that a backward starts from
flops.py           floating point operations
spec.py            what a well-formed graph is

The helpers of the first five are here: `graph.emit`, `graph.tensor`, `graph.skip_views_and_casts`, ...
"""

from __future__ import annotations

from fp8pass.graph.names import clean_path, module_path, operator_name, value_names
from fp8pass.graph.nodes import (
    aten,
    bytes_of,
    copy_module,
    dtype_text,
    emit,
    is_call,
    is_getitem,
    is_non_tensor,
    nbytes,
    numel,
    operator_of,
    output_node,
    outputs,
    prims,
    shape_text,
    stride_order,
    tensor,
    value,
)
from fp8pass.graph.order import (
    ancestors,
    depends_on,
    insertion_point_after,
    sort_and_prune,
    tangent_dependent,
)
from fp8pass.graph.patterns import (
    CASTS,
    RESHAPES,
    is_batched_transpose,
    is_residual_sum,
    match_column_slice,
    skip_batched_transposes,
    skip_reshapes,
    skip_transposes,
    skip_views_and_casts,
)
from fp8pass.graph.tags import ORIGINAL_OPERATOR, original_name

__all__ = [
    "CASTS",
    "ORIGINAL_OPERATOR",
    "RESHAPES",
    "ancestors",
    "aten",
    "bytes_of",
    "clean_path",
    "copy_module",
    "depends_on",
    "dtype_text",
    "emit",
    "insertion_point_after",
    "is_batched_transpose",
    "is_call",
    "is_getitem",
    "is_non_tensor",
    "is_residual_sum",
    "match_column_slice",
    "module_path",
    "nbytes",
    "numel",
    "operator_name",
    "operator_of",
    "original_name",
    "output_node",
    "outputs",
    "prims",
    "shape_text",
    "skip_batched_transposes",
    "skip_reshapes",
    "skip_transposes",
    "skip_views_and_casts",
    "sort_and_prune",
    "stride_order",
    "tangent_dependent",
    "tensor",
    "value",
    "value_names",
]
