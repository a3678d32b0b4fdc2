"""Summarize the error rules of a graph for `fp8pass.explain`: AGoQ's two cases and a formula."""

from __future__ import annotations

import re
from dataclasses import replace

from sympy import S, Symbol
from torch import fx

from fp8pass import compat, graph
from fp8pass.error_analysis.derivation import Derivation, InputFacts
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.formulas import Formulas
from fp8pass.error_analysis.regions import Region
from fp8pass.graph.names import operator_name
from fp8pass.graph.symbols import Underivable
from fp8pass.plan import RuleSummary

# Operators of the largest region whose bound is written as a formula: four times a norm's.
LARGEST_FORMULA = 40


def summarize_rules(rules: Rules) -> list[RuleSummary]:
    """Summarize each region that has a backward and values that may be stored."""
    known: dict[object, tuple[Region, RuleSummary]] = {}  # one of each set of equal regions
    summaries = []
    with compat.real_tensors():
        for region in rules.regions:
            if not region.backward or not region.values:
                continue
            facts = rules.input_facts(region)
            key = region.key(), facts.key(region)
            if key not in known:
                known[key] = region, _summarize(region, facts, rules.reason_of(region))
            summaries.append(_rename(*known[key], region))
    return summaries


def _rename(equal: Region, summary: RuleSummary, region: Region) -> RuleSummary:
    """Return the summary of an `equal` region with the names of `region`."""
    pairs = zip((*equal.inputs, *equal.nodes), (*region.inputs, *region.nodes), strict=True)
    names = {a.name: b.name for a, b in pairs}
    bound = re.sub(r"%(\w+)", lambda found: "%" + names.get(found[1], found[1]), summary.bound)
    forward = [n for n in region.nodes if n not in region.backward]
    return replace(
        summary,
        module=graph.module_path(graph.source((forward or region.nodes)[0])),
        inputs=tuple(f"{n.name} ({_short_name(n)})" for n in region.values),
        cached=tuple(f"{n.name} ({_short_name(n)})" for n in region.cached),
        operators=tuple(dict.fromkeys(map(_short_name, forward))),
        bound=bound,
    )


def _short_name(node: fx.Node) -> str:
    """Return the name of an operator without its namespace and overload."""
    parts = operator_name(node).split(".")
    return parts[min(1, len(parts) - 1)]


def _summarize(region: Region, facts: InputFacts, reason: str) -> RuleSummary:
    """Compute the bounds of the output with the largest one, in both cases."""
    nothing = RuleSummary("", (), (), (), 0.0, 0.0, "", reason)
    if reason:
        return nothing
    try:
        derivation = Derivation(region, facts)
        one, two = derivation.cases()
    except Underivable as error:
        return replace(nothing, reason=str(error))
    if not one:
        return replace(nothing, reason="no gradient leaves it")
    worst = max(one, key=lambda s: one[s])
    bound = _write_bound(derivation, worst)
    return replace(nothing, case_1=one[worst], case_2=max(two.values()), bound=bound)


def _write_bound(derivation: Derivation, output: Symbol) -> str:
    """Write the bound of an output in Case 1; '' if it would be too long to read."""
    expressions = derivation.expressions
    if len(expressions.definitions) > LARGEST_FORMULA:
        return ""
    formulas = Formulas(expressions, [output])
    inputs = frozenset(expressions.values)
    terms = [formulas.bounds(source, inputs)[output] for source in sorted(inputs, key=str)]
    return str(sum(terms, S.Zero))
