"""The optimizer: against torch.optim.AdamW and fp64, its formats, and PyTorch's protocols."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fp8pass.optim import PRESETS, AdamW, groups, rounding
from fp8pass.optim.formats import MOMENT_FORMATS, PLAIN, dynamic_values, moment_format
from fp8pass.optim.groups import MAX_POWER, MIN_POWER, decode, encode
from fp8pass.optim.options import WEIGHTS

GROUPED = tuple(name for name in MOMENT_FORMATS if name not in PLAIN)
EXPANDED = tuple(name for name in GROUPED if name.endswith("+expand"))
EXACT_STATES = {"first_moment": "fp32", "second_moment": "fp32"}
SHAPES = ((), (1,), (127,), (128,), (3, 5), (129,), (2, 64, 3))


def parameters(shapes=SHAPES, dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    """Parameters of all kinds of sizes, always the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(params, step: int, scale: float = 1e-3) -> None:
    """Gradients of random size, always the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        size = scale * torch.rand((), generator=generator)
        p.grad = (torch.randn(p.shape, generator=generator) * size).to(p.dtype)


def run(params, optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Bit by bit."""
    for p, q in zip(all_parameters(a), all_parameters(b), strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for key, x in a.state[p].items():
            y = b.state[q][key]
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def all_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- the update ---------------------------------------------------------------------------------

hyperparameters = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-5, 1e-1),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.9999)),
        "eps": st.sampled_from([1e-8, 1e-6, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "maximize": st.booleans(),
    }
)


@given(
    hyperparameters, st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4), st.integers(1, 9)
)
def test_with_fp32_states_equals_torch_and_fp64(options, shapes, steps):
    ours, theirs, wide = parameters(shapes), parameters(shapes), parameters(shapes)
    wide = [nn.Parameter(p.detach().double()) for p in wide]
    run(ours, AdamW(ours, **options, **EXACT_STATES), range(steps))
    run(theirs, torch.optim.AdamW(theirs, **options), range(steps))
    exact = torch.optim.AdamW(wide, **options)
    for step in range(steps):
        set_gradients(theirs, step)  # rounded to fp32 before they are widened
        for p, q in zip(wide, theirs, strict=True):
            p.grad = q.grad.double()
        exact.step()
    for p, q, r in zip(ours, theirs, wide, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(p.double(), r, rtol=1e-5, atol=1e-6)


@given(hyperparameters, st.integers(1, 9))
def test_bf16_parameters_and_states_equal_the_fused_torch(options, steps):
    """Fused, it computes in fp32 and rounds what it stores, as we do."""
    ours, theirs = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    storage = {"first_moment": "bf16", "second_moment": "bf16", "weights": "nearest"}
    run(ours, AdamW(ours, **options, **storage), range(steps))
    run(theirs, torch.optim.AdamW(theirs, **options, fused=True), range(steps))
    for p, q in zip(ours, theirs, strict=True):
        # Values near the middle between two numbers may be rounded two ways.
        torch.testing.assert_close(p, q, rtol=2**-7, atol=options["lr"] * 2**-6)
        if p.numel() > 100:
            assert (p != q).double().mean() < 0.05


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_stay_near_those_of_fp32(dtype, weights):
    ours, wide = parameters(dtype=dtype), parameters(dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in wide]
    run(ours, AdamW(ours, **EXACT_STATES, weights=weights), range(20))
    exact = torch.optim.AdamW(wide)
    for step in range(20):
        set_gradients(ours, step)
        for p, q in zip(wide, ours, strict=True):
            p.grad = q.grad.float()
        exact.step()
    for p, q in zip(ours, wide, strict=True):
        rounded = {torch.float32: 20, torch.bfloat16: 8, torch.float16: 11}[dtype]
        kept = {"fp32": 24, "fp16": 11}.get(weights, rounded - 1)
        if dtype == torch.float32:
            kept = rounded
        # What is kept between steps is rounded in each of them, what is shown once.
        bound = q.abs() * (20 * 2.0**-kept + 2.0**-rounded)
        assert ((p - q).abs() <= bound + 1e-5).all()


def test_a_master_copy_keeps_what_parameters_lose():
    """Updates far below a weight's last bit add up; an FP16 copy has three bits more."""
    for weights, lr in (("fp32", 2e-5), ("stochastic", 2e-5), ("nearest", 2e-5), ("fp16", 6e-4)):
        p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=lr, weight_decay=0.0, weights=weights)
        for _ in range(round(0.02 / lr)):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved = 1 - p.detach().float().mean().item()
        assert moved == pytest.approx(0.0 if weights == "nearest" else 0.02, rel=0.25, abs=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_of_states(preset):
    p = nn.Parameter(torch.randn(1024, 1024, dtype=torch.bfloat16))
    optimizer = AdamW([p], preset=preset)
    run([p], optimizer, range(1))
    state = optimizer.state[p]
    total = sum(x.numel() * x.itemsize for x in state.values()) / p.numel()
    assert total <= {"coat": 2.07, "fp8-lm": 5.05}[preset]


def test_what_is_updated_together_does_not_matter():
    together, apart = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    run(together, AdamW(together), range(5))
    optimizer = AdamW(apart)
    for step in range(5):
        set_gradients(apart, step)
        gradients = [p.grad for p in apart]
        for p, g in zip(apart, gradients, strict=True):
            for q in apart:
                q.grad = None
            p.grad = g
            optimizer.step()
    for p, q in zip(together, apart, strict=True):
        assert torch.equal(p, q)


def test_large_and_many_parameters_are_batched(monkeypatch):
    whole, batched = parameters(SHAPES * 3), parameters(SHAPES * 3)
    run(whole, AdamW(whole), range(3))
    monkeypatch.setattr("fp8pass.optim.update.BATCH", 100)
    run(batched, AdamW(batched), range(3))
    for p, q in zip(whole, batched, strict=True):
        assert torch.equal(p, q)


def test_parameters_that_are_not_contiguous():
    base = torch.randn(6, 4, 5)
    strided = nn.Parameter(base.permute(2, 0, 1))
    plain = nn.Parameter(base.permute(2, 0, 1).contiguous())
    for p in (strided, plain):
        optimizer = AdamW([p])
        run([p], optimizer, range(4))
    assert torch.equal(strided, plain)


# --- formats ------------------------------------------------------------------------------------


@st.composite
def rows(draw, signed: bool = True) -> Tensor:
    """Groups of a range between 1 and 1e18, with some zeros."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.floats(0, 18))
    x = 10 ** (-spread * torch.rand(5, 128, generator=generator, dtype=torch.float64))
    x *= 10 ** draw(st.floats(-18, 18))
    if draw(st.booleans()):
        x *= torch.rand(5, 128, generator=generator) < 0.5
    if signed:
        x *= torch.randint(2, x.shape, generator=generator) * 2 - 1
    return x.float()


def largest_step(format) -> float:
    """The largest ratio of neighbouring codes in the upper half of the format's binades."""
    if format.values:
        codes = torch.tensor([x for x in format.values if x > 0], dtype=torch.float64)
    else:
        bits = {1: torch.uint8, 2: torch.int16}[format.dtype.itemsize]
        every = torch.arange(1, 2 ** (8 * format.dtype.itemsize - 1), dtype=torch.int32)
        codes = every.to(bits).view(format.dtype).double()
        codes = codes[codes.isfinite()]
    upper = codes[codes >= format.middle]
    return (upper[1:] / upper[:-1]).max().item()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", GROUPED)
@given(st.data())
def test_errors_are_those_of_the_format(name, signed, data):
    format = moment_format(name, signed=signed)
    x = data.draw(rows(signed))
    stored = encode(x, format)
    y = decode(stored, format)
    assert (y.sign() * x.sign() >= 0).all()
    if not signed:
        assert torch.equal(y == 0, x == 0)
    power = 1.0 if stored.power is None else stored.power.float()
    middle = stored.scale.float() * (1 if format.expands else format.middle)
    # Values whose codes are in the upper half of the format are off by half a step, taken to 1/k.
    upper = x.abs() >= middle.unsqueeze(-1) * (1 + 1e-5)
    bound = (largest_step(format) ** (1 / torch.as_tensor(power)) - 1) * (1 + 1e-3)
    error = ((y - x).abs() / x.abs()).nan_to_num()
    assert (error <= bound.reshape(-1, 1) + 1e-4)[upper].all()
    # The rest is at most as far off as the smallest value in the upper half is large.
    assert ((y - x).abs() <= middle.unsqueeze(-1) * 1.1)[~upper].all()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", EXPANDED)
@given(st.data())
def test_expansion_maps_a_groups_range_to_the_formats(name, signed, data):
    format = moment_format(name, signed=signed)
    x = data.draw(rows(signed)).double().abs()
    stored = encode(x.float(), format)
    power = stored.power.double()
    high, low = x.amax(-1), torch.where(x == 0, torch.inf, x).amin(-1)
    span = (high / low).log2()
    fits = (span > format.span / MAX_POWER * 1.05) & (span < format.span / MIN_POWER * 0.95)
    center = stored.scale.double()
    top = (high / center) ** power * format.middle
    bottom = (low / center) ** power * format.middle
    # Scale and power are rounded to bf16, so that nothing leaves the format.
    assert (top <= format.max * 1.001)[fits].all()
    assert (bottom >= format.min * 0.999)[fits].all()
    missing = (math.log2(format.max) - top.log2()) + (bottom.log2() - math.log2(format.min))
    allowed = format.span * 2**-7 + power * 2**-6 + 0.01
    assert (missing <= allowed)[fits].all()


@pytest.mark.parametrize("name", EXPANDED)
@given(st.data())
def test_expansion_is_the_identity_for_a_power_of_one(name, data):
    x = data.draw(rows())
    expanding, plain = moment_format(name, signed=True), moment_format(name[:-7], signed=True)
    stored = encode(x, plain)
    ones = torch.ones_like(stored.scale)
    middle = stored.scale.double() * expanding.middle
    one = groups.Stored(stored.codes, middle.float(), ones)
    torch.testing.assert_close(decode(one, expanding), decode(stored, plain), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_edge_groups(name):
    format = moment_format(name, signed=False)

    def back(x: Tensor) -> Tensor:
        return decode(encode(x[None], format), format)[0]

    zeros = torch.zeros(128)
    assert torch.equal(back(zeros), zeros)
    outlier = zeros.clone()
    outlier[7] = 3e-9
    assert torch.equal(back(outlier) > 0, outlier > 0)
    torch.testing.assert_close(back(outlier), outlier, rtol=0.01, atol=0)
    equal = torch.full((128,), 1.234e-11)
    torch.testing.assert_close(back(equal), equal, rtol=0.01, atol=0)
    lone = torch.cat([torch.tensor([1.0]), torch.full((127,), 1e-12)])
    assert (back(lone) > 0).all()
    torch.testing.assert_close(back(lone)[0], lone[0], rtol=0.2, atol=0)
    if format.grouped:
        denormal = torch.full((128,), 1e-40)
        assert (back(denormal) <= 1e-38).all()
        assert back(denormal).isfinite().all()
    assert back(torch.full((128,), 1e37)).isfinite().all()
    for bad in (torch.nan, torch.inf):
        x = torch.rand(128)
        x[3] = bad
        assert not back(x)[3].isfinite()


@pytest.mark.parametrize("name", EXPANDED)
def test_a_second_moment_never_becomes_zero(name):
    """It divides: where it is zero an update is m / ε."""
    for plain in (name, name.removesuffix("+expand")):
        format = moment_format(plain, signed=False)
        x = torch.logspace(-18, 0, 128)[None]
        assert (decode(encode(x, format), format) > 0).all()


def test_dynamic_values():
    signed, unsigned = dynamic_values(signed=True), dynamic_values(signed=False)
    assert len(set(signed)) == len(set(unsigned)) == 256
    assert signed[-1] == unsigned[-1] == 1.0
    assert unsigned[0] == 0.0
    assert signed[0] == pytest.approx(-0.99296875)  # the largest magnitude but one has a sign
    assert min(x for x in signed if x > 0) == pytest.approx(5.5e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("preset", PRESETS)
def test_bad_gradients_are_not_hidden(preset, bad):
    p = nn.Parameter(torch.randn(300))
    optimizer = AdamW([p], preset=preset)
    run([p], optimizer, range(2))
    p.grad = torch.randn(300)
    p.grad[200] = bad
    optimizer.step()
    assert not p[200].isfinite() or bad == math.inf
    set_gradients([p], 3)
    optimizer.step()
    assert not p[200].isfinite()
    assert p[:128].isfinite().all()


# --- stochastic rounding ------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_uncorrelated():
    x = torch.full((1 << 16,), 1 + 0.3 * 2**-7)
    element = torch.arange(len(x), dtype=torch.int32)
    key = rounding.keys(0, torch.tensor([3], dtype=torch.int32), torch.tensor([7.0]))
    up = rounding.round_to_bf16(x, key, element).float() > 1
    assert up.double().mean().item() == pytest.approx(0.3, abs=0.01)
    bits = up.double() - 0.3
    for other in ((1, 3, 7.0), (0, 4, 7.0), (0, 3, 8.0)):
        seed, number, step = other
        key = rounding.keys(seed, torch.tensor([number], dtype=torch.int32), torch.tensor([step]))
        again = rounding.round_to_bf16(x, key, element).float() > 1
        assert abs((bits * (again.double() - 0.3)).mean().item()) < 0.005
    for lag in (1, 2, 128):
        assert abs((bits[lag:] * bits[:-lag]).mean().item()) < 0.005


@given(st.integers(-(2**40), 2**40))
def test_stochastic_rounding_keeps_what_bf16_holds(seed):
    special = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 1e-40])
    x = torch.cat([special, torch.randn(100)]).bfloat16().float()
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    rounded = rounding.round_to_bf16(x, key, torch.arange(len(x), dtype=torch.int32)).float()
    assert torch.equal(rounded.nan_to_num(7), x.nan_to_num(7))


def test_same_seed_same_results():
    results = []
    for seed in (0, 0, 1):
        params = parameters(dtype=torch.bfloat16)
        run(params, AdamW(params, seed=seed), range(3))
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
