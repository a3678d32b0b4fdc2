"""Optimizer states saved and loaded: bit by bit, between formats, and from PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optim_helpers import (
    EXACT_STATES,
    all_parameters,
    parameters,
    run,
    same_state,
    through_a_file,
    values_of,
)

import fp8pass
from fp8pass.optim import AdamW
from fp8pass.optim.options import WEIGHTS
from fp8pass.optim.state_formats import MOMENT_FORMATS


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


def test_copies_and_pickles_go_on_alike():
    params = parameters(dtype=torch.bfloat16)
    optimizer = AdamW(params)
    run(params, optimizer, range(2))
    others = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    run(params, optimizer, range(2, 4))
    for other in others:
        run(all_parameters(other), other, range(2, 4))
        same_state(other, optimizer)


@pytest.mark.parametrize("name", MOMENT_FORMATS)
def test_resuming_goes_on_rounding_to_nearest(name):
    """The option of the checkpoint counts, as with betas and seed."""
    options = {"first_moment": name, "second_moment": name, "weights": "fp16"}
    straight, params = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    uninterrupted = AdamW(straight, lr=0.01, state_rounding="nearest", **options)
    run(straight, uninterrupted, range(4))
    optimizer = AdamW(params, lr=0.01, state_rounding="nearest", **options)
    run(params, optimizer, range(2))
    resumed = AdamW(params, **options)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["state_rounding"] == "nearest"
    run(params, resumed, range(2, 4))
    same_state(resumed, uninterrupted)


def test_checkpoints_without_the_rounding_of_states():
    """A checkpoint may be older than the option: the optimizer's own value counts."""
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["state_rounding"]
    other = AdamW(params, state_rounding="nearest")
    other.load_state_dict(saved)
    assert other.param_groups[0]["state_rounding"] == "nearest"
    same_state(other, optimizer)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (2, 3)}, r"betas\[0\] must be a number in \[0, 1\), got 2"),
        ({"group_size": 7}, "group_size must be a power of two from 16 to 1024, got 7"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"eps": -1.0}, "eps must be"),
        ({"weights": "stochastik"}, "Did you mean 'stochastic'"),
        ({"state_rounding": "nearst"}, "Did you mean 'nearest'"),
        ({"second_moment": "e4m4+expand"}, "second_moment: Unknown format"),
        ({"seed": None}, "seed must be an int"),
    ],
)
def test_wrong_options_of_checkpoints_say_what_to_do(options, message):
    params = parameters()
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= options
    other = AdamW(params)
    with pytest.raises(fp8pass.ConfigError, match=f"checkpoint cannot be loaded. .*{message}"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    assert not other.state
    del saved["param_groups"][0]["group_size"]
    with pytest.raises(fp8pass.ConfigError, match="without group_size: it is not complete"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("given", [{}, {"optimizer": {}}, None, "checkpoint.pt", [1]], ids=str)
def test_what_is_no_checkpoint_is_refused(given):
    with pytest.raises(fp8pass.ConfigError, match=r"has no param_groups, state.* Load what"):
        AdamW(parameters()).load_state_dict(given)


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
