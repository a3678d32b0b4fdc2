"""The decision about each forward value, and the bytes of its saved tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.dialect.formats import EXACT, Format
from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE
from fp8pass.graph.joint_facts import JointFacts


@dataclass(frozen=True)
class Decision:
    """How one forward value reaches the backward."""

    format: Format | None  # the format of the saved value; None if the value is recomputed
    # Number of elements that share a scale; 0 if the value is saved exactly or recomputed.
    group_size: int
    reason: str  # the reason for the decision, as text
    # Relative RMS error that rounding this value is expected to cause in gradients.
    expected_error: float = 0.0
    # Cost of saving the value in a low-bit format, in units of `costs.py`. Infinite if the value is
    # saved exactly or recomputed.
    price: float = math.inf
    on_host: bool = False  # whether the saved tensors, except scales and means, are in host memory
    # Whether the mean over tokens is subtracted before the value is quantized. The mean is saved,
    # too.
    centred: bool = False

    @property
    def recomputed(self) -> bool:
        """Whether the backward recomputes the value."""
        return self.format is None

    @property
    def low_bit(self) -> bool:
        """Whether the forward quantizes the value and the backward dequantizes it."""
        return self.group_size > 0

    @property
    def lossy(self) -> bool:
        """Whether the saved value has rounding errors."""
        return self.low_bit and self.format is not None and not self.format.lossless


Decisions = dict[fx.Node, Decision]


def decide_free(node: fx.Node, facts: JointFacts) -> Decision:
    """Return the decision about a parameter or leaf, which is alive in the backward anyway."""
    return Decision(
        EXACT, 0, SavedReason.PARAMETER if node in facts.parameters else SavedReason.LEAF
    )


def saved_bytes(decisions: Decisions, facts: JointFacts) -> float:
    """Return the bytes that a plan saves on the device, except values that stay alive anyway."""
    return sum(
        stored_bytes(node, decision) - host_bytes(node, decision)
        for node, decision in decisions.items()
        if not (decision.recomputed or facts.is_free(node) or graph.is_non_tensor(node))
    )


def host_bytes(node: fx.Node, decision: Decision) -> float:
    """Return how many bytes of a saved value are in host memory: all except scales and means."""
    if not decision.on_host:
        return 0.0
    on_device = _scale_bytes(node, decision) + _mean_bytes(node, decision)
    return stored_bytes(node, decision) - on_device


def stored_bytes(node: fx.Node, decision: Decision) -> float:
    """Return the bytes of a saved value: data, scales and means, wherever they are stored."""
    if not decision.low_bit or decision.format is None:
        return graph.nbytes(node)
    if decision.format.lossless:
        return graph.nbytes(node) + _scale_bytes(node, decision)
    elements = graph.numel(graph.tensor(node))
    quantized = decision.format.stored_bytes(elements, decision.group_size)
    return quantized + _mean_bytes(node, decision)


def _scale_bytes(node: fx.Node, decision: Decision) -> int:
    if not decision.low_bit:
        return 0
    groups = graph.numel(graph.tensor(node)) // decision.group_size
    return groups * GROUP_SCALE_DTYPE.itemsize


def _mean_bytes(node: fx.Node, decision: Decision) -> int:
    if not decision.centred:
        return 0
    return graph.nbytes(node) // compat.size_hint(graph.tensor(node).shape[-2])
