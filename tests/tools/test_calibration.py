"""Moments measured on a batch are used by the error rules of a compilation."""

from __future__ import annotations

import json
import re

import pytest
import torch
from helpers import llama, tokens
from torch import nn

import fp8pass
from fp8pass import Config, ConfigError
from fp8pass.error_analysis.samples import UNIT_VARIANCE, Moments


class Exponential(nn.Module):
    """Amplifies an error by its argument."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.first.weight, std=size / 8)

    def forward(self, x):
        y = self.first(x)
        return self.second(torch.exp(0.5 * y) * torch.tanh(y))


def mean_square(model, x):
    return model(x).square().mean()


def bound(model, x, **options) -> float:
    """Return the error bound of the saved exponential, read from its reason."""
    (report,) = fp8pass.explain(model, x, config=Config(save_format="e2m1", **options)).graphs
    (reason,) = (s.reason for s in report.plan.saved if "amplif" in s.reason)
    return float(re.search(r"([\d.]+)×", reason)[1])


@pytest.mark.long
def test_larger_activations_have_larger_bounds():
    torch.manual_seed(0)
    x, bounds = torch.randn(256, 64), []
    for size in (1.0, 4.0):
        model = Exponential(size)
        calibration = fp8pass.calibrate(model, mean_square, x)
        assert round(calibration[0][2]) == size
        bounds.append(bound(model, x, calibration=calibration))
    assert bounds[0] < 0.6 * bounds[1]


@pytest.mark.long
def test_an_exponential_saves_exact_values_without_calibration():
    (report,) = fp8pass.explain(Exponential(1.0), torch.randn(256, 64)).graphs
    assert any(
        "its formula contains an exponential that may have any size" in s.reason
        for s in report.plan.saved
    )


@pytest.mark.long
def test_moments_are_plain_data_and_valid_options():
    model, batch = llama(), tokens()
    calibration = fp8pass.calibrate(model, lambda m, b: m(b).logits.square().mean(), batch)
    assert len({name for name, _, _ in calibration}) == len(calibration) > 10
    restored = json.loads(json.dumps(calibration))
    assert Config(calibration=restored) == Config(calibration=calibration)
    hash(Config(calibration=restored))
    options = {"calibration": restored, "compiler": "eager"}
    program = torch.compile(model, backend="fp8pass", options=options)
    program(batch).logits.square().mean().backward()


@pytest.mark.long
def test_names_do_not_depend_on_the_batch():
    model = llama()
    few, many = (
        fp8pass.calibrate(model, lambda m, b: m(b).logits.square().mean(), tokens()[:rows])
        for rows in (1, 2)
    )
    assert [name for name, _, _ in few] == [name for name, _, _ in many]


def test_the_model_does_not_change():
    model, x = Exponential(1.0), torch.randn(32, 64, requires_grad=True)
    mean_square(model, x).backward()
    tensors = [*model.parameters(), x]
    before = [(p.detach().clone(), p.grad.clone()) for p in tensors]
    state = torch.get_rng_state()
    fp8pass.calibrate(model, mean_square, x)
    assert torch.equal(torch.get_rng_state(), state)
    for p, (value, gradient) in zip(tensors, before, strict=True):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)


class Twice(nn.Module):
    """One layer, in two graphs, with small and large values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = torch.exp(0.1 * self.layer(x)) * self.layer(x)
        torch._dynamo.graph_break()
        return self.last(torch.exp(0.1 * self.layer(10 * y)) * y).sum()


def test_a_module_in_two_graphs_has_the_larger_moments():
    calibration = fp8pass.calibrate(Twice(), lambda m, x: m(x), torch.randn(32, 64))
    names = [name for name, _, _ in calibration]
    assert len(set(names)) == len(names)
    assert max(std for name, _, std in calibration if name.startswith("layer")) > 2


class Gate(nn.Module):
    """Reads a second input next to the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, y):
        return self.second(torch.exp(0.1 * self.first(x)) * y).sum()


@pytest.mark.long
def test_names_of_inputs_do_not_depend_on_dynamic_shapes():
    model, found = Gate(), []
    for dynamic in (False, True):
        batch = [torch.randn(32, 64, requires_grad=True) * scale for scale in (1, 2)]
        for x in batch if dynamic else ():
            torch._dynamo.mark_dynamic(x, 0)
        calibration = fp8pass.calibrate(model, lambda m, b: m(*b), batch)
        found.append({name: round(std) for name, _, std in calibration if ":placeholder:" in name})
    assert found[0] == found[1]
    assert list(found[0].values()) == [2]


@pytest.mark.parametrize("given", ["calibration.json", [1.0], [("a", "b", "c")], [("a", 1.0)]])
def test_invalid_moments_are_refused(given):
    with pytest.raises(ConfigError, match="calibrate"):
        Config(calibration=given)


def test_similar_moments_share_a_rule():
    assert Moments.rounded(0.01, 0.98) == Moments.rounded(-0.02, 1.05) == Moments(0.0, 1.0)
    assert Moments.rounded(0.0, 3.9) == Moments(0.0, 4.0)
    assert Moments.rounded(float("nan"), 1.0) == Moments.rounded(0.0, 0.0) == UNIT_VARIANCE
