"""Propagate the error of a saved value into the values that are recomputed from it.

If `s = a + b` is recomputed from a rounded `a`, the operators that read `s` amplify the error of
`a`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fp8pass.activation_memory.decision import Decision, Decisions
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.error_analysis.derivation import Amplification
from fp8pass.error_analysis.error_rules import Rules


def propagate_errors(decisions: Decisions, rules: Rules) -> Decisions:
    """Raise the expected error of each saved value to the error of values recomputed from it."""
    found, worst = dict(decisions), dict[fx.Node, Amplification]()
    for node in reversed(rules.graph.nodes):
        decision = decisions.get(node)
        if decision is None:
            continue
        uses = [worst[user] for user in node.users if user in worst]
        if decision.recomputed:
            uses += rules.uses_of_recomputed(node)
        if not uses:
            continue
        largest = max(uses, key=lambda x: (x.expected, x.bound))
        if decision.recomputed:
            worst[node] = largest
        else:
            found[node] = _include(decision, largest)
    return found


def _include(decision: Decision, use: Amplification) -> Decision:
    assert decision.format is not None
    error = use.expected * decision.format.relative_error
    if not decision.low_bit or error <= decision.expected_error:
        return decision
    reason = decision.reason
    if use.bound > 1:
        reason += SavedReason.RECOMPUTED_USES.format(bound=use.bound)
    return replace(decision, reason=reason, expected_error=error)
