"""Trace a function into operators that Inductor lowers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.compat.attributes import set_attributes
from fp8pass.compat.operators import fake_mode_of

__all__ = ["trace"]

_aten = torch.ops.aten
# On a CPU, Inductor would decompose small GEMMs into sums, which round differently.
_GEMMS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.Graph:
    """Return the graph of `function` on fake inputs, with Inductor's decompositions and no
    metadata.

    Layouts are not recorded, because `make_fx` would add a guard on a dynamic number of elements.
    """
    traced = make_fx(function, tracing_mode="real", decomposition_table=_decompositions())
    without_layouts = set_attributes(
        [(proxy_tensor, "_extract_tensor_metadata", lambda *args: None)]
    )
    with torch.no_grad(), fake_mode_of(inputs[0]), enable_python_dispatcher(), without_layouts:
        graph = traced(*inputs).graph
    for node in graph.nodes:
        node.meta.clear()
        if node.target is _aten.alias.default:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    return graph


@cache
def _decompositions() -> dict[Any, Any]:
    return {op: rule for op, rule in select_decomp_table().items() if op not in _GEMMS}
