"""Keep no more than a memory budget, at the least extra time: a mixed-integer linear program.

The cuts of `save_plan.py` recompute what is nearly free. A budget below what they keep buys the
recomputation of anything that gives the same again, GEMMs, attention, whole blocks: LLMQ's levels
(non-GEMM, SwiGLU, norms, FFN, QKV, attention, block) are points on the curve that this traces. For
each value v of the forward four choices, 0 or 1 each:

    keep_v exactly     store_v in low bits     redo_v from exact values     remake_v from any values

    minimize    Σ seconds(v) (redo_v + remake_v) + price(v) store_v
    such that   Σ bytes(v) keep_v + low(v) store_v ≤ budget
                redo_v ≤ keep_u + redo_u                          for every operand u of v
                remake_v ≤ keep_u + redo_u + store_u + remake_u   for every operand u of v
                keep_v + redo_v ≥ 1                               if v is needed exactly
                keep_v + redo_v + store_v + remake_v ≥ 1          if v is needed in any form
                redo + remake of two sums in a row ≤ 1            along the residual stream
                alive(t) - excess ≤ budget + allowance            at moments t of the backward

The one before the last holds recomputation to one block: what the backward of the last block needs
would else be recomputed from the first one's input, and all of it be alive at once.

The last is for the peak, which counts what is kept, recomputed values and gradients
(`backward_memory.py`). The allowance is what the plan of the cuts needs above what it keeps, so
that the peak falls as the budget does. `excess` is a variable, and expensive: towards the smallest
budgets recomputation holds more than it saves.

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
from fp8pass.config import ConfigError
from fp8pass.dialect import hardware
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.patterns import SUMS
from fp8pass.plan import FrontierPoint
from fp8pass.saving.backward_memory import BackwardMemory
from fp8pass.saving.costs import UNITS_PER_BYTE, bytes_to_store, can_run_again, seconds
from fp8pass.saving.decision import Decision, Needs, free_decision, kept_bytes
from fp8pass.saving.storage import Storage

# Within this of the least time, and no longer than that for it: repeated layers have very many
# solutions that are equally good.
RELATIVE_GAP = 0.03
TIME_LIMIT_S = 15.0

# What recomputing a value costs at least, of what the most expensive one does: so that nothing is
# recomputed for nothing.
NEGLIGIBLE_SHARE = 1e-6

Decisions = dict[fx.Node, Decision]

# What a byte of the peak above its share costs, in what a kept byte saves on average.
EXCESS_PRICE = 30

INFEASIBLE = 2  # scipy's status

KEEP, STORE, REDO, REMAKE = range(4)
EXCESS = -1

MEGA = 1e6


class Program:
    """The linear program of one joint graph, to be solved for one or several budgets.

    Args:
        needs: what the backward needs, something at least.
        storage: how values may be stored.
        memory: of the backward, for the peak; without it only kept bytes count.
        allowance: bytes that the peak may be above the budget for free.
    """

    def __init__(
        self,
        needs: Needs,
        storage: Storage,
        memory: BackwardMemory | None = None,
        allowance: float = 0.0,
    ) -> None:
        self.needs, self.storage = needs, storage
        self.memory, self.allowance = memory, allowance
        self.values = relevant_values(needs)
        self.index = {v: i for i, v in enumerate(self.values)}
        count = 4 * len(self.values) + 1  # the last one is the excess
        self.bytes = np.zeros(count)
        self.seconds = np.zeros(count)
        self.upper = np.ones(count)
        for value in self.values:
            self._price(value)
        again = np.arange(count) % 4 >= REDO
        self.seconds[again] += NEGLIGIBLE_SHARE * self.seconds.max(initial=0)
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
            # Too many moments to find a plan in time: better a high peak than none.
            result = self._solve(self.seconds, budget, minds_peak=False)
        if result.status == INFEASIBLE:
            return None
        if result.x is None:
            raise ConfigError(_unsolved(f"a memory_budget of {budget / 2**20:.1f} MiB"))
        return self._plan(np.round(result.x))

    def _solve(self, cost: np.ndarray, budget: float, *, minds_peak: bool = True) -> OptimizeResult:
        constraints = [self.availability]
        if math.isfinite(budget):  # in millions, as the solver's tolerances are absolute
            row = csr_matrix(self.bytes[None, :] / MEGA)
            constraints.append(LinearConstraint(row, -np.inf, budget / MEGA))
            if self.memory and minds_peak:
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
        """Seconds that a kept byte saves, where all values are either kept or computed again."""
        kept = self.bytes[KEEP:EXCESS:4].sum()
        return float(self.seconds[REDO:EXCESS:4].sum() / kept) if kept else 0.0

    def _alive(self) -> csr_matrix:
        """Megabytes that each choice holds at each moment of the backward; one row each."""
        if self.memory is None:
            return csr_matrix((0, len(self.bytes)))
        alive = np.zeros((len(self.memory.moments), len(self.bytes)))
        for value, index in self.index.items():
            at = 4 * index
            kept = self.memory.alive_kept(value)
            alive[kept.start : kept.stop, at : at + REDO] = self.bytes[at : at + REDO] / MEGA
            for moments, bytes_ in self.memory.alive_again(value):
                alive[moments.start : moments.stop, at + REDO : at + 4] += bytes_ / MEGA
        alive[:, EXCESS] = -1
        return csr_matrix(alive)

    def _price(self, value: fx.Node) -> None:
        at, storage = 4 * self.index[value], self.storage
        exact, choice = bytes_to_store(value) / UNITS_PER_BYTE, storage.choice(value)
        if storage.facts.is_free(value):
            exact = 0.0
        if math.isinf(exact):
            self.upper[at + KEEP] = 0
        else:
            self.bytes[at + KEEP] = exact
        if choice.group_size and not choice.format.lossless:
            self.bytes[at + STORE] = choice.bytes
            self.seconds[at + STORE] = choice.units / UNITS_PER_BYTE / hardware.BANDWIDTH
        else:
            self.upper[at + STORE] = 0
        again = can_run_again(value) and not storage.facts.is_free(value)
        self.upper[at + REDO] = again
        self.upper[at + REMAKE] = again and storage.may_be_recomputed(value)
        self.seconds[at + REDO : at + 4] = seconds(value)

    def _availability(self) -> LinearConstraint:
        """One row each: what a value is recomputed from, and in which form it is needed."""
        rows: list[dict[int, int]] = []
        lower: list[int] = []
        for value in self.values:
            at = 4 * self.index[value]
            if value in self.needs.exact:
                rows.append(dict.fromkeys((at + KEEP, at + REDO), 1))
                lower.append(1)
            elif value in self.needs.all:
                rows.append(dict.fromkeys(range(at, at + 4), 1))
                lower.append(1)
            for operand in value.all_input_nodes if self.upper[at + REDO] else ():
                of = 4 * self.index[operand]
                rows.append({of + KEEP: 1, of + REDO: 1, at + REDO: -1})
                rows.append({**dict.fromkeys(range(of, of + 4), 1), at + REMAKE: -1})
                lower.extend((0, 0))
        for chain in self._chains():
            again = [4 * self.index[v] + choice for v in chain for choice in (REDO, REMAKE)]
            rows.append(dict.fromkeys(again, -1))
            lower.append(-1)
        entries = [(r, c, v) for r, row in enumerate(rows) for c, v in row.items()]
        row_index, column_index, values = zip(*entries, strict=True)
        shape = len(rows), len(self.bytes)
        matrix = csr_matrix((values, (row_index, column_index)), shape=shape)
        return LinearConstraint(matrix, np.array(lower), np.inf)

    def _chains(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Sums of the residual stream that follow each other, those that may be kept."""
        junctions = self.storage.rules.junctions
        keepable = (v for v in self.values if self.upper[4 * self.index[v] + KEEP])
        sums = dict.fromkeys(v for v in keepable if v.target in SUMS and v in junctions)
        for later in sums:
            for operand in later.all_input_nodes:
                if graph.source(operand) in sums:
                    yield graph.source(operand), later

    def _plan(self, chosen: np.ndarray) -> dict[fx.Node, Decision]:
        """Decisions for what the backward asks for, not for what the solver chose besides."""
        plan: dict[fx.Node, Decision] = {}
        asked = set(self.needs.all)
        for value in reversed(self.values):
            if value in asked:
                plan[value] = self._decision(value, chosen)
                if plan[value].recomputed:
                    asked.update(value.all_input_nodes)
        return plan

    def _decision(self, value: fx.Node, chosen: np.ndarray) -> Decision:
        at, choice = 4 * self.index[value], self.storage.choice(value)
        if self.storage.facts.is_free(value):
            return free_decision(value, self.storage.facts)
        if chosen[at + KEEP]:
            return Decision(EXACT, 0, self.needs.exact.get(value, "the budget allows it"))
        if chosen[at + STORE] and not chosen[at + REDO]:
            return Decision(choice.format, choice.group_size, choice.reason, choice.expected_error)
        return Decision(None, 0, "recomputed to meet the budget")


def _unsolved(wanted: str) -> str:
    return (
        f"No plan for {wanted} was found in {TIME_LIMIT_S:.0f} s. Compile the model's blocks one "
        "by one, or raise it."
    )


class Planner:
    """Plans of one joint graph under budgets, with the plan of the cuts to compare with."""

    def __init__(self, g: fx.Graph, cuts: Decisions, needs: Needs, storage: Storage) -> None:
        self.storage = storage
        self.most = kept_bytes(cuts, storage)
        self.memory = BackwardMemory(g, relevant_values(needs), storage)
        allowance = self.memory.peak(cuts) - self.most
        self.program = Program(needs, storage, self.memory, allowance)

    def within(self, budget: float) -> Decisions:
        """The fastest plan that keeps at most `budget` bytes.

        Raises:
            ConfigError: there is none; the message names the smallest budget that can be met.
        """
        plan = self.program.within(budget)
        if plan is None:
            least = self.program.least()
            raise ConfigError(
                f"memory_budget of {budget / 2**20:.1f} MiB cannot be met: this graph keeps at "
                f"least {least / 2**20:.1f} MiB. Raise memory_budget to {math.ceil(least)} bytes "
                "or more, or allow smaller formats with recipe='agoq'."
            )
        return plan

    def frontier(self, points: int = 8) -> list[FrontierPoint]:
        """Plans between the least budget that can be met and what the cuts keep."""
        least = self.program.least() * 1.001
        budgets = np.linspace(least, max(self.most, least), points)
        plans = (self.program.within(float(b)) for b in budgets)
        return [self.point(p) for p in plans if p is not None]

    def point(self, decisions: Decisions) -> FrontierPoint:
        """Where a plan lies."""
        spent = sum(seconds(node) for node, d in decisions.items() if d.recomputed)
        errors = [d.expected_error for d in decisions.values() if not d.recomputed]
        error = math.sqrt(sum(e**2 for e in errors) / max(len(errors), 1))
        kept = int(kept_bytes(decisions, self.storage))
        return FrontierPoint(kept, int(self.memory.peak(decisions)), spent, error)


def relevant_values(needs: Needs) -> list[fx.Node]:
    """What is needed, and what that may be recomputed from."""
    found = set(needs.all)
    for node in reversed(needs.values):
        if node in found and can_run_again(node):
            found.update(node.all_input_nodes)
    return [n for n in needs.values if n in found]
