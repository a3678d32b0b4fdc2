"""Spend what a budget leaves over on formats of more bits, where errors fall most for a byte.

A knapsack: each value that a plan keeps in low bits has the formats that the error rules allow, and
the sum of errors over all elements is to be the smallest within the budget. One more bit lowers
errors by less than the bit before it. So steps to the next format, taken in the order of what they
lower errors by for a byte, are optimal until the first that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.decision import Decision, Decisions, kept_bytes
from fp8pass.activation_memory.format_choices import FormatChoice, FormatChoices
from fp8pass.dialect.formats import Format


@dataclass(frozen=True)
class _Step:
    """From one format of a value to the next allowed one."""

    value: fx.Node
    before: FormatChoice
    after: FormatChoice
    lowers_error: float

    @property
    def bytes(self) -> float:
        return self.after.bytes - self.before.bytes


def more_bits(decisions: Decisions, choices: FormatChoices, budget: float) -> Decisions:
    """The plan that keeps the same values, in as many bits as `budget` bytes allow.

    Args:
        decisions: a plan that keeps no more than the budget.
        choices: how values may be stored.
        budget: in bytes.
    """
    plan = dict(decisions)
    left = budget - kept_bytes(plan, choices)
    steps = [step for value in plan for step in _steps(value, plan[value], choices)]
    for step in sorted(steps, key=lambda s: s.lowers_error / s.bytes, reverse=True):
        after = step.after
        if step.bytes <= left and plan[step.value].format is step.before.format:
            left -= step.bytes
            reason = f"{after.reason}; the budget allows {after.format.bits} bits"
            plan[step.value] = Decision(
                after.format, after.group_size, reason, after.expected_error
            )
    return plan


def _steps(value: fx.Node, decision: Decision, choices: FormatChoices) -> Iterator[_Step]:
    """The steps from what a plan gives a value to more bits; none if that is not low bits."""
    if not decision.low_bit:
        return
    options = choices.options(value)
    first = next(i for i, option in enumerate(options) if option.format is decision.format)
    weight = choices.rules.amplification(value).expected * graph.numel(graph.tensor(value))
    for before, after in pairwise(options[first:]):
        lowers_error = weight * (_rounding_error(before.format) - _rounding_error(after.format))
        yield _Step(value, before, after, lowers_error)


def _rounding_error(format: Format) -> float:
    """Root-mean-square error in a group, relative to its values, most of which are small.

    About what docs/formats.md measures for values with tails. `relative_error` alone is the same
    for 6 bits and for 8, which differ in how small values may be.
    """
    return format.relative_error + format.flushed_share
