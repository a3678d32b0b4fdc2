"""Incomplete sums of gradients of `step_in_backward`, and events between two updates."""

from __future__ import annotations

import copy

import pytest
import torch
from optim_helpers import EXACT_STATES, assert_same_state
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.pipelining import Schedule1F1B

import fp8pass
from fp8pass import compat
from fp8pass.distributed.pipeline_parallel import planned_schedule
from fp8pass.optim import AdamW, step_in_backward


def model_of_three() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Linear(40, 40))


def run_backwards(model: nn.Module, seeds: range) -> None:
    for seed in seeds:
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# --- layers that are frozen ---------------------------------------------------------------------


@pytest.mark.parametrize("ends_by", ["step", "backwards", "step after backwards"])
def test_a_layer_frozen_in_the_middle_of_a_step_is_not_updated(ends_by):
    model = model_of_three()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer, accumulate=3)
    run_backwards(model, range(2))
    model[2].requires_grad_(False)
    before = weights_of(model[2]), weights_of(model[3])
    if "backwards" in ends_by:
        run_backwards(model, range(2, 3))
    if "step" in ends_by:
        optimizer.step()
    assert all(map(torch.equal, before[0], model[2].parameters()))
    assert not any(map(torch.equal, before[1], model[3].parameters()))


@pytest.mark.parametrize("steps", [True, False])
def test_a_layer_that_is_unfrozen_again_begins_a_new_sum(steps):
    """Gradients from before the layer was frozen do not belong to this step."""
    model, plain = model_of_three(), model_of_three()
    optimizer = AdamW(model.parameters(), lr=0.1, **EXACT_STATES)
    step_in_backward(model, optimizer, accumulate=2, buffer="fp16")
    run_backwards(model, range(1))
    model[3].requires_grad_(False)
    run_backwards(model, range(1, 2))
    if steps:
        optimizer.step()
    model[3].requires_grad_(True)
    plain.load_state_dict(model.state_dict())
    after = AdamW(plain[3].parameters(), lr=0.1, **EXACT_STATES)
    run_backwards(model, range(2, 4))
    run_backwards(plain, range(2, 4))
    after.step()
    for p, q in zip(model[3].parameters(), plain[3].parameters(), strict=True):
        assert optimizer.state[p]["step"] == 1
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def test_a_bias_is_frozen_alone():
    model = model_of_three()
    optimizer = AdamW(model.parameters(), lr=0.1, offload=("states", "gradients"))
    step_in_backward(model, optimizer, accumulate=2)
    run_backwards(model, range(1))
    model[0].bias.requires_grad_(False)
    weight, bias = (p.detach().clone() for p in (model[0].weight, model[0].bias))
    run_backwards(model, range(1, 2))
    optimizer.step()
    assert torch.equal(bias, model[0].bias)
    assert not torch.equal(weight, model[0].weight)


# --- checkpoints --------------------------------------------------------------------------------


def by_get_state_dict(model: nn.Module, optimizer: AdamW) -> None:
    get_state_dict(model, optimizer)


def by_flat_state_dict(model: nn.Module, optimizer: AdamW) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    get_optimizer_state_dict(model, optimizer, options=options)


def by_full_state_dict(model: nn.Module, optimizer: AdamW) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    get_state_dict(model, optimizer, options=options)


def by_state_dict(_: nn.Module, optimizer: AdamW) -> None:
    copy.deepcopy(optimizer.state_dict())


WAYS = [by_get_state_dict, by_flat_state_dict, by_full_state_dict, by_state_dict]


@pytest.mark.long
@pytest.mark.drawn(4)
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_checkpoint_leaves_a_sum_as_it_is(way, when):
    """This includes the first step, in which get_state_dict creates missing states by a step."""
    found = []
    for saves in (False, True):
        model = model_of_three()
        optimizer = AdamW(model.parameters(), lr=0.1)
        attached = step_in_backward(model, optimizer, accumulate=3)
        run_backwards(model, range(when))
        if saves:
            way(model, optimizer)
        assert {x.count for x in attached.accumulated.values()} == {when % 3}
        run_backwards(model, range(when, 6))
        found.append(optimizer)
    assert_same_state(*found)
    assert all(state["step"] == 2 for state in found[1].state.values())


@pytest.mark.parametrize("offload", [(), ("states",), ("gradients",)], ids=str)
def test_states_during_the_first_sum_are_initial_states(offload):
    model = model_of_three()
    optimizer = AdamW(model.parameters(), lr=0.1, preset="fp8-lm", offload=offload)
    step_in_backward(model, optimizer, accumulate=2)
    run_backwards(model, range(1))
    assert all(state["step"] == 0 for state in optimizer.state.values())
    assert len(optimizer.state) == len(list(model.parameters()))
    run_backwards(model, range(1, 2))
    assert all(state["step"] == 1 for state in optimizer.state.values())


# --- compiled autograd --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("by", ["config", "context"])
def test_compiled_autograd_is_refused_before_an_update(accumulate, by):
    model = model_of_three()
    optimizer = AdamW(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer, accumulate=accumulate)
    before = weights_of(model)

    def backward(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def compiled_backward(x: torch.Tensor) -> None:
        torch.compile(backward, backend="eager")(x)

    if by == "config":
        backward_of = compiled_backward
        compiles = torch._dynamo.config.patch(compiled_autograd=True)
    else:
        backward_of = backward
        compiles = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
    refused = pytest.raises(fp8pass.ConfigError, match="does not support compiled autograd")
    with refused, compiles:
        backward_of(torch.randn(4, 40))
    assert all(map(torch.equal, before, model.parameters()))
    for p in model.parameters():
        p.grad = None
    run_backwards(model, range(accumulate))
    assert not any(map(torch.equal, before, model.parameters()))
    assert all(state["step"] == 1 for state in optimizer.state.values())


def test_a_schedule_that_only_plans_memory_trains_no_model():
    schedule = planned_schedule(Schedule1F1B, 2, 2, 4)
    model = nn.Linear(4, 4)
    assert compat.find_schedule(model) is None
    del schedule
