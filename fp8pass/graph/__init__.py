"""FX graphs: read nodes, name them, classify them, and create new ones.

nodes.py           create a node, read its value, copy a graph module
tags.py            the keys that fp8pass sets in `node.meta`
names.py           names of modules, values and operators; patterns that match them
patterns.py        skip views, casts and transposes; match slices, fills and residual additions
sums.py            find and remove the terms of sums
order.py           ancestors and dependences; topological order
joint_facts.py     which inputs of a joint graph are parameters, and other facts about inputs
symbols.py         the sympy functions that pointwise formulas use
pointwise.py       the formula of each pointwise operator, in sympy and in Triton
classify.py        the kind of an operator: GEMM, view, reduction, ...
inlined_regions.py inline the regions of nested_compile_region into Dynamo's graph
collectives.py     collectives; all-gathers and the tensors that they gather
origins.py         whether a value depends on the data, on parameters or on constants
dropped_logits.py  replace logits that a model returns alongside its loss
split_adapters.py  multiply tokens with adapters, instead of adding adapters to weights of experts
output_heads.py    layers that compute logits; MoE routers
linear_layers.py   the GEMMs of linear layers, forward and backward
chunks.py          subgraphs that run on chunks of rows
row_graph.py       the graph that computes a chunk of rows, and its inputs
row_writer.py      translates operators of the original graph into the graph of a chunk
multiples.py       check that a value of the backward is linear in the incoming gradient
flops.py           floating-point operations
traffic.py         bytes of values, and whether generated code computes them
launches.py        whether launching the kernels of a graph takes longer than running them
spec.py            check that a graph is well formed

This package re-exports the most common helpers: `graph.emit`, `graph.tensor`, ...
"""
# ruff: noqa: F401

from __future__ import annotations

from fp8pass.graph.names import clean_path, module_path, operator_name, tag_inputs, value_names
from fp8pass.graph.nodes import (
    bytes_of,
    copy_module,
    dtype_text,
    emit,
    is_call,
    is_float,
    is_getitem,
    is_non_tensor,
    nbytes,
    numel,
    operator_of,
    output_node,
    outputs,
    shape_text,
    stride_order,
    tensor,
    value,
)
from fp8pass.graph.order import ancestors, insertion_point_after, sort_and_prune, tangent_dependent
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
