"""`fp8pass.sharpness` compared with independent maxima in fp64, and in a `Monitor`."""

from __future__ import annotations

import csv
import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import COAT_EAGER
from monitor_helpers import monitored
from scipy.special import logsumexp
from scipy.stats import spearmanr
from torch import nn
from torch.nn import functional as F

import fp8pass
from fp8pass import ConfigError, Monitor, sharpness

EPSILON = 5e-4  # of the paper


class Tiny(nn.Module):
    """A bigram language model."""

    def __init__(self, vocabulary=64, dim=16, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.drop = nn.Dropout(dropout)
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.runs = 0

    def forward(self, ids):
        self.runs += 1
        return self.lm_head(self.drop(self.embed(ids)))


def batch_of(count=1, length=8, vocabulary=64):
    return torch.randint(0, vocabulary, (count, length)), torch.randint(0, vocabulary, (count,))


def last_loss(model, batch):
    return F.cross_entropy(model(batch[0])[:, -1].float(), batch[1])


def compute_maximum(logits: np.ndarray, target: int) -> tuple[float, float]:
    """Return the loss of one token and its maximum: the target logit falls, the rest rises."""
    noise = EPSILON * (np.abs(logits) + 1)
    noise[target] *= -1
    return tuple(float(logsumexp(y) - y[target]) for y in (logits, logits + noise))


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize(("vocabulary", "scale"), [(16, 1.0), (64, 4.0), (512, 1.0)])
def test_the_maximum_of_cross_entropy_is_right(vocabulary, scale, search):
    model, batch = Tiny(vocabulary), batch_of(vocabulary=vocabulary)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
        logits = model(batch[0])[0, -1].double().numpy()
    start, largest = compute_maximum(logits, int(batch[1]))
    want = 100 * (largest - start) / (1 + start)
    assert sharpness(model, last_loss, batch, search=search) == pytest.approx(want, rel=0.01)


def test_the_sharpness_of_a_batch_is_a_ratio_of_means():
    model, batch = Tiny().bfloat16(), batch_of(6)
    logits = model(batch[0])[:, -1].detach().double().numpy()
    found = [compute_maximum(y, int(t)) for y, t in zip(logits, batch[1], strict=True)]
    start, largest = np.mean(found, axis=0)
    want = 100 * (largest - start) / (1 + start)
    assert sharpness(model, last_loss, batch) == pytest.approx(want, rel=0.01)


def test_the_maximum_of_another_loss_is_in_a_corner():
    """A convex loss has its maximum in one of the 256 corners of eight logits."""
    model, (ids, target) = Tiny(8), batch_of(vocabulary=8)

    def loss(y):
        top = torch.logsumexp(y, -1)
        return (top - y.gather(-1, target[:, None])[:, 0] + 0.1 * top**2 - y[:, 0]).mean()

    y = model(ids)[:, -1].detach().double()
    corners = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=8)), dtype=torch.float64)
    noise = EPSILON * (y.abs() + 1)
    start = loss(y).item()
    want = 100 * (max(loss(y + c * noise).item() for c in corners) - start) / (1 + start)
    got = sharpness(model, lambda m, b: loss(m(b)[:, -1]), ids)
    assert got == pytest.approx(want, rel=0.01)


def test_minima_are_ranked_by_curvature():
    """Near a minimum the curvature determines the rise of the loss."""
    y = torch.randn(1, 1, 32, dtype=torch.float64)
    offset = 1e-3 * torch.randn(32, dtype=torch.float64)
    room = EPSILON * (y[0, 0].abs() + 1)
    curvatures = [1.0, 10.0, 1e2, 1e3, 1e4]
    found = []
    for k in curvatures:

        def loss(model, _, k=k):
            return 0.5 * k * (model()[0, -1] - y[0, 0] - offset).square().sum() + 1

        start = 0.5 * k * offset.square().sum() + 1
        largest = 0.5 * k * (offset.abs() + room).square().sum() + 1
        want = float(100 * (largest - start) / (1 + start))
        found.append(sharpness(lambda: y, loss, None))
        assert found[-1] == pytest.approx(want, rel=0.01)
    assert found == sorted(found)


def test_the_box_widens_with_epsilon():
    model, batch = Tiny(), batch_of()
    assert sharpness(model, last_loss, batch, epsilon=1e-3) == pytest.approx(
        2 * sharpness(model, last_loss, batch), rel=0.01
    )


def test_the_cheap_variant_ranks_checkpoints_as_the_exact_one_does():
    torch.manual_seed(0)
    model, optimizer = Tiny(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids, targets = batch_of(32)
    exact, cheap = [], []
    for _ in range(12):
        exact.append(sharpness(model, last_loss, (ids[:4], targets[:4])))
        cheap.append(sharpness(model, last_loss, (ids[:4], targets[:4]), search=False))
        optimizer.zero_grad()
        last_loss(model, (ids, targets)).backward()
        optimizer.step()
    assert len(set(exact)) == 12
    assert spearmanr(exact, cheap).statistic > 0.99


# --- how it runs --------------------------------------------------------------------------------


def test_the_model_runs_once_and_does_not_change():
    model, batch = Tiny(dropout=0.5), batch_of(2)
    model.embed.eval()
    before = {n: p.clone() for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    sharpness(model, last_loss, batch)
    assert model.runs == 1
    assert [m.training for m in model.modules()] == [True, False, True, True]
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())


@dataclass
class Output:
    logits: torch.Tensor
    loss: None = None


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, None), lambda o: o[0]),
        (lambda y: {"logits": y}, lambda o: o["logits"]),
        (Output, lambda o: o.logits),
        (lambda y: SimpleNamespace(logits=y), lambda o: o.logits),
    ],
    ids=["tuple", "mapping", "dataclass", "object"],
)
def test_logits_are_found_in_outputs_of_models(wrap, unwrap):
    model, batch = Tiny(), batch_of(2)
    got = sharpness(
        lambda ids: wrap(model(ids)),
        lambda m, b: F.cross_entropy(unwrap(m(b[0]))[:, -1], b[1]),
        batch,
    )
    assert got == pytest.approx(sharpness(model, last_loss, batch), rel=1e-3)  # computed in fp32


def test_a_loss_that_is_not_finite_is_the_result():
    model, batch = Tiny(), batch_of()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    assert math.isnan(sharpness(model, last_loss, batch))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[0].flatten()), "failed on logits"),
        (lambda m, b: (m(b[0]), torch.tensor(1.0))[1], "does not depend on"),
        (lambda m, b: torch.tensor(1.0), "did not call the model"),
        (lambda m, b: m(b[0]), "not a scalar"),
    ],
)
def test_losses_that_cannot_be_measured_are_refused(loss_fn, message):
    with pytest.raises(ConfigError, match=message) as error:
        sharpness(Tiny(), loss_fn, batch_of(2))
    assert "F.cross_entropy(m(b['input_ids']).logits[:, -1], b['next'])" in str(error.value)


def test_other_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="epsilon must be a positive number"):
        sharpness(Tiny(), last_loss, batch_of(), epsilon=0)
    with pytest.raises(ConfigError, match="search must be True or False, got 'no'"):
        sharpness(Tiny(), last_loss, batch_of(), search="no")
    with pytest.raises(ConfigError, match="divides by 1 \\+ loss, so the loss must be above -1"):
        sharpness(Tiny(), lambda m, b: last_loss(m, b) * 0 - 1, batch_of())
    with pytest.raises(ConfigError, match="instead of logits"):
        sharpness(lambda ids: torch.tensor(1.0), last_loss, batch_of())
    with pytest.raises(ZeroDivisionError):  # raised by the model
        sharpness(lambda ids: 1 / 0, last_loss, batch_of())
    with pytest.raises(ConfigError, match="sharpness must be a function without arguments"):
        Monitor(sharpness=True)


# --- in a monitor -------------------------------------------------------------------------------


class Board:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def flush(self):
        pass


@pytest.mark.long
@pytest.mark.parametrize("simulate", [False, True])
def test_each_sample_writes_a_row(tmp_path, simulate):
    config = COAT_EAGER
    if simulate:
        config = fp8pass.Config(simulate="e8m3", compiler="eager")
    model, batch, board = Tiny(), batch_of(2), Board()

    def measure():
        return sharpness(compiled, last_loss, batch)

    file = tmp_path / "health.csv"
    monitor = Monitor(every=2, csv=file, tensorboard=board, sharpness=measure)
    compiled = monitored(model, monitor, replace(config, quantize_lm_head=True))
    for _ in range(3):
        last_loss(compiled, batch).backward()
        monitor.step()
    rows = [r for r in csv.DictReader(file.open()) if r["tensor"] == "loss landscape"]
    assert [(r["step"], r["module"]) for r in rows] == [("0", ""), ("2", "")]
    assert all(float(r["sharpness"]) == pytest.approx(measure()) for r in rows)
    scalars = [(value, step) for tag, value, step in board.scalars if tag == "fp8pass/sharpness"]
    assert scalars == [(float(r["sharpness"]), int(r["step"])) for r in rows]
    assert f"sharpness {measure():.3g}%" in str(monitor)
    others = [r for r in csv.DictReader(file.open()) if r["tensor"] != "loss landscape"]
    assert bool(others) != simulate
    assert all(r["sharpness"] == "nan" for r in others)
