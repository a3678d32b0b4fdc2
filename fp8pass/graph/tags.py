"""The keys that fp8pass sets in `node.meta`."""

from __future__ import annotations

from torch import fx

# On an input of a graph: its name in the model, such as `ids` or `layers.0.up.weight`.
INPUT_NAME = "fp8pass_input_name"

# On a node that replaces an operator: the name of the replaced operator, for use in value names.
ORIGINAL_OPERATOR = "fp8pass_original_operator"

# On views and copies that passes add. These nodes do not count as operators of the model.
ADDED_BY_PASS = "fp8pass_added_by_pass"

# On `scaled_mm`: the name of the GEMM that it replaced.
REPLACED_GEMM = "fp8pass_replaced_gemm"

# On `scaled_mm`: whether the result is transposed (each matrix in a batched GEMM).
IS_TRANSPOSED = "fp8pass_is_transposed"

# On the GEMMs of linear layers: `forward`, `dgrad` or `wgrad`.
ROLE = "fp8pass_role"

# On GEMMs that stay in high precision by choice or, like output heads, by default. Tensors that
# they save stay in high precision, too.
HIGH_PRECISION_BY_CHOICE = "fp8pass_high_precision_by_choice"

# On `quantize`: the layers that read the result, as pairs of a module path and an operand (`input`,
# `weight` or `gradient`).
OPERAND_OF = "fp8pass_operand_of"

# On `addmm`: whether the result may overwrite the first operand, which nothing else reads.
ADDS_IN_PLACE = "fp8pass_adds_in_place"

# On FP8 data that are quantized before the all-gather: the name of the gathered tensor.
ORIGINAL_GATHER = "fp8pass_original_gather"

# On an all-gather: the reason why it does not gather quantized data.
WHY_NOT_QUANTIZED = "fp8pass_why_not_quantized"

# On a backward node that recomputes or dequantizes a forward value: the name of the forward value.
COPIED_VALUE = "fp8pass_copied_value"

# On a saved tensor: whether it lives in host memory between forward and backward.
IS_OFFLOADED = "fp8pass_is_offloaded"


def original_name(node: fx.Node) -> str:
    """Return the name of the GEMM that a node replaced, or else the node's name."""
    return str(node.meta.get(REPLACED_GEMM, node.name))
