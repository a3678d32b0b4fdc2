"""The forward values that the backward needs, and the decision about each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.format_choices import FormatChoice, FormatChoices
from fp8pass.dialect.formats import EXACT, Format
from fp8pass.dialect.scaling import GROUP_SCALE_DTYPE
from fp8pass.graph.joint import JointFacts


@dataclass(frozen=True)
class Decision:
    """How one forward value reaches the backward.

    Attributes:
        format: None if the value is recomputed.
        group_size: elements that share a scale; 0 if the value is kept exactly or recomputed.
        reason: why it was decided so, as text.
        expected_error: relative RMS error of the gradients.
        on_host: whether it is kept on the host, except for scales and means.
        centred: whether it is the difference from its mean over tokens that is stored.
    """

    format: Format | None
    group_size: int
    reason: str
    expected_error: float = 0.0
    on_host: bool = False
    centred: bool = False

    @property
    def recomputed(self) -> bool:
        """Whether the backward computes the value again."""
        return self.format is None

    @property
    def low_bit(self) -> bool:
        """Whether the value goes through quantize and dequantize."""
        return self.group_size > 0


Decisions = dict[fx.Node, Decision]


@dataclass(frozen=True)
class Needs:
    """The forward values that the backward needs.

    Attributes:
        values: all nodes that depend on no gradient, in order.
        all: those that the backward uses.
        exact: those that it needs exactly, because of an operator that tolerates no error or
            because the user says so; each with the reason.
    """

    values: list[fx.Node]
    all: set[fx.Node] = field(default_factory=set)
    exact: dict[fx.Node, str] = field(default_factory=dict)


def find_needs(gm: fx.GraphModule, choices: FormatChoices) -> Needs:
    """The values that cross from the forward to the backward of a joint graph."""
    facts, backward = choices.facts, choices.rules.backward
    needs = Needs([n for n in gm.graph.nodes if n not in backward and n.op != "output"])
    for gradient in graph.outputs(gm.graph)[facts.num_fwd_outputs :]:
        if isinstance(gradient, fx.Node) and gradient not in backward:
            needs.all.add(gradient)
            needs.exact[gradient] = "a gradient"
    for node in gm.graph.nodes:
        if node in backward and node.op != "output":
            needs.all.update(n for n in node.all_input_nodes if n not in backward)
    for node in needs.values:
        used = node in needs.all or choices.must_be_available(node)
        if used and (reason := choices.why_exact(node)):
            needs.exact.setdefault(node, reason)
    return needs


def choice_made(choice: FormatChoice, *, on_host: bool = False) -> Decision:
    """The decision to store a value as `choice` says."""
    return Decision(
        choice.format,
        choice.group_size,
        choice.reason,
        choice.expected_error,
        on_host=on_host,
        centred=choice.centred,
    )


def free_decision(node: fx.Node, facts: JointFacts) -> Decision:
    """The decision about a value that stays alive until the backward anyway."""
    parameter = node in facts.parameters
    return Decision(
        EXACT, 0, "parameter" if parameter else "a leaf tensor, which autograd holds anyway"
    )


def kept_bytes(decisions: Decisions, choices: FormatChoices) -> float:
    """Bytes that a plan keeps where it computes, without those of what stays alive anyway."""
    total = 0.0
    for node, decision in decisions.items():
        if decision.recomputed or choices.facts.is_free(node) or graph.is_non_tensor(node):
            continue
        total += stored_bytes(node, decision) - host_bytes(node, decision)
    return total


def host_bytes(node: fx.Node, decision: Decision) -> float:
    """Bytes of a kept value that are on the host: all but scales and means."""
    if not decision.on_host:
        return 0.0
    beside = scale_bytes(node, decision.group_size) + mean_bytes(node, decision)
    return stored_bytes(node, decision) - beside


def scale_bytes(node: fx.Node, group_size: int) -> int:
    """Bytes of the scales of a value that is kept in groups; 0 without groups."""
    if not group_size:
        return 0
    return graph.numel(graph.tensor(node)) // group_size * GROUP_SCALE_DTYPE.itemsize


def mean_bytes(node: fx.Node, decision: Decision) -> int:
    """Bytes of the means over tokens of a value that is kept less these."""
    if not decision.centred:
        return 0
    return graph.nbytes(node) // compat.size_hint(graph.tensor(node).shape[-2])


def stored_bytes(node: fx.Node, decision: Decision) -> float:
    """Bytes of a kept value, wherever; the lossless format keeps scales like the others."""
    if not decision.low_bit or decision.format is None:
        return graph.nbytes(node)
    if decision.format.lossless:
        return graph.nbytes(node) + scale_bytes(node, decision.group_size)
    elements = graph.numel(graph.tensor(node))
    coded = decision.format.stored_bytes(elements, decision.group_size)
    return coded + mean_bytes(node, decision)
