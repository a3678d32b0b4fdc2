"""`Guard` on a GPU: steps do not wait for the device, and copies to the host are correct."""

import pytest
import torch
from guard_helpers import event_kinds
from helpers import identical
from torch import nn

import fp8pass
from fp8pass import Guard
from fp8pass.stability.guard.snapshots import Snapshot

pytestmark = pytest.mark.gpu


def training(make_optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).cuda()
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    guard = Guard(None, optimizer, model=model, **options)

    def step(factor=1.0):
        x = torch.ones(32, 256, device="cuda")
        loss = factor * model(x).square().mean()
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        guard.step(loss, gradient_norm=norm)
        optimizer.zero_grad()

    return model, optimizer, guard, step


def test_steps_and_readings_do_not_wait():
    *_, guard, step = training()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.steps == 20


def test_readings_arrive_later_and_in_order():
    *_, guard, step = training()
    for _ in range(5):
        step(torch.nan)
    torch.cuda.synchronize()
    step()
    assert event_kinds(guard)[:2] == ["alarm", "confirmed"]
    assert guard.events[0].step in (5, 6)


@pytest.mark.parametrize("make", [torch.optim.AdamW, fp8pass.optim.AdamW])
def test_a_snapshot_restores_every_bit(make):
    model, optimizer, _, step = training(make)

    def state():
        states = [x for s in optimizer.state.values() for x in s.values()]
        return [x.detach().clone() for x in (*model.parameters(), *states)]

    for _ in range(3):
        step()
    before, snapshot = state(), Snapshot()
    snapshot.take(3, model, optimizer)
    assert all(x.is_pinned() for key, x in snapshot.tensors.items() if key[0] == "model")
    for _ in range(3):
        step()
    after = state()
    snapshot.restore(model, optimizer)
    assert all(map(identical, state(), before))
    for _ in range(3):
        step()
    assert all(map(identical, state(), after))


def test_a_run_that_breaks_is_rolled_back():
    model, _, guard, step = training(act=("lower lr", "roll back"), quiet=20)
    for _ in range(100):
        step()
    for _ in range(5):  # up to a reading
        step(torch.nan)
    torch.cuda.synchronize()
    for _ in range(10):
        step()
    assert "roll back" in event_kinds(guard)
    assert all(p.isfinite().all() for p in model.parameters())
