"""`capture_step` trains as the same step without a CUDA graph, and refuses what it would skip."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass import hardware
from fp8pass.config import Config
from fp8pass.optim import AdamW, Muon, capture_step, captured_step, step_in_backward
from fp8pass.optim.captured_step import CapturedStep
from fp8pass.option_checks import ConfigError

STEPS = 8


class Model(nn.Module):
    def __init__(self, *, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.dropout, self.checkpointed = dropout, checkpointed

    def block(self, x):
        h = nn.functional.dropout(nn.functional.gelu(self.up(x)), self.dropout)
        return x + self.down(h)

    def forward(self, x):
        y = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return (y.float() - x.float().roll(1, -1)).square().mean()


def adamw(model):
    return [AdamW(model.parameters(), lr=0.01)]


def stock_adamw(model):
    return [torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)]


def muon(model):
    weights = [model.up.weight, model.down.weight]
    return [Muon(weights, lr=0.02), AdamW([model.up.bias, model.down.bias], lr=0.01)]


def batches(steps=STEPS, micro=2, rows=128, device="cpu"):
    torch.manual_seed(1)
    return torch.randn(steps, micro, rows, 64, device=device).bfloat16()


def step_of(model, optimizers, program):
    def step(xs):
        total = 0.0
        for x in xs:
            loss = program(x) / len(xs)
            loss.backward()
            total = total + loss
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": total, "norm": norm}

    return step


def make(optimizers=adamw, *, device="cpu", backend="fp8pass", options=None, **model):
    """Return a model, its optimizers, and a step that compiles the model.

    On a CPU, fp8pass runs graphs op by op, which saves the compilation of C++.
    """
    if device == "cpu" and backend == "fp8pass" and options is None:
        options = {"compiler": "eager"}
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = Model(**model).to(device, torch.bfloat16)
    program = torch.compile(network, backend=backend, options=options)
    chosen = optimizers(network)
    return network, chosen, step_of(network, chosen, program)


def train(step, data, between=lambda i: None):
    results = []
    for i, xs in enumerate(data):
        results.append(step(xs))
        between(i)
    return [r["loss"].item() for r in results], [r["norm"].item() for r in results]


def both(between=lambda network, optimizers, i: None, data=None, **how):
    """Train with and without a CUDA graph. Return losses, norms and weights of both."""
    found = []
    data = batches(device="cuda") if data is None else data
    for captures in (False, True):
        network, optimizers, step = make(device="cuda", **how)
        if captures:
            step = capture_step(step)
        numbers = train(step, data, lambda i, n=network, o=optimizers: between(n, o, i))
        found.append((*numbers, [p.detach().clone() for p in network.parameters()]))
        if captures:
            assert step._graph is not None
    return found


def assert_equal(plain, captured):
    for want, got in zip(plain[:2], captured[:2], strict=True):
        assert got == pytest.approx(want, rel=1e-4)
    for want, got in zip(plain[2], captured[2], strict=True):
        # Learning rates in FP32 instead of FP64 change some stochastic roundings of weights.
        assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("optimizers", [adamw, stock_adamw, muon])
@pytest.mark.parametrize("backend", ["fp8pass", "inductor"])
def test_training_is_the_same(backend, optimizers):
    assert_equal(*both(optimizers=optimizers, backend=backend))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"recipe": "agoq"}, {"memory_budget": 0.5}])
def test_training_with_low_bit_saves_is_the_same(options):
    assert_equal(*both(options=options))


@pytest.mark.gpu
def test_training_with_checkpointing_is_the_same():
    assert_equal(*both(checkpointed=True))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizers", [adamw, stock_adamw, muon])
def test_learning_rates_are_read_in_each_step(optimizers):
    schedulers = {}

    def schedule(network, chosen, i):
        if network not in schedulers:
            schedulers[network] = [LambdaLR(o, lambda n: 1 / (1 + n)) for o in chosen]
        for scheduler in schedulers[network]:
            scheduler.step()

    def assign(network, chosen, i):
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + i)

    for between in (schedule, assign):
        plain, captured = both(between, optimizers=optimizers)
        assert_equal(plain, captured)


@pytest.mark.gpu
def test_other_numbers_are_captured_again():
    def weaken(network, chosen, i):
        if i == STEPS // 2:
            chosen[0].param_groups[0]["betas"] = (0.5, 0.9)

    assert_equal(*both(weaken, data=batches(2 * STEPS, device="cuda")))


@pytest.mark.gpu
def test_loaded_checkpoints_are_captured_again():
    states = {}

    def reload(network, chosen, i):
        if i == 1:
            states[network] = [
                {k: v.clone() for k, v in network.state_dict().items()},
                chosen[0].state_dict(),
            ]
        if i == STEPS // 2:
            network.load_state_dict(states[network][0])
            chosen[0].load_state_dict(states[network][1])

    assert_equal(*both(reload, data=batches(2 * STEPS, device="cuda")))


@pytest.mark.gpu
def test_layers_that_are_unfrozen_are_captured_again():
    def freeze(network, chosen, i):
        network.up.weight.requires_grad_(i >= STEPS // 2)

    plain, captured = both(freeze, data=batches(2 * STEPS, device="cuda"))
    assert_equal(plain, captured)


@pytest.mark.gpu
def test_other_shapes_run_as_usual():
    long, short = batches(device="cuda"), batches(1, rows=64, device="cuda")
    data = [*long[:6], short[0], *long[6:]]
    assert_equal(*both(data=data))


@pytest.mark.gpu
def test_replays_draw_other_random_numbers():
    _, optimizers, step = make(device="cuda", dropout=0.5)
    for group in optimizers[0].param_groups:
        group["lr"] = 0.0
    losses, _ = train(capture_step(step), batches(1, device="cuda").repeat(8, 1, 1, 1))
    assert len(set(losses)) == 8


@pytest.mark.gpu
def test_invalid_values_reach_the_caller():
    data = batches(device="cuda")
    data[-1, 0, 0, 0] = math.nan
    *_, step = make(device="cuda")
    losses, norms = train(capture_step(step), data)
    assert [math.isnan(x) for x in losses] == [False] * (STEPS - 1) + [True]
    assert math.isnan(norms[-1])


@pytest.mark.gpu
def test_results_are_copies():
    *_, step = make(device="cuda")
    step = capture_step(step)
    data = batches(device="cuda")
    first, second = [step(xs)["loss"] for xs in data][-2:]
    assert first.item() != second.item()
    assert not first.requires_grad


@pytest.mark.gpu
def test_reading_a_value_is_an_error():
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = AdamW([weight])

    def step(x):
        loss = (weight * x).sum()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = capture_step(step)
    x = torch.ones(4, device="cuda")
    for _ in range(2):
        step(x)
    with pytest.raises(RuntimeError, match=r"waits for the GPU.*\.item\(\)"):
        step(x)


# Without a GPU, a replay calls the step with the tensors of the capture.


@pytest.fixture
def replays_on_cpu(monkeypatch):
    """Capture steps on the CPU. Return the list of captures and replays."""
    calls = []

    def capture(self, device, key, args, kwargs):
        def replay():
            calls.append("replay")
            with self._observe_optimizers(device):
                for old, new in zip(
                    results.values(), self._step(*args, **kwargs).values(), strict=True
                ):
                    old.copy_(new.detach())

        calls.append("capture")
        results = {name: torch.zeros(()) for name in ("loss", "norm")}
        graph = SimpleNamespace(replay=replay)
        self._graph = captured_step._Graph(key, graph, self._inputs, results, self._states())

    monkeypatch.setattr(CapturedStep, "_capture", capture)
    monkeypatch.setattr(CapturedStep, "_on_stream", lambda self, device: nullcontext())
    monkeypatch.setattr(captured_step, "_captures", lambda device: True)
    monkeypatch.setattr(captured_step, "_refuse_waits", nullcontext)
    return calls


def on_cpu(between=lambda network, optimizers, i: None, data=None, **how):
    """Return losses, norms and weights without and with captures on the CPU."""
    found = []
    data = batches() if data is None else data
    for captures in (False, True):
        network, optimizers, step = make(**how, backend="eager")
        step = capture_step(step) if captures else step
        numbers = train(step, data, lambda i, n=network, o=optimizers: between(n, o, i))
        found.append((*numbers, [p.detach().clone() for p in network.parameters()]))
    return found


@pytest.mark.parametrize("optimizers", [adamw, muon])
def test_three_calls_run_as_usual(replays_on_cpu, optimizers):
    assert_equal(*on_cpu(optimizers=optimizers))
    assert replays_on_cpu == ["capture", *["replay"] * (STEPS - 3)]


def test_slices_and_expanded_tensors_are_copied(replays_on_cpu):
    data = [xs[:, :, :64] for xs in torch.cat([batches(), batches()], -1)]
    expanded = [xs[:, :1].expand(-1, 128, -1) for xs in data]
    assert_equal(*on_cpu(data=[*data[:5], *expanded[5:]]))
    assert replays_on_cpu.count("capture") == 1


def test_users_learning_rates_stay_theirs(replays_on_cpu):
    rates = []

    def restore(network, optimizers, i):
        for group in optimizers[0].param_groups:
            rates.append(group["lr"])
            group["lr"] = 0.0 if i % 2 else 0.01

    assert_equal(*on_cpu(restore))
    assert all(isinstance(rate, float) for rate in rates)


def test_shared_rate_tensors_are_not_overwritten(replays_on_cpu):
    rate = torch.tensor(0.01, dtype=torch.float64)
    groups = lambda n: [{"params": [n.up.weight]}, {"params": [n.down.weight, n.down.bias]}]  # noqa: E731

    def change(network, optimizers, i):
        optimizers[0].param_groups[0]["lr"] = 0.02
        rate.fill_(0.01 / (1 + i))

    def make_optimizer(network):
        network.up.bias.requires_grad_(False)
        rate.fill_(0.01)
        return [AdamW(groups(network), lr=rate)]

    assert_equal(*on_cpu(change, optimizers=make_optimizer))
    assert "replay" in replays_on_cpu


def test_a_call_that_replaces_states_drops_the_graph(replays_on_cpu):
    """The graph would update states that no longer exist."""

    def freeze(network, optimizers, i):
        network.up.weight.requires_grad_(i != 4)

    assert_equal(*on_cpu(freeze, data=batches(12)))
    assert replays_on_cpu.count("capture") == 2


def test_other_batches_do_not_count_as_equal_calls(replays_on_cpu, caplog):
    long, short = batches(30), batches(30, rows=64)
    data = [*long[:4], *(xs for pair in zip(short, long, strict=True) for xs in pair)]
    assert_equal(*on_cpu(data=data))
    assert replays_on_cpu.count("capture") == 1
    assert not caplog.records


def test_steps_that_are_never_captured_are_reported(replays_on_cpu, caplog):
    def change(network, optimizers, i):
        optimizers[0].param_groups[0]["weight_decay"] = 0.1 / (1 + i)

    on_cpu(change, data=batches(22))
    assert not replays_on_cpu
    assert "captured none of the last 20 calls" in caplog.text


def test_graphs_are_freed_with_the_function(replays_on_cpu):
    *_, step = make(backend="eager")
    step = capture_step(step)
    train(step, batches(5))
    found = ref(step)
    del step
    gc.collect()
    assert found() is None


def test_a_step_on_the_cpu_runs_as_usual():
    want = train(make()[2], batches(3))
    *_, step = make()
    assert train(capture_step(step), batches(3)) == want


def test_launches_are_not_counted(monkeypatch):
    monkeypatch.setattr(hardware, "rates_of", lambda device: hardware.GPUS["H200"])
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 10.0)
    limits, keys = [], []
    for captures in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        network = Model().bfloat16()
        seen = []
        backend = fp8pass.dynamo.Backend(Config(compiler="eager"), seen.append)
        optimizers = adamw(network)
        step = step_of(network, optimizers, torch.compile(network, backend=backend))
        step = capture_step(step) if captures else step
        step(batches(1)[0])
        limits.append(bool(seen[0].ctx.launch_limit))
        with hardware.launching_at_once() if captures else hardware.planning_for(None):
            keys.append(fp8pass.compilation.Compilation(Config(), None).cache_key())
    assert limits == [True, False]
    assert keys[0] != keys[1]


def test_gradients_must_be_dropped(replays_on_cpu):
    network = Model()
    optimizer = AdamW(network.parameters())

    def step(x):
        network(x).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"Call optimizer\.zero_grad\(\)"):
        capture_step(step)(torch.randn(4, 64))


@pytest.mark.parametrize("argument", [torch.nn.Linear(2, 2), {"x": object()}])
def test_arguments_must_have_known_types(argument):
    *_, step = make()
    with pytest.raises(ConfigError, match="must be tensors, numbers"):
        capture_step(step)(argument)


@pytest.mark.gpu
def test_the_batch_must_be_on_the_gpu():
    *_, step = make(device="cuda")
    captured, (batch,) = capture_step(lambda batch: step(batch.cuda())), batches(1)
    with pytest.raises(ConfigError, match="batch and all parameters on one GPU"):
        captured(batch)


@pytest.mark.gpu
def test_optimizers_must_be_capturable():
    network, _, _ = make(device="cuda")
    optimizer = torch.optim.AdamW(network.parameters())
    with pytest.raises(ConfigError, match="Create AdamW with capturable=True"):
        capture_step(step_of(network, [optimizer], network))(batches(1)[0].cuda())


def test_offloaded_states_are_refused():
    network, _, _ = make()
    optimizer = AdamW(network.parameters(), offload=("states",))
    with pytest.raises(ConfigError, match="cannot capture AdamW with offload="):
        capture_step(step_of(network, [optimizer], network))(batches(1)[0])


def test_steps_in_the_backward_are_refused():
    network, optimizers, step = make()
    step_in_backward(network, *optimizers, accumulate=8)
    with pytest.raises(ConfigError, match=r"Hooks of AdamW\.step\(\)"):
        capture_step(step)(batches(1)[0])


def test_a_step_without_an_optimizer_is_refused():
    network, optimizers, _ = make()
    step_in_backward(network, *optimizers)

    def backward(xs):
        loss = network(xs[0])
        loss.backward()
        return loss

    with pytest.raises(ConfigError, match="With step_in_backward, call the function without"):
        capture_step(backward)(batches(1)[0])


def test_schedulers_must_be_called_outside(replays_on_cpu):
    """The first call finds the optimizers, and the second call notices the scheduler."""
    _, chosen, step = make()
    schedulers = [LambdaLR(optimizer, lambda n: 1 / (1 + n)) for optimizer in chosen]

    def whole(xs):
        results = step(xs)
        for scheduler in schedulers:
            scheduler.step()
        return results

    first, second = batches(2)
    captured = capture_step(whole)
    captured(first)
    with pytest.raises(RuntimeError, match=r"call scheduler\.step\(\) after the function"):
        captured(second)
    rates = [group["lr"] for optimizer in chosen for group in optimizer.param_groups]
    assert all(isinstance(rate, float) for rate in rates)


def test_a_guard_is_refused():
    network, optimizers, step = make()
    monitor = fp8pass.Monitor()
    guard = fp8pass.Guard(monitor, *optimizers, model=network)
    with pytest.raises(ConfigError, match="such as a Guard's"):
        capture_step(step)(batches(1)[0])
    guard.close()
    monitor.close()


def test_a_monitor_is_refused():
    monitor = fp8pass.Monitor()
    backend = fp8pass.backend(fp8pass.Config(compiler="eager"), monitor=monitor)
    *_, step = make(backend=backend)
    with pytest.raises(ConfigError, match="capture_step replays one version"):
        capture_step(step)(batches(1)[0])
    monitor.close()


@pytest.mark.parametrize("options", [{"offload": True}, {"triton.cudagraphs": True}])
def test_other_owners_of_memory_are_refused(options):
    *_, step = make(options=options)
    with pytest.raises(BackendCompilerFailed, match="capture_step"):
        capture_step(step)(batches(1)[0])
