"""Rules are derived in linear time, or the derivation is refused without an exception."""

from __future__ import annotations

import time

import pytest
import torch
from rules_helpers import D, gradient_cosines, rules_of
from torch.nn import functional as F

from fp8pass.error_analysis import derivation
from fp8pass.error_analysis.formulas import summarize_rules
from fp8pass.error_analysis.samples import Samples


def norms(m, h):
    for _ in range(3):
        h = F.gelu(F.layer_norm(h, (D,)))
    return h


def sinkhorn(m, h):
    h = h.exp()
    for _ in range(20):
        h = h / (h.sum(-1, keepdim=True) + 1e-6)
        h = h / (h.sum(0, keepdim=True) + 1e-6)
    return h


def runge_kutta(m, h):
    def slope(h):
        return torch.tanh(h) * 0.5 - h

    for _ in range(4):
        a = slope(h)
        b = slope(h + a * 0.05)
        c = slope(h + b * 0.05)
        h = h + (a + 2 * b + 2 * c + slope(h + c * 0.1)) * (0.1 / 6)
    return h


def spikes(m, h):
    potential, out = torch.zeros_like(h), 0.0
    for _ in range(8):
        potential = potential * 0.9 + h
        spike = torch.sigmoid(5 * (potential - 1))
        potential = potential - spike
        out = out + spike
    return out


def powers(m, h):
    for _ in range(8):
        h = h * h * 0.1 + h
    return torch.tanh(h)


CHAINS = {"norms": norms, "sinkhorn": sinkhorn, "ode": runge_kutta, "spikes": spikes, "pow": powers}


def seconds_for(function) -> float:
    """Return the CPU seconds for the rules of a function, with an empty cache."""
    rules = rules_of(function)
    derivation._rule_cache.clear()
    start = time.process_time()
    assert rules._findings.rules
    return time.process_time() - start


@pytest.mark.long
@pytest.mark.parametrize("name", CHAINS)
def test_chains_without_a_gemm_are_derived_or_refused_in_time(name):
    assert seconds_for(CHAINS[name]) < 3  # tenths of seconds on an idle machine


@pytest.mark.long
def test_500_pointwise_operators_take_two_seconds():
    def many(m, h):
        for _ in range(83):
            h = torch.tanh(h * 1.1) + torch.sigmoid(h) * 0.3
        return h

    assert seconds_for(many) < 6  # a second on an idle machine


@pytest.mark.long
def test_a_region_that_is_too_large_has_a_reason():
    rules = rules_of(sinkhorn)
    (reason,) = {rule.reason for rule in rules._findings.rules.values()} - {""}
    assert "81 reductions" in reason
    assert "too long" in reason


NOT_DERIVABLE = {
    "huge": lambda m, h: h * 1e20 * 1e-20,
    "complex": lambda m, h: (h * 1j).imag,
    "means of means": lambda m, h: h + h.mean().mean(0),
    "logaddexp": lambda m, h: torch.logaddexp(h, 2 * h),
    "integers": lambda m, h: h * (h * 10).round().to(torch.int64).remainder(7),
}


@pytest.mark.parametrize("name", NOT_DERIVABLE)
def test_no_derivation_raises(name):
    assert min(gradient_cosines(NOT_DERIVABLE[name], "e2m1")) > 0.97


def test_an_exception_is_a_reason(monkeypatch):
    def broken(*_):
        raise RuntimeError("of a formula")

    monkeypatch.setattr(Samples, "run", broken)
    monkeypatch.setattr(derivation, "_rule_cache", {})
    rules = rules_of(norms)
    with pytest.raises(RuntimeError, match="of a formula"):  # the tests set FP8PASS_CHECK
        [rules.reason_of(region) for region in rules.regions]
    monkeypatch.setenv("FP8PASS_CHECK", "0")
    rules = rules_of(norms)
    reasons = {rules.reason_of(region) for region in rules.regions}
    assert any("no rule was found (RuntimeError: of a formula)" in r for r in reasons)
    assert {s.reason for s in summarize_rules(rules)} <= reasons


def test_a_tolerance_of_infinity_derives_nothing(monkeypatch):
    rules = rules_of(norms)
    rules.error_tolerance = float("inf")
    monkeypatch.setattr("fp8pass.error_analysis.error_rules.derive", None)
    assert all(rules.amplification(n).bound <= 1 for r in rules.regions for n in r.values)


@pytest.mark.parametrize("save_format", ["e4m3", "e2m1"])
def test_saturated_powers_hold_their_bound(save_format):
    """Small values count most, and groups with a large value flush them to zero."""
    assert min(gradient_cosines(lambda m, h: torch.tanh(h) ** 1000, save_format)) > 0.97
