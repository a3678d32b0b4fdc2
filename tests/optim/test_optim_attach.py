"""`fp8pass.optim.step_in_backward`: models and wrappers, lifetimes, and wrong arguments."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from optim_helpers import (
    all_parameters,
    assert_same_state,
    losses,
    single_process,
    small_model,
)
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fp8pass
from fp8pass.optim import AdamW, step_in_backward


def test_a_parameter_of_two_optimizers_is_refused():
    model = small_model()
    both = AdamW(model.parameters()), AdamW(model.parameters())
    with pytest.raises(fp8pass.ConfigError, match="Several optimizers have the same parameter"):
        step_in_backward(model, *both)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_attaching_twice_is_refused(accumulate):
    model = small_model()
    optimizer = AdamW(model.parameters())
    attached = step_in_backward(model, optimizer, accumulate=accumulate)
    for other in (optimizer, AdamW(model.parameters())):
        with pytest.raises(fp8pass.ConfigError, match=r"already .*: 0\.weight.*detach\(\)"):
            step_in_backward(model, other, accumulate=accumulate)
    with pytest.raises(fp8pass.ConfigError, match="already attached"):
        step_in_backward(model[2], AdamW(model[2].parameters()))
    next(losses(model, 1)).backward()
    attached.detach()
    step_in_backward(model, optimizer)
    next(losses(model, 1)).backward()
    assert optimizer.state[model[0].weight]["step"] == (2 if accumulate == 1 else 1)


@pytest.mark.long
def test_a_wrapper_may_be_attached():
    """The optimizer lives as long as the module that owns the parameter."""
    model = nn.Linear(4, 4)
    step_in_backward(nn.Sequential(model), AdamW(model.parameters(), lr=0.1))
    gc.collect()
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(model.weight, before)


@pytest.mark.long
def test_parameters_that_outlive_their_optimizer_say_so():
    model = nn.Linear(4, 4)
    weight = model.weight
    step_in_backward(model, AdamW(model.parameters()))
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="Keep the optimizer"):
        weight.sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_attached_optimizers_live_as_long_as_their_models(accumulate):
    """The model keeps the optimizer alive, and no reference keeps the parameters alive."""
    model = nn.Linear(4, 4)
    step_in_backward(model, AdamW(model.parameters(), lr=0.1), accumulate=accumulate)
    before, alive = model.weight.detach().clone(), weakref.ref(model.weight)
    gc.collect()
    for _ in range(accumulate):
        model(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(model.weight, before)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.long
def test_attached_optimizers_follow_schedules_and_checkpoints():
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step_in_backward(model, optimizer)
    next(losses(model, 1)).backward()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in model.parameters()]
    next(losses(model, 1)).backward()
    for p, q in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[model[0].weight]["step"] == 2


def test_an_optimizer_of_two_models_refuses_a_grad_scaler_until_both_are_detached():
    first, second = small_model(), small_model()
    optimizer = AdamW([*first.parameters(), *second.parameters()])
    attached = [step_in_backward(model, optimizer) for model in (first, second)]
    for each, refuses in zip(attached, (True, False), strict=True):
        each.detach()
        assert optimizer._step_supports_amp_scaling == refuses


@pytest.mark.filterwarnings("error")
def test_learning_rate_schedulers_do_not_warn():
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step_in_backward(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for loss in losses(model, 2):
        loss.backward()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] > 0.01 / 3  # the first rate of this schedule


def test_wrong_arguments_are_refused(tmp_path):
    model = small_model()
    optimizer = AdamW(model.parameters())
    for max_norm in (0.0, "1.0"):
        with pytest.raises(fp8pass.ConfigError, match="max_norm must be a positive number"):
            step_in_backward(model, optimizer, max_norm=max_norm)
    for accumulate in (0, True, 1.5):
        with pytest.raises(fp8pass.ConfigError, match="positive int"):
            step_in_backward(model, optimizer, accumulate=accumulate)
    for buffer in ("fp32", "e4m3+expand"):
        with pytest.raises(fp8pass.ConfigError, match="buffer must be one of"):
            step_in_backward(model, optimizer, buffer=buffer)
    with pytest.raises(fp8pass.ConfigError, match=r"takes an fp8pass\.optim\.AdamW"):
        step_in_backward(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(fp8pass.ConfigError, match=r"lack parameters of the model: 2\.weight"):
        step_in_backward(model, AdamW(model[0].parameters()))
    with single_process(tmp_path):
        parallel = nn.parallel.DistributedDataParallel(model)
        with pytest.raises(fp8pass.ConfigError, match="reduces gradients over ranks"):
            step_in_backward(parallel, optimizer)


# --- models that change, and wrappers -----------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_layers_that_are_unfrozen_later_are_updated(accumulate):
    """The result equals a step of the optimizer after the backward."""
    model, plain = small_model(), small_model()
    optimizer, after = AdamW(model.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01)
    for each in (model, plain):
        each[2].requires_grad_(False)
    frozen = [p.detach().clone() for p in model[2].parameters()]
    step_in_backward(model, optimizer, accumulate=accumulate, buffer="fp16")
    assert not any(p.requires_grad for p in model[2].parameters())
    for number in range(2 * accumulate):
        if number == accumulate:
            assert all(map(torch.equal, frozen, model[2].parameters()))
            for each in (model, plain):
                each[2].requires_grad_(True)
        for each in (model, plain):
            list(losses(each, number + 1))[-1].backward()
        if number % accumulate == accumulate - 1:
            after.step()
            after.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(frozen[0], model[2].weight)
    if accumulate == 1:
        assert_same_state(optimizer, after)


def trained_parameters(model: nn.Module):
    return [p for p in model.parameters() if p.requires_grad]


def unfreeze(model: nn.Module) -> None:
    model[0].requires_grad_(True)


def add_a_layer(model: nn.Module) -> None:
    model.append(nn.Linear(40, 40))


def replace_a_layer(model: nn.Module) -> None:
    model[2] = nn.Sequential(nn.Linear(40, 40))


def wrap_an_adapter(model: nn.Module) -> None:
    model[2].register_parameter("lora", nn.Parameter(torch.zeros(2, 40)))


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "change", [unfreeze, add_a_layer, replace_a_layer, wrap_an_adapter], ids=lambda f: f.__name__
)
def test_parameters_that_no_update_takes_are_refused(change, accumulate):
    """Every backward raises the error before it updates anything, until the optimizer has them."""
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = AdamW(trained_parameters(model), lr=0.01)
    attached = step_in_backward(model, optimizer, accumulate=accumulate)
    next(losses(model, 1)).backward()
    change(model)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises(
            fp8pass.ConfigError, match=r"not update these parameters: .*add_param_group"
        ):
            next(losses(model, 1)).backward()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
    attached.detach()
    known = set(all_parameters(optimizer))
    optimizer.add_param_group({"params": [p for p in trained_parameters(model) if p not in known]})
    step_in_backward(model, optimizer, accumulate=accumulate)
    for _ in range(accumulate):
        next(losses(model, 1)).backward()
    assert not all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def ddp_of_a_parent(model: nn.Module) -> nn.Module:
    return ddp(nn.Sequential(model, nn.Linear(40, 40)))


def ddp_of_a_layer(model: nn.Module) -> nn.Module:
    model[2] = ddp(model[2])
    return model


def fsdp(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp_with_original_parameters(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def replicated(model: nn.Module) -> nn.Module:
    return replicate(model)


def replicated_parent(model: nn.Module) -> nn.Module:
    return replicate(nn.Sequential(model, nn.Tanh()))


WRAPS = [
    ddp,
    ddp_of_a_parent,
    ddp_of_a_layer,
    fsdp,
    fsdp_with_original_parameters,
    replicated,
    replicated_parent,
]


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("attaches_first", [False, True])
@pytest.mark.parametrize("wrap", WRAPS, ids=lambda f: f.__name__)
def test_gradients_that_are_reduced_later_are_refused(tmp_path, wrap, attaches_first, runs):
    """In either order of `step_in_backward` and wrapper, the error comes in the first forward."""
    with single_process(tmp_path):
        model = small_model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(fp8pass.ConfigError, match="reduces gradients over ranks"):  # noqa: PT012
            if attaches_first:
                step_in_backward(model, optimizer)
            wrapped = wrap(model)
            if runs and not attaches_first:
                wrapped(torch.ones(2, 40))
            if not attaches_first:
                step_in_backward(model, optimizer)
            wrapped(torch.ones(2, 40)).sum().backward()
        if "fsdp" not in wrap.__name__:
            assert all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("child", [False, True])
def test_fully_shard_after_attach_is_refused(tmp_path, child):
    """The next step raises the error, or the next backward if a hooked parameter still gets a
    gradient.
    """
    with single_process(tmp_path):
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = small_model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        step_in_backward(model, optimizer)
        fully_shard(model[2] if child else model, mesh=mesh)
        with pytest.raises(fp8pass.ConfigError, match="before the optimizer is created"):  # noqa: PT012
            next(losses(model, 1)).backward()
            assert not child
            optimizer.step()


@pytest.mark.long
def test_other_models_may_be_wrapped(tmp_path):
    with single_process(tmp_path):
        first, second = small_model(), small_model()
        wrapped = ddp(first)
        attached = step_in_backward(second, AdamW(second.parameters()))
        ddp(copy.deepcopy(second))
        for each in (wrapped, second):
            next(losses(first if each is wrapped else each, 1)).backward()
        attached.detach()
        ddp(second)


@pytest.mark.long
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_grad_scaler_is_refused(accumulate, unscales):
    """The first step raises the error. A disabled scaler changes nothing."""
    model = nn.Linear(64, 64)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step_in_backward(model, optimizer, accumulate=accumulate)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(model(torch.randn(4, 64)).square().mean()).backward()
        if enabled:
            if unscales:  # as before clipping
                scaler.unscale_(optimizer)
            with pytest.raises(fp8pass.ConfigError, match="Train in BF16 without a GradScaler"):
                scaler.step(optimizer)
            optimizer.step()  # the error leaves nothing behind
        else:
            scaler.step(optimizer)


@pytest.mark.long
def test_attaching_adds_no_guards_to_a_forward_that_makes_modules():
    model = nn.Linear(64, 64)
    step_in_backward(model, AdamW(model.parameters(), lr=1e-3))

    @torch.compile(backend="eager", fullgraph=True)
    def forward(x):
        return nn.Sequential(nn.SiLU())(x)

    forward(torch.randn(4, 64))
    del model
    gc.collect()
    with torch._dynamo.config.patch(error_on_recompile=True):
        forward(torch.randn(4, 64))
