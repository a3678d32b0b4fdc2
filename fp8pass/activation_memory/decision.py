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

    format: Format | None  # None if the value is recomputed
    group_size: int  # 0 if the value is saved exactly or recomputed
    reason: str
    expected_error: float = 0.0  # relative RMS error of gradients
    price: float = math.inf  # in units of `costs.py`; infinite if saved exactly or recomputed
    on_host: bool = False  # whether host memory has the saved tensors, except scales and means
    # Whether the mean over tokens is saved exactly, and the value minus this mean in low bits.
    centred: bool = False

    @property
    def recomputed(self) -> bool:
        return self.format is None

    @property
    def low_bit(self) -> bool:
        return self.group_size > 0

    @property
    def lossy(self) -> bool:
        return self.low_bit and self.format is not None and not self.format.lossless


Decisions = dict[fx.Node, Decision]


def decide_free(node: fx.Node, facts: JointFacts) -> Decision:
    return Decision(
        EXACT, 0, SavedReason.PARAMETER if node in facts.parameters else SavedReason.LEAF
    )


def saved_bytes(decisions: Decisions, facts: JointFacts) -> float:
    """Return the bytes that a plan saves on the device, without values that stay alive anyway."""
    return sum(
        stored_bytes(node, decision) - host_bytes(node, decision)
        for node, decision in decisions.items()
        if not (decision.recomputed or facts.is_free(node) or graph.is_non_tensor(node))
    )


def host_bytes(node: fx.Node, decision: Decision) -> float:
    """Return the bytes of a saved value in host memory. Scales and means stay on the device."""
    if not decision.on_host:
        return 0.0
    on_device = _scale_bytes(node, decision) + _mean_bytes(node, decision)
    return stored_bytes(node, decision) - on_device


def stored_bytes(node: fx.Node, decision: Decision) -> float:
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
