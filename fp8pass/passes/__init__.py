"""The pipeline: what happens to a joint forward and backward graph, in this order.

A pass is one function in one file, `pass_(gm, ctx) -> None`, that rewrites `gm.graph` in place or
adds to `ctx`. Where it does not apply it leaves the graph as it was.

    linear.py        mm, addmm of a parameter -> quantize + scaled_mm
    save_plan.py     which forward values the backward keeps, in which format
    materialize.py   the plan -> quantize, dequantize and recompute nodes
    merge_dgrads.py  gradients of an input that layers share -> one GEMM

`classify.py` says what an operator is. What may be inexact is derived: `regions.py` (what belongs
together), `expressions.py` (its maths), `perturbation.py` (bounds), `amplification.py` and
`derivation.py` (numbers), `attention_rule.py`, and `error_rules.py`, which puts them together;
`rule_summary.py` shows them.
`storage.py` chooses a value's format, `costs.py` says what keeping and recomputing cost,
`decision.py` is what was decided, and `budget.py` decides under a memory budget, with an eye on
what the backward holds besides (`backward_memory.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fp8pass.passes.context import Context
from fp8pass.passes.linear import quantize_linears
from fp8pass.passes.materialize import materialize_plan
from fp8pass.passes.merge_dgrads import merge_dgrads
from fp8pass.passes.save_plan import plan_saved_values

Pass = Callable[[fx.GraphModule, Context], None]

# For graphs with a backward.
JOINT_PASSES: tuple[Pass, ...] = (
    quantize_linears,
    plan_saved_values,
    materialize_plan,
    merge_dgrads,
)

# For graphs without one: evaluation gives the values that training would.
INFERENCE_PASSES: tuple[Pass, ...] = (quantize_linears,)

__all__ = ["INFERENCE_PASSES", "JOINT_PASSES", "Context", "Pass"]
