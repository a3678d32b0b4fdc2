"""Continuous functions get a rule; functions that jump use the masks of the forward."""

from __future__ import annotations

import pytest
import torch
from rules_helpers import gradient_cosines, plan_of, rules_of
from torch.nn import functional as F

from fp8pass.error_analysis.derivation import Derivation
from fp8pass.error_analysis.jumps import find_sign_roots
from fp8pass.graph.symbols import UnitStep

CONTINUOUS = {
    "softplus": lambda m, h: F.softplus(h),
    "mish": lambda m, h: F.mish(h),
    "elu": lambda m, h: F.elu(h),
    "log sigmoid": lambda m, h: F.logsigmoid(h),
    "made up": lambda m, h: F.softplus(h) * torch.tanh(h) * torch.exp(-h * h),
    "clamp of one side": lambda m, h: F.softplus(h).clamp(0.0, float("inf")),
    "clamp of no side": lambda m, h: torch.tanh(h).clamp(float("-inf"), float("inf")) ** 2,
    "by hand": lambda m, h: torch.where(h > 0.5, h * h, h - 0.25),
}
JUMPING = {
    "relu6": lambda m, h: F.relu6(3 * h + 4),
    "hardswish": lambda m, h: F.hardswish(3 * h),
    "hardtanh": lambda m, h: F.hardtanh(3 * h),
    "clamp": lambda m, h: h.clamp(-0.5, 0.7),
    "softshrink": lambda m, h: F.softshrink(h, 0.3),
    "maximum": lambda m, h: torch.maximum(h, h.roll(1, -1)),
    "step": lambda m, h: h * (h > 0.3),
    "of the largest": lambda m, h: h * (h == h.amax(-1, keepdim=True)),
    "of the k largest": lambda m, h: h * (h >= h.topk(8, -1).values[:, -1:]),
    "by an index": lambda m, h: h * (torch.arange(h.shape[-1]) <= h.argmax(-1, keepdim=True)),
    "less the largest": lambda m, h: h - h.amax(-1, keepdim=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CONTINUOUS)
def test_piecewise_functions_without_a_jump_get_a_4_bit_rule(name):
    saved = plan_of(CONTINUOUS[name], "e2m1").saved
    assert any(s.saved_as.startswith("e2m1") for s in saved)
    assert min(gradient_cosines(CONTINUOUS[name], "e2m1")) > 0.97


@pytest.mark.parametrize("name", JUMPING)
def test_functions_that_jump_use_the_masks_of_the_forward(name):
    """Masks that are recomputed from 4 bits would lead gradients to other elements."""
    assert min(gradient_cosines(JUMPING[name], "e2m1")) > 0.985
    assert min(gradient_cosines(JUMPING[name], "e4m3")) > 0.999


def test_a_mask_is_saved_instead_of_its_exact_operand():
    plan = plan_of(JUMPING["relu6"], "e2m1")
    assert any(s.dtype == "bool" for s in plan.saved)
    assert any(s.saved_as.startswith("e2m1") for s in plan.saved)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, h: F.relu(h),
        lambda m, h: F.leaky_relu(h * m.gain.exp()),
        lambda m, h: F.relu(torch.tanh(2 * h)) ** 2,
        lambda m, h: h.abs(),
    ],
)
def test_a_sign_may_come_from_a_value_of_the_same_sign(function):
    plan = plan_of(function, "e4m3")
    assert not any(s.dtype == "bool" for s in plan.saved)
    assert min(gradient_cosines(function, "e4m3")) > 0.999


def test_a_sign_of_a_difference_does_not_come_from_its_operands():
    """h - 1/2 may cross zero when h is rounded."""

    def shifted(m, h):
        return torch.tanh(h) * F.relu(h - 0.5)

    assert min(gradient_cosines(shifted, "e2m1")) > 0.98


def test_sign_roots_are_found_through_functions_that_keep_signs():
    rules = rules_of(lambda m, h: F.relu(torch.tanh(3 * h) * torch.sigmoid(h)))
    region = max(rules.regions, key=lambda r: len(r.nodes))
    expressions = Derivation(region).expressions
    roots = find_sign_roots(expressions)
    compared = [d.symbol for d in expressions.definitions if d.value.atoms(UnitStep)]
    (h,) = expressions.values
    assert all(roots[s] == h for s in compared[:1])


def test_a_region_that_computes_indices_alone_has_no_rule():
    """Its results are not floats, so they cannot jump."""
    plan = plan_of(lambda m, x: x.gather(-1, (x.detach() > 0).long()), "e2m1")
    assert not any(s.saved_as.startswith("e2m1") and s.op == "aten.gt.Scalar" for s in plan.saved)
