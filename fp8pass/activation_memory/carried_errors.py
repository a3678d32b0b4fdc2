"""What errors of a stored value do in the values that the backward computes again from it.

A rule of one value knows of the operators that read it. A sum that is computed again from an
inexact term has that term's error, and what reads the sum may amplify it more.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fp8pass.activation_memory.decision import Decision, Decisions
from fp8pass.error_analysis.derivation import Amplification
from fp8pass.error_analysis.error_rules import Rules


def with_carried_errors(g: fx.Graph, decisions: Decisions, rules: Rules) -> Decisions:
    """`decisions`, whose expected errors are the worst of all that is computed from a value."""
    found, worst = dict(decisions), dict[fx.Node, Amplification]()
    for node in reversed(g.nodes):
        decision = decisions.get(node)
        if decision is None:
            continue
        uses = [worst[user] for user in node.users if user in worst]
        if decision.recomputed:
            uses += rules.uses_of_recomputed(node)
        largest = max(uses, key=lambda x: (x.expected, x.bound), default=None)
        if largest is None:
            continue
        if decision.recomputed:
            worst[node] = largest
        else:
            found[node] = _with_uses(decision, largest)
    return found


def _with_uses(decision: Decision, largest: Amplification) -> Decision:
    """The decision with the error of the worst value that is computed again from the stored one."""
    assert decision.format is not None
    error = largest.expected * decision.format.relative_error
    if not decision.low_bit or error <= decision.expected_error:
        return decision
    amplified = f", and {largest.bound:.1f}× in what is computed again from it"
    reason = decision.reason + (amplified if largest.bound > 1 else "")
    return replace(decision, reason=reason, expected_error=error)
