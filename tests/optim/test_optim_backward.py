"""`fp8pass.optim.step_in_backward`: updates within the backward."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from optim_helpers import EXACT_STATES, all_parameters, assert_same_state, single_process
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fp8pass
from fp8pass.optim import AdamW, step_in_backward
from fp8pass.optim.offload import Staging
from fp8pass.optim.sums import GradientSum


def small_model(dtype=torch.float32) -> nn.Module:
    """Return a model that uses a weight twice."""
    torch.manual_seed(0)
    first, last = nn.Linear(40, 40), nn.Linear(40, 40)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), last).to(dtype)


def losses(model: nn.Module, backwards: int):
    for step in range(backwards):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 40, generator=generator).to(next(model.parameters()).dtype)
        yield model(x).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_the_backward_equal_steps_after_it(dtype, monkeypatch):
    model, plain = small_model(dtype), small_model(dtype)
    optimizer, after = AdamW(model.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01)
    alive = []
    update = AdamW.update

    def counting(self, group, parameters):
        alive.append(sum(p.grad is not None for p in all_parameters(self)))
        update(self, group, parameters)

    attached = step_in_backward(model, optimizer)
    for ours, theirs in zip(losses(model, 3), losses(plain, 3), strict=True):
        theirs.backward()
        after.step()
        after.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(AdamW, "update", counting)
            ours.backward()
    assert alive == [1] * 3 * 5
    assert all(p.grad is None for p in model.parameters())
    assert_same_state(optimizer, after)
    attached.detach()
    next(losses(model, 1)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert optimizer.state[model[0].weight]["step"] == 3


@pytest.mark.long
@pytest.mark.parametrize("buffer", ["e4m3", "e5m2", "de8"])
def test_gradients_add_up_in_bytes(buffer):
    model, plain = small_model(), small_model()
    optimizer = AdamW(model.parameters(), lr=0.01, **EXACT_STATES)
    attached = step_in_backward(model, optimizer, accumulate=3, buffer=buffer)
    for number, (ours, theirs) in enumerate(zip(losses(model, 3), losses(plain, 3), strict=True)):
        theirs.backward()
        ours.backward()
        assert all(p.grad is None for p in model.parameters())
        sums = list(attached.accumulated.values())
        if number < 2:
            assert all(x.stored.data.dtype == torch.uint8 for sum_ in sums for x in sum_.pieces)
            assert all(state["step"] == 0 for state in optimizer.state.values())
    assert not any(sum_.pieces for sum_ in sums)
    error = {"e4m3": 0.04, "e5m2": 0.08, "de8": 0.03}[buffer]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        total = optimizer.state[p]["exp_avg"] / 0.1
        assert ((total - q.grad).norm() / q.grad.norm()).item() < error


def sum_of_gradients(gradients, **options) -> torch.Tensor:
    """Return the sum of many gradients that the optimizer receives.

    Each one is small compared with it.
    """
    model = nn.ParameterList([nn.Parameter(torch.zeros(gradients[0].numel()))])
    optimizer = AdamW(model.parameters(), betas=(0.0, 0.0), **EXACT_STATES)
    step_in_backward(model, optimizer, accumulate=len(gradients), **options)
    for gradient in gradients:
        (model[0] * gradient).sum().backward()
    return optimizer.state[model[0]]["exp_avg"].double()


def many_gradients(noise: float) -> list[torch.Tensor]:
    """Return the gradients of 256 backwards, which have the same mean."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(1 << 12, generator=generator)
    return [mean + noise * torch.randn(1 << 12, generator=generator) for _ in range(256)]


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("buffer", [None, "e4m3", "e5m2", "de8", "fp16"])
def test_sums_of_many_gradients_do_not_drift(buffer, noise):
    """With rounding to nearest, sums of equal gradients would be 1.3 times too long in E4M3 and
    E5M2.
    """
    gradients = many_gradients(noise)
    exact = torch.stack(gradients).double().sum(0)
    found = sum_of_gradients(gradients, buffer=buffer)
    length = (found @ exact / (exact @ exact)).item()
    error = ((found - exact).norm() / exact.norm()).item()
    sixteen = buffer in (None, "fp16")
    assert length == pytest.approx(1, abs=1e-3 if sixteen else 0.03)
    assert error < (0.005 if sixteen else {"de8": 0.2, "e4m3": 0.5, "e5m2": 0.9}[buffer])


@pytest.mark.long
def test_sums_are_rounded_alike_in_every_run():
    gradients = many_gradients(1.0)[:12]
    for buffer in ("e4m3", "fp16"):
        first, second = (sum_of_gradients(gradients, buffer=buffer) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.long
def test_sums_go_on_alike_after_a_checkpoint():
    model, resumed = small_model(torch.bfloat16), small_model(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=0.01, seed=3)
    step_in_backward(model, optimizer, accumulate=3)
    for loss in losses(model, 6):
        loss.backward()
    resumed.load_state_dict(model.state_dict())
    again = AdamW(resumed.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_in_backward(resumed, again, accumulate=3)
    for trained in (model, resumed):
        for loss in losses(trained, 3):
            loss.backward()
    assert_same_state(again, optimizer)


def trained_by_branches(used, offload=None):
    """Return whether each branch was updated in each step.

    `used` selects the backwards that use a branch.
    """
    torch.manual_seed(0)
    always, branch = nn.Linear(40, 40), nn.Linear(40, 40)
    model = nn.ModuleList([always, branch])
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.0, offload=offload or ())
    if offload is not None:
        step_in_backward(model, optimizer, accumulate=2, buffer="fp16")
    moved, x = [], torch.randn(4, 40)
    for uses in used:
        before = branch.weight.detach().clone()
        for use in uses:
            (always(x) + (branch(x) if use else 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, branch.weight))
    return moved, model


@pytest.mark.long
@pytest.mark.parametrize("offload", [(), ("states", "gradients")], ids="+".join)
def test_a_step_ends_sums_that_are_not_complete(offload, monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST", 1 << 10)
    used = [(True, False), (True, True), (False, True), (False, False), (True, True), (True,)]
    moved, model = trained_by_branches(used, offload)
    want, plain = trained_by_branches(used)
    assert moved == want
    assert want == [True, True, True, False, True, True]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.long
def test_the_closure_of_a_step_may_be_the_last_backward_of_a_sum():
    """Lightning runs the closure within the step, and the other backwards before it."""
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    attached = step_in_backward(model, optimizer, accumulate=2)
    moved = []
    for number, loss in enumerate(losses(model, 6)):
        before = model[0].weight.detach().clone()
        optimizer.step(loss.backward) if number % 2 else loss.backward()
        moved.append(not torch.equal(before, model[0].weight))
        assert {sum_.count for sum_ in attached.accumulated.values()} == {1 - number % 2}
    assert moved == [False, True] * 3
    assert optimizer.state[model[0].weight]["step"] == 3


@pytest.mark.long
def test_large_sums_are_rounded_in_pieces(monkeypatch):
    gradients = many_gradients(1.0)[:4]
    whole = sum_of_gradients(gradients, buffer="e4m3")
    monkeypatch.setattr("fp8pass.optim.update.CPU_BATCH", 384)
    assert torch.equal(sum_of_gradients(gradients, buffer="e4m3"), whole)


@pytest.mark.long
@pytest.mark.parametrize(("accumulate", "dtype"), [(8, torch.uint8), (9, torch.float16)])
def test_many_gradients_are_accumulated_in_16_bits(accumulate, dtype):
    model = small_model()
    attached = step_in_backward(model, AdamW(model.parameters()), accumulate=accumulate)
    next(losses(model, 1)).backward()
    sums = attached.accumulated.values()
    assert {piece.stored.data.dtype for sum_ in sums for piece in sum_.pieces} == {dtype}


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


# --- backwards that fail ------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """A function with a backward that fails on request."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.fails:
            raise ValueError("in the middle")
        return gradient


def model_that_fails(dtype=torch.bfloat16) -> nn.Module:
    """Return a model with a backward that fails after the last layer got gradients."""
    torch.manual_seed(0)

    class Middle(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    layers = nn.Linear(40, 40), nn.Tanh(), Middle(), nn.Linear(40, 40), nn.Linear(40, 40)
    return nn.Sequential(*layers).to(dtype)


@pytest.fixture
def failing(monkeypatch):
    """Make backwards fail within the context."""

    @contextmanager
    def context():
        monkeypatch.setattr(Fails, "fails", True)
        with pytest.raises(ValueError, match="in the middle"):
            yield
        monkeypatch.setattr(Fails, "fails", False)

    return context


@pytest.mark.long
def test_training_goes_on_after_a_backward_that_failed(failing, caplog):
    """The result equals a step of the optimizer with the gradients that were final."""
    model, plain = model_that_fails(), model_that_fails()
    optimizer, after = AdamW(model.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01)
    step_in_backward(model, optimizer)
    for number, both in enumerate(zip(losses(model, 3), losses(plain, 3), strict=True)):
        for loss in both:
            with failing() if number == 1 else nullcontext():
                loss.backward()
        after.step()
        after.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert_same_state(optimizer, after)
    (message,) = (r.getMessage() for r in caplog.records)
    assert "failed after 4 of 6 gradients and updated only 4 parameters" in message
    assert "sums" not in message


@pytest.mark.long
@pytest.mark.parametrize("offload", [(), ("states", "gradients")], ids="+".join)
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_all_sums_have_the_same_backwards_after_a_backward_that_failed(
    failed, offload, failing, caplog, monkeypatch
):
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST", 1 << 10)
    model = model_that_fails()
    optimizer = AdamW(model.parameters(), lr=0.01, offload=offload)
    attached = step_in_backward(model, optimizer, accumulate=3)
    for loss in losses(model, failed):
        loss.backward()
    with failing():
        next(losses(model, 1)).backward()
    assert {sum_.count for sum_ in attached.accumulated.values()} == {0}
    assert "All accumulated gradients were dropped" in caplog.text
    resumed = model_that_fails()
    resumed.load_state_dict(model.state_dict())
    again = AdamW(resumed.parameters(), lr=0.01, offload=offload)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_in_backward(resumed, again, accumulate=3)
    for trained in (model, resumed):
        for loss in losses(trained, 4):
            loss.backward()
    assert_same_state(again, optimizer)


@pytest.mark.long
def test_updates_are_waited_for_if_a_backward_fails(failing, monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST", 1 << 10)
    waited = []
    monkeypatch.setattr(Staging, "abandon", lambda self: waited.append("abandon"))
    monkeypatch.setattr(Staging, "join", lambda self: waited.append("join"))
    model = model_that_fails()
    step_in_backward(model, AdamW(model.parameters(), offload=("states",)))
    for number, loss in enumerate(losses(model, 3)):
        with failing() if number == 1 else nullcontext():
            loss.backward()
    assert waited == ["join", "abandon", "join"]


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failed_update_leaves_no_gradient(accumulate, monkeypatch, caplog):
    """Otherwise the next gradient would be added to it."""
    model = model_that_fails()
    step_in_backward(model, AdamW(model.parameters()), accumulate=accumulate)

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "update", fail)
        patch.setattr(GradientSum, "add", fail)
        with pytest.raises(torch.OutOfMemoryError):
            next(losses(model, 1)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert "failed after 1 of 6 gradients and updated only 0 parameters" in caplog.text


def test_a_step_that_fails_is_waited_for(monkeypatch):
    joined = []
    monkeypatch.setattr(AdamW, "join", lambda self: joined.append(self))
    model = small_model()
    optimizer = AdamW([{"params": [p]} for p in model.parameters()])
    next(losses(model, 1)).backward()
    model[2].weight.grad = model[2].weight.grad.to_sparse()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="is sparse"):
        optimizer.step()  # raised before any launch
    assert all(map(torch.equal, before, model.parameters()))
    assert not joined
    model[2].weight.grad = torch.ones_like(model[2].weight)
    monkeypatch.setattr(AdamW, "_control", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert joined == [optimizer]


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


def test_wrong_arguments_are_refused(tmp_path):
    model = small_model()
    optimizer = AdamW(model.parameters())
    for accumulate in (0, True, 1.5):
        with pytest.raises(fp8pass.ConfigError, match="positive int"):
            step_in_backward(model, optimizer, accumulate=accumulate)
    for buffer in ("fp32", "e4m3+expand"):
        with pytest.raises(fp8pass.ConfigError, match="buffer must be one of"):
            step_in_backward(model, optimizer, buffer=buffer)
    with pytest.raises(fp8pass.ConfigError, match=r"takes an fp8pass\.optim\.AdamW"):
        step_in_backward(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(fp8pass.ConfigError, match=r"lacks parameters of the model: 2\.weight"):
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
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_grad_scaler_is_refused(accumulate):
    """The first step raises the error. A disabled scaler changes nothing."""
    model = nn.Linear(64, 64)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    step_in_backward(model, optimizer, accumulate=accumulate)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(model(torch.randn(4, 64)).square().mean()).backward()
        if enabled:
            with pytest.raises(fp8pass.ConfigError, match="Train in BF16 without a GradScaler"):
                scaler.step(optimizer)
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
