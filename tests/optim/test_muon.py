"""`fp8pass.optim.Muon` in one process, compared with torch.optim.Muon and with FP64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_helpers import assert_same_state, parameters, run, set_gradients
from torch import nn

import fp8pass
from fp8pass.optim import AdamW, Muon, muon, offload
from fp8pass.optim.group_options import STATE_ROUNDINGS, WEIGHTS
from fp8pass.optim.newton_schulz import newton_schulz
from fp8pass.optim.state_formats import ALL_FORMATS

MATRICES = ((3, 5), (16, 8), (8, 16), (33, 128), (2, 129))
EXACT = {"momentum_format": "fp32"}
hyperparameters = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 1e-1),
        "weight_decay": st.sampled_from([0.0, 0.1, 0.5]),
        "momentum": st.floats(0, 0.99),
        "nesterov": st.booleans(),
        "ns_steps": st.integers(0, 6),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
        "ns_coefficients": st.sampled_from([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
        "eps": st.sampled_from([1e-7, 1e-3]),
    }
)
some_shapes = st.lists(st.sampled_from(MATRICES), min_size=1, max_size=4)


@given(hyperparameters, some_shapes, st.integers(1, 6))
def test_with_fp32_momentum_equals_torch(options, shapes, steps):
    ours, theirs = parameters(shapes), parameters(shapes)
    optimizer, expected = Muon(ours, **options, **EXACT), torch.optim.Muon(theirs, **options)
    run(ours, optimizer, range(steps))
    run(theirs, expected, range(steps))
    for p, q in zip(ours, theirs, strict=True):
        buffers = optimizer.state[p]["momentum_buffer"], expected.state[q]["momentum_buffer"]
        assert torch.equal(*buffers)
        torch.testing.assert_close(p, q, rtol=1e-6 * steps, atol=1e-6 * steps)


def test_defaults_are_those_of_torch():
    ours, theirs = Muon(parameters(MATRICES)), torch.optim.Muon(parameters(MATRICES))
    own = ("momentum_format", "weights", "state_rounding", "group_size", "seed", "offload")
    assert {k: v for k, v in ours.defaults.items() if k not in own} == theirs.defaults


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32)])
def test_singular_values_become_about_one(shape):
    x = newton_schulz(torch.randn(shape), (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert x.dtype == torch.bfloat16
    values = torch.linalg.svdvals(x.float())
    assert (values < 1.25).all()
    assert (values > 0.6).double().mean() > 0.9


@pytest.mark.parametrize("name", ALL_FORMATS)
@pytest.mark.parametrize("rounding", STATE_ROUNDINGS)
def test_momentum_in_any_format_is_near_fp32(name, rounding):
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    optimizer = Muon(ours, lr=0.1, momentum_format=name, state_rounding=rounding)
    run(ours, optimizer, range(3))
    run(theirs, Muon(theirs, lr=0.1, **EXACT), range(3))
    start = parameters(MATRICES)
    for p, q, s in zip(ours, theirs, start, strict=True):
        distance = (p - q).norm() / (q - s).norm()
        assert distance < (0.02 if name in ("fp32", "bf16", "fp16") else 0.3), (name, distance)
    exact = Muon(parameters(MATRICES), **EXACT)
    assert all(key.split(":")[0] in ("step", "momentum_buffer") for key in optimizer.state[p])
    assert not exact.state


def test_bytes_of_states():
    p = nn.Parameter(torch.randn(512, 512, dtype=torch.bfloat16))
    for name in ("e4m3", "e4m3+expand"):
        optimizer = Muon([p], momentum_format=name)
        run([p], optimizer, range(1))
        state = optimizer.state[p]
        assert sum(x.numel() * x.itemsize for x in state.values()) <= 0.26 * 4 * p.numel()
        parts = ("", ":scale", ":power") if "expand" in name else ("", ":scale")
        assert set(state) == {"step", *(f"momentum_buffer:{name}{part}" for part in parts)}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_stay_near_fp32(dtype, weights):
    ours = parameters(MATRICES, dtype=dtype)
    wide = [nn.Parameter(p.detach().float()) for p in parameters(MATRICES, dtype=dtype)]
    optimizer, exact = (Muon(x, lr=1e-2, **EXACT, weights=weights) for x in (ours, wide))
    for step in range(10):
        set_gradients(ours, step)
        for p, q in zip(wide, ours, strict=True):
            p.grad = q.grad.float()
        optimizer.step()
        exact.step()
    for p, q in zip(ours, wide, strict=True):
        digits = {torch.float32: 20, torch.bfloat16: 7, torch.float16: 10}[dtype]
        assert ((p - q).abs() <= q.abs() * 10 * 2.0**-digits + 1e-3).all()


@pytest.mark.long
def test_updates_below_the_last_bit_add_up():
    for weights in ("fp32", "stochastic", "nearest", "fp16"):
        p = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
        optimizer = Muon([p], lr=5e-3, weight_decay=0.0, weights=weights)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        # The direction of a matrix of rank one is one matrix entry of about 1/64 everywhere.
        moved = 1 - p.detach().float().mean().item()
        assert (moved == 0.0) if weights == "nearest" else (0.002 < moved < 0.006), (weights, moved)


def test_one_round_or_many(monkeypatch):
    together, apart = parameters(MATRICES, torch.bfloat16), parameters(MATRICES, torch.bfloat16)
    optimizer, in_rounds = Muon(together), Muon(apart)
    run(together, optimizer, range(3))
    monkeypatch.setattr(muon, "ROUND", 64)
    run(apart, in_rounds, range(3))
    assert_same_state(optimizer, in_rounds)


def test_matrices_can_be_updated_together_or_alone():
    together, apart = parameters(MATRICES, torch.bfloat16), parameters(MATRICES, torch.bfloat16)
    run(together, Muon(together), range(3))
    optimizer = Muon(apart)
    for step in range(3):
        set_gradients(apart, step)
        gradients = [p.grad for p in apart]
        for p, g in zip(apart, gradients, strict=True):
            optimizer.zero_grad()
            p.grad = g
            optimizer.step()
    for p, q in zip(together, apart, strict=True):
        assert torch.equal(p, q)


def test_large_matrices_are_updated_in_pieces(monkeypatch):
    whole, batched = (parameters(MATRICES, torch.bfloat16) for _ in range(2))
    optimizer, in_pieces = (Muon(x, weights="fp16") for x in (whole, batched))
    run(whole, optimizer, range(3))
    monkeypatch.setattr("fp8pass.optim.update.CPU_BATCH", 300)
    run(batched, in_pieces, range(3))
    assert_same_state(optimizer, in_pieces)


def test_matrices_that_are_not_contiguous():
    strided = nn.Parameter(torch.randn(16, 24).t())
    plain = nn.Parameter(strided.detach().contiguous().clone())
    for p in (strided, plain):
        run([p], Muon([p]), range(3))
    assert torch.equal(strided, plain)


def test_gradients_do_not_change():
    params = parameters(MATRICES)
    set_gradients(params, 0)
    before = [p.grad.clone() for p in params]
    Muon(params).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_states_in_host_memory(weights, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 64)
    on_device, on_host = (parameters(MATRICES, torch.bfloat16) for _ in range(2))
    optimizer = Muon(on_device, weights=weights)
    streamed = Muon(on_host, weights=weights, offload=("states",))
    run(on_device, optimizer, range(3))
    run(on_host, streamed, range(3))
    assert_same_state(streamed, optimizer)


def test_weights_in_host_memory(monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)).bfloat16()
    plain = copy.deepcopy(model)
    fp8pass.optim.offload_weights(model, "cpu")
    optimizers = [Muon(m.parameters(), lr=0.01) for m in (model, plain)]
    for step in range(3):
        set_gradients(list(plain.parameters()), step)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.grad = q.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.source, q)


@pytest.mark.parametrize("fails", [False, True])
def test_grad_scaler(fails):
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    optimizer, unscaled = Muon(ours), Muon(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        scaler.scale(torch.zeros(()))
        for p in ours:
            p.grad *= scaler.get_scale()
        if fails and step == 1:
            ours[1].grad.fill_(torch.inf)
        else:
            unscaled.step()
        scaler.step(optimizer)
        scaler.update()
    assert_same_state(optimizer, unscaled)


def test_the_rate_as_a_tensor_and_schedules():
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    optimizer, expected = Muon(ours, lr=torch.tensor(0.1), **EXACT), Muon(theirs, lr=0.1, **EXACT)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(x, 0.5) for x in (optimizer, expected)]
    for step in range(3):
        run(ours, optimizer, range(step, step + 1))
        run(theirs, expected, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_options_can_change_between_steps():
    """As in nanochat, which warms the momentum up and schedules the rate and the weight decay."""
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    optimizers = Muon(ours, lr=0.02, **EXACT), torch.optim.Muon(theirs, lr=0.02)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    for step in range(5):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / 10)
                group["momentum"] = 0.85 + 0.02 * step
                group["weight_decay"] = 0.1 * (1 - step / 10)
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            run(params, optimizer, range(step, step + 1))
            optimizer.zero_grad()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["e5m2+expand", "bf16", "fp32"])
def test_the_format_can_change_between_steps(target):
    params = parameters(MATRICES, torch.bfloat16)
    optimizer = Muon(params, weights="stochastic")
    run(params, optimizer, range(2))
    optimizer.param_groups[0].update(momentum_format=target, weights="fp32", group_size=32)
    run(params, optimizer, range(2, 4))
    for p in params:
        names = {key.split(":")[0] for key in optimizer.state[p]}
        assert names == {"step", "momentum_buffer", "master"}
        assert not any("e4m3" in key for key in optimizer.state[p])
        assert optimizer.state[p]["step"] == 4


def test_frozen_and_unfrozen_matrices():
    params = parameters(MATRICES)
    optimizer = Muon(params)
    run(params, optimizer, range(1))
    frozen = params[0].detach().clone()
    set_gradients(params, 1)
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], frozen)
    run(params, optimizer, range(2, 3))
    assert not torch.equal(params[0], frozen)
    assert optimizer.state[params[0]]["step"] == 2


def test_groups_have_options_of_their_own():
    first, second, third = parameters(MATRICES[:3])
    options = {"params": [second], "lr": 0.5, "momentum_format": "bf16", "nesterov": False}
    optimizer = Muon([{"params": [first]}, options])
    optimizer.add_param_group({"params": [third], "momentum_format": "fp32"})
    run([first, second, third], optimizer, range(2))
    assert optimizer.state[second]["momentum_buffer"].dtype == torch.bfloat16
    assert optimizer.state[third]["momentum_buffer"].dtype == torch.float32
    with pytest.raises(fp8pass.ConfigError, match="Did you mean 'momentum_format'"):
        optimizer.add_param_group({"params": parameters(MATRICES), "momentum_fromat": "fp32"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a number >= 0"),
        ({"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
        ({"weight_decay": math.nan}, "weight_decay must be"),
        ({"eps": "0"}, "eps must be"),
        ({"ns_steps": 100}, "ns_steps must be an int from 0 to 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three numbers"),
        ({"adjust_lr_fn": "match_rms"}, "Did you mean 'match_rms_adamw'"),
        ({"momentum_format": "e4m4"}, "momentum_format: .*Did you mean 'e4m3'"),
        ({"weights": "stochastik"}, "Did you mean 'stochastic'"),
        ({"group_size": 100}, "power of two from 16"),
        ({"offload": ("gradient",)}, "Did you mean 'gradients'"),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    with pytest.raises(fp8pass.ConfigError, match=message):
        Muon(parameters(MATRICES), **options)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_parameters_that_are_not_matrices(shape):
    with pytest.raises(fp8pass.ConfigError, match=r"takes matrices.*split_parameters"):
        Muon(parameters((shape,)))
    with pytest.raises(fp8pass.ConfigError, match=r"fp8pass.optim.Muon takes float32.*torch.optim"):
        Muon([torch.zeros(3, 3, dtype=torch.float64).requires_grad_()])


@pytest.mark.long
def test_the_loss_with_fp8_momentum_is_close():
    """A small network learns a random map with momentum in several formats."""

    def losses(name: str) -> list[float]:
        torch.manual_seed(0)
        layers = (nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        model = nn.Sequential(*layers)
        target = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
        matrices, others = fp8pass.optim.split_parameters(model, skip="4")
        optimizers = [Muon(matrices, lr=0.02, momentum_format=name), AdamW(others, lr=3e-3)]
        found = []
        for step in range(100):
            for group in (g for optimizer in optimizers for g in optimizer.param_groups):
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - step / 100)
            x = torch.randn(64, 32)
            loss = (model(x) - target(x).detach()).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    start, *_, exact = losses("fp32")
    assert exact < 0.05 * start
    for name in ("e4m3", "e4m3+expand"):
        assert abs(losses(name)[-1] - exact) < 0.01 * start
