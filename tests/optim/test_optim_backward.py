"""`fp8pass.optim.step_in_backward`: updates, sums of gradients, and backwards that fail."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from optim_helpers import (
    EXACT_STATES,
    all_parameters,
    assert_same_state,
    losses,
    small_model,
)
from torch import nn

from fp8pass.optim import AdamW, step_in_backward
from fp8pass.optim.offload import Staging
from fp8pass.optim.sums import GradientSum


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
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 10)
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
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 10)
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
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 10)
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
