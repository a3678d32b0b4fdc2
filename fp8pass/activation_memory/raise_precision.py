"""Spend the rest of a budget on formats with more bits, where a byte reduces errors most.

This is a knapsack problem. Each step raises one value to its next larger format, e.g. from 5 to 6
bits. Each additional bit reduces the error by less than the previous bit, so the steps are taken in
the order of their error reduction per byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.decision import Decision, Decisions, saved_bytes, stored_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.dialect.formats import Format


@dataclass(frozen=True)
class _Step:
    value: fx.Node
    before: Decision
    after: Decision
    bytes: float
    gain: float  # reduction of the error


def raise_precision(decisions: Decisions, choices: FormatChoices, budget: float) -> Decisions:
    """Return `decisions` with formats of more bits where `budget` allows them."""
    plan = dict(decisions)
    left = budget - saved_bytes(plan, choices.facts)
    steps = [step for value in plan for step in _steps(value, plan[value], choices)]
    for step in sorted(steps, key=lambda s: s.gain / s.bytes, reverse=True):
        after = step.after
        if step.bytes <= left and plan[step.value].format is step.before.format:
            assert after.format is not None
            left -= step.bytes
            reason = after.reason + SavedReason.MORE_BITS.format(bits=after.format.bits)
            plan[step.value] = replace(after, reason=reason)
    return plan


def _steps(value: fx.Node, decision: Decision, choices: FormatChoices) -> Iterator[_Step]:
    if not decision.low_bit:
        return
    options = choices.options(value)
    first = next(i for i, option in enumerate(options) if option.format is decision.format)
    weight = choices.rules.amplification(value).expected * graph.numel(graph.tensor(value))
    for before, after in pairwise(options[first:]):
        assert before.format is not None
        assert after.format is not None
        gain = weight * (_rounding_error(before.format) - _rounding_error(after.format))
        bytes_ = stored_bytes(value, after) - stored_bytes(value, before)
        yield _Step(value, before, after, bytes_, gain)


def _rounding_error(format: Format) -> float:
    """Return the relative RMS error of a group in which most values are small.

    Formats of 6 and 8 bits may have equal `relative_error`, but 6 bits round more values to zero
    and so have larger errors (docs/measured-memory.md).
    """
    return format.relative_error + format.flushed_share
