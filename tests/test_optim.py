"""The optimizer: against torch.optim.AdamW and fp64, its formats, and PyTorch's protocols."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import math
import pickle
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fp8pass
from fp8pass.optim import PRESETS, AdamW, attach, groups, rounding
from fp8pass.optim.formats import MOMENT_FORMATS, PLAIN, dynamic_values, moment_format
from fp8pass.optim.groups import MAX_POWER, MIN_POWER, decode, encode
from fp8pass.optim.options import WEIGHTS
from fp8pass.optim.slots import to_rows

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


some_shapes = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4)


@given(hyperparameters, some_shapes, st.integers(1, 9))
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


@given(hyperparameters, some_shapes, st.integers(1, 9))
def test_fp8_states_are_near_those_of_fp64(options, shapes, steps):
    """A step rounds by up to the distance of two codes, an eighth; roundings add up at random."""
    ours, wide = parameters(shapes), parameters(shapes)
    wide = [nn.Parameter(p.detach().double()) for p in wide]
    optimizer, exact = AdamW(ours, **options), torch.optim.AdamW(wide, **options)
    for step in range(steps):
        set_gradients(ours, step)
        for p, q in zip(wide, ours, strict=True):
            p.grad = q.grad.double()
        optimizer.step()
        exact.step()
        if step == 0:  # states are rounded after they were used
            for p, q in zip(ours, wide, strict=True):
                torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)
    for number, q in enumerate(wide):
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            want = exact.state[q][name].reshape(-1)
            error = values_of(optimizer, number, name, signed).double() - want
            assert error.norm() <= 0.15 * steps**0.5 * want.norm() + 1e-30


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
    for weights, lr in (("fp32", 1e-4), ("stochastic", 1e-4), ("nearest", 1e-4), ("fp16", 6e-4)):
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
    for weights in ("stochastic", "fp16"):
        shapes = (*SHAPES, (7, 100)) * 2
        whole, batched = (parameters(shapes, torch.bfloat16) for _ in range(2))
        optimizer, in_pieces = (AdamW(ps, weights=weights) for ps in (whole, batched))
        run(whole, optimizer, range(3))
        with monkeypatch.context() as patch:
            patch.setattr("fp8pass.optim.update.CPU_BATCH", 300)
            run(batched, in_pieces, range(3))
        same_state(optimizer, in_pieces)


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


def test_expansion_lessens_errors_of_states_of_real_training(monkeypatch):
    """COAT reports 1.63 times; Table 1's order of the first moment's formats."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    benchmark = importlib.import_module("optimizer")
    states = benchmark.trained_states("tiny", steps=25)
    errors = {x: benchmark.error(states, x, x) for x in ("e4m3", "e4m3+expand")}
    assert errors["e4m3"] >= 1.5 * errors["e4m3+expand"]
    order = ("e4m3+expand", "e5m2+expand", "e4m3", "e5m2")
    found = [benchmark.error(states, first, "e4m3+expand") for first in order]
    assert found == sorted(found)


# --- stochastic rounding ------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_uncorrelated():
    x = torch.full((1 << 16,), 1 + 0.3 * 2**-7)
    element = torch.arange(len(x), dtype=torch.int32)
    key = rounding.keys(0, torch.tensor([3], dtype=torch.int32), torch.tensor([7.0]))
    up = rounding.round_to_bf16(x, rounding.random_bits(key, element)).float() > 1
    assert up.double().mean().item() == pytest.approx(0.3, abs=0.01)
    bits = up.double() - 0.3
    for other in ((1, 3, 7.0), (0, 4, 7.0), (0, 3, 8.0)):
        seed, number, step = other
        key = rounding.keys(seed, torch.tensor([number], dtype=torch.int32), torch.tensor([step]))
        again = rounding.round_to_bf16(x, rounding.random_bits(key, element)).float() > 1
        assert abs((bits * (again.double() - 0.3)).mean().item()) < 0.005
    for lag in (1, 2, 128):
        assert abs((bits[lag:] * bits[:-lag]).mean().item()) < 0.005


@given(st.integers(-(2**40), 2**40))
def test_stochastic_rounding_keeps_what_bf16_holds(seed):
    special = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 1e-40])
    x = torch.cat([special, torch.randn(100)]).bfloat16().float()
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    bits = rounding.random_bits(key, torch.arange(len(x), dtype=torch.int32))
    rounded = rounding.round_to_bf16(x, bits).float()
    assert torch.equal(rounded.nan_to_num(7), x.nan_to_num(7))


@given(st.integers(-(2**31), 2**31 - 1))
def test_noise_is_uniform(seed):
    key = rounding.keys(seed, torch.tensor([0], dtype=torch.int32), torch.tensor([1.0]))
    bits = rounding.random_bits(key, torch.arange(1 << 14, dtype=torch.int32))
    noise = rounding.uniform(bits).double()
    assert -0.5 <= noise.min() < -0.49
    assert 0.49 < noise.max() < 0.5
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    assert noise.square().mean().item() == pytest.approx(1 / 12, rel=0.03)
    # Weights are rounded by the other bits.
    low = (bits & 0xFFFF).double() / 65536 - 0.5
    assert abs((noise * low).mean().item()) < 0.004


@pytest.mark.parametrize("name", ["e4m3+expand", "e5m2+expand", "fp16"])
def test_second_moments_follow_gradients_that_shrink(name):
    """Rounded to nearest they would stay five times too large: 0.1% of them is no step."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = AdamW([p], lr=0.0, betas=(0.0, 0.999), second_moment=name)
    exact = torch.zeros(4096)
    torch.manual_seed(0)
    for step in range(2000):
        p.grad = torch.randn(4096) * (1.0 if step < 500 else 0.2)
        exact = 0.999 * exact + 0.001 * p.grad**2
        optimizer.step()
    found = values_of(optimizer, 0, "exp_avg_sq", False)
    assert (found.mean() / exact.mean()).item() == pytest.approx(1, abs=0.15)
    assert (exact / found).sqrt().mean().item() == pytest.approx(1, abs=0.1)


def test_same_seed_same_results():
    results = []
    for seed in (0, 0, 1):
        params = parameters(dtype=torch.bfloat16)
        run(params, AdamW(params, seed=seed), range(3))
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


# --- PyTorch's protocols ------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_resuming_is_bit_exact(name, weights):
    options = {"first_moment": name, "second_moment": name, "weights": weights}
    straight = parameters(dtype=torch.bfloat16)
    uninterrupted = AdamW(straight, lr=0.01, seed=3, **options)
    run(straight, uninterrupted, range(6))

    params = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(params, lr=0.01, seed=3, **options)
    run(params, optimizer, range(3))
    saved = through_a_file(optimizer.state_dict())
    resumed = AdamW(params, **options)
    resumed.load_state_dict(saved)
    run(params, resumed, range(3, 6))
    same_state(resumed, uninterrupted)


@pytest.mark.parametrize("target", ["e5m2+expand", "de8", "bf16", "fp32"])
@pytest.mark.parametrize("source", ["e4m3+expand", "e5m2", "fp16", "fp32"])
def test_checkpoints_are_converted_between_formats(source, target):
    params = parameters(dtype=torch.bfloat16)
    old = AdamW(params, lr=0.5, first_moment=source, second_moment=source, weights="fp32")
    run(params, old, range(4))
    new = AdamW(params, first_moment=target, second_moment=target, group_size=32)
    new.load_state_dict(through_a_file(old.state_dict()))
    (group,) = new.param_groups
    assert (group["lr"], group["first_moment"], group["group_size"]) == (0.5, target, 32)
    for number, p in enumerate(params):
        assert new.state[p].keys() >= {"step", "exp_avg", "exp_avg_sq"}
        assert "master" not in new.state[p]
        assert new.state[p]["step"] == 4
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            before = values_of(old, number, name, signed)
            after = values_of(new, number, name, signed)
            bound = 0.02 * before.abs().amax() if before.numel() else 0.0
            assert ((after - before).abs() <= 0.15 * before.abs() + bound).all()
    run(params, new, range(4, 6))


def values_of(optimizer, number: int, name: str, signed: bool) -> Tensor:
    p = all_parameters(optimizer)[number]
    (group,) = optimizer.param_groups
    option = "first_moment" if signed else "second_moment"
    format, size = moment_format(group[option], signed=signed), group["group_size"]
    state = optimizer.state[p]
    parts = [state[f"{name}_{part}"] for part in format.parts]
    rows_ = to_rows(state[name], size, format.stored)
    return decode(groups.Stored(rows_, *parts), format).reshape(-1)[: p.numel()]


def test_a_master_copy_begins_with_the_weights_of_a_checkpoint_without():
    params = parameters(dtype=torch.bfloat16)
    old, new = AdamW(params), AdamW(params, weights="fp32")
    run(params, old, range(2))
    new.load_state_dict(old.state_dict())
    for p in params:
        assert torch.equal(new.state[p]["master"], p.float())


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints_of_torch(fused):
    ours, theirs = parameters(), parameters()
    torch_optimizer = torch.optim.AdamW(theirs, lr=0.02, fused=fused)
    run(theirs, torch_optimizer, range(3))
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q.data)
    optimizer = AdamW(ours, **EXACT_STATES)
    optimizer.load_state_dict(through_a_file(torch_optimizer.state_dict()))
    run(theirs, torch_optimizer, range(3, 6))
    run(ours, optimizer, range(3, 6))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    AdamW(ours).load_state_dict(torch_optimizer.state_dict())
    with pytest.raises(fp8pass.ConfigError, match="amsgrad=True"):
        AdamW(ours).load_state_dict(torch.optim.AdamW(ours, amsgrad=True).state_dict())


def test_checkpoints_that_do_not_fit():
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    with pytest.raises(
        fp8pass.ConfigError, match=r"shape \(1,\) for a parameter of shape \(128,\)"
    ):
        AdamW([*params[:1], params[3], params[1], *params[2:3], *params[4:]]).load_state_dict(
            optimizer.state_dict()
        )
    with pytest.raises(ValueError, match="size of optimizer's group"):
        AdamW(params[1:]).load_state_dict(optimizer.state_dict())
    momentum = torch.optim.SGD(params, momentum=0.9)
    run(params, momentum, range(1))
    with pytest.raises(fp8pass.ConfigError, match="another optimizer"):
        AdamW(params).load_state_dict(momentum.state_dict())
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["state"][2]["exp_avg_power"]
    with pytest.raises(fp8pass.ConfigError, match="exp_avg_power: it is not complete"):
        AdamW(params).load_state_dict(broken)


def test_user_hooks_see_checkpoints_and_steps():
    params, seen = parameters(), []
    optimizer = AdamW(params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(params, optimizer, range(1))
    assert seen == ["before", "after"]
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda _, d: seen.append(sorted(d["state"])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(saved)
    assert seen[2:] == [list(range(len(SHAPES))), len(SHAPES)]


def test_parameter_groups_have_options_of_their_own():
    first, second, third = parameters(((256,), (256,), (256,)))
    options = {"params": [second], "lr": 0.5, "first_moment": "bf16", "weight_decay": 0.0}
    optimizer = AdamW([{"params": [first]}, options], lr=0.1)
    optimizer.add_param_group({"params": [third], "second_moment": "fp32"})
    run([first, second, third], optimizer, range(2))
    dtypes = [
        (optimizer.state[p]["exp_avg"].dtype, optimizer.state[p]["exp_avg_sq"].dtype)
        for p in (first, second, third)
    ]
    f8 = torch.uint8
    assert dtypes == [(f8, f8), (torch.bfloat16, f8), (f8, torch.float32)]
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'e4m3'"):
        optimizer.add_param_group({"params": parameters(((3,),)), "first_moment": "e4m4"})
    assert len(optimizer.param_groups) == 3


def test_schedulers_change_the_rate():
    params, same = parameters(), parameters()
    ours, theirs = AdamW(params, **EXACT_STATES), torch.optim.AdamW(same)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5) for o in (ours, theirs)]
    for step in range(5):
        run(params, ours, range(step, step + 1))
        run(same, theirs, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    for p, q in zip(params, same, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)


def test_absent_gradients_are_skipped_and_sparse_ones_refused():
    present, absent = parameters(((5,), (6,)))
    before = absent.detach().clone()
    optimizer = AdamW([present, absent])
    set_gradients([present], 0)
    optimizer.step()
    assert torch.equal(absent, before)
    assert absent not in optimizer.state
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        AdamW(embedding.parameters()).step()


def test_the_rate_as_a_tensor():
    ours, theirs = parameters(), parameters()
    rate = torch.tensor(0.1)
    run(ours, AdamW(ours, lr=rate), range(2))
    run(theirs, AdamW(theirs, lr=rate.item()), range(2))
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_closures():
    (p,) = parameters(((4,),))
    optimizer = AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert optimizer.state[p]["step"] == 1


def test_copies_and_pickles_go_on_alike():
    params = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(params)
    run(params, optimizer, range(2))
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    run(params, optimizer, range(2, 4))
    for other in others:
        run(all_parameters(other), other, range(2, 4))
        same_state(other, optimizer)


def test_grad_scaler_skips_steps_that_overflow():
    ours, theirs = parameters(), parameters()
    optimizer, unscaled = AdamW(ours), AdamW(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        scaler.scale(torch.zeros(()))
        for p in ours:
            p.grad *= scaler.get_scale()
        if step == 2:
            ours[1].grad.fill_(torch.inf)
        else:
            unscaled.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    same_state(optimizer, unscaled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number from 0 on"),
        ({"lr": torch.ones(2)}, "one element"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be"),
        ({"betas": 0.9}, "betas must be two numbers"),
        ({"eps": math.nan}, "eps must be"),
        ({"weight_decay": "0.1"}, "weight_decay must be"),
        ({"amsgrad": True}, "use torch.optim.AdamW"),
        ({"differentiable": True}, "use torch.optim.AdamW"),
        ({"preset": "fp8lm"}, "Did you mean 'fp8-lm'"),
        ({"first_moment": "e4m3-expand"}, r"Did you mean 'e4m3\+expand'"),
        ({"second_moment": 8}, "second_moment: Unknown format 8"),
        ({"weights": "stochastik"}, "Did you mean 'stochastic'"),
        ({"group_size": 100}, "power of two from 16"),
        ({"seed": 0.5}, "seed must be an int"),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    with pytest.raises(fp8pass.ConfigError, match=message):
        AdamW(parameters(), **options)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.complex64, "view_as_real"),
        (torch.float64, "is float64.*Leave it to another"),
        (torch.float8_e4m3fn, "is float8_e4m3fn"),
    ],
)
def test_parameters_that_cannot_be_optimized(dtype, message):
    with pytest.raises(fp8pass.ConfigError, match=message):
        AdamW([torch.zeros(3, dtype=dtype).requires_grad_()])


def test_training_with_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)

    def trained(steps: int, resume: bool) -> tuple[Any, AdamW]:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        data = [{"input_ids": x, "labels": x} for x in torch.arange(128).view(8, 16) % 64]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, schedule)
        )
        trainer.train(resume_from_checkpoint=resume)
        return model, optimizer

    whole, optimizer = trained(4, resume=False)
    assert optimizer.state[whole.lm_head.weight]["exp_avg"].dtype == torch.uint8
    trained(2, resume=False)
    for folder in tmp_path.glob("checkpoint-4"):
        shutil.rmtree(folder)
    resumed, _ = trained(4, resume=True)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


# --- the optimizer in the backward --------------------------------------------------------------


def small_model(dtype=torch.float32) -> nn.Module:
    """With a weight that is used twice."""
    torch.manual_seed(0)
    first, last = nn.Linear(40, 40), nn.Linear(40, 40)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), last).to(dtype)


def losses(model: nn.Module, backwards: int):
    for step in range(backwards):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 40, generator=generator).to(next(model.parameters()).dtype)
        yield model(x).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_the_backward_equal_those_after_it(dtype, monkeypatch):
    model, plain = small_model(dtype), small_model(dtype)
    optimizer, after = AdamW(model.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01)
    alive = []
    update = AdamW.update

    def counting(self, group, parameters):
        alive.append(sum(p.grad is not None for p in all_parameters(self)))
        update(self, group, parameters)

    attached = attach(model, optimizer)
    for ours, theirs in zip(losses(model, 3), losses(plain, 3), strict=True):
        theirs.backward()
        after.step()
        after.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(AdamW, "update", counting)
            ours.backward()
    assert alive == [1] * 3 * 5
    assert all(p.grad is None for p in model.parameters())
    same_state(optimizer, after)
    attached.detach()
    next(losses(model, 1)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert optimizer.state[model[0].weight]["step"] == 3


@pytest.mark.parametrize("buffer", ["e4m3", "e5m2", "de8"])
def test_gradients_add_up_in_bytes(buffer):
    model, plain = small_model(), small_model()
    optimizer = AdamW(model.parameters(), lr=0.01, **EXACT_STATES)
    attached = attach(model, optimizer, accumulate=3, buffer=buffer)
    for number, (ours, theirs) in enumerate(zip(losses(model, 3), losses(plain, 3), strict=True)):
        theirs.backward()
        ours.backward()
        assert all(p.grad is None for p in model.parameters())
        stored = [sum_.stored for sum_ in attached.accumulated.values()]
        if number < 2:
            assert all(x.codes.dtype == torch.uint8 for x in stored)
            assert len(optimizer.state) == 0
    assert all(x is None for x in stored)
    error = {"e4m3": 0.04, "e5m2": 0.08, "de8": 0.03}[buffer]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        total = optimizer.state[p]["exp_avg"] / 0.1
        assert ((total - q.grad).norm() / q.grad.norm()).item() < error


@pytest.mark.parametrize("accumulate", [1, 2])
def test_attached_optimizers_live_as_long_as_their_models(accumulate):
    """Nobody else need hold the optimizer, and nothing holds the parameters."""
    model = nn.Linear(4, 4)
    attach(model, AdamW(model.parameters(), lr=0.1), accumulate=accumulate)
    before, alive = model.weight.detach().clone(), weakref.ref(model.weight)
    gc.collect()
    for _ in range(accumulate):
        model(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(model.weight, before)
    del model
    gc.collect()
    assert alive() is None


def test_attached_optimizers_follow_schedules_and_checkpoints():
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    attach(model, optimizer)
    next(losses(model, 1)).backward()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in model.parameters()]
    next(losses(model, 1)).backward()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[model[0].weight]["step"] == 2


def test_what_cannot_be_attached(tmp_path):
    model = small_model()
    optimizer = AdamW(model.parameters())
    for accumulate in (0, True, 1.5):
        with pytest.raises(fp8pass.ConfigError, match="positive int"):
            attach(model, optimizer, accumulate=accumulate)
    for buffer in ("fp32", "e4m3+expand"):
        with pytest.raises(fp8pass.ConfigError, match="buffer is one of"):
            attach(model, optimizer, buffer=buffer)
    with pytest.raises(fp8pass.ConfigError, match=r"takes an fp8pass\.optim\.AdamW"):
        attach(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(fp8pass.ConfigError, match=r"lacks parameters of the model: 2\.weight"):
        attach(model, AdamW(model[0].parameters()))
    with single_process(tmp_path):
        parallel = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(fp8pass.ConfigError, match="reduces gradients over ranks"):
            attach(parallel, optimizer)


@contextmanager
def single_process(folder: Path) -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# --- distributed --------------------------------------------------------------------------------


def sharded_training(rank: int, folder: str, world: int) -> None:
    """On each rank: FSDP2, a distributed checkpoint, and going on from it bit by bit."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mesh = torch.distributed.init_device_mesh("cpu", (world,))

    def new_model() -> nn.Module:
        torch.manual_seed(0)
        # 33 rows are not divided evenly, and one row is on one rank only.
        model = nn.Sequential(nn.Linear(50, 33), nn.Tanh(), nn.Linear(33, 1))
        return fully_shard(model, mesh=mesh)

    def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step + 10 * rank)
            model(torch.randn(8, 50)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model = new_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    weight = model[0].weight
    state = optimizer.state[weight]
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].to_local().shape == weight.to_local().shape
    assert state["exp_avg_scale"].shape == (world * math.ceil(math.ceil(33 / world) * 50 / 128),)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    train(model, optimizer, range(2, 4))

    again = new_model()
    resumed = AdamW(again.parameters(), lr=0.5)
    loaded = {"optim": get_optimizer_state_dict(again, resumed)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(again, resumed, loaded["optim"])
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.copy_(weights[name])
    train(again, resumed, range(2, 4))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        for key, x in optimizer.state[p].items():
            y = resumed.state[q][key]
            x, y = (t.to_local() if isinstance(t, DTensor) else t for t in (x, y))
            assert torch.equal(x.float(), y.float()), key
    torch.distributed.destroy_process_group()


def test_sharded_parameters_and_distributed_checkpoints(tmp_path):
    torch.multiprocessing.spawn(sharded_training, (str(tmp_path), 2), nprocs=2)


def test_zero_redundancy(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with single_process(tmp_path):
        ours, sharded = parameters(), parameters()
        # It sorts parameters by size, and numbers, which random bits depend on, are others.
        options = {"lr": 0.01, "second_moment": "fp32"}
        run(sharded, ZeroRedundancyOptimizer(sharded, AdamW, **options), range(3))
        run(ours, AdamW(ours, **options), range(3))
        for p, q in zip(ours, sharded, strict=True):
            assert torch.equal(p, q)
