"""Huge, infinite and undefined values do not change other elements of their group."""

from __future__ import annotations

import pytest
import torch
from rules_helpers import ROWS, D, gradient_cosines, plan_of, rules_of
from torch import Tensor
from torch.nn import functional as F


def mask(value: float) -> Tensor:
    x = torch.zeros(ROWS, D)
    x[:, ::5] = value
    return x


def sigmoid_masked(m, h, added):
    return torch.sigmoid(h + added) * h


@pytest.mark.parametrize("save_format", ["e4m3", "e2m1"])
@pytest.mark.parametrize("value", [-1e9, -torch.inf, -3e4])
def test_a_mask_does_not_flush_its_neighbours(value, save_format):
    assert min(gradient_cosines(sigmoid_masked, save_format, mask(value))) > 0.985


@pytest.mark.parametrize("fill", [-1e9, -torch.inf])
def test_filled_values_do_not_flush_their_neighbours(fill):
    def filled(m, h, where):
        return torch.sigmoid(h.masked_fill(where > 0, fill)) * h

    assert min(gradient_cosines(filled, "e2m1", mask(1.0))) > 0.985


def test_outliers_stay_outliers_in_sums_and_slices():
    """Masked elements may move, or be added to other values."""

    def moved(m, h, added):
        masked = torch.cat([h + added, torch.tanh(m.first(h))], -1)
        return torch.sigmoid(masked[:, :D] + masked[:, D:]) * h

    assert min(gradient_cosines(moved, "e2m1", mask(-1e9))) > 0.98


def test_replaced_nans_are_harmless():
    def replaced(m, h):
        return torch.nan_to_num(torch.where(h > 0.9, torch.nan, h))

    assert min(gradient_cosines(replaced, "e2m1")) > 0.98


def test_the_operand_is_stored_before_the_mask():
    plan = plan_of(sigmoid_masked, "e2m1", mask(-1e9))
    formats = {s.op: s.saved_as for s in plan.saved}
    assert formats["fp8pass.scaled_mm"].startswith("e2m1")
    assert "aten.add.Tensor" not in formats


def test_masked_values_do_not_share_a_scale():
    rules = rules_of(sigmoid_masked, mask(-1e9))
    why = {n.name: rules.why_ungrouped(n) for n in rules.graph.nodes}
    assert "mask" in why["add"]
    assert not why["sigmoid"]


def test_parameters_may_be_added():
    """A bias or a learned position is as large as other values."""
    plan = plan_of(lambda m, h: F.gelu(h * 2 + m.gain), "e2m1")
    assert not any("mask" in s.reason and s.dtype != "bool" for s in plan.saved)


@pytest.mark.long
def test_statistics_of_columns_are_not_rounded():
    """A mean over rows has the length of a row, but is one number for each column."""

    def batch_norm(m, h):
        return F.silu((h - h.mean(0)) * torch.rsqrt(h.var(0) + 1e-5) + m.gain)

    plan = plan_of(batch_norm, "e2m1")
    assert not any(s.shape.startswith(("1×", "128")) and "e2m1" in s.saved_as for s in plan.saved)
