"""The pipeline: the passes over joint, forward, backward and inference graphs, in order.

A pass is one function `pass_(gm, ctx) -> None` in a file of the same name. It rewrites `gm.graph`
in place or adds results to `ctx`, and leaves graphs alone that it does not apply to.

joint/         passes over joint graphs
lowering/      passes over forward and backward graphs
context.py     `ctx`, which passes read and write
runner.py      runs a list of passes, except passes that `FP8PASS_DISABLE_PASSES` names
added.py       inserts the user's passes
quantizer.py   quantizes the operands of GEMMs, for several passes
gemm_choice.py chooses the GEMMs that run in FP8
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from fp8pass.graph import spec
from fp8pass.passes.context import Context, Requests
from fp8pass.passes.joint.chunk_head import chunk_head
from fp8pass.passes.joint.describe_graph import describe_graph
from fp8pass.passes.joint.exchange_quantized import exchange_quantized
from fp8pass.passes.joint.gather_quantized import gather_quantized
from fp8pass.passes.joint.materialize_plan import materialize_plan
from fp8pass.passes.joint.merge_adapters import merge_adapters
from fp8pass.passes.joint.merge_dgrads import merge_dgrads
from fp8pass.passes.joint.merge_reductions import merge_reductions
from fp8pass.passes.joint.offload_saved import offload_saved
from fp8pass.passes.joint.plan_saved_values import plan_saved_values
from fp8pass.passes.joint.quantize_experts import quantize_experts
from fp8pass.passes.joint.quantize_linears import quantize_linears
from fp8pass.passes.joint.repeat_gathers import repeat_gathers
from fp8pass.passes.joint.scatter_quantized import scatter_quantized
from fp8pass.passes.joint.simulate_format import simulate_format
from fp8pass.passes.lowering.add_in_place import add_in_place
from fp8pass.passes.lowering.buffer_residual_sums import buffer_residual_sums
from fp8pass.passes.lowering.describe_kernels import describe_kernels
from fp8pass.passes.lowering.fuse_launches import fuse_launches
from fp8pass.passes.lowering.fuse_losses import fuse_losses
from fp8pass.passes.lowering.fuse_norms import fuse_norms
from fp8pass.passes.lowering.fuse_rows import fuse_rows
from fp8pass.passes.lowering.fuse_scales import fuse_scales
from fp8pass.passes.lowering.fuse_tiles import fuse_tiles
from fp8pass.passes.lowering.lower_dialect import lower_dialect
from fp8pass.passes.lowering.pin_layouts import pin_layouts
from fp8pass.passes.lowering.split_cats import split_cats
from fp8pass.passes.lowering.unroll_chunks import unroll_chunks
from fp8pass.passes.lowering.use_addmm import use_addmm

Pass = Callable[[fx.GraphModule, Context], None]


@dataclass(frozen=True)
class Entry:
    """A pass in the pipeline."""

    run: Pass
    in_inference: bool = False
    adds_guards: bool = False  # whether the pass may add guards on dynamic shapes
    required: bool = False  # whether graphs cannot be compiled without the pass
    # Whether the pass replaces kernels that stock Inductor would generate. It skips graphs that use
    # PyTorch's own partition (`Context.stock`).
    rewrites_stock: bool = False


_JOINT = (
    # Output head and loss -> one operator that runs on chunks of the tokens. The pass adds guards
    # on the number of tokens: for few tokens PyTorch recompiles the graph, with an unchunked head.
    Entry(chunk_head, in_inference=True, adds_guards=True),
    # mm, addmm of a parameter -> quantize + scaled_mm
    Entry(quantize_linears, in_inference=True),
    # _grouped_mm, bmm of a parameter -> quantize + scaled_grouped_mm
    Entry(quantize_experts, in_inference=True),
    # With Config.simulate, this pass replaces the two passes above:
    # mm, addmm of a parameter -> the same GEMM, with operands and result rounded by mask_format
    Entry(simulate_format, in_inference=True),
    # all_gather + quantize -> quantize + all_gather
    Entry(gather_quantized, in_inference=True),
    # all_to_all + quantize -> quantize + all_to_all
    Entry(exchange_quantized, in_inference=True),
    # Sum of all_reduces or reduce_scatters -> reduction of the sum
    Entry(merge_reductions, in_inference=True),
    # With Config.scatter_format: reduce_scatter -> quantize + all_to_all + dequantize + sum
    Entry(scatter_quantized, in_inference=True),
    # GEMMs of adapters that read one tensor, or add to one sum -> one GEMM
    Entry(merge_adapters, in_inference=True),
    # Marks gathers of parameters, and gathers of FP8 data, for recomputation
    Entry(repeat_gathers),
    # Decides which forward values are saved, and in which format
    Entry(plan_saved_values),
    # The plan -> quantize, dequantize and recompute nodes
    Entry(materialize_plan, required=True),
    # Sum of the dgrads of layers that share an input -> one GEMM
    Entry(merge_dgrads),
    # Saved tensors that the plan offloads -> copies to the host and back
    Entry(offload_saved),
    # Adds the collectives to the plan
    Entry(describe_graph, in_inference=True),
)

_LOWERING = (
    # in_chunks -> the operators of each chunk
    Entry(unroll_chunks, required=True),
    # Sum of a GEMM and of an adapter's product -> addmm
    Entry(use_addmm, rewrites_stock=True),
    # Cross entropies and their gradients -> row kernels
    Entry(fuse_losses, rewrites_stock=True),
    # Quantization by row, and the operators that compute its input -> row kernels
    Entry(fuse_rows),
    # The backward of norms -> row kernels
    Entry(fuse_norms, rewrites_stock=True),
    # Quantization in both layouts, and the operators that compute its input -> tile kernels
    Entry(fuse_tiles),
    # Reductions of stored amaxes, and the scales computed from them -> one row kernel
    Entry(fuse_scales),
    # Kernels that can run together -> one launch
    Entry(fuse_launches),
    # Adds the kernels to the plan
    Entry(describe_kernels),
    # Dialect operators that no kernel replaced -> aten
    Entry(lower_dialect, required=True),
    # addmm of another GEMM's result -> the product is added in place
    Entry(add_in_place, rewrites_stock=True),
    # cat of computed parts -> one buffer, in which each part is stored in place
    Entry(split_cats, rewrites_stock=True),
    # Sums of the residual stream -> stored in buffers
    Entry(buffer_residual_sums, rewrites_stock=True),
    # Operands of grouped GEMMs -> stored in buffers with the strides from tracing
    Entry(pin_layouts),
)

JOINT_PASSES: tuple[Pass, ...] = tuple(entry.run for entry in _JOINT)

INFERENCE_PASSES: tuple[Pass, ...] = tuple(entry.run for entry in _JOINT if entry.in_inference)

# Passes over forward, backward and inference graphs, right before Inductor compiles them.
LOWERING_PASSES: tuple[Pass, ...] = tuple(entry.run for entry in _LOWERING)

ALL_PASSES: tuple[Pass, ...] = (*JOINT_PASSES, *LOWERING_PASSES)
ENTRIES: dict[Pass, Entry] = {entry.run: entry for entry in (*_JOINT, *_LOWERING)}

# Checks of the graph after the last pass of a list. They run only with FP8PASS_CHECK=1.
CONTRACTS: dict[tuple[Pass, ...], Callable[[fx.Graph], None]] = {
    JOINT_PASSES: spec.verify_no_kernels,
    INFERENCE_PASSES: spec.verify_no_kernels,
    LOWERING_PASSES: spec.verify_lowered,
}

__all__ = [
    "ALL_PASSES",
    "CONTRACTS",
    "ENTRIES",
    "INFERENCE_PASSES",
    "JOINT_PASSES",
    "LOWERING_PASSES",
    "Context",
    "Pass",
    "Requests",
]
