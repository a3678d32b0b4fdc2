"""Find the plan within a memory budget that adds the least time, by mixed-integer programming.

The plan of `cuts.py` recomputes only values that are cheap to recompute. The mixed-integer program
may recompute every value that has the same result when it is computed again, including results of
GEMMs and attention, and whole blocks. Each forward value v has four binary variables, one for each
way in which the backward can get v, and two more if v may be in host memory. any_v is the sum of
these variables of v:

    save_exact_v     host_exact_v      recompute_exact_v      (from exact operands)
    save_low_bit_v   host_low_bit_v    recompute_inexact_v    (from any operands)

Below, save_x_v stands for save_x_v + host_x_v, except in products with bytes.

    minimize    Σ seconds(v) (recompute_exact_v + recompute_inexact_v) + price(v) save_low_bit_v
                + Σ slowdown(v) (host_exact_v + host_low_bit_v) + waits
    such that   Σ bytes(v) save_exact_v + low_bit_bytes(v) save_low_bit_v ≤ budget
                recompute_exact_v ≤ save_exact_u + recompute_exact_u    for every operand u of v
                recompute_inexact_v ≤ any_u                             for every operand u of v
                save_exact_v + recompute_exact_v ≥ 1     if v is needed exactly
                any_v ≥ 1                                if v is needed in any form
       (1)      Σ recompute_exact + recompute_inexact ≤ 1
                                   over any two consecutive sums of the residual stream
       (2)      alive(t) - excess ≤ budget + allowance   at times t of the backward
       (3)      Σ copy_seconds(v) (host_exact_v + host_low_bit_v) - wait ≤ time for the copies
                                   at times of the forward and of the backward

(1) limits a chain of recomputation to one block. Otherwise values of all blocks could be alive at
once.

(2) limits the peak of saved values, recomputed values and gradients (`backward_memory.py`). The
allowance is the peak of the plan of `cuts.py`, minus the bytes that this plan saves. `excess` has a
high price. The smallest budgets need `excess`, because recomputed values may take more bytes than
saved values.

(3) limits the copies to and from host memory (`host_transfer.py`). `wait` is the time of copies
that computation cannot hide, in the forward or in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix
from torch import fx

from fp8pass import graph, hardware
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.costs import (
    UNITS_PER_BYTE,
    can_run_again,
    recompute_seconds,
    save_price,
)
from fp8pass.activation_memory.decision import (
    Decision,
    Decisions,
    decide_free,
    host_bytes,
    stored_bytes,
)
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.host_transfer import HostTransfer, limit_copies
from fp8pass.activation_memory.needs import Needs
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.dialect.formats import EXACT
from fp8pass.graph.patterns import SUM_OPERATORS
from fp8pass.option_checks import ConfigError, bytes_text

# The solver stops within this relative distance from the optimum, because a model with equal layers
# has many equally good plans.
RELATIVE_GAP = 0.03
TIME_LIMIT_S = 15.0

# Each recomputation takes additional seconds: this share of the largest variable's seconds. If
# recomputation were free, the solver might recompute values that are not needed.
NEGLIGIBLE_SHARE = 1e-6

# Price of a byte of `excess`, in average prices of recomputing a byte.
EXCESS_PRICE = 30

INFEASIBLE = 2  # scipy's status

# Values that may be in host memory have variables for all ways, other values for the first four.
SAVE_EXACT, SAVE_LOW_BIT, RECOMPUTE_EXACT, RECOMPUTE_INEXACT, HOST_EXACT, HOST_LOW_BIT = range(6)
WAYS_WITHOUT_HOST = 4
ALL_WAYS = range(6)
EXACT_WAYS = (SAVE_EXACT, RECOMPUTE_EXACT, HOST_EXACT)
RECOMPUTE_WAYS = (RECOMPUTE_EXACT, RECOMPUTE_INEXACT)
ON_HOST = {SAVE_EXACT: HOST_EXACT, SAVE_LOW_BIT: HOST_LOW_BIT}

# Columns of the continuous variables in the constraint matrix.
FORWARD_WAIT, BACKWARD_WAIT, EXCESS = -3, -2, -1
CONTINUOUS = 3

MEGA = 1e6  # the constraints are in megabytes, because the solver's tolerances are absolute


class _Variable(NamedTuple):
    """A binary variable: one way in which the backward can get one value."""

    allowed: bool
    bytes: float  # saved on the device
    seconds: float  # added to a step
    host_bytes: float = 0.0


_Variables = dict[tuple[fx.Node, int], _Variable]  # key: a value, and one of the ways


class BudgetProblem:
    """The mixed-integer program of one joint graph, to be solved for one or several budgets.

    Args:
        needs: the values that the backward needs, at least one.
        choices: the formats in which each value may be saved.
        memory: bytes alive in the backward.
        allowance: bytes by which the peak may exceed the budget at no price.
        transfer: copies to host memory. If None, host memory is not used.
    """

    def __init__(
        self,
        needs: Needs,
        choices: FormatChoices,
        memory: BackwardMemory,
        allowance: float,
        transfer: HostTransfer | None = None,
    ) -> None:
        self.needs, self.choices = needs, choices
        self.memory, self.allowance, self.transfer = memory, allowance, transfer
        self.values = needs.relevant_values()
        self.variables = self._variables()
        self.columns = {key: i for i, key in enumerate(self.variables)}
        of_values = WAYS_WITHOUT_HOST * len(self.values)
        self.bytes = self._vector("bytes")
        self.seconds = self._vector("seconds")
        self.upper = self._vector("allowed")
        self.upper[[FORWARD_WAIT, BACKWARD_WAIT]] = np.inf if transfer else 0
        self.upper[EXCESS] = np.inf
        saved = self.bytes[SAVE_EXACT:of_values:WAYS_WITHOUT_HOST].sum()
        recomputed = self.seconds[RECOMPUTE_EXACT:of_values:WAYS_WITHOUT_HOST].sum()
        price_of_a_byte = float(recomputed / saved) if saved else 0.0
        self.seconds[EXCESS] = EXCESS_PRICE * MEGA * price_of_a_byte
        self.availability = self._availability()
        self.alive = self._alive()
        self.waits = self._waits()

    def least(self) -> float:
        return float(self.bytes @ self._smallest)

    def smallest(self) -> Decisions:
        return self._plan(self._smallest)

    @cached_property
    def _smallest(self) -> np.ndarray:
        result = self._solve(self.bytes, math.inf)
        if result.x is None:
            raise ConfigError(_unsolved("the smallest memory_budget"))
        return np.round(result.x)

    def within(self, budget: float) -> Decisions | None:
        """Return the fastest plan that saves at most `budget` bytes; None if no plan does."""
        result = self._solve(self.seconds, budget)
        if result.x is None and result.status != INFEASIBLE:
            # No plan was found in time. Try again without the constraints on the peak, because a
            # plan with a high peak is better than no plan.
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
            if limits_peak:
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

    def _variables(self) -> _Variables:
        found = {
            (value, way): variable
            for value in self.values
            for way, variable in enumerate(self._variables_of(value))
        }
        negligible = NEGLIGIBLE_SHARE * max((x.seconds for x in found.values()), default=0.0)
        for (value, way), x in found.items():
            if way in RECOMPUTE_WAYS:
                found[value, way] = x._replace(seconds=x.seconds + negligible)
        for value in self.values if self.transfer else ():
            found |= self._host_variables(value, found)
        return found

    def _variables_of(self, value: fx.Node) -> tuple[_Variable, ...]:
        """Return a value's four variables that do not use host memory, in the order of the ways."""
        choices = self.choices
        choice, free = choices.cheapest(value), choices.facts.is_free(value)
        exact = 0.0 if free else save_price(value) / UNITS_PER_BYTE
        low_bit = _Variable(False, 0.0, 0.0)
        if choice.lossy:
            seconds = choice.price / UNITS_PER_BYTE / hardware.BANDWIDTH
            low_bit = _Variable(True, stored_bytes(value, choice), seconds)
        again, seconds = can_run_again(value) and not free, recompute_seconds(value)
        return (
            _Variable(math.isfinite(exact), exact if math.isfinite(exact) else 0.0, 0.0),
            low_bit,
            _Variable(again, 0.0, seconds),
            _Variable(again and choices.may_be_recomputed(value), 0.0, seconds),
        )

    def _host_variables(self, value: fx.Node, variables: _Variables) -> _Variables:
        """Return the variable for the value in host memory, in low bits if allowed, or {}.

        The seconds include the slowdown of other work, but not the waits for copies.
        """
        assert self.transfer is not None
        low_bit = value not in self.needs.exact and variables[value, SAVE_LOW_BIT].allowed
        found: _Variables = {}
        for way, host_way in ON_HOST.items():
            x = variables[value, way]
            if not x.allowed or (way == SAVE_EXACT and low_bit):
                continue
            bytes_ = host_bytes(value, self._save(value, host_way))
            if self.transfer.may_send(value, bytes_):
                seconds = x.seconds + self.transfer.slowdown(bytes_)
                found[value, host_way] = _Variable(True, x.bytes - bytes_, seconds, bytes_)
        return found

    def _vector(self, attribute: str) -> np.ndarray:
        """Return an attribute of each variable, in column order; 0 for continuous variables."""
        values = [getattr(x, attribute) for x in self.variables.values()]
        return np.array(values + CONTINUOUS * [0.0], dtype=float)

    def _columns(self, value: fx.Node, ways: Iterable[int]) -> dict[int, float]:
        """Map the column of each variable for `value` and one of `ways` to the coefficient 1."""
        return {self.columns[key]: 1 for way in ways if (key := (value, way)) in self.columns}

    def _availability(self) -> LinearConstraint:
        """Return the constraints that make needed values available, and constraint (1)."""
        rows: list[dict[int, float]] = []
        lower: list[int] = []
        for value in self.values:
            if value in self.needs.exact:
                rows.append(self._columns(value, EXACT_WAYS))
                lower.append(1)
            elif value in self.needs.all:
                rows.append(self._columns(value, ALL_WAYS))
                lower.append(1)
            if not self.variables[value, RECOMPUTE_EXACT].allowed:
                continue
            for operand in value.all_input_nodes:
                for way, ways in ((RECOMPUTE_EXACT, EXACT_WAYS), (RECOMPUTE_INEXACT, ALL_WAYS)):
                    rows.append({**self._columns(operand, ways), self.columns[value, way]: -1})
                    lower.append(0)
        for pair in self._consecutive_sums():
            recomputes = [self.columns[value, way] for value in pair for way in RECOMPUTE_WAYS]
            rows.append(dict.fromkeys(recomputes, -1))
            lower.append(-1)
        return LinearConstraint(self._matrix(rows), np.array(lower), np.inf)

    def _matrix(self, rows: list[dict[int, float]]) -> csr_matrix:
        entries = [(r, c, x) for r, row in enumerate(rows) for c, x in row.items()]
        row_index, column_index, values = zip(*entries, strict=True)
        shape = len(rows), len(self.bytes)
        return csr_matrix((values, (row_index, column_index)), shape=shape)

    def _consecutive_sums(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield each pair of consecutive sums of the residual stream, if both can be saved."""
        junctions = self.choices.rules.junctions
        savable = (v for v in self.values if self.variables[v, SAVE_EXACT].allowed)
        sums = dict.fromkeys(v for v in savable if v.target in SUM_OPERATORS and v in junctions)
        for later in sums:
            for operand in later.all_input_nodes:
                if graph.skip_views_and_casts(operand) in sums:
                    yield graph.skip_views_and_casts(operand), later

    def _alive(self) -> csr_matrix:
        """Return the matrix of constraint (2): megabytes by time (row) and variable (column)."""
        alive = np.zeros((len(self.memory.times), len(self.bytes)))
        for (value, way), column in self.columns.items():
            if way in RECOMPUTE_WAYS:
                spans = self.memory.alive_recomputed(value)
            else:
                variable = self.variables[value, way]
                spans = self.memory.alive_saved(value, variable.bytes, variable.host_bytes)
            for times, bytes_ in spans:
                alive[times.start : times.stop, column] += bytes_ / MEGA
        alive[:, EXCESS] = -1
        return csr_matrix(alive)

    def _waits(self) -> list[LinearConstraint]:
        sent = {key: x.host_bytes for key, x in self.variables.items() if x.host_bytes}
        if self.transfer is None or not sent:
            return []
        seconds = {key: self.transfer.seconds(bytes_) for key, bytes_ in sent.items()}
        unit = max(seconds.values())
        self.seconds[[FORWARD_WAIT, BACKWARD_WAIT]] = unit
        values = {value for value, _ in sent}
        rows: list[dict[int, float]] = []
        most = []
        for wait, left in (
            (FORWARD_WAIT, self.transfer.to_send),
            (BACKWARD_WAIT, self.transfer.to_fetch),
        ):
            for copied, available in limit_copies(left, values):
                row = {
                    self.columns[key]: s / unit for key, s in seconds.items() if key[0] in copied
                }
                rows.append({**row, len(self.bytes) + wait: -1})
                most.append(available / unit)
        return [LinearConstraint(self._matrix(rows), -np.inf, np.array(most))]

    def _plan(self, chosen: np.ndarray) -> Decisions:
        """Return decisions for needed values, and for values from which they are recomputed.

        The variables of all other values are ignored, because the solver may set them to 1 at no
        cost.
        """
        plan: Decisions = {}
        needed = set(self.needs.all)
        for value in reversed(self.values):
            if value in needed:
                plan[value] = self._decide(value, chosen)
                if plan[value].recomputed:
                    needed.update(value.all_input_nodes)
        return plan

    def _decide(self, value: fx.Node, chosen: np.ndarray) -> Decision:
        if self.choices.facts.is_free(value):
            return decide_free(value, self.choices.facts)
        ways = {way for way in ALL_WAYS if chosen[list(self._columns(value, (way,)))].any()}
        if RECOMPUTE_EXACT in ways:
            ways.discard(SAVE_LOW_BIT)
        for way in (SAVE_EXACT, HOST_EXACT, SAVE_LOW_BIT, HOST_LOW_BIT):
            if way in ways:
                return self._save(value, way)
        return Decision(None, 0, SavedReason.RECOMPUTED)

    def _save(self, value: fx.Node, way: int) -> Decision:
        on_host = way in ON_HOST.values()
        if way in (SAVE_LOW_BIT, HOST_LOW_BIT):
            return replace(self.choices.cheapest(value), on_host=on_host)
        where = SavedReason.ON_HOST if on_host else SavedReason.WITHIN_BUDGET
        return Decision(EXACT, 0, self.needs.exact.get(value, where), on_host=on_host)


def _unsolved(wanted: str) -> str:
    return (
        f"No plan for {wanted} was found in {TIME_LIMIT_S:.0f} s. Raise memory_budget, or compile "
        "the model's blocks one by one, because a smaller graph needs less time."
    )
