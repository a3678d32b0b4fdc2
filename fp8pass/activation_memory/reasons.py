"""The texts of all reasons for decisions about forward values."""

from __future__ import annotations

from enum import Enum


class SavedReason(str, Enum):
    """The text of a reason. `str.format` fills in its parameters."""

    PARAMETER = "parameter"
    LEAF = "a leaf tensor, which autograd keeps alive anyway"
    GRADIENT = "a gradient"
    KEEP_EXACT = "matches keep_exact pattern {pattern!r}"
    NEEDED_FOR = "values computed from this tensor must be exact: {reason}"
    EXACT_VALUES_FOLLOW = "exact values are recomputed from this tensor"
    NO_LOW_BITS = "save_format='none'"
    INPUT = "an input that needs no gradient, such as a table, a mask or data"
    QUANTIZED = "already quantized for a linear layer"
    DISCRETE = "integers and masks are saved as they are"
    CHUNKED_HEAD = "a gradient that the forward computes in the chunked output head"
    OPERATOR = "{operator} is not computed from activations"
    CONSTANT = "computed only from parameters and data"
    NO_GROUPS = "its last dimension does not split into equal groups of 16 or more"
    SLOWER = "{format} would free {bytes} and take {microseconds:.3g} µs more"
    AMPLIFIED = "may amplify errors {bound}, which is too much for every format"
    ALLOWED = "amplifies errors at most {bound:.1f}×"
    SIGNS = ", and gradients depend on its small values, which {format} rounds to zero"
    RECOMPUTED_USES = ", and {bound:.1f}× in values recomputed from this tensor"
    ATTENTION_OUTPUT = (
        "attention_output={format!r}: attention amplifies errors about {expected:.1f}×"
    )
    CHEAP = "cheap to recompute"
    RECOMPUTED = "recomputed to meet the budget"
    WITHIN_BUDGET = "fits the budget"
    ON_HOST = "in host memory to meet the budget"
    MORE_BITS = "; the budget allows {bits} bits"

    __str__ = str.__str__
