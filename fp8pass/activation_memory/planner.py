"""Plans of one joint graph within budgets, beside the plan of the cuts."""

from __future__ import annotations

import math

import numpy as np
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.budget import BudgetProblem, relevant_values
from fp8pass.activation_memory.carried_errors import with_carried_errors
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.activation_memory.decision import Decisions, Needs, host_bytes, kept_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.link import Link
from fp8pass.config import ConfigError, bytes_text
from fp8pass.plan import FrontierPoint

# By how much the solver's sums of bytes may be off.
TOLERANCE = 1e-3


class BudgetTooSmall(ConfigError):
    """A graph keeps more than a memory budget at least; no smaller one can be met either."""


class Planner:
    """Plans of one joint graph within budgets, compared with the plan of the cuts.

    Attributes:
        most: bytes that the plan of the cuts keeps.
    """

    def __init__(self, g: fx.Graph, cuts: Decisions, needs: Needs, choices: FormatChoices) -> None:
        self.graph, self.choices, self.cuts = g, choices, cuts
        self.most = kept_bytes(cuts, choices)
        self.memory = BackwardMemory(g, relevant_values(needs), choices)
        allowance = self.memory.peak(cuts) - self.most
        self.link = Link(g, self.memory, choices) if choices.config.offload else None
        self.problem = BudgetProblem(needs, choices, self.memory, allowance, self.link)

    def within(self, budget: float) -> Decisions:
        """The fastest plan that keeps at most `budget` bytes.

        Raises:
            BudgetTooSmall: there is none; the message names the smallest budget that can be met.
            ConfigError: none was found in time.
        """
        plan = self.problem.within(budget)
        if plan is None:
            raise BudgetTooSmall(self._why_not(budget))
        return plan

    def nearest(self, budget: float) -> Decisions:
        """The fastest plan that keeps at most `budget` bytes, or what has to be kept."""
        return self.within(max(budget, self._least))

    @property
    def _least(self) -> float:
        """The smallest budget that can be met, and a little more for the solver."""
        return self.problem.least() * (1 + TOLERANCE)

    def _why_not(self, budget: float) -> str:
        least, config = self.problem.least(), self.choices.config
        enough = f"{math.ceil(least)} bytes"
        if isinstance(config.memory_budget, float):
            enough = f"{math.ceil(1000 * least / self.most) / 1000:g}"
        # Where nothing is in low bits although it might be, fewer of them change nothing.
        may_shrink = self.choices.coarsest.lossless or any(d.low_bit for d in self.cuts.values())
        smaller = ""
        if may_shrink and config.save_format != "e2m1":
            smaller = ", or allow smaller formats with recipe='agoq'"
        other = "" if self.link else ", or keep values on the host with offload=True"
        return (
            f"memory_budget of {bytes_text(budget)} cannot be met: this graph keeps at least "
            f"{bytes_text(least, up=True)}{self._largest()}. Raise memory_budget to {enough} or "
            f"more{smaller}{other}."
        )

    def _largest(self) -> str:
        """What is largest of what has to be kept, as text."""
        plan = self.problem.smallest()
        sizes = {node: kept_bytes({node: d}, self.choices) for node, d in plan.items()}
        node = max(sizes, key=lambda node: sizes[node])
        of = f" of {path}" if (path := graph.module_path(node)) else ""
        return f", most of all {node.name}{of}, {bytes_text(sizes[node])}"

    def frontier(self, chosen: FrontierPoint, points: int = 8) -> list[FrontierPoint]:
        """Plans from the smallest budget that can be met up to the plan of the cuts, without one.

        None is both larger and slower than another. One that would be both smaller and faster than
        the chosen plan is that by less than the solver's tolerance.
        """
        budgets = np.linspace(self._least, max(self.most, self._least), points)[:-1]
        plans = [p for b in budgets if (p := self.problem.within(float(b))) is not None]
        unlimited = self.point(self.cuts)
        shown = {chosen, unlimited}
        for point in map(self.point, plans):
            if not any(_dominates(p, point) or _dominates(point, p) for p in shown):
                shown.add(point)
        return sorted(shown - ({chosen} - {unlimited}), key=lambda p: (p.bytes, p.seconds))

    def point(self, decisions: Decisions) -> FrontierPoint:
        """Kept bytes, peak, time and error of a plan.

        What the cuts compute again counts for nothing: generated code does it where it reads the
        values, which the roofline of single operators does not know of.
        """
        spent = sum(
            recompute_seconds(node)
            for node, d in decisions.items()
            if d.recomputed and not (node in self.cuts and self.cuts[node].recomputed)
        )
        spent += sum(self.link.waits(decisions)) if self.link else 0.0
        carried = with_carried_errors(self.graph, decisions, self.choices.rules)
        errors = [d.expected_error for d in carried.values() if not d.recomputed]
        error = math.sqrt(sum(e**2 for e in errors) / max(len(errors), 1))
        kept = int(kept_bytes(decisions, self.choices))
        away = int(sum(host_bytes(node, d) for node, d in decisions.items()))
        return FrontierPoint(kept, int(self.memory.peak(decisions)), spent, error, away)


def _dominates(p: FrontierPoint, q: FrontierPoint) -> bool:
    """Whether `p` keeps no more than `q` and takes no longer, and one of the two is less."""
    return (p.bytes, p.seconds) != (q.bytes, q.seconds) and (
        p.bytes <= q.bytes and p.seconds <= q.seconds
    )
