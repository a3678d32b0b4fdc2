"""Find plans for memory budgets of one joint graph, and the curve of their bytes and times."""

from __future__ import annotations

import math

import numpy as np

from fp8pass import graph
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.budget import BudgetProblem
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.activation_memory.decision import Decisions, host_bytes, saved_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.host_transfer import HostTransfer
from fp8pass.activation_memory.needs import Needs
from fp8pass.activation_memory.propagated_errors import propagate_errors
from fp8pass.graph.tags import INPUT_NAME
from fp8pass.option_checks import ConfigError, bytes_text
from fp8pass.plan import FrontierPoint

# Largest relative error of the bytes that the solver computes for a plan.
BUDGET_TOLERANCE = 1e-3
# A user who sets a smaller budget in bytes probably means GiB.
LEAST_BUDGET = 1024
FRONTIER_POINTS = 8


class BudgetTooSmall(ConfigError):
    """The memory budget is smaller than the bytes that the smallest plan of a graph saves."""


class Planner:
    """Finds plans of one joint graph within memory budgets.

    Attributes:
        most: bytes that `cuts`, the plan without a budget, saves.
    """

    def __init__(self, cuts: Decisions, needs: Needs, choices: FormatChoices) -> None:
        self.choices, self.cuts = choices, cuts
        self.most = saved_bytes(cuts, choices.facts)
        self.memory = BackwardMemory(needs.relevant_values(), choices)
        allowance = self.memory.peak(cuts) - self.most
        offloads = choices.config.offload
        self.transfer = HostTransfer(self.memory, choices) if offloads else None
        self.problem = BudgetProblem(needs, choices, self.memory, allowance, self.transfer)

    def within(self, budget: float) -> Decisions:
        """Return the fastest plan that saves at most `budget` bytes.

        Raises:
            BudgetTooSmall: every plan saves more. The message names the smallest possible budget.
            ConfigError: the solver did not find a plan in time.
        """
        plan = self.problem.within(budget)
        if plan is None:
            raise BudgetTooSmall(self._why_not(budget))
        return plan

    def nearest(self, budget: float) -> Decisions:
        """Return the fastest plan within `budget`, or within the smallest possible budget."""
        return self.within(max(budget, self._least))

    @property
    def _least(self) -> float:
        """The smallest budget that can be met, with a margin for the solver's errors."""
        return self.problem.least() * (1 + BUDGET_TOLERANCE)

    def _why_not(self, budget: float) -> str:
        least, config = self.problem.least(), self.choices.config
        enough = f"{math.ceil(least)} bytes"
        if isinstance(config.memory_budget, float):
            enough = f"{math.ceil(1000 * least / self.most) / 1000:g}"
        # If no value is in a low-bit format although such formats are allowed, smaller formats do
        # not help.
        may_shrink = self.choices.smallest.lossless or any(d.low_bit for d in self.cuts.values())
        smaller = ""
        if may_shrink and config.save_format != "e2m1":
            smaller = ", or allow smaller formats with save_format='e2m1'"
        offload = "" if self.transfer else ", or save values in host memory with offload=True"
        advice = f"Raise memory_budget to {enough} or more{smaller}{offload}."
        if isinstance(config.memory_budget, int) and budget < LEAST_BUDGET:
            advice = f"For {budget:.0f} GiB write memory_budget='{budget:.0f}GiB'."
        return (
            f"memory_budget of {bytes_text(budget)} cannot be met: this graph saves at least "
            f"{bytes_text(least, up=True)} ({self._name_largest()}). {advice}"
        )

    def _name_largest(self) -> str:
        plan, facts = self.problem.smallest(), self.choices.facts
        sizes = {node: saved_bytes({node: d}, facts) for node, d in plan.items()}
        node = max(sizes, key=lambda node: sizes[node])
        name = node.meta.get(INPUT_NAME) or graph.value_names(self.choices.rules.graph)[node]
        return f"the largest tensor is {name}, {bytes_text(sizes[node])}"

    def frontier(self, chosen: FrontierPoint) -> list[FrontierPoint]:
        """Return the costs of plans, from the smallest possible budget up to no budget.

        Points that are neither smaller nor faster than another point or `chosen` are left out.
        Points that beat an earlier point are left out, too, because the difference is within the
        solver's tolerance.
        """
        budgets = np.linspace(self._least, max(self.most, self._least), FRONTIER_POINTS)[:-1]
        plans = [p for b in budgets if (p := self.problem.within(float(b))) is not None]
        unlimited = self.point(self.cuts)
        shown = {chosen, unlimited}
        for point in map(self.point, plans):
            if not any(_dominates(p, point) or _dominates(point, p) for p in shown):
                shown.add(point)
        return sorted(shown - ({chosen} - {unlimited}), key=lambda p: (p.bytes, p.seconds))

    def point(self, decisions: Decisions) -> FrontierPoint:
        """Return the saved bytes, peak, time and error of a plan.

        The time excludes values that the plan without a budget also recomputes, because generated
        code fuses them.
        """
        seconds = sum(
            recompute_seconds(node)
            for node, d in decisions.items()
            if d.recomputed and not (node in self.cuts and self.cuts[node].recomputed)
        )
        seconds += self.transfer.wait(decisions) if self.transfer else 0.0
        saved = propagate_errors(decisions, self.choices.rules).values()
        errors = [d.expected_error for d in saved if not d.recomputed]
        return FrontierPoint(
            bytes=int(saved_bytes(decisions, self.choices.facts)),
            peak_bytes=int(self.memory.peak(decisions)),
            seconds=seconds,
            error=math.sqrt(sum(e**2 for e in errors) / max(len(errors), 1)),
            host_bytes=int(sum(host_bytes(node, d) for node, d in decisions.items())),
        )


def _dominates(p: FrontierPoint, q: FrontierPoint) -> bool:
    return (p.bytes, p.seconds) != (q.bytes, q.seconds) and (
        p.bytes <= q.bytes and p.seconds <= q.seconds
    )
