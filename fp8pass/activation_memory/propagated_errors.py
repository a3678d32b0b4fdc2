"""Propagate the error of a saved value into the values that are recomputed from it.

The error rules of a value cover only the operators that read this value. But if a sum is recomputed
from a rounded term, the sum also has the term's error, and the operators that read the sum may
amplify this error more than the operators that read the term.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from fp8pass.activation_memory.decision import Decision, Decisions
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.error_analysis.derivation import Amplification
from fp8pass.error_analysis.error_rules import Rules


def propagate_errors(g: fx.Graph, decisions: Decisions, rules: Rules) -> Decisions:
    """Return `decisions` with expected errors that also cover recomputed values.

    If a saved value causes a larger error in gradients through the values that are recomputed from
    it, its expected error is raised to this error.
    """
    found, worst = dict(decisions), dict[fx.Node, Amplification]()
    for node in reversed(g.nodes):
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
    """Raise the expected error of `decision` to the error that `use` causes, if that is larger."""
    assert decision.format is not None
    error = use.expected * decision.format.relative_error
    if not decision.low_bit or error <= decision.expected_error:
        return decision
    reason = decision.reason
    if use.bound > 1:
        reason += SavedReason.RECOMPUTED_USES.format(bound=use.bound)
    return replace(decision, reason=reason, expected_error=error)
