"""`bisect` finds the sources of a gradient error in few compilations."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers import COAT_EAGER, EXACT, MLP, llama, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fp8pass
from fp8pass import Bisection, Config, ConfigError
from fp8pass.tools.bisection import Trials, measure_relative_error
from fp8pass.tools.culprit_search import CULPRIT_SHARE, CULPRIT_TIMES, CulpritSearch

# --- the search, on synthetic errors ------------------------------------------------------------


class Errors:
    """The error of a model in which some numbered units are exact. Counts calls."""

    def __init__(self, errors: list[float]) -> None:
        self.errors, self.calls = errors, 0

    def __call__(self, exact: frozenset[int]) -> float:
        self.calls += 1
        return math.sqrt(sum(e for i, e in enumerate(self.errors) if i not in exact))


def compilations(units: int) -> int:
    """Return how many compilations finding one culprit may take."""
    return math.ceil(math.log2(units)) + 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.data())
def test_the_largest_is_found_in_log_n(small, data):
    index = data.draw(st.integers(0, len(small) - 1))
    planted = sum(small) - small[index] + 1
    small[index] = planted * max(1.01, CULPRIT_TIMES)
    errors = Errors(small)
    found = CulpritSearch(len(small), errors).culprits(most=1)
    assert found == [index]
    assert errors.calls <= compilations(len(small))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 5))
def test_all_units_with_large_errors_are_found_and_no_others(caused, most):
    errors = Errors(caused)
    found = CulpritSearch(len(caused), errors).culprits(most)
    left = list(caused)
    for index in found:
        assert left[index] >= 0.999 * CULPRIT_SHARE * sum(left)
        assert left[index] == max(left)
        left[index] = 0.0
    others = len(left) - len(found) - 1
    if len(found) < most and sum(left) > 1e-9:
        assert max(left) <= 1.001 * max(
            CULPRIT_SHARE, CULPRIT_TIMES / (CULPRIT_TIMES + others)
        ) * sum(left)
    # At each level at most four ranges cause a quarter or more.
    levels = math.ceil(math.log2(len(caused))) + 1
    assert errors.calls <= (most + 1) * (levels / CULPRIT_SHARE + 4)


@pytest.mark.parametrize("units", [1, 2, 7, 64, 300])
def test_evenly_spread_errors_have_no_culprit(units):
    errors = Errors([0.01] * units)
    found = CulpritSearch(units, errors).culprits(most=4)
    assert found == ([0] if units == 1 else [])
    assert errors.calls <= 16


def test_nothing_to_find():
    assert CulpritSearch(0, Errors([])).culprits(4) == []
    assert CulpritSearch(5, Errors([0.0] * 5)).culprits(4) == []


@given(st.integers(1, 100), st.data())
def test_everything_that_overflows_is_found(units, data):
    """The error is finite only if all of them are exact."""
    broken = data.draw(st.sets(st.integers(0, units - 1), min_size=1, max_size=3))

    def error(exact: frozenset[int]) -> float:
        return 0.1 if broken <= exact else math.inf

    search = CulpritSearch(units, error)
    assert set(search.culprits(most=3)) == broken
    assert set(search.culprits(most=1)) <= broken


@pytest.mark.parametrize("culprits", [{3}, {3, 40}, {3, 4, 60}])
def test_culprits_of_a_saturated_error_are_found(culprits):
    """The error saturates at one, so it falls only if all culprits are exact."""

    def error(exact: frozenset[int]) -> float:
        caused = sum((100.0 if i in culprits else 0.001) for i in range(64) if i not in exact)
        return math.sqrt(min(caused, 1.0))

    found = CulpritSearch(64, error).culprits(most=4)
    assert set(found) == culprits


def test_the_last_of_many_equal_errors_is_not_blamed():
    """Many equal errors saturate, so the error falls only when the last of them are exact."""

    def error(exact: frozenset[int]) -> float:
        return math.sqrt(min(64 - len(exact), 4) / 4)

    assert CulpritSearch(64, error).culprits(most=4) == []


# --- models -------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A gated layer. `before` and `after` mask features out."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(size, size), nn.Linear(size, size)
        self.register_buffer("before", torch.ones(size))
        self.register_buffer("after", torch.ones(size))

    def forward(self, x):
        x_in = x * self.before
        return x + 0.3 * torch.tanh(self.gate(x_in)) * self.up(x_in) * self.after


def stack(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def ruin_linear(layer: Layer) -> None:
    """Set large weights of a feature that is always zero, so that few FP8 values are left."""
    with torch.no_grad():
        layer.before[0] = 0
        layer.up.weight[:, 0] = 1e6


def ruin_saved(layer: Layer, value: float = 1e6) -> None:
    """Set a large saved value that no GEMM reads, so that few FP8 values are left in its group."""
    with torch.no_grad():
        layer.after[0] = 0
        layer.up.bias[0] = value


X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def loss(model, x):
    return (model(x) * X.flip(0)).sum()


def names(found: Bisection) -> list[tuple[str, str]]:
    return [(c.kind, c.name.split(":")[0]) for c in found.culprits]


@pytest.mark.long
def test_a_linear_layer_is_found():
    model = stack(4)
    ruin_linear(model[2])
    found = fp8pass.bisect(model, loss, X)
    assert names(found) == [("linear", "2.up")]
    assert found.spread
    assert found.suggested == {"skip": ("2.up",)}
    (culprit,) = found.culprits
    assert culprit.error_before == found.error > 1.5 * found.remaining
    assert found.units > 14
    assert found.probes <= 3 * math.log2(found.units)


@pytest.mark.long
@pytest.mark.parametrize(
    "config", [Config(), Config.recipe("agoq", error_tolerance=math.inf)], ids=["coat", "agoq"]
)
def test_a_saved_tensor_is_found(config):
    model = stack(2)
    ruin_saved(model[1])
    found = fp8pass.bisect(model, loss, X, config=config, most=1)
    assert names(found) == [("saved", "1.up")]
    assert found.culprits[0].module == "1.up"
    assert not found.spread
    assert "pass a larger number as most=" in str(found)
    # The suggested options remove the error.
    fixed = fp8pass.bisect(model, loss, X, config=replace(config, **found.suggested), most=1)
    assert fixed.error == found.remaining < 0.8 * found.error


@pytest.mark.long
def test_a_linear_layer_and_a_saved_tensor_are_both_found():
    model = stack(3)
    ruin_saved(model[1])
    ruin_linear(model[2])
    found = fp8pass.bisect(model, loss, X)
    assert set(names(found)) == {("saved", "1.up"), ("linear", "2.up")}
    assert found.suggested.keys() == {"skip", "keep_exact"}


@pytest.mark.long
def test_an_evenly_spread_error_has_no_culprit():
    found = fp8pass.bisect(stack(3), loss, X)
    assert 0.02 < found.error == found.remaining < 0.2
    assert not found.culprits
    assert not found.suggested
    assert "No layer or saved tensor stands out: many of them cause" in str(found)


class Exponential(nn.Module):
    """Becomes infinite if its argument is rounded. Another feature is masked out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        with torch.no_grad():
            self.linear.weight[:2] = 0
            self.linear.bias[:2] = torch.tensor([88.0, -98.0])  # 88 becomes 91
        self.register_buffer("after", torch.ones(32))
        self.after[:2] = 0

    def forward(self, x):
        y = self.linear(x)
        return x + 0.1 * torch.exp(y) * torch.tanh(y) * self.after


@pytest.mark.long
@pytest.mark.parametrize("broken", [{1}, {0, 2}])
def test_the_unit_that_overflows_is_found(broken):
    torch.manual_seed(0)
    model = nn.Sequential(*(Exponential() if i in broken else Layer() for i in range(3)))
    config = Config(error_tolerance=math.inf)
    found = fp8pass.bisect(model, loss, X, config=config)
    assert math.isinf(found.error)
    assert set(names(found)) == {("saved", f"{i}.linear") for i in broken}
    assert found.remaining < 0.2
    assert json.loads(found.to_json())["error"] is None


class Named(nn.Module):
    """Layers with given names."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: Layer() for key in keys})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


@pytest.mark.long
def test_names_may_have_special_characters():
    """Names with characters of patterns and of rich's markup, and a similar name without them."""
    torch.manual_seed(0)
    model = Named(("up[0]", "up0", "*", "[bold]"))
    ruin_linear(model.layers["*"])
    ruin_saved(model.layers["up[0]"])
    found = fp8pass.bisect(model, loss, X, most=2)
    assert set(names(found)) == {("saved", "layers.up[0].up"), ("linear", "layers.*.up")}
    assert found.suggested["skip"] == ("layers.[*].up",)
    assert "layers.up[0].up" in str(found)
    plan = fp8pass.explain(model, X, config=Config(**found.suggested)).graphs[0].plan
    assert [y.module for y in plan.high_precision] == ["layers.*.up"]


@pytest.mark.long
def test_the_model_does_not_change():
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)
    )
    x = X.clone().requires_grad_()
    loss(model, x).backward()
    tensors = [*model.parameters(), x]
    before = [(t.detach().clone(), t.grad.clone()) for t in tensors]
    buffers = [b.clone() for b in model.buffers()]
    state = torch.get_rng_state()
    found = fp8pass.bisect(model, loss, x)
    assert found.error < 0.2  # with different dropout masks it would be above one
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), buffers, strict=True))
    for t, (value, gradient) in zip(tensors, before, strict=True):
        assert torch.equal(t, value)
        assert torch.equal(t.grad, gradient)


@pytest.mark.long
def test_a_compiled_model_and_its_options():
    model = stack(3)
    ruin_linear(model[2])
    options = {"recipe": "linear", "skip": ("0.gate",)}
    found = fp8pass.bisect(torch.compile(model, backend="fp8pass", options=options), loss, X)
    assert found.config == Config.recipe("linear", skip=("0.gate",))
    assert found.suggested == {"skip": ("0.gate", "2.up")}


@pytest.mark.long
def test_the_printed_report(tmp_path, capfd):
    model = stack(2)
    ruin_linear(model[1])
    found = fp8pass.bisect(model, loss, X)
    assert capfd.readouterr() == ("", "")  # progress is shown on terminals only
    *_, last = str(found).strip().splitlines()
    assert repr(found).startswith("<fp8pass.Bisection: gradient error ")
    assert "\n" not in repr(found)
    assert last == "To run the culprits in high precision, add these options: {'skip': ('1.up',)}"
    data = json.loads(found.to_json(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text()) == data
    (culprit,) = data["culprits"]
    assert (culprit["kind"], culprit["name"], culprit["fix"]) == ("linear", "1.up", "1.up")
    assert data["suggested"] == {"skip": ["1.up"]}
    assert data["remaining"] == culprit["error_after"] < data["error"]


@pytest.mark.long
def test_nothing_in_low_bits():
    found = fp8pass.bisect(MLP(), lambda m, x: m(x).sum(), torch.randn(16, 64), config=EXACT)
    assert (found.error, found.units, found.probes, found.culprits) == (0.0, 0, 2, [])
    assert "Nothing to bisect" in str(found)


@pytest.mark.long
def test_units_of_a_llama():
    """The output head is not a unit."""
    trials = Trials(
        llama(), lambda m, b: m(b, labels=b).loss, tokens(), COAT_EAGER, progress=lambda total: None
    )
    assert trials.error(frozenset()) < 0.1
    linears = [unit.name for unit in trials.units if unit.kind == "linear"]
    assert len(linears) == 7
    assert not any("lm_head" in name for name in linears)
    assert len(trials.units) > 7


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"most": 0}, ConfigError, "must be at least 1, got 0"),
        ({"most": True}, ConfigError, "must be at least 1, got True"),
        ({"config": "coat"}, TypeError, "Config.recipe"),
        ({"model": loss}, TypeError, "takes a torch.nn.Module, got function"),
        ({"loss_fn": lambda m, x: m(x)}, TypeError, r"it returned a tensor of shape \(32, 32\)"),
        ({"loss_fn": lambda m, x: {"loss": m(x).sum()}}, TypeError, "it returned dict"),
        ({"batch": X * math.nan}, ValueError, "not finite in recipe 'exact' either"),
        ({"model": MLP((32, 32, 32)).requires_grad_(False)}, ValueError, "nothing to compare"),
    ],
)
def test_invalid_arguments_raise_errors(options, error, message):
    arguments = {"model": MLP((32, 32, 32)), "loss_fn": loss, "batch": X} | options
    with pytest.raises(error, match=message):
        fp8pass.bisect(**arguments)


def test_relative_error():
    exact = [torch.tensor([3.0, 0.0]), None, torch.tensor([4.0])]
    assert measure_relative_error(exact, exact) == 0
    assert (
        measure_relative_error([torch.tensor([3.0, 2.5]), None, torch.tensor([4.0])], exact) == 0.5
    )
    for wrong in (math.nan, math.inf):
        assert measure_relative_error([exact[0], None, torch.tensor([wrong])], exact) == math.inf
