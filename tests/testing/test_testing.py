"""`fp8pass.testing`: checks pass for correct programs, and name errors of wrong ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8pass import Config
from fp8pass.dialect.formats import E4M3
from fp8pass.dialect.quantization import Quantization
from fp8pass.plan import Plan
from fp8pass.testing import assert_close, assert_exact, assert_plan_is_true, checks, strategies
from fp8pass.testing.closeness import Verdict
from fp8pass.testing.noise import Formats, Noise
from fp8pass.testing.steps import identical


class Wrong(torch.autograd.Function):
    """An identity. If it is compiled, its gradient is 1.5 times too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.5 if torch.compiler.is_compiling() else 1.0)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(Wrong.apply(self.up(x))))


def batch(rows: int = 32, grad: bool = True) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


@pytest.mark.long
@settings(max_examples=2)
@given(module=strategies.modules(depth=2), rows=st.sampled_from([16, 17, 48]))
def test_correct_modules_pass(module, rows):
    x = batch(rows)
    assert_exact(module, x)
    assert_close(module, x)
    assert_plan_is_true(module, x)


def test_a_saved_input_may_be_a_view():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    assert_plan_is_true(model, torch.randn(16, 128)[:, ::2])


def test_the_name_of_a_recipe_is_refused():
    for check in (assert_close, assert_plan_is_true):
        with pytest.raises(TypeError, match=r"got str.*Config.recipe\('agoq'\)"):
            check(nn.Linear(16, 16), torch.randn(4, 16), config="agoq")


def test_modules_do_not_change():
    module, x = Broken(), batch()
    weights = {name: p.clone() for name, p in module.named_parameters()}
    assert_exact(module, x)
    assert x.grad is None
    for name, p in module.named_parameters():
        assert p.grad is None
        assert torch.equal(p, weights[name])


@pytest.mark.long
@pytest.mark.parametrize("config", [None, Config.recipe("agoq")], ids=["coat", "agoq"])
def test_a_wrong_gradient_is_named(config):
    with pytest.raises(AssertionError, match=r"gradient of up\.weight has error 0\.[45]"):
        assert_close(Broken(), batch(), config=config)


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ({"cosine": 0.9999}, "gradient of up.weight: cosine is 0.9"),
        ({"norm": 0.05}, "gradient of up.weight: norm is 0."),
        ({"sqnr": 40.0}, "gradient of up.weight: sqnr is "),
    ],
    ids=["cosine", "norm", "sqnr"],
)
def test_bounds_can_be_set(bounds, found):
    with pytest.raises(AssertionError) as failure:
        assert_close(Broken(), batch(), **bounds)
    assert found in str(failure.value)
    assert_close(Broken(), batch(), cosine=0.9, norm=0.6, sqnr=4.0)


@pytest.mark.long
def test_a_rewrite_that_changes_bits_is_found(monkeypatch):
    module = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1))
    assert_exact(module, batch())
    original = checks._run_step

    def changed(module, args, backend, seed=7):
        step = original(module, args, backend, seed)
        if backend is not checks.stock_eager:
            step.gradients["0.weight"][0, 0] += 1
        return step

    monkeypatch.setattr(checks, "_run_step", changed)
    with pytest.raises(AssertionError, match=r"gradient of 0\.weight"):
        assert_exact(module, batch())


@pytest.mark.long
def test_a_wrong_plan_is_found(monkeypatch):
    def one_less(plan: Plan):
        found = checks_planned(plan)
        found.subtract([next(iter(found))])
        return +found

    checks_planned = checks.count_planned
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    assert_plan_is_true(module, batch())
    monkeypatch.setattr(checks, "count_planned", one_less)
    with pytest.raises(AssertionError, match=r"saved but not in the plan: \{\('"):
        assert_plan_is_true(module, batch())


@given(drawn=st.data(), format=strategies.formats())
def test_edges_are_edges_of_the_format(drawn, format):
    x = drawn.draw(strategies.edges(format)).double()
    half_step = 2.0 ** (format.min_exponent - format.mantissa - 1)

    def are_edges(y):
        """Whether all are values of the format, midpoints, or up to twice the largest value."""
        multiples = y[y.abs() < format.max] / half_step
        return y.abs().max() <= 2 * format.max and (multiples == multiples.round()).all()

    assert x.isfinite().all()
    assert any(are_edges(x * 2.0**shift) for shift in range(-8, 9))
    assert not any(are_edges((x + half_step / 3) * 2.0**shift) for shift in range(-8, 9))


@given(drawn=st.data())
def test_blocks_fit_matrices(drawn):
    columns = drawn.draw(st.sampled_from([16, 48, 256]))
    block = drawn.draw(strategies.blocks(columns))
    scales = Quantization(E4M3, block).scale_shape((4, columns))
    assert scales in ((), (4, 1), (4, columns // max(block[1], 1)))


@given(x=strategies.matrices(columns=32, finite=False))
def test_matrices_have_the_width(x):
    assert x.shape[1] == 32
    assert x.dtype in strategies.DTYPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_missing_and_infinite_values_are_compared(dtype):
    nan, inf, largest = torch.tensor([torch.nan, torch.inf, torch.finfo(dtype).max]).to(dtype)
    assert identical(nan, nan)
    assert identical(inf, inf)
    for a, b in itertools.permutations((nan, inf, largest), 2):
        assert not identical(a, b)


def test_noise_keeps_the_strides_of_saved_tensors():
    """Memory-efficient attention saves a bias of 78 columns with rows of 80 elements."""
    noise = Noise(Formats(saved="e4m3"), seed=0)
    padded = torch.randn(2, 4, 80)[..., :78]
    rounded = noise.round_saved(padded)
    assert rounded.stride() == padded.stride()
    assert 0 < (rounded - padded).norm() / padded.norm() < 0.1
    expanded = torch.randn(1, 78).expand(4, 78)
    assert noise.round_saved(expanded).shape == expanded.shape


@pytest.mark.parametrize(("noise", "complaints"), [(0.0, 1), (torch.nan, 0)])
def test_a_tensor_is_only_judged_by_finite_noise(noise, complaints):
    exact, plain, noisy = torch.zeros(4), torch.full((4,), 1e-7), torch.full((4,), noise)
    verdict = Verdict()
    verdict.judge("gradient", [torch.ones(4), exact, plain, noisy], 0.0, 1.0)
    assert len(verdict.complaints) == complaints
    assert verdict.unjudged == 1
