"""Decide how forward values reach the backward: exact, in a low-bit format, or recomputed.

The backward needs some forward values *exactly*, e.g. for attention, and others in *any* form. Two
minimum cuts, modelled on PyTorch's partitioner, choose the values to save:

    source --price--> v_in --bytes--> v_out --∞--> u_in   for every user u of v
                                      v_out --∞--> sink   if the backward uses v

Cutting the middle arc saves v. Cutting the first arc recomputes v, at a price that may be infinite.
The first cut covers exact needs, in exact bytes. The second cut covers all needs: values of the
first cut cost nothing, other values the bytes of the cheapest format that the error rules allow.
One cut with three states (exact, low-bit, absent) would have costs that are not submodular.

Time has a price, too (`compact_saves`). The pass takes the lowest of several prices at which
low-bit formats and recomputation add no more time than FP8 GEMMs save. Small tensors are then saved
exactly, because the time of a kernel that quantizes them costs more than the saved bytes.

The first cut may have several solutions of equal cost. `cuts.py` tries several of these solutions
and takes the cheapest plan. Results of GEMMs and attention are never recomputed here, so they split
the graph into regions that are cut separately (with networkx).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from torch import fx

from fp8pass import graph, hardware
from fp8pass.activation_memory.added_time import AddedTime
from fp8pass.activation_memory.cuts import cheapest_plan
from fp8pass.activation_memory.decision import Decisions, saved_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.needs import Needs, find_needs
from fp8pass.activation_memory.propagated_errors import propagate_errors
from fp8pass.activation_memory.raise_precision import raise_precision
from fp8pass.activation_memory.stock import partition_stock, plan_as_stock
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.formulas import summarize_rules
from fp8pass.graph.launches import why_launch_bound
from fp8pass.option_checks import bytes_text
from fp8pass.passes.context import Context

if TYPE_CHECKING:
    from fp8pass.activation_memory.planner import Planner


# Prices of added time: the bytes that must be saved for each byte that the GPU's memory could move
# in the added time. With the first price, one more kernel launch must save 1 MB on an H200.
# Dequantizing an FP8 operand for a GEMM moves 3 bytes per element, and saving the operand in FP8
# instead of BF16 saves 1 byte.
PRICES = (0.025, 0.25, 0.7, 1.2)

# A budget that is a share, e.g. 0.5, does not apply to graphs that save fewer bytes than this, such
# as the few operators between two graph breaks.
NEGLIGIBLE_BYTES = 4096


def plan_saved_values(gm: fx.GraphModule, ctx: Context) -> None:
    """Set `ctx.decisions` for every forward value that the backward uses or recomputes.

    Raises:
        ConfigError: the memory budget cannot be met.
    """
    rules = Rules(gm.graph, ctx.config, ctx.facts)
    if ctx.requests.rules:
        ctx.plan.rules = summarize_rules(rules)
    choices = FormatChoices(rules)
    needs = find_needs(choices)
    cuts = _within_spare_time(gm, ctx, needs, choices)
    if ctx.config.offload and ctx.config.memory_budget is None:
        ctx.plan.note = "offload=True has no effect: set memory_budget, too"

    @cache  # built on the first use, and shared by the budget, the frontier and the least bytes
    def planner() -> Planner:
        # Imported late, because importing the solver takes as long as planning a small graph.
        from fp8pass.activation_memory.planner import Planner

        return Planner(cuts, needs, choices)

    decisions = _within_budget(ctx, cuts, choices, planner)
    ctx.decisions = propagate_errors(decisions, rules)
    if ctx.requests.least and needs.all:
        ctx.plan.least_bytes = math.ceil(planner().problem.least())
    if ctx.requests.frontier and needs.all:
        ctx.plan.point = planner().point(ctx.decisions)
        ctx.plan.frontier = planner().frontier(ctx.plan.point)


def _within_spare_time(
    gm: fx.GraphModule, ctx: Context, needs: Needs, choices: FormatChoices
) -> Decisions:
    """Return the smallest plan that adds no more time than FP8 GEMMs save.

    Added time is relative to the plan of the highest price, which approximates a step without
    fp8pass. If the CPU limits the step, return the plan of stock `torch.compile`, because low-bit
    formats and recomputation add launches.
    """
    values = (graph.value(n) for n in needs.values if n in needs.all)
    devices = (val.device for val in values if val is not None)
    gpu = next(filter(None, map(hardware.rates_of, devices)), None)
    if gpu is None or ctx.config.memory_budget is not None or ctx.config.compact_saves == "all":
        return cheapest_plan(needs, choices)
    if not ctx.spare_seconds:  # no GEMM runs in FP8, so maybe the launches were not estimated yet
        ctx.launch_limit = ctx.launch_limit or why_launch_bound(gm.graph, gpu)
    if ctx.launch_limit:
        ctx.stock = partition_stock(gm, (), ctx.facts)
        return plan_as_stock(ctx.stock, ctx.facts, needs, ctx.launch_limit)
    time = AddedTime(gpu, choices.rules.backward)

    @cache
    def plan_with(price: float) -> Decisions:
        priced = replace(time, price_of_time=price)
        return cheapest_plan(needs, FormatChoices(choices.rules, priced))

    for price in PRICES[:-1]:
        added = time.total(plan_with(price)) - ctx.spare_seconds
        if added <= 0 or added <= time.total(plan_with(PRICES[-1])):
            return plan_with(price)
    return plan_with(PRICES[-1])


def _within_budget(
    ctx: Context, cuts: Decisions, choices: FormatChoices, planner: Callable[[], Planner]
) -> Decisions:
    """Return the plan for the memory budget.

    If the plan `cuts` saves fewer bytes than the budget, formats with more bits fill the rest.
    """
    most, is_share = saved_bytes(cuts, ctx.facts), isinstance(ctx.config.memory_budget, float)
    if most < NEGLIGIBLE_BYTES and is_share:
        return cuts
    budget = ctx.config.budget_bytes(most)
    if budget >= most:
        return cuts if math.isinf(budget) else raise_precision(cuts, choices, budget)
    if is_share and not ctx.plan.linears:
        return _plan_nearest(ctx, budget, planner())
    return planner().within(budget)


def _plan_nearest(ctx: Context, budget: float, planner: Planner) -> Decisions:
    """Return the plan whose bytes are nearest to the budget, for a graph without linear layers.

    Graph breaks leave such graphs, e.g. the loss. They often cannot meet a share, but must not stop
    the training.
    """
    least = min(planner.problem.least(), planner.most)
    if least > budget:
        ctx.plan.note = (
            f"a graph without linear layers exceeds memory_budget={ctx.config.memory_budget:g}: it "
            f"saves {least / planner.most:.0%} of {bytes_text(planner.most)}"
        )
    return planner.nearest(budget) if least < planner.most else planner.cuts
