"""Decide what the backward keeps: exact, in low bits, or recomputed.

Every value the backward uses is needed either *exactly* (by attention, by operators that amplify
errors) or in *any* form. Two minimum cuts choose, with PyTorch's partitioner as the model:

    source --price--> v_in --bytes--> v_out --∞--> u_in   for every user u of v
                                      v_out --∞--> sink   if the backward uses v

Cutting the middle arc stores v, at its bytes; cutting the first one recomputes it, at a price that
is infinite for values that are too expensive or impossible to compute again. The first cut covers
exact needs at exact prices. The second covers all needs. Values that the first one keeps are free,
and everything else is at the bytes of the cheapest format that the error rules allow. One cut for
both would need three states a value (exact, low-bit, absent) whose costs are not submodular.

Among equal first cuts, the one closest to the backward recomputes least, and the one closest to
the inputs leaves most for the second to be computed from. Both are tried, the cheaper one wins; so
are they with masks, and what checkpointed regions compute, as exact needs where no low bits can
give them.

Values that cannot be recomputed do not depend on how their inputs are kept, so the graph falls
apart at GEMMs and attention into regions, which are solved one by one (with networkx).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from torch import fx

from fp8pass.activation_memory.cuts import cheapest_plan
from fp8pass.activation_memory.decision import Decisions, saved_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.needs import find_needs
from fp8pass.activation_memory.propagated_errors import propagate_errors
from fp8pass.activation_memory.raise_precision import raise_precision
from fp8pass.config import bytes_text
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.summary import summarize_rules
from fp8pass.passes.context import Context

if TYPE_CHECKING:
    from fp8pass.activation_memory.planner import Planner


# Bytes of a graph for which a share is no matter: what a graph break leaves keeps a loss or two.
NEGLIGIBLE = 4096


def plan_saved_values(gm: fx.GraphModule, ctx: Context) -> None:
    """Fill `ctx.decisions` for every forward value that the backward uses or recomputes from.

    Raises:
        ConfigError: the memory budget cannot be met.
    """
    rules = Rules(gm.graph, ctx.config, ctx.facts)
    if ctx.requests.rules:
        ctx.plan.rules = summarize_rules(rules)
    choices = FormatChoices(ctx.config, ctx.facts, rules)
    needs = find_needs(gm, choices)
    cuts = cheapest_plan(needs, choices)
    if ctx.config.offload and ctx.config.memory_budget is None:
        ctx.plan.note = "offload=True has no memory_budget to meet"

    @cache  # most graphs need none, others one for several questions
    def planner() -> Planner:
        # Here rather than above: its solver takes as long to import as a small graph to plan.
        from fp8pass.activation_memory.planner import Planner

        return Planner(gm.graph, cuts, needs, choices)

    decisions = _within_budget(ctx, cuts, choices, planner)
    ctx.decisions = propagate_errors(gm.graph, decisions, rules)
    if ctx.requests.least and needs.all:
        ctx.plan.least_bytes = math.ceil(planner().problem.least())
    if ctx.requests.frontier and needs.all:
        ctx.plan.point = planner().point(ctx.decisions)
        ctx.plan.frontier = planner().frontier(ctx.plan.point)


def _within_budget(
    ctx: Context, cuts: Decisions, choices: FormatChoices, planner: Callable[[], Planner]
) -> Decisions:
    """The plan of the cuts; one that computes more again if it keeps too much, or has more bits."""
    most, is_share = saved_bytes(cuts, ctx.facts), isinstance(ctx.config.memory_budget, float)
    if most < NEGLIGIBLE and is_share:
        return cuts
    budget = ctx.config.budget_bytes(most)
    if budget >= most:
        return cuts if math.isinf(budget) else raise_precision(cuts, choices, budget)
    if is_share and not ctx.plan.linears:
        return _nearest(ctx, budget, planner())
    return planner().within(budget)


def _nearest(ctx: Context, budget: float, planner: Planner) -> Decisions:
    """The plan nearest to the share of a graph without layers, such as a loss and its logits.

    PyTorch leaves such a graph where it breaks a model in parts. What the others can do without it
    often cannot: that is no reason not to train.
    """
    least = min(planner.problem.least(), planner.most)
    if least > budget:
        ctx.plan.note = (
            f"a graph without linear layers keeps {least / planner.most:.0%} of "
            f"{bytes_text(planner.most)} in spite of memory_budget={ctx.config.memory_budget:g}"
        )
    return planner.nearest(budget) if least < planner.most else planner.cuts
