"""Replace operators of the dialect by aten operators, right before Inductor compiles a graph.

before   s = scale(amax(x));  q = quantize(x, s)
after    a = amax(amax(abs(x), -1));  s = power_of_two(clamp(a / 448))
         q = buffer(convert(clamp(x * reciprocal(s))))
"""

from __future__ import annotations

from torch import fx

from fp8pass.codegen.lowering import lower_graph
from fp8pass.passes.context import Context


def lower_dialect(gm: fx.GraphModule, ctx: Context) -> None:
    lower_graph(gm.graph)
