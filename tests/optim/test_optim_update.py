"""The update of `fp8pass.optim.AdamW` against torch.optim.AdamW and fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_helpers import (
    EXACT_STATES,
    SHAPES,
    assert_same_state,
    moment_values,
    parameters,
    run,
    set_gradients,
)
from torch import Tensor, nn

from fp8pass.optim import PRESETS, AdamW
from fp8pass.optim.group_options import WEIGHTS

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
        set_gradients(theirs, step)  # the gradients are rounded to fp32 first
        for p, q in zip(wide, theirs, strict=True):
            p.grad = q.grad.double()
        exact.step()
    for p, q, r in zip(ours, theirs, wide, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(p.double(), r, rtol=1e-5, atol=1e-6)


@given(hyperparameters, st.integers(1, 9))
def test_bf16_parameters_and_states_are_near_fused_torch(options, steps):
    """PyTorch's fused optimizer computes in fp32 and rounds states to nearest.

    The first step is equal. Each further step may add a difference of one rounding step.
    """
    ours, theirs = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    storage = {"first_moment": "bf16", "second_moment": "bf16", "weights": "nearest"}
    run(ours, AdamW(ours, **options, **storage), range(steps))
    run(theirs, torch.optim.AdamW(theirs, **options, fused=True), range(steps))
    for p, q in zip(ours, theirs, strict=True):
        # Values near the middle of two numbers may be rounded either way.
        atol = options["lr"] * 2**-6 * (1 if steps == 1 else 4 * steps)
        torch.testing.assert_close(p, q, rtol=2**-7 * steps, atol=atol)
        if p.numel() > 100 and steps == 1:
            assert (p != q).double().mean() < 0.05


@pytest.mark.parametrize(("name", "distance"), [("e4m3+expand", 0.15), ("bf16", 2**-7)])
@given(hyperparameters, some_shapes, st.integers(1, 9))
def test_rounded_states_are_near_fp64(name, distance, options, shapes, steps):
    """Errors add up at random. Gradients may cancel, so they are relative to the largest state."""
    ours, wide = parameters(shapes), parameters(shapes)
    wide = [nn.Parameter(p.detach().double()) for p in wide]
    optimizer = AdamW(ours, first_moment=name, second_moment=name, **options)
    exact = torch.optim.AdamW(wide, **options)
    largest: dict[tuple[int, str], Tensor] = {}
    for step in range(steps):
        set_gradients(ours, step)
        for p, q in zip(wide, ours, strict=True):
            p.grad = q.grad.double()
        optimizer.step()
        exact.step()
        for number, q in enumerate(wide):
            for name in ("exp_avg", "exp_avg_sq"):
                norm = exact.state[q][name].norm()
                largest[number, name] = max(norm, largest.get((number, name), norm))
        if step == 0:  # the update uses states before they are rounded
            for p, q in zip(ours, wide, strict=True):
                torch.testing.assert_close(p.double(), q, rtol=1e-5, atol=1e-6)
    for number, q in enumerate(wide):
        for name in ("exp_avg", "exp_avg_sq"):
            want = exact.state[q][name].reshape(-1)
            error = moment_values(optimizer, number, name).double() - want
            assert error.norm() <= distance * steps**0.5 * largest[number, name] + 1e-30


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_stay_near_fp32(dtype, weights):
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
        stored = {"fp32": 24, "fp16": 11}.get(weights, rounded - 1)
        if dtype == torch.float32:
            stored = rounded
        # Each step rounds the stored copy; the parameter is rounded once.
        bound = q.abs() * (20 * 2.0**-stored + 2.0**-rounded)
        assert ((p - q).abs() <= bound + 1e-5).all()


@pytest.mark.long
def test_a_master_copy_keeps_what_parameters_lose():
    """Updates far below the last bit of a weight add up, also below the last bit of an FP16 copy,
    which has three bits more.
    """
    for weights, lr in (("fp32", 1e-4), ("stochastic", 1e-4), ("nearest", 1e-4), ("fp16", 5e-5)):
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
    assert total <= {"coat": 2.07, "coat-paper": 6.07, "fp8-lm": 5.05}[preset]


def test_parameters_can_be_updated_together_or_alone():
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
        assert_same_state(optimizer, in_pieces)


def test_parameters_that_are_not_contiguous():
    base = torch.randn(6, 4, 5)
    strided = nn.Parameter(base.permute(2, 0, 1))
    plain = nn.Parameter(base.permute(2, 0, 1).contiguous())
    for p in (strided, plain):
        optimizer = AdamW([p])
        run([p], optimizer, range(4))
    assert torch.equal(strided, plain)


def test_operands_of_the_kernel_do_not_depend_on_the_default_dtype():
    (parameter,) = parameters([(16, 16)])
    optimizer = AdamW([parameter])
    torch.set_default_dtype(torch.bfloat16)
    try:
        control = optimizer._control(optimizer.param_groups[0], parameter.device)
    finally:
        torch.set_default_dtype(torch.float32)
    assert control.dtype is torch.float32
