"""Keep no more than a memory budget, at the least extra time: a mixed-integer linear program.

The cuts of `cuts.py` recompute values that are nearly free. A budget below the bytes that they keep
is met by recomputing anything whose result is the same again: GEMMs, attention, whole blocks.
LLMQ's levels (non-GEMM, SwiGLU, norms, FFN, QKV, attention, block) are points on the curve that
this traces. Each forward value v has four variables, 0 or 1, of which any_v is the sum:

    keep_exact_v         recompute_exact_v      from exact values
    keep_low_bit_v       recompute_inexact_v    from any values

    minimize    Σ seconds(v) (recompute_exact_v + recompute_inexact_v) + price(v) keep_low_bit_v
    such that   Σ bytes(v) keep_exact_v + low_bit_bytes(v) keep_low_bit_v ≤ budget
                recompute_exact_v ≤ keep_exact_u + recompute_exact_u    for every operand u of v
                recompute_inexact_v ≤ any_u                             for every operand u of v
                keep_exact_v + recompute_exact_v ≥ 1     if v is needed exactly
                any_v ≥ 1                                if v is needed in any form
                Σ recompute_exact + recompute_inexact ≤ 1
                                   over any two consecutive sums of the residual stream
                alive(t) - excess ≤ budget + allowance   at times t of the backward

The last but one limits recomputation to one block. Without it, the values that the backward of the
last block needs would be recomputed from the first block's input, and all be alive at once.

The last one limits the peak of kept values, recomputed values and gradients (`backward_memory.py`).
The allowance is how far the peak of the cuts' plan is above the bytes that it keeps, so that the
peak falls with the budget. `excess` is a variable with a high price: for the smallest budgets
recomputation holds more bytes than it saves.

Solved by HiGHS, through scipy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix
from torch import fx

from fp8pass import graph
from fp8pass.config import ConfigError, bytes_text
from fp8pass.dialect import hardware
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.patterns import SUMS
from fp8pass.plan import FrontierPoint
from fp8pass.saving.backward_memory import BackwardMemory
from fp8pass.saving.costs import UNITS_PER_BYTE, can_run_again, keep_price, recompute_seconds
from fp8pass.saving.decision import Decision, Decisions, Needs, free_decision, kept_bytes
from fp8pass.saving.format_choices import FormatChoices

# A solution may take this much longer than the fastest, and the search for it this long: repeated
# layers have very many solutions that are equally good.
RELATIVE_GAP = 0.03
TIME_LIMIT_S = 15.0

# The lowest price of recomputing a value, as a share of the highest: without a price the solver
# would recompute values that nothing needs.
NEGLIGIBLE_SHARE = 1e-6

# The price of a byte of the peak above the limit, relative to the average price of a kept byte.
EXCESS_PRICE = 30

INFEASIBLE = 2  # scipy's status

# The variables of a value in their order; that of the excess comes after those of all values.
KEEP_EXACT, KEEP_LOW_BIT, RECOMPUTE_EXACT, RECOMPUTE_INEXACT = range(4)
VARIABLES = 4
EXCESS = -1

MEGA = 1e6  # bytes in the solver's unit, since its tolerances are absolute


class BudgetProblem:
    """The mixed-integer program of one joint graph, to be solved for one or several budgets.

    Args:
        needs: the values that the backward needs, at least one.
        choices: how values may be stored.
        memory: bytes alive in the backward; without it the peak is not limited.
        allowance: bytes by which the peak may exceed the budget for free.
    """

    def __init__(
        self,
        needs: Needs,
        choices: FormatChoices,
        memory: BackwardMemory | None = None,
        allowance: float = 0.0,
    ) -> None:
        self.needs, self.choices = needs, choices
        self.memory, self.allowance = memory, allowance
        self.values = relevant_values(needs)
        self.index = {v: i for i, v in enumerate(self.values)}
        count = VARIABLES * len(self.values) + 1
        self.bytes = np.zeros(count)
        self.seconds = np.zeros(count)
        self.upper = np.ones(count)
        for value in self.values:
            self._price(value)
        recomputes = np.arange(count) % VARIABLES >= RECOMPUTE_EXACT
        self.seconds[recomputes] += NEGLIGIBLE_SHARE * self.seconds.max(initial=0)
        self.upper[EXCESS] = np.inf if memory else 0
        self.seconds[EXCESS] = EXCESS_PRICE * MEGA * self._price_of_a_byte()
        self.availability = self._availability()
        self.alive = self._alive()

    def least(self) -> float:
        """The smallest budget that can be met."""
        result = self._solve(self.bytes, math.inf)
        if result.x is None:
            raise ConfigError(_unsolved("the smallest memory_budget"))
        return float(self.bytes @ np.round(result.x))

    def within(self, budget: float) -> dict[fx.Node, Decision] | None:
        """The fastest plan within `budget` bytes; None if there is none."""
        result = self._solve(self.seconds, budget)
        if result.x is None and result.status != INFEASIBLE and self.memory:
            # Too many constraints to find a plan in time: a high peak is better than no plan.
            result = self._solve(self.seconds, budget, limits_peak=False)
        if result.status == INFEASIBLE:
            return None
        if result.x is None:
            raise ConfigError(_unsolved(f"a memory_budget of {bytes_text(budget)}"))
        return self._plan(np.round(result.x))

    def _solve(
        self, cost: np.ndarray, budget: float, *, limits_peak: bool = True
    ) -> OptimizeResult:
        constraints = [self.availability]
        if math.isfinite(budget):
            row = csr_matrix(self.bytes[None, :] / MEGA)
            constraints.append(LinearConstraint(row, -np.inf, budget / MEGA))
            if self.memory and limits_peak:
                most = (budget + self.allowance - np.array(self.memory.gradients)) / MEGA
                constraints.append(LinearConstraint(self.alive, -np.inf, most))
        scale = 1 / max(cost[:EXCESS].max(), 1e-30)
        integral = np.ones(len(cost))
        integral[EXCESS] = 0
        return milp(
            cost * scale,
            integrality=integral,
            bounds=Bounds(0, self.upper),
            constraints=constraints,
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": TIME_LIMIT_S},
        )

    def _price_of_a_byte(self) -> float:
        """Seconds of recomputation that a kept byte saves, on average over all values."""
        kept = self.bytes[KEEP_EXACT:EXCESS:VARIABLES].sum()
        recomputed = self.seconds[RECOMPUTE_EXACT:EXCESS:VARIABLES].sum()
        return float(recomputed / kept) if kept else 0.0

    def _alive(self) -> csr_matrix:
        """Megabytes that each variable holds (columns) at each time of the backward (rows)."""
        if self.memory is None:
            return csr_matrix((0, len(self.bytes)))
        alive = np.zeros((len(self.memory.times), len(self.bytes)))
        for value, index in self.index.items():
            at = VARIABLES * index
            keeps = slice(at, at + RECOMPUTE_EXACT)
            recomputes = slice(at + RECOMPUTE_EXACT, at + VARIABLES)
            kept = self.memory.alive_kept(value)
            alive[kept.start : kept.stop, keeps] = self.bytes[keeps] / MEGA
            for times, bytes_ in self.memory.alive_recomputed(value):
                alive[times.start : times.stop, recomputes] += bytes_ / MEGA
        alive[:, EXCESS] = -1
        return csr_matrix(alive)

    def _price(self, value: fx.Node) -> None:
        """Fill in the bytes, seconds and upper bounds of the variables of a value."""
        at, choices = VARIABLES * self.index[value], self.choices
        exact, choice = keep_price(value) / UNITS_PER_BYTE, choices.cheapest(value)
        if choices.facts.is_free(value):
            exact = 0.0
        if math.isinf(exact):
            self.upper[at + KEEP_EXACT] = 0
        else:
            self.bytes[at + KEEP_EXACT] = exact
        if choice.group_size and not choice.format.lossless:
            self.bytes[at + KEEP_LOW_BIT] = choice.bytes
            self.seconds[at + KEEP_LOW_BIT] = choice.units / UNITS_PER_BYTE / hardware.BANDWIDTH
        else:
            self.upper[at + KEEP_LOW_BIT] = 0
        again = can_run_again(value) and not choices.facts.is_free(value)
        self.upper[at + RECOMPUTE_EXACT] = again
        self.upper[at + RECOMPUTE_INEXACT] = again and choices.may_be_recomputed(value)
        self.seconds[at + RECOMPUTE_EXACT : at + VARIABLES] = recompute_seconds(value)

    def _availability(self) -> LinearConstraint:
        """A row for each operand that a value is recomputed from, and for each needed value."""
        rows: list[dict[int, int]] = []
        lower: list[int] = []
        for value in self.values:
            at = VARIABLES * self.index[value]
            if value in self.needs.exact:
                rows.append(dict.fromkeys((at + KEEP_EXACT, at + RECOMPUTE_EXACT), 1))
                lower.append(1)
            elif value in self.needs.all:
                rows.append(dict.fromkeys(range(at, at + VARIABLES), 1))
                lower.append(1)
            if not self.upper[at + RECOMPUTE_EXACT]:
                continue
            for operand in value.all_input_nodes:
                of = VARIABLES * self.index[operand]
                rows.append({of + KEEP_EXACT: 1, of + RECOMPUTE_EXACT: 1, at + RECOMPUTE_EXACT: -1})
                any_form = dict.fromkeys(range(of, of + VARIABLES), 1)
                rows.append({**any_form, at + RECOMPUTE_INEXACT: -1})
                lower.extend((0, 0))
        for pair in self._consecutive_sums():
            recomputes = [
                VARIABLES * self.index[v] + variable
                for v in pair
                for variable in (RECOMPUTE_EXACT, RECOMPUTE_INEXACT)
            ]
            rows.append(dict.fromkeys(recomputes, -1))
            lower.append(-1)
        entries = [(r, c, v) for r, row in enumerate(rows) for c, v in row.items()]
        row_index, column_index, values = zip(*entries, strict=True)
        shape = len(rows), len(self.bytes)
        matrix = csr_matrix((values, (row_index, column_index)), shape=shape)
        return LinearConstraint(matrix, np.array(lower), np.inf)

    def _consecutive_sums(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Pairs of consecutive sums of the residual stream, of those that may be kept."""
        junctions = self.choices.rules.junctions
        keepable = (v for v in self.values if self.upper[VARIABLES * self.index[v] + KEEP_EXACT])
        sums = dict.fromkeys(v for v in keepable if v.target in SUMS and v in junctions)
        for later in sums:
            for operand in later.all_input_nodes:
                if graph.source(operand) in sums:
                    yield graph.source(operand), later

    def _plan(self, chosen: np.ndarray) -> dict[fx.Node, Decision]:
        """Decisions about the values that the backward needs and those they are recomputed from.

        The solver may choose more, where it costs nothing.
        """
        plan: dict[fx.Node, Decision] = {}
        needed = set(self.needs.all)
        for value in reversed(self.values):
            if value in needed:
                plan[value] = self._decision(value, chosen)
                if plan[value].recomputed:
                    needed.update(value.all_input_nodes)
        return plan

    def _decision(self, value: fx.Node, chosen: np.ndarray) -> Decision:
        at, choice = VARIABLES * self.index[value], self.choices.cheapest(value)
        if self.choices.facts.is_free(value):
            return free_decision(value, self.choices.facts)
        if chosen[at + KEEP_EXACT]:
            return Decision(EXACT, 0, self.needs.exact.get(value, "the budget allows it"))
        if chosen[at + KEEP_LOW_BIT] and not chosen[at + RECOMPUTE_EXACT]:
            return Decision(choice.format, choice.group_size, choice.reason, choice.expected_error)
        return Decision(None, 0, "recomputed to meet the budget")


def _unsolved(wanted: str) -> str:
    return (
        f"No plan for {wanted} was found in {TIME_LIMIT_S:.0f} s. Compile the model's blocks one "
        "by one, or raise it."
    )


class Planner:
    """Plans of one joint graph within budgets, compared with the plan of the cuts.

    Attributes:
        most: bytes that the plan of the cuts keeps.
    """

    def __init__(self, g: fx.Graph, cuts: Decisions, needs: Needs, choices: FormatChoices) -> None:
        self.choices, self.cuts = choices, cuts
        self.most = kept_bytes(cuts, choices)
        self.memory = BackwardMemory(g, relevant_values(needs), choices)
        allowance = self.memory.peak(cuts) - self.most
        self.problem = BudgetProblem(needs, choices, self.memory, allowance)

    def within(self, budget: float) -> Decisions:
        """The fastest plan that keeps at most `budget` bytes.

        Raises:
            ConfigError: there is none; the message names the smallest budget that can be met.
        """
        plan = self.problem.within(budget)
        if plan is None:
            least = self.problem.least()
            raise ConfigError(
                f"memory_budget of {bytes_text(budget)} cannot be met: this graph keeps at "
                f"least {bytes_text(least)}. Raise memory_budget to {math.ceil(least)} bytes "
                "or more, or allow smaller formats with recipe='agoq'."
            )
        return plan

    def frontier(self, chosen: FrontierPoint, points: int = 8) -> list[FrontierPoint]:
        """Plans from the smallest budget that can be met up to the plan of the cuts, without one.

        None is both larger and slower than another. One that would be both smaller and faster than
        the chosen plan is that by less than the solver's tolerance.
        """
        least = self.problem.least() * 1.001
        budgets = np.linspace(least, max(self.most, least), points)[:-1]
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
        errors = [d.expected_error for d in decisions.values() if not d.recomputed]
        error = math.sqrt(sum(e**2 for e in errors) / max(len(errors), 1))
        kept = int(kept_bytes(decisions, self.choices))
        return FrontierPoint(kept, int(self.memory.peak(decisions)), spent, error)


def _dominates(p: FrontierPoint, q: FrontierPoint) -> bool:
    """Whether `p` keeps no more than `q` and takes no longer, and one of the two is less."""
    return (p.bytes, p.seconds) != (q.bytes, q.seconds) and (
        p.bytes <= q.bytes and p.seconds <= q.seconds
    )


def relevant_values(needs: Needs) -> list[fx.Node]:
    """The needed values and all values that they may be recomputed from."""
    found = set(needs.all)
    for node in reversed(needs.values):
        if node in found and can_run_again(node):
            found.update(node.all_input_nodes)
    return [n for n in needs.values if n in found]
