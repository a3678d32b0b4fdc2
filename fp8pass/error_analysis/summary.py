"""The error rules of a graph as text: both of AGoQ's cases, as numbers and as formulas."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sympy import S, Symbol
from torch import fx

from fp8pass import compat, graph
from fp8pass.error_analysis.derivation import Derivation, Known
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.formulas import Formulas
from fp8pass.error_analysis.regions import Region
from fp8pass.graph.names import operator_name
from fp8pass.graph.symbols import Underivable
from fp8pass.plan import RuleSummary

# Operators of a region whose bound is written as a formula: four times a norm's.
LARGEST_FORMULA = 40


@dataclass(frozen=True)
class Cases:
    """The bounds of one region.

    Attributes:
        one: the bound of the worst output in Case 1.
        two: the same in Case 2.
        bound: the formula of `one`.
        reason: why there is none; '' if there is.
    """

    one: float = 0.0
    two: float = 0.0
    bound: str = ""
    reason: str = ""


def summarize_rules(rules: Rules) -> list[RuleSummary]:
    """A summary of each region that has a backward and values that may be stored."""
    known: dict[object, tuple[Region, Cases]] = {}  # one of each set of equal regions
    summaries = []
    with compat.real_tensors():
        for region in rules.regions:
            if not region.backward or not region.values:
                continue
            of_inputs = rules.known_of(region)
            key = region.key(), of_inputs.key(region)
            if key not in known:
                reason = rules.reason_of(region)
                cases = Cases(reason=reason) if reason else _cases(region, of_inputs)
                known[key] = region, cases
            equal, cases = known[key]
            summaries.append(_summary(region, replace(cases, bound=_renamed(cases, equal, region))))
    return summaries


def _renamed(cases: Cases, equal: Region, region: Region) -> str:
    """The formula of an `equal` region, with the names of `region`."""
    pairs = zip((*equal.inputs, *equal.nodes), (*region.inputs, *region.nodes), strict=True)
    names = {a.name: b.name for a, b in pairs}
    return re.sub(r"%(\w+)", lambda found: "%" + names.get(found[1], found[1]), cases.bound)


def _summary(region: Region, cases: Cases) -> RuleSummary:
    forward = [n for n in region.nodes if n not in region.backward]
    return RuleSummary(
        module=graph.module_path(graph.source((forward or region.nodes)[0])),
        inputs=tuple(_described(n) for n in region.values),
        operators=tuple(dict.fromkeys(_short(n) for n in forward)),
        case_1=cases.one,
        case_2=cases.two,
        bound=cases.bound,
        reason=cases.reason,
    )


def _cases(region: Region, known: Known) -> Cases:
    try:
        derivation = Derivation(region, known)
        one, two = derivation.cases()
    except Underivable as error:
        return Cases(reason=str(error))
    if not one:
        return Cases(reason="no gradient leaves it")
    worst = max(one, key=lambda s: one[s])
    return Cases(one[worst], max(two.values()), _formula(derivation, worst))


def _formula(derivation: Derivation, output: Symbol) -> str:
    """The bound of an output in Case 1; '' if it would be too long to read."""
    expressions = derivation.expressions
    if len(expressions.definitions) > LARGEST_FORMULA:
        return ""
    formulas = Formulas(expressions, [output])
    inputs = frozenset(expressions.values)
    terms = [formulas.bounds(source, inputs)[output] for source in sorted(inputs, key=str)]
    return str(sum(terms, S.Zero))


def _described(node: fx.Node) -> str:
    return f"{node.name} ({_short(node)})"


def _short(node: fx.Node) -> str:
    return operator_name(node).split(".")[1] if "." in operator_name(node) else operator_name(node)
