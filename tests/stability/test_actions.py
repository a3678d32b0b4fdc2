"""Actions of a `Guard`: lower learning rates, high precision, rolling back to good weights."""

import re
from dataclasses import replace

import pytest
import torch
from guard_helpers import Training, event_kinds, guard_losses, network
from helpers import COAT_EAGER, MLP, identical
from monitor_helpers import BATCHES, monitored

import fp8pass
from fp8pass import ConfigError, Guard, Monitor
from fp8pass.stability.guard.actions import LowerRate
from fp8pass.stability.guard.guard import MOST_ROLLBACKS
from fp8pass.stability.guard.snapshots import Snapshot, Snapshots

OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "fp8pass AdamW": fp8pass.optim.AdamW,
}
# Arguments of `Training`.
TRAININGS = {name: (make,) for name, make in OPTIMIZERS.items()}
BOTH = {
    "Muon": (torch.optim.AdamW, torch.optim.Muon),
    "fp8pass Muon": (fp8pass.optim.AdamW, fp8pass.optim.Muon),
}


# --- rolling back -------------------------------------------------------------------------------


@pytest.mark.drawn(5)
@pytest.mark.parametrize("makers", (TRAININGS | BOTH).values(), ids=TRAININGS | BOTH)
def test_a_snapshot_restores_every_bit(makers):
    training = Training(*makers).run(5)
    before = training.state()
    snapshot = Snapshot()
    snapshot.take(5, training.model, *training.optimizers)
    training.run(5)
    assert not any(map(identical, training.state(), before))
    snapshot.restore(training.model, *training.optimizers)
    assert all(map(identical, training.state(), before))
    # Training continues with the same values.
    training.step = 5
    again = training.run(3).state()
    other = Training(*makers).run(8)
    assert all(map(identical, again, other.state()))


@pytest.mark.parametrize("name", ["AdamW", "fp8pass AdamW", "Muon", "fp8pass Muon"])
def test_states_that_did_not_exist_are_dropped(name):
    makers = (TRAININGS | BOTH)[name]
    training = Training(*makers)
    snapshot = Snapshot()
    snapshot.take(0, training.model, *training.optimizers)
    training.run(3)
    snapshot.restore(training.model, *training.optimizers)
    assert not any(optimizer.state for optimizer in training.optimizers)
    training.step, other = 0, Training(*makers).run(4)
    assert all(map(identical, training.run(4).state(), other.state()))


def test_states_that_only_one_optimizer_had_stay():
    training = Training(*BOTH["fp8pass Muon"])
    muon, adamw = training.optimizers
    training.optimizers = [adamw]
    training.run(3)
    before, snapshot = training.state(), Snapshot()
    snapshot.take(3, training.model, muon, adamw)
    training.optimizers = [muon, adamw]
    training.run(3)
    snapshot.restore(training.model, muon, adamw)
    assert not muon.state
    assert all(map(identical, training.state(), before))


@pytest.mark.parametrize("name", BOTH)
def test_a_guard_acts_on_all_optimizers(name):
    training = Training(*BOTH[name], act=("lower lr", "roll back"), every=1, quiet=5)
    rates = [[], []]
    for optimizer, found in zip(training.optimizers, rates, strict=True):
        optimizer.register_step_pre_hook(lambda x, *_, to=found: to.append(x.param_groups[0]["lr"]))
    states = {}
    while not (events := training.guard.events) or events[-1].kind != "roll back":
        assert training.step < 40
        training.run(1, factor=torch.nan if training.step == 20 else 1.0)
        states[training.step] = training.state()
    restored = int(re.search(r"step (\d+)$", events[-1].message)[1])
    assert restored < 20
    assert not all(map(identical, states[20], states[restored]))
    assert all(map(identical, training.state(), states[restored]))
    training.run(1)
    assert all(found[:20] == [1e-3] * 20 for found in rates)
    assert all(found[-1] == pytest.approx(1e-4) for found in rates)
    assert all(p.isfinite().all() for p in training.model.parameters())


@pytest.mark.long
def test_updates_of_two_optimizers_in_the_backward_are_rolled_back():
    model, states = network(), {}
    muon = fp8pass.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3)
    adamw = fp8pass.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-3)
    fp8pass.optim.step_in_backward(model, muon, adamw)
    with pytest.raises(ConfigError, match="'lower lr' has no effect with"):
        Guard(None, torch.optim.SGD(network().parameters()), adamw, model=model, act="lower lr")
    guard = Guard(None, muon, adamw, model=model, act="roll back", every=1, quiet=5)
    while "roll back" not in event_kinds(guard):
        assert guard.steps < 40
        loss = model(torch.randn(32, 16)).square().mean()
        (loss * torch.nan if guard.steps == 20 else loss).backward()
        guard.step(loss * torch.nan if guard.steps == 20 else loss)
        every = (x for optimizer in (muon, adamw) for x in optimizer.state.values())
        tensors = [*model.parameters(), *(x for state in every for x in state.values())]
        states[guard.steps] = [x.detach().clone() for x in tensors if isinstance(x, torch.Tensor)]
    restored = int(re.search(r"step (\d+)$", guard.events[-1].message)[1])
    assert all(map(identical, states[guard.steps], states[restored]))


def test_fp8_data_follow_restored_weights(monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 8)
    model = fp8pass.optim.offload_weights(MLP().bfloat16(), "cpu")
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=0.1)
    snapshot, want = Snapshot(), model.up.weight.fp8_data.clone()
    snapshot.take(0, model, optimizer)
    model(BATCHES[0].bfloat16()).float().square().mean().backward()
    optimizer.step()
    assert not identical(model.up.weight.fp8_data.float(), want.float())
    snapshot.restore(model, optimizer)
    assert identical(model.up.weight.fp8_data.float(), want.float())


def test_quantized_frozen_weights_are_not_copied():
    model = MLP().bfloat16()
    model.up.requires_grad_(False)
    fp8pass.quantize_frozen(model)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=1e-3, offload=("states",))
    guard = Guard(None, optimizer, model=model, act="roll back")
    for _ in range(3):
        loss = model(BATCHES[0].bfloat16()).float().square().mean()
        loss.backward()
        optimizer.step()
        guard.step(loss)
        optimizer.zero_grad()
    snapshot = Snapshot()
    snapshot.take(3, model, optimizer)
    assert {name for of, name, *_ in snapshot.tensors if of == "model"} == {
        "down.weight",
        "down.bias",
    }
    snapshot.restore(model, optimizer)


def test_tensors_added_after_the_copy_do_not_change():
    training, snapshot = Training().run(2), Snapshot()
    snapshot.take(2, training.model, training.optimizer)
    training.model.register_buffer("late", torch.ones(3))
    snapshot.restore(training.model, training.optimizer)
    assert training.model.late.sum() == 3


def test_a_snapshot_is_restored_several_times():
    """LBFGS changes the lists of its state in place."""
    model = network()
    optimizer, snapshot = torch.optim.LBFGS(model.parameters(), max_iter=3), Snapshot()

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    snapshot.take(1, model, optimizer)
    count = len(optimizer.state_dict()["state"][0]["old_dirs"])
    for _ in range(2):
        optimizer.step(closure)
        snapshot.restore(model, optimizer)
        assert len(optimizer.state_dict()["state"][0]["old_dirs"]) == count


def test_a_copy_is_trusted_after_quiet_steps_and_dropped_after_an_alarm():
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    snapshots = Snapshots(quiet=10)
    for step in range(25):
        snapshots.tend(step, model, optimizer)
    assert snapshots.good is not None
    assert snapshots.good.step == 10  # the copy of step 20 is not trusted yet
    snapshots.distrust()
    snapshots.tend(30, model, optimizer)
    assert snapshots.good.step == 10
    snapshots.tend(40, model, optimizer)
    assert snapshots.good.step == 30


@pytest.mark.long
def test_a_run_that_breaks_is_rolled_back_and_recovers():
    training = Training(act="roll back", quiet=40).run(150)
    expected = Training().run(400)
    with torch.no_grad():
        for p in training.model.parameters():
            p.mul_(30)
    training.run(300)
    assert event_kinds(training.guard) == ["alarm", "confirmed", "roll back"]
    assert training.guard.events[-1].step <= 160

    def loss(model):
        x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        return (model(x) - x.roll(1, dims=1).tanh()).square().mean()

    assert loss(training.model) < 1.05 * loss(expected.model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_layers_that_are_unfrozen_later_are_rolled_back(name):
    """A rollback restores the values that they had while they were frozen."""
    training = Training(OPTIMIZERS[name], act="roll back", quiet=5, every=1)
    first = training.model[0]
    first.requires_grad_(False)
    training.run(23)
    before = first.weight.detach().clone()
    first.requires_grad_(True)
    training.run(2).run(1, factor=torch.nan).run(2)
    assert "roll back" in event_kinds(training.guard)
    assert all(p.isfinite().all() for p in training.model.parameters())
    assert training.guard.events[-1].step < 30
    unfrozen = next(e for e in training.guard.events if e.kind == "roll back")
    assert "step" in unfrozen.message
    # Few steps ran since the copy, so the layer has changed little.
    assert (first.weight - before).abs().max() < 0.05


@pytest.mark.long
def test_layers_that_are_unfrozen_in_the_backward_are_rolled_back():
    model = network()
    model[0].requires_grad_(False)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=1e-3)
    fp8pass.optim.step_in_backward(model, optimizer)
    guard = Guard(None, optimizer, model=model, act=("roll back",), every=1, quiet=5)
    for step in range(30):
        model[0].requires_grad_(step >= 20)
        x = torch.randn(32, 16)
        loss = model(x).square().mean() * (torch.nan if step == 25 else 1)
        loss.backward()
        guard.step(loss)
    assert "roll back" in event_kinds(guard)
    assert all(p.isfinite().all() for p in model.parameters())


def test_unfrozen_layers_are_watched():
    """Frozen layers are no longer watched."""
    training = Training(every=1)
    for part, trained in ((0, False), (2, False), (0, True), (4, False)):
        training.model[part].requires_grad_(trained)
        training.run(12)
        names = {name for name, p in training.model.named_parameters() if p.requires_grad}
        assert {".".join(name) for name in training.guard._norms.names} == names
    assert not training.guard.events
    with torch.no_grad():
        training.model[0].weight.fill_(torch.nan)
    training.run(2)
    assert "0 weight" in training.guard.events[0].message


def test_missing_good_weights_are_reported():
    training = Training(act="roll back", quiet=100).run(50).run(100, factor=torch.nan)
    assert event_kinds(training.guard) == ["alarm", "confirmed", "no roll back"]


@pytest.mark.long
def test_rolling_back_ends_after_several_attempts():
    training = Training(act="roll back", quiet=20).run(60)
    training.run(20 * MOST_ROLLBACKS + 60, factor=torch.nan)
    _, _, *done = event_kinds(training.guard)
    assert done[: MOST_ROLLBACKS + 1] == ["roll back"] * MOST_ROLLBACKS + ["no roll back"]


# --- learning rates -----------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_rate_is_lower_only_during_the_step(rate):
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=rate)
    lower = LowerRate(optimizer)
    lower.factor = 0.1
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == pytest.approx(1 - 0.05)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    lower.close()
    optimizer.step()
    assert p.item() == pytest.approx(1 - 0.05 - 0.5)


def test_groups_that_share_a_tensor_are_lowered_once():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [p]} for p in parameters]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    LowerRate(optimizer).factor = 0.1
    for p in parameters:
        p.grad = torch.ones(1)
    optimizer.step()
    assert [p.item() for p in parameters] == pytest.approx([0.95, 0.95])
    assert float(optimizer.param_groups[1]["lr"]) == 0.5


def test_a_step_that_fails_does_not_change_the_rate():
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.5)
    lower = LowerRate(optimizer)
    lower.factor = 0.1

    def fails():
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(fails)
    p.grad = torch.ones(1)
    optimizer.step()
    assert p.item() == pytest.approx(0.95)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_schedules_are_not_affected_by_a_guard():
    def rates(act):
        training = Training(act=act, hold=20, quiet=10)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 100)
        found = []
        for step in range(100):
            training.run(1, factor=torch.nan if step == 50 else 1.0)
            schedule.step()
            found.append(training.optimizer.param_groups[0]["lr"])
        return found, event_kinds(training.guard)

    plain, _ = rates(())
    lowered, done = rates("lower lr")
    assert "lower lr" in done
    assert lowered == plain


def test_alarms_in_a_row_lower_the_rate_further_and_for_longer():
    guard = guard_losses([1.0] * 5, act="lower lr", hold=10, quiet=5)
    for step in range(60):
        guard.step(torch.nan if step % 5 == 0 else 1.0)
    messages = [e.message for e in guard.events if e.kind == "lower lr"]
    assert messages[0] == "learning rates ×0.1 for 10 steps"
    assert messages[1] == "learning rates ×0.01 for 10 steps"


@pytest.mark.long
def test_lowering_rates_of_updates_in_the_backward_is_refused():
    model = network()
    optimizer = fp8pass.optim.AdamW(model.parameters())
    fp8pass.optim.step_in_backward(model, optimizer)
    with pytest.raises(ConfigError, match="'lower lr' has no effect with"):
        Guard(None, optimizer, model=model, act="lower lr")
    Guard(None, optimizer, model=model)


@pytest.mark.long
def test_attaching_an_optimizer_later_is_refused():
    model = network()
    optimizer = fp8pass.optim.AdamW(model.parameters())
    guard = Guard(None, optimizer, model=model, act="lower lr")
    fp8pass.optim.step_in_backward(model, optimizer)
    with pytest.raises(ConfigError, match="'lower lr' has no effect with"):
        guard.step(1.0)


def test_a_loss_of_several_numbers_is_refused():
    with pytest.raises(ValueError, match=r"one number each, got a tensor of shape \(2,\)"):
        guard_losses([torch.ones(2)])


# --- high precision -----------------------------------------------------------------------------


def gradient(run, model):
    model.zero_grad()
    run(BATCHES[0]).float().square().mean().backward()
    return model.up.weight.grad.clone(), model.down.weight.grad.clone()


@pytest.mark.long
@pytest.mark.parametrize("fallback", ["*", ("down",)], ids=["all", "one layer"])
def test_the_fallback_computes_what_skipped_layers_compute(fallback):
    model = MLP().bfloat16()
    monitor = Monitor(every=1000, fallback=fallback)
    monitor.resume(1)
    run = monitored(model, monitor)
    low = gradient(run, model)
    monitor.falls_back = True
    high = gradient(run, model)
    monitor.falls_back = False
    assert all(map(identical, gradient(run, model), low))
    torch._dynamo.reset()
    skipped = replace(COAT_EAGER, skip=(fallback,) if fallback == "*" else fallback)
    expected = gradient(torch.compile(model, backend=fp8pass.backend(skipped)), model)
    assert all(map(identical, high, expected))
    assert not all(map(identical, high, low))


def test_a_guard_switches_to_high_precision_for_some_steps():
    model, monitor = MLP().bfloat16(), Monitor(fallback="*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"act": "high precision", "hold": 20, "quiet": 10}
    guard = Guard(monitor, optimizer, model=model, **options)
    found = []
    for step in range(40):
        guard.step(torch.nan if step == 2 else 1.0)
        found.append(monitor.falls_back)
    assert found == [False] * 4 + [True] * 20 + [False] * 16
    kinds = event_kinds(guard)
    kinds.remove("confirmed")  # before or after the switch
    assert kinds == ["alarm", "high precision", "end of high precision"]


def test_actions_are_taken_in_order():
    model, monitor = MLP().bfloat16(), Monitor(fallback="*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(
        monitor, optimizer, model=model, act=("high precision", "lower lr"), hold=50, quiet=10
    )
    for step in range(30):
        guard.step(torch.nan if step in (2, 20) else 1.0)
    done = [e.kind for e in guard.events if e.kind in ("high precision", "lower lr")]
    assert done == ["high precision", "high precision", "lower lr"]
