"""The pipeline: all passes over a graph, in order.

A pass is one function in one file of its name, `pass_(gm, ctx) -> None`. It rewrites `gm.graph` in
place or adds to `ctx` (`context.py`), and changes nothing where it does not apply. Files are in the
folder of their stage: `joint/`, then `lowering/`; those in `counters/` only count.
`runner.py` runs the passes of a list, records, times and checks them, and leaves out those that
`FP8PASS_DISABLE_PASSES` names.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fp8pass.graph import spec
from fp8pass.passes.context import Context, Requests
from fp8pass.passes.counters.count_casts import count_casts
from fp8pass.passes.counters.count_kernels import count_kernels
from fp8pass.passes.counters.list_collectives import list_collectives
from fp8pass.passes.joint.chunk_head import chunk_head
from fp8pass.passes.joint.gather_again import gather_again
from fp8pass.passes.joint.gather_codes import gather_codes
from fp8pass.passes.joint.materialize_plan import materialize_plan
from fp8pass.passes.joint.merge_dgrads import merge_dgrads
from fp8pass.passes.joint.offload_saved import offload_saved
from fp8pass.passes.joint.plan_saved_values import plan_saved_values
from fp8pass.passes.joint.quantize_experts import quantize_experts
from fp8pass.passes.joint.quantize_linears import quantize_linears
from fp8pass.passes.joint.simulate_format import simulate_format
from fp8pass.passes.lowering.buffer_residual_sums import buffer_residual_sums
from fp8pass.passes.lowering.fuse_launches import fuse_launches
from fp8pass.passes.lowering.fuse_norms import fuse_norms
from fp8pass.passes.lowering.fuse_rows import fuse_rows
from fp8pass.passes.lowering.fuse_scales import fuse_scales
from fp8pass.passes.lowering.fuse_tiles import fuse_tiles
from fp8pass.passes.lowering.lower_dialect import lower_dialect
from fp8pass.passes.lowering.pin_layouts import pin_layouts
from fp8pass.passes.lowering.split_cats import split_cats
from fp8pass.passes.lowering.unroll_chunks import unroll_chunks

Pass = Callable[[fx.GraphModule, Context], None]

# Joint graphs, forward and backward in one.
JOINT_PASSES: tuple[Pass, ...] = (
    chunk_head,  # output head and loss -> one operator, chunk by chunk of tokens
    quantize_linears,  # mm, addmm of a parameter -> quantize + scaled_mm
    quantize_experts,  # _grouped_mm, bmm of a parameter -> quantize + scaled_grouped_mm
    simulate_format,  # instead of that: mm, addmm of a parameter -> mask_format around them
    gather_codes,  # gathers of what is only quantized -> gathers of codes
    gather_again,  # gathered parameters and codes -> marked, not to be kept
    plan_saved_values,  # which forward values the backward keeps, in which format
    materialize_plan,  # the plan -> quantize, dequantize and recompute nodes
    merge_dgrads,  # gradients of an input that layers share -> one GEMM
    offload_saved,  # what is kept on the host -> copies there, and back before it is used
    list_collectives,  # what ranks send each other, for the plan
    count_casts,  # what FP8 GEMMs compute and their casts move, for the plan
)

# Graphs without a backward: evaluation gives the values that training would.
INFERENCE_PASSES: tuple[Pass, ...] = (
    chunk_head,
    quantize_linears,
    quantize_experts,
    simulate_format,
    gather_codes,
    list_collectives,
)

# The forward and the backward, or an inference graph, right before Inductor compiles them.
LOWERING_PASSES: tuple[Pass, ...] = (
    unroll_chunks,  # operators that run in chunks -> the chunks, one after the other
    fuse_rows,  # matrices quantized by row -> row kernels
    fuse_norms,  # the backward of norms -> row kernels
    fuse_tiles,  # matrices quantized in both layouts -> tile kernels
    fuse_scales,  # second stages of amaxes, and scales -> one row kernel
    fuse_launches,  # kernels that can run together -> one launch
    count_kernels,  # how matrices are quantized, for the plan
    lower_dialect,  # the rest of the dialect -> aten
    split_cats,  # concatenations of computed parts -> each part stored in its place
    buffer_residual_sums,  # sums of the residual stream -> memory
    pin_layouts,  # operands of grouped GEMMs -> memory, in the strides they were traced with
)

ALL_PASSES: tuple[Pass, ...] = (*JOINT_PASSES, *LOWERING_PASSES)

# Without these no graph could be cut, or compiled.
INDISPENSABLE: tuple[Pass, ...] = (materialize_plan, unroll_chunks, lower_dialect)

# What holds for a graph after all passes of a list, checked with FP8PASS_CHECK=1.
CONTRACTS: dict[tuple[Pass, ...], Callable[[fx.Graph], None]] = {
    JOINT_PASSES: spec.verify_no_kernels,
    INFERENCE_PASSES: spec.verify_no_kernels,
    LOWERING_PASSES: spec.verify_lowered,
}

# These ask something of sizes that vary: few tokens are compiled anew, with a head that is whole.
GUARDING: tuple[Pass, ...] = (chunk_head,)

__all__ = [
    "ALL_PASSES",
    "CONTRACTS",
    "GUARDING",
    "INFERENCE_PASSES",
    "JOINT_PASSES",
    "LOWERING_PASSES",
    "Context",
    "Pass",
    "Requests",
]
