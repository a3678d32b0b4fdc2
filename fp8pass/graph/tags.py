"""Every key that fp8pass sets in `node.meta`, and reads elsewhere."""

from __future__ import annotations

from torch import fx

# On what replaces an operator: the operator's name, by which values are named.
ORIGINAL_OPERATOR = "fp8pass_replaced"

# On views and copies around what passes put into a graph. They do not count among the model's own.
ADDED_BY_PASS = "fp8pass_added"

# On `scaled_mm`: the name of the GEMM that it replaced.
REPLACED_GEMM = "fp8pass_stands_for"

# On `scaled_mm`: that it computes the transpose of that GEMM, or of each of a batch of them.
IS_TRANSPOSED = "fp8pass_turned"

# On the GEMMs of linear layers: `forward`, `dgrad` or `wgrad`.
ROLE = "fp8pass_role"

# On GEMMs that stay in high precision because the user, or the default for output heads, says so.
# What they save is kept as it is, too.
HIGH_PRECISION_BY_CHOICE = "fp8pass_kept_by_choice"

# On `quantize`: the layers that the codes are an operand of, as (module path, `input`, `weight` or
# `gradient`).
OPERAND_OF = "fp8pass_operand_of"

# On gathered codes: the name of the tensor that was gathered and quantized in their place.
ORIGINAL_GATHER = "fp8pass_gathered_as"

# On a gather: why it is not one of codes.
WHY_NOT_QUANTIZED = "fp8pass_why_wide"

# On the copy of a forward value in the backward, recomputed or dequantized: the value's name.
COPIED_VALUE = "fp8pass_carries"

# On what crosses to the backward: that it is kept on the host meanwhile.
IS_OFFLOADED = "fp8pass_to_host"


def original_name(node: fx.Node) -> str:
    """The name of a node, or of the GEMM that it replaced."""
    return str(node.meta.get(REPLACED_GEMM, node.name))
