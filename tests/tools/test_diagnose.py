"""`diagnose` measures the errors that the rules predict."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import relative
from torch import nn

import fp8pass
from fp8pass import Config, graph
from fp8pass.demo.model import new_model
from fp8pass.demo.sizes import SIZES
from fp8pass.testing import hardware_accumulation
from fp8pass.tools.diagnosis import NEGLIGIBLE_ERROR, LayerError
from fp8pass.tools.recording import record_step

SIZE = replace(SIZES["small"], layers=2, seq=128)
UNIFORM = Config.recipe("agoq", error_tolerance=math.inf)


def loss_of(model, tokens):
    return model(tokens[:, :-1], tokens[:, 1:])


def tokens(seed: int = 0) -> torch.Tensor:
    """Return windows of Python source code."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    starts = torch.randint(
        len(text) - SIZE.seq - 1, (8,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([text[i : i + SIZE.seq + 1] for i in starts.tolist()]).long()


def few_tokens() -> torch.Tensor:
    """Return a batch of the tiny model."""
    return tokens()[:2, : SIZES["tiny"].seq + 1]


@cache
def trained_model() -> nn.Module:
    model = new_model(SIZE, 0, torch.device("cpu")).float()  # many CPUs are slow in BF16
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(30):
        optimizer.zero_grad()
        loss_of(model, tokens(step)).backward()
        optimizer.step()
    return model.bfloat16()


@cache
def errors_of(config: Config, trained: bool) -> list[LayerError]:
    """Return the measured errors of the model's gradients in a configuration."""
    model = trained_model() if trained else new_model(SIZE, 0, torch.device("cpu")).bfloat16()
    return fp8pass.diagnose(model, loss_of, tokens(1), config=config).layers


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "trained"),
    [(Config(), False), (Config(), True), (Config.recipe("agoq"), True), (UNIFORM, True)],
    ids=["coat of random weights", "coat", "agoq", "uniform"],
)
def test_prediction_agrees_with_measurement(config, trained):
    """Predictions are within a factor of three of measurements, and their ranks correlate.

    Negligible errors are not compared. Errors above one, which attention without rules has, count
    as equal, because such a gradient is wrong anyway.
    """
    found = errors_of(config, trained)
    layers = [y for y in found if y.predicted is not None and y.relative > NEGLIGIBLE_ERROR]
    assert len(layers) > 20
    assert config == UNIFORM or all(y.predicted is not None for y in found)
    measured = torch.tensor([min(y.relative, 1.0) for y in layers])
    predicted = torch.tensor([min(y.predicted, 1.0) for y in layers])
    ratios = measured / predicted
    assert ratios.min() > 1 / 3
    assert ratios.max() < 3
    assert spearman(measured, predicted) >= 0.8


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the rank correlation."""
    return float(torch.corrcoef(torch.stack([ranked(a), ranked(b)]))[0, 1])


def ranked(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([(x < b).sum() + ((x == b).sum() - 1) / 2 for b in x]).double()


@pytest.mark.long
def test_attention_has_the_largest_error_without_rules():
    """AGoQ, Table 13."""
    layers = errors_of(UNIFORM, True)
    attention = [y.relative for y in layers if y.gradient.startswith("attention")]
    assert len(attention) == 3 * SIZE.layers
    assert min(attention) > max(y.relative for y in layers if "attention" not in y.gradient)


@pytest.mark.long
def test_attention_is_exact_with_rules():
    layers = errors_of(Config.recipe("agoq"), True)
    assert not any(y.gradient.startswith("attention") for y in layers)


def long_layer(config: Config) -> dict[str, LayerError]:
    """Return the gradient errors of a layer with 8192 correlated tokens in wgrad's contraction."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False).bfloat16()
    x, y = ((torch.randn(8192, 64) + 0.5).bfloat16() for _ in range(2))
    with hardware_accumulation():
        found = fp8pass.diagnose(layer, lambda m, b: (m(b) * y).sum(), x, config=config)
    return {error.gradient: error for error in found.layers}


@pytest.mark.long
def test_accumulation_is_measured_and_predicted():
    """Fast accumulation adds an error to a long contraction."""
    fast, precise = (long_layer(Config(longest_fast=n))["weight"] for n in (8192, 4096))
    for of in ("relative", "predicted"):
        assert getattr(fast, of) > 2 * getattr(precise, of)
    assert fast.relative == pytest.approx(fast.predicted, rel=0.3)
    assert not fast.far_above


@pytest.mark.long
def test_exact_recipe_has_no_errors():
    model = new_model(SIZES["tiny"], 0, torch.device("cpu"))
    assert not fp8pass.diagnose(model, loss_of, few_tokens(), config=Config.recipe("exact")).layers


@pytest.mark.long
def test_the_model_does_not_change():
    model = new_model(SIZES["tiny"], 0, torch.device("cpu"))
    loss_of(model, few_tokens()).backward()
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    fp8pass.diagnose(torch.compile(model, backend="fp8pass"), loss_of, few_tokens())
    assert torch.equal(state, torch.get_rng_state())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][0])
        assert torch.equal(p.grad, before[name][1])


@pytest.mark.parametrize("tool", [fp8pass.diagnose, fp8pass.calibrate, fp8pass.bisect])
@pytest.mark.parametrize("beside", [nn.BatchNorm1d(64), nn.Dropout(0.5)], ids=["norm", "dropout"])
def test_buffers_and_random_state_do_not_change(tool, beside):
    """Running the recorded graph again must not change buffers or the random number generator.

    The graph updates the running statistics of a norm and draws the random numbers of dropout.
    """
    model = nn.Sequential(nn.Linear(64, 64), beside, nn.Linear(64, 64))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(32, 64)
    state = torch.get_rng_state()
    tool(model, lambda model, x: model(x).square().mean(), x)
    assert torch.equal(state, torch.get_rng_state())
    for name, buffer in model.state_dict().items():
        assert torch.equal(buffer, before[name]), name


def test_an_outlier_is_flagged_with_a_skip_entry():
    """Large entries of the weight leave few FP8 values to the other entries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6
        model[2].weight[0, 1:] = 0

    def loss(model, x):
        return model(x)[:, 1:].sum()

    found = fp8pass.diagnose(model, loss, torch.randn(64, 64))
    assert "2" in found.suggested_skip
    assert "!" in str(found)
    assert "skip=" in str(found)
    assert repr(found).startswith("<fp8pass.Diagnosis: errors of ")
    assert "far above the predicted error; largest " in repr(found)
    assert len(repr(found)) < 200


@pytest.mark.long
def test_report_formats(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    found = fp8pass.diagnose(model, lambda m, x: m(x).sum(), torch.randn(64, 64))
    data = json.loads(found.to_json(tmp_path / "errors.json"))
    assert [y["module"] for y in data["layers"]] == [y.module for y in found.layers]
    assert "predicted" in str(found)
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "errors.png")
    assert (tmp_path / "errors.png").stat().st_size > 1000


def test_a_product_of_a_matrix_with_itself_is_measured():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return torch.mm(y := self.layer(x), y)

    found = fp8pass.diagnose(Square(), lambda m, x: m(x).square().mean(), torch.randn(64, 64))
    assert {y.module for y in found.layers} >= {"layer"}


class Gated(nn.Module):
    """Two layers enter one region, the second layer after the first operator of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_layers_that_enter_a_region_are_measured(dtype):
    """This includes gradients of biases, which are sums of a gradient that another layer reads."""
    torch.manual_seed(0)
    x = torch.randn(256, 128, dtype=dtype)
    weights = torch.randn(256, 128, dtype=dtype)
    found = fp8pass.diagnose(
        Gated().to(dtype), lambda m, b: (m(b) * weights).sum(), x, config=Config.recipe("agoq")
    )
    assert not found.suspicious
    for y in found.layers:
        if y.relative > NEGLIGIBLE_ERROR or y.predicted > NEGLIGIBLE_ERROR:
            assert 1 / 3 < y.relative / y.predicted < 3, y
    assert any(y.gradient == "weight" and y.shape == "128" for y in found.layers)


def test_every_run_of_a_graph_is_recorded():
    """Only the incoming gradient of the last run follows from its output."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def loss(model, x):
        return model(10 * model(x)).square().sum()

    records = record_step(model, loss, torch.randn(64, 64, requires_grad=True), Config())
    follows = []
    for record in records:
        (tangent,) = (x for name, x in record.inputs.items() if "tangents" in name)
        output, *_ = graph.outputs(record.exact.graph)
        follows.append(relative(tangent, 2 * record.exact_values()[output.name]) < 0.1)  # rounded
    assert follows == [False, True]


def test_parameters_of_more_dimensions_are_measured():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.scale = nn.Parameter(torch.ones(1, 1, 64))

        def forward(self, x):
            return self.layer(nn.functional.layer_norm(self.layer(x), (64,)) * self.scale)

    found = fp8pass.diagnose(Scaled(), lambda m, x: m(x).square().sum(), torch.randn(4, 16, 64))
    assert found.layers


def test_tokens_may_be_columns():
    """The number of tokens is not a multiple of 16, so operands and results are transposed."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(48, 32) / 6)
            self.down = nn.Parameter(torch.randn(48, 48) / 7)

        def forward(self, x):
            return self.down @ (self.up @ x).relu()

    x = torch.randn(32, 20, requires_grad=True)
    found = fp8pass.diagnose(Columns(), lambda m, x: m(x).square().mean(), x)
    assert len(found.layers) == 4
    for error in found.layers:
        assert 0.5 < error.relative / error.predicted < 1.5


def test_nan_is_suspicious_and_valid_json():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    x[0, 0] = float("nan")
    found = fp8pass.diagnose(model, lambda m, b: m(b).sum(), x)
    assert found.suspicious
    assert json.loads(found.to_json())["layers"]
    assert "NaN" not in found.to_json()


def test_dropout_is_drawn_once():
    """The backward must recompute the mask of the forward."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64))
    found = fp8pass.diagnose(model, lambda m, b: m(b).square().mean(), torch.randn(128, 64))
    assert found.layers
    assert not found.suspicious
