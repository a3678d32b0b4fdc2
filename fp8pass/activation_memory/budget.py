"""Keep no more than a memory budget, at the least extra time: a mixed-integer linear program.

The cuts of `cuts.py` recompute values that are nearly free. A budget below the bytes that they keep
is met by recomputing anything whose result is the same again: GEMMs, attention, whole blocks.
LLMQ's levels (non-GEMM, SwiGLU, norms, FFN, QKV, attention, block) are points on the curve that
this traces. Each forward value v has four variables, 0 or 1, and two more where a link to the host
is given, of which any_v is the sum:

    keep_exact_v     host_exact_v      recompute_exact_v      from exact values
    keep_low_bit_v   host_low_bit_v    recompute_inexact_v    from any values

Wherever keep_exact_v or keep_low_bit_v stands below without bytes, the host's variable is added.

    minimize    Σ seconds(v) (recompute_exact_v + recompute_inexact_v) + price(v) keep_low_bit_v
                + Σ slowdown(v) (host_exact_v + host_low_bit_v) + waits
    such that   Σ bytes(v) keep_exact_v + low_bit_bytes(v) keep_low_bit_v ≤ budget
                recompute_exact_v ≤ keep_exact_u + recompute_exact_u    for every operand u of v
                recompute_inexact_v ≤ any_u                             for every operand u of v
                keep_exact_v + recompute_exact_v ≥ 1     if v is needed exactly
                any_v ≥ 1                                if v is needed in any form
                Σ recompute_exact + recompute_inexact ≤ 1
                                   over any two consecutive sums of the residual stream
                alive(t) - excess ≤ budget + allowance   at times t of the backward
                Σ crossing(v) (host_exact_v + host_low_bit_v) - wait ≤ time for it
                                   at times of the forward and of the backward (`link.py`)

The third from last limits recomputation to one block. Without it, the values that the backward of
the last block needs would be recomputed from the first block's input, and all be alive at once.

The last but one limits the peak of kept values, recomputed values and gradients
(`backward_memory.py`). The allowance is how far the peak of the cuts' plan is above the bytes that
it keeps, so that the peak falls with the budget. `excess` is a variable with a high price: for the
smallest budgets recomputation holds more bytes than it saves. So are the waits, of the forward and
of the backward, for copies that nothing is there to hide behind.

Solved by HiGHS, through scipy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix
from torch import fx

from fp8pass import graph, hardware
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.costs import (
    UNITS_PER_BYTE,
    can_run_again,
    keep_price,
    recompute_seconds,
)
from fp8pass.activation_memory.decision import (
    Decision,
    Needs,
    choice_made,
    free_decision,
    host_bytes,
)
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.link import Link
from fp8pass.config import ConfigError, bytes_text
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.patterns import ADDITIONS

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

# The variables of a value in their order. After those of all values come those of values that may
# be on the host, and three that are no choices.
KEEP_EXACT, KEEP_LOW_BIT, RECOMPUTE_EXACT, RECOMPUTE_INEXACT = range(4)
VARIABLES = 4
FORWARD_WAIT, BACKWARD_WAIT, EXCESS = -3, -2, -1
CONTINUOUS = 3

MEGA = 1e6  # bytes in the solver's unit, since its tolerances are absolute


class BudgetProblem:
    """The mixed-integer program of one joint graph, to be solved for one or several budgets.

    Args:
        needs: the values that the backward needs, at least one.
        choices: how values may be stored.
        memory: bytes alive in the backward; without it the peak is not limited.
        allowance: bytes by which the peak may exceed the budget for free.
        link: to the host; without it nothing is kept there. It needs `memory`.
    """

    def __init__(
        self,
        needs: Needs,
        choices: FormatChoices,
        memory: BackwardMemory | None = None,
        allowance: float = 0.0,
        link: Link | None = None,
    ) -> None:
        self.needs, self.choices = needs, choices
        self.memory, self.allowance, self.link = memory, allowance, link
        self.values = relevant_values(needs)
        self.index = {v: i for i, v in enumerate(self.values)}
        self.of_values = VARIABLES * len(self.values)
        sent = [(v, kind) for v in self.values for kind in (KEEP_EXACT, KEEP_LOW_BIT)]
        away = {key: bytes_ for key in sent if (bytes_ := self._bytes_away(*key))}
        self.away = {key: self.of_values + i for i, key in enumerate(away)}
        count = self.of_values + len(away) + CONTINUOUS
        self.bytes = np.zeros(count)
        self.seconds = np.zeros(count)
        self.upper = np.ones(count)
        for value in self.values:
            self._price(value)
        recomputes = np.arange(self.of_values) % VARIABLES >= RECOMPUTE_EXACT
        self.seconds[: self.of_values][recomputes] += NEGLIGIBLE_SHARE * self.seconds.max(initial=0)
        self.crossing = self._price_away(away)
        self.upper[-CONTINUOUS:] = np.inf if link else 0
        self.upper[EXCESS] = np.inf if memory else 0
        self.seconds[EXCESS] = EXCESS_PRICE * MEGA * self._price_of_a_byte()
        self.availability = self._availability()
        self.alive = self._alive()
        self.waits = self._waits()

    def least(self) -> float:
        """The smallest budget that can be met."""
        return float(self.bytes @ self._smallest)

    def smallest(self) -> dict[fx.Node, Decision]:
        """A plan that meets it, however long it takes."""
        return self._plan(self._smallest)

    @cached_property
    def _smallest(self) -> np.ndarray:
        result = self._solve(self.bytes, math.inf)
        if result.x is None:
            raise ConfigError(_unsolved("the smallest memory_budget"))
        return np.round(result.x)

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
        constraints = [self.availability, *self.waits]
        if math.isfinite(budget):
            row = csr_matrix(self.bytes[None, :] / MEGA)
            constraints.append(LinearConstraint(row, -np.inf, budget / MEGA))
            if self.memory and limits_peak:
                most = (budget + self.allowance - np.array(self.memory.gradients)) / MEGA
                constraints.append(LinearConstraint(self.alive, -np.inf, most))
        scale = 1 / max(cost[:-CONTINUOUS].max(), 1e-30)
        integral = np.ones(len(cost))
        integral[-CONTINUOUS:] = 0
        return milp(
            cost * scale,
            integrality=integral,
            bounds=Bounds(0, self.upper),
            constraints=constraints,
            options={"mip_rel_gap": RELATIVE_GAP, "time_limit": TIME_LIMIT_S},
        )

    def _price_of_a_byte(self) -> float:
        """Seconds of recomputation that a kept byte saves, on average over all values."""
        kept = self.bytes[KEEP_EXACT : self.of_values : VARIABLES].sum()
        recomputed = self.seconds[RECOMPUTE_EXACT : self.of_values : VARIABLES].sum()
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
        for (value, kind), column in self.away.items():
            kept, back = self.memory.alive_kept(value), self.memory.alive_fetched(value)
            alive[kept.start : kept.stop, column] = self.bytes[column] / MEGA
            alive[back.start : back.stop, column] += self._bytes_away(value, kind) / MEGA
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

    def _bytes_away(self, value: fx.Node, kind: int) -> float:
        """Bytes that would be on the host if a value were kept there; 0 if it may not be.

        What may be in low bits crosses in these.
        """
        if self.link is None or not self._may_keep(value, kind):
            return 0.0
        in_low_bits = value not in self.needs.exact and self._may_keep(value, KEEP_LOW_BIT)
        if kind == KEEP_EXACT and in_low_bits:
            return 0.0
        bytes_ = host_bytes(value, self._kept(value, kind, on_host=True))
        return bytes_ if self.link.may_send(value, bytes_) else 0.0

    def _may_keep(self, value: fx.Node, kind: int) -> bool:
        if kind == KEEP_EXACT:
            return math.isfinite(keep_price(value))
        choice = self.choices.cheapest(value)
        return bool(choice.group_size) and not choice.format.lossless

    def _price_away(self, away: dict[tuple[fx.Node, int], float]) -> dict[int, float]:
        """Fill in the bytes and seconds of what may be on the host; the seconds that each crosses.

        A copy takes the GPU no time that others could use, but slows them down a little.
        """
        crossing = {}
        for (value, kind), bytes_ in away.items():
            assert self.link is not None
            column, here = self.away[value, kind], VARIABLES * self.index[value] + kind
            self.bytes[column] = self.bytes[here] - bytes_
            self.seconds[column] = self.seconds[here] + self.link.slowdown(bytes_)
            crossing[column] = self.link.seconds(bytes_)
        return crossing

    def _waits(self) -> list[LinearConstraint]:
        """A row for each instant by which some copies must have crossed, or are waited for."""
        if self.link is None or not self.away:
            return []
        columns: dict[fx.Node, list[int]] = {}
        for (value, _), column in self.away.items():
            columns.setdefault(value, []).append(column)
        unit = max(self.crossing.values())
        self.seconds[[FORWARD_WAIT, BACKWARD_WAIT]] = unit
        rows, most = [], []
        for wait, limits in (
            (FORWARD_WAIT, self.link.leaving(columns)),
            (BACKWARD_WAIT, self.link.returning(columns)),
        ):
            for values, seconds in limits:
                row = np.zeros(len(self.bytes))
                crossing = [column for v in values for column in columns[v]]
                row[crossing] = [self.crossing[column] / unit for column in crossing]
                row[wait] = -1
                rows.append(row)
                most.append(seconds / unit)
        return [LinearConstraint(csr_matrix(np.array(rows)), -np.inf, np.array(most))]

    def _in_memory(self, value: fx.Node, *kinds: int) -> list[int]:
        """The variables of a value, and of the same on the host."""
        here = [VARIABLES * self.index[value] + kind for kind in kinds]
        return here + [self.away[value, kind] for kind in kinds if (value, kind) in self.away]

    def _availability(self) -> LinearConstraint:
        """A row for each operand that a value is recomputed from, and for each needed value."""
        rows: list[dict[int, int]] = []
        lower: list[int] = []
        for value in self.values:
            at = VARIABLES * self.index[value]
            if value in self.needs.exact:
                rows.append(dict.fromkeys(self._in_memory(value, KEEP_EXACT, RECOMPUTE_EXACT), 1))
                lower.append(1)
            elif value in self.needs.all:
                rows.append(dict.fromkeys(self._in_memory(value, *range(VARIABLES)), 1))
                lower.append(1)
            if not self.upper[at + RECOMPUTE_EXACT]:
                continue
            for operand in value.all_input_nodes:
                exact = dict.fromkeys(self._in_memory(operand, KEEP_EXACT, RECOMPUTE_EXACT), 1)
                rows.append({**exact, at + RECOMPUTE_EXACT: -1})
                any_form = dict.fromkeys(self._in_memory(operand, *range(VARIABLES)), 1)
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
        sums = dict.fromkeys(v for v in keepable if v.target in ADDITIONS and v in junctions)
        for later in sums:
            for operand in later.all_input_nodes:
                if graph.skip_views_and_casts(operand) in sums:
                    yield graph.skip_views_and_casts(operand), later

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
        if self.choices.facts.is_free(value):
            return free_decision(value, self.choices.facts)
        at = VARIABLES * self.index[value]
        for kind in (KEEP_EXACT, KEEP_LOW_BIT):
            if chosen[at + kind] and not (kind == KEEP_LOW_BIT and chosen[at + RECOMPUTE_EXACT]):
                return self._kept(value, kind)
            if (value, kind) in self.away and chosen[self.away[value, kind]]:
                return self._kept(value, kind, on_host=True)
        return Decision(None, 0, "recomputed to meet the budget")

    def _kept(self, value: fx.Node, kind: int, *, on_host: bool = False) -> Decision:
        """The decision to keep a value exactly or in low bits."""
        where = "on the host to meet the budget" if on_host else "the budget allows it"
        if kind == KEEP_EXACT:
            reason = self.needs.exact.get(value, where)
            return Decision(EXACT, 0, reason, on_host=on_host)
        return choice_made(self.choices.cheapest(value), on_host=on_host)


def _unsolved(wanted: str) -> str:
    return (
        f"No plan for {wanted} was found in {TIME_LIMIT_S:.0f} s. Compile the model's blocks one "
        "by one, which makes smaller graphs, or raise memory_budget."
    )


def relevant_values(needs: Needs) -> list[fx.Node]:
    """The needed values and all values that they may be recomputed from."""
    found = set(needs.all)
    for node in reversed(needs.values):
        if node in found and can_run_again(node):
            found.update(node.all_input_nodes)
    return [n for n in needs.values if n in found]
