"""Options of stored states, and dtypes of parameters, that change during training."""

from __future__ import annotations

import copy

import pytest
import torch
from optim_helpers import (
    all_parameters,
    assert_same_state,
    moment_values,
    parameters,
    run,
    set_gradients,
)
from torch import Tensor, nn

import fp8pass
from fp8pass.optim import AdamW, step_in_backward
from fp8pass.optim.offload import is_offloaded
from fp8pass.optim.slots import name_of

SHAPES = ((3, 5), (2, 64, 3))
CHANGES = [
    {"first_moment": "e5m2+expand"},
    {"first_moment": "e4m3", "second_moment": "fp16"},
    {"first_moment": "de8"},
    {"first_moment": "fp32", "second_moment": "bf16"},
    {"weights": "fp32"},
    {"weights": "fp16"},
    {"group_size": 64},
    {"group_size": 1024, "second_moment": "e4m3"},
]


def reloaded(optimizer: AdamW, **options) -> AdamW:
    """Return an optimizer of copies of the parameters that loaded the states into these formats."""
    params = [nn.Parameter(p.detach().clone()) for p in all_parameters(optimizer)]
    other = AdamW(params, **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of log2(0)
@pytest.mark.parametrize("changed", CHANGES, ids=str)
def test_changed_options_convert_states(path, changed):
    """The result equals loading a checkpoint into an optimizer with these options."""
    params = parameters(SHAPES, torch.bfloat16)
    optimizer = AdamW(params, 0.01)
    run(params, optimizer, range(2))
    other = reloaded(optimizer, **changed)
    optimizer.param_groups[0].update(changed)
    run(params, optimizer, range(2, 4))
    run(all_parameters(other), other, range(2, 4))
    assert_same_state(optimizer, other)


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_models_change_their_dtype(before, after, weights):
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8)).to(before)
    params = list(model.parameters())
    optimizer = AdamW(params, 0.01, weights=weights)
    run(params, optimizer, range(2))
    moments = [moment_values(optimizer, i, "exp_avg") for i in range(len(params))]
    model.to(after)
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.0
    expected = [p.detach().clone() for p in params]
    rounded = 2.0**-9 if weights == "fp16" else 0.0  # relative to the largest element of a group
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for i, p in enumerate(params):
        assert p.dtype == after
        assert (p - expected[i]).abs().amax() <= rounded * p.abs().amax()
        names = {name_of(key) for key in optimizer.state[p]}
        assert ("master" in names) == (after != torch.float32)
        decayed = moment_values(optimizer, i, "exp_avg")
        assert (decayed - 0.9 * moments[i]).norm() <= 0.1 * moments[i].norm()


def test_other_states_of_a_parameter_do_not_change():
    (p,) = params = parameters(((64,),))
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    optimizer.state[p]["average"] = p.detach().clone()
    optimizer.param_groups[0]["first_moment"] = "e5m2"
    run(params, optimizer, range(1, 2))
    assert "average" in optimizer.state[p]


@pytest.mark.parametrize("offload", [(), ("states",)], ids=str)
def test_states_follow_the_offload_option(offload):
    """The results are the same for every previous location of the states."""
    changed = () if offload else ("states",)
    found = []
    for option in (offload, None):
        params = parameters(((256, 256), (64,)), torch.bfloat16)
        optimizer = AdamW(params, 0.01, offload=offload)
        run(params, optimizer, range(2))
        if option is not None:
            optimizer.param_groups[0].update(offload=changed, first_moment="e4m3")
        else:
            optimizer.param_groups[0].update(first_moment="e4m3")
        assert is_offloaded(optimizer.param_groups[0], "states", params[0]) != (
            (option is None) == (offload == ())
        )
        run(params, optimizer, range(2, 4))
        found.append(optimizer)
    assert_same_state(*found)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first_moment": "e4m4"}, "first_moment: Unknown format 'e4m4'"),
        ({"weights": "bf16"}, "Unknown weights 'bf16'"),
        ({"state_rounding": "down"}, "Unknown state_rounding 'down'"),
        ({"group_size": 100}, "group_size must be a power of two from 16 to 1024, got 100"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_an_update(changed, message):
    first, second = params = parameters(((64,), (64,)), torch.bfloat16)
    optimizer = AdamW([{"params": [first]}, {"params": [second]}])
    run(params, optimizer, range(1))
    optimizer.param_groups[1].update(changed)
    before = [p.detach().clone() for p in params]
    set_gradients(params, 1)
    with pytest.raises(fp8pass.ConfigError, match=message):
        optimizer.step()
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))


def test_a_parameter_of_another_shape_is_refused():
    (p,) = params = parameters(((64,),))
    optimizer = AdamW(params)
    run(params, optimizer, range(1))
    p.data = torch.zeros(32)
    p.grad = torch.zeros(32)
    with pytest.raises(fp8pass.ConfigError, match=r"shape \(64,\), but the parameter has shape"):
        optimizer.step()


@pytest.mark.long
def test_steps_in_the_backward_convert_states():
    def train(optimizer: AdamW, model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()

    torch.manual_seed(0)
    models = [nn.Linear(32, 16), nn.Linear(32, 16)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 32)
    optimizers = [AdamW(model.parameters(), 0.01) for model in models]
    step_in_backward(models[0], optimizers[0])
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 2:
                optimizer.param_groups[0].update(first_moment="de8", group_size=32)
            train(optimizer, model, x)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_same_state(*optimizers)
