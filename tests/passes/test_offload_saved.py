"""Offloaded tensors: the same numbers, the planned buffers, and copies in time."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from helpers import (
    assert_same_step,
    benchmark_models,
    capture_joint,
    compiled,
    count_planned,
    count_saved,
    relative,
    step,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from fp8pass import explain, graph
from fp8pass.activation_memory import host_transfer
from fp8pass.config import Config
from fp8pass.graph.flops import is_expensive
from fp8pass.option_checks import ConfigError
from fp8pass.passes import JOINT_PASSES, offload_saved
from fp8pass.passes.runner import run_passes
from fp8pass.plan import HostCopy, Offload
from fp8pass.runtime import copies
from fp8pass.runtime.copies import from_host, settled, to_host
from fp8pass.testing.strategies import programs

# A bandwidth that is as fast for a tiny model as a real link is for a real model.
FAST = 5e12
HOST = {"memory_budget": 0.3, "offload": True, "host_bandwidth": FAST}


@pytest.fixture(autouse=True)
def small_tensors(monkeypatch):
    monkeypatch.setattr(host_transfer, "SMALLEST_COPY", 1 << 10)


def config(recipe: str = "coat", **changes) -> Config:
    return Config.recipe(recipe, **{"compiler": "eager", **HOST, **changes})


def decoder(layers: int = 1, seq: int = 32):
    models = benchmark_models()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, seq, 128, generator=generator).bfloat16().requires_grad_()
    torch.manual_seed(0)
    model = models.Stack(layers, 128, 4, 352).bfloat16()
    return model, (x, *models.rope_tables(seq, 32, torch.device("cpu")))


def mlp(width: int = 64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    return model, (torch.randn(64, width).requires_grad_(),)


def in_buffers() -> int:
    """Bytes of host buffers in use."""
    return copies.lane_of(torch.device("cpu")).buffers.used


def train(make, options, monkeypatch=None, **how):
    """A step and its plan; with `monkeypatch` the plan is the same, but nothing is copied."""
    torch._dynamo.reset()
    if monkeypatch:
        monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "offload_saved")
    model, args = make()
    program, spy = compiled(model, options, **how)
    found = step(program, model, args)
    if monkeypatch:
        monkeypatch.delenv("FP8PASS_DISABLE_PASSES")
    return found, spy.plan


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["agoq", "linear"])
def test_copies_change_no_number(recipe, monkeypatch):
    got, plan = train(decoder, config(recipe))
    want, beside = train(decoder, config(recipe), monkeypatch)
    assert plan.offload.bytes > 0
    assert beside.offload is None
    assert_same_step(got, want)
    assert plan.saved_bytes + plan.offload.bytes == beside.saved_bytes
    assert not copies._unsettled


@pytest.mark.long
def test_recipe_exact_is_exact_with_offload():
    want, _ = train(decoder, Config.recipe("exact", compiler="eager"))
    got, plan = train(decoder, config("exact"))
    assert plan.offload.bytes > 0
    assert_same_step(got, want)


@pytest.mark.long
def test_generated_code(monkeypatch):
    got, plan = train(mlp, config("exact", compiler="inductor"))
    want, _ = train(mlp, config("exact", compiler="inductor"), monkeypatch)
    assert plan.offload.bytes > 0
    assert_same_step(got, want)
    assert not copies._unsettled
    assert in_buffers() == 0


@pytest.mark.long
@settings(max_examples=4)
@given(programs(), st.floats(0.2, 0.8))
def test_random_programs_give_the_same_bits(case, budget):
    program, inputs = case

    def run(options):
        torch._dynamo.reset()
        twin = copy.deepcopy(program)
        return step(compiled(twin, options)[0], twin, inputs)

    want = run(Config.recipe("exact", compiler="eager"))
    try:
        got = run(config("exact", memory_budget=budget))
    except Exception as error:
        assert "cannot be met" in str(error)  # noqa: PT017
        return
    assert_same_step(got, want)


@pytest.mark.long
def test_dynamic_shapes():
    torch._dynamo.reset()
    model, _ = decoder()
    program, spy = compiled(model, config("exact"), dynamic=True)
    plain, other = compiled(model, Config.recipe("exact", compiler="eager"), dynamic=True)
    for seq in (32, 48, 96):
        _, args = decoder(seq=seq)
        assert_same_step(step(program, model, args), step(plain, model, args))
    assert len(spy.plans) == len(other.plans)
    assert all(plan.offload.bytes > 0 for plan in spy.plans)


# --- who holds what -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "exact"])
def test_autograd_saves_the_planned_tensors(recipe):
    torch._dynamo.reset()
    model, args = decoder()
    program, spy = compiled(model, config(recipe))
    kept = count_saved(program, args, args[:1])
    plan = spy.plan
    assert kept == count_planned(plan)
    assert plan.saved_bytes <= 0.3 * sum(s.bytes + s.host_bytes for s in plan.saved)
    assert plan.offload.bytes == sum(s.host_bytes for s in plan.saved)
    assert in_buffers() == 0
    loss = program(*args).float().sum()
    assert plan.offload.bytes <= in_buffers() <= plan.offload.bytes * 9 / 8 + 512 * len(plan.saved)
    loss.backward()
    assert in_buffers() == 0


@pytest.mark.long
def test_scales_and_statistics_stay(monkeypatch):
    monkeypatch.setattr(host_transfer, "SMALLEST_COPY", 1 << 13)
    _, plan = train(decoder, config())
    away = [t for s in plan.saved for t in s.tensors if t.on_host]
    assert away
    assert all(t.bytes >= 1 << 13 for t in away)
    low_bits = [s for s in plan.saved if "×" in s.saved_as and s.host_bytes]
    assert low_bits
    assert all(not s.tensors[-1].on_host and s.bytes == s.tensors[-1].bytes for s in low_bits)


@pytest.mark.long
def test_forwards_before_their_backwards():
    """Every call has its own buffers, which the next step reuses."""
    torch._dynamo.reset()
    model, (x, *tables) = decoder()
    program, spy = compiled(model, config("exact"))
    batches = [x.detach() * (i + 1) for i in range(3)]
    losses = [program(b, *tables).float().sum() for b in batches]
    assert in_buffers() >= 3 * spy.plan.offload.bytes
    for loss in losses:
        loss.backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    plain, _ = compiled(model, Config.recipe("exact", compiler="eager"))
    for loss in [plain(b, *tables).float().sum() for b in batches]:
        loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(got[name], p.grad), name
    taken = copies.lane_of(torch.device("cpu")).buffers._taken
    program(x, *tables).float().sum().backward()
    assert copies.lane_of(torch.device("cpu")).buffers._taken == taken


@pytest.mark.long
def test_a_backward_that_runs_twice_and_one_that_never_does():
    torch._dynamo.reset()
    model, args = decoder()
    program, _ = compiled(model, config("exact"))
    loss = program(*args).float().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del loss
    dropped = program(*args)
    assert in_buffers() > 0
    del dropped
    assert in_buffers() == 0


# --- decisions ----------------------------------------------------------------------------------


@pytest.mark.long
def test_without_need_nothing_is_on_the_host():
    _, plan = train(decoder, config(memory_budget=None))
    assert plan.offload is None
    assert "set memory_budget" in plan.summary()
    _, roomy = train(decoder, config(memory_budget=1.0))
    assert roomy.offload is None


@pytest.mark.long
def test_a_slow_link_is_not_used():
    _, plan = train(decoder, config(memory_budget=0.6, host_bandwidth=1e3))
    assert plan.offload is None


@pytest.mark.long
def test_an_error_about_a_budget_knows_of_the_host():
    with pytest.raises(Exception, match="or save values in host memory with offload=True"):
        train(decoder, config(memory_budget=0.01, offload=False))


@pytest.mark.long
def test_tensors_that_the_link_can_carry_are_not_recomputed():
    def gemms(**changes) -> int:
        found = joint(config("exact", memory_budget=0.4, **changes))
        return sum(d.recomputed and is_expensive(n) for n, d in found.ctx.decisions.items())

    assert gemms(offload=False) > gemms(host_bandwidth=1e14)


def test_results_leaves_and_parameters_are_never_sent():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            shown, hidden = torch.tanh(self.a(x)), torch.tanh(self.b(x))
            return shown.view(-1), (hidden * shown).exp() * hidden

    x = torch.randn(64, 64, requires_grad=True)
    found = capture_joint(Shows(), x, config=config("exact", memory_budget=0.7))
    run_passes(JOINT_PASSES, found.gm, found.ctx)
    sent = [n.args[0] for n in found.calls(to_host)]
    results = {
        host_transfer.base(n) for n in graph.outputs(found.gm.graph) if isinstance(n, fx.Node)
    }
    assert sent
    assert results.isdisjoint(map(host_transfer.base, sent))
    assert all(n.op != "placeholder" for n in sent)


def joint(options: Config, layers: int = 2):
    """A joint graph after all passes, and its context."""
    model, args = decoder(layers)
    found = capture_joint(model, *args, config=options)
    run_passes(JOINT_PASSES, found.gm, found.ctx)
    return found


@pytest.mark.long
def test_where_copies_are():
    found = joint(config("exact", host_bandwidth=2e12))
    nodes = list(found.gm.graph.nodes)
    order = {n: i for i, n in enumerate(nodes)}
    sent, back = found.calls(to_host), found.calls(from_host)
    assert len(sent) == len(back) == len(found.ctx.plan.offload.copies) > 2
    for node in sent:
        assert set(nodes[order[node.args[0]] : order[node]]).isdisjoint(node.args[0].users)
        (crossing,) = node.users
        assert crossing.target is settled
        assert crossing in found.ctx.saved
        assert node.args[0] not in found.ctx.saved
    for node in back:
        (here,) = node.users
        first = min(here.users, key=order.__getitem__)
        assert order[here] < order[first]
        anchor = node.args[2]
        assert anchor is None or order[anchor] < order[node]
    anchored = [n for n in back if n.args[2] is not None]
    assert len(anchored) >= len(back) - 2
    assert max(order[next(iter(n.users))] - order[n] for n in back) > 2  # ahead of use


@pytest.mark.long
def test_little_is_on_its_way_at_once(monkeypatch):
    monkeypatch.setattr(offload_saved_module(), "IN_FLIGHT_SECONDS", 0.0)
    found = joint(config("exact", host_bandwidth=4e11, memory_budget=0.1), layers=4)
    offload = found.ctx.plan.offload
    largest = sorted(c.bytes for c in offload.copies)[-2:]
    assert offload.in_flight_bytes <= sum(largest) < offload.bytes
    sizes = {n: n.meta["val"].nbytes for n in found.gm.graph.nodes if n.target is from_host}
    on_way = most = 0
    for node in found.gm.graph.nodes:
        if node.target is from_host:
            on_way += sizes[node]
            most = max(most, on_way)
        elif node.target is settled and node.args[0] in sizes:
            on_way -= sizes[node.args[0]]
    assert on_way == 0
    assert most <= sum(largest)


def offload_saved_module():
    import importlib

    return importlib.import_module("fp8pass.passes.joint.offload_saved")


@pytest.mark.long
def test_a_pass_that_has_nothing_to_send_changes_nothing():
    found = joint(config(memory_budget=0.6, offload=False))
    before = found.code
    offload_saved(found.gm, found.ctx)
    assert found.code == before


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_host_that_is_too_small(monkeypatch):
    monkeypatch.setattr(offload_saved_module(), "available", lambda: 4096)
    with pytest.raises(Exception, match=r"but only .* GiB are free: raise memory_budget"):
        train(decoder, config())


def test_exposed_copies_are_logged_before_the_first_step(caplog):
    copies_ = [HostCopy("a", "8×8", "bfloat16", 10**9, 0.01, 0.01)]
    warn = offload_saved_module()._warn_about_exposed_copies
    with caplog.at_level(logging.WARNING, "fp8pass"):
        warn(Offload(50e9, 0.1, 0.2, copies_))
        assert not caplog.records
        warn(Offload(50e9, 0.1, 0.2, copies_, wait_s=0.012))
    (record,) = caplog.records
    assert "take 40 ms per step, at 50 GB/s; 12 ms of them are exposed" in record.getMessage()


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5)), max_size=6),
    st.floats(10, 12),
)
def test_waits(sent, end):
    """Compare with a simulation of the link, which carries one copy at a time, in order."""
    free = 0.0
    for made, seconds in sorted(sent):
        free = (made if made > free else free) + seconds
    left = ((end - made, seconds) for made, seconds in sent)
    assert host_transfer.exposed_seconds(left) == pytest.approx(max(free - end, 0))
    now = delay = 0.0
    for used, seconds in sorted(sent):
        now += seconds
        delay += max(now - (used + delay), 0)
    assert host_transfer.exposed_seconds(sent) == pytest.approx(delay)


def test_cuda_graphs_are_refused():
    model, args = mlp()
    program = torch.compile(model, backend="fp8pass", options={**HOST, "triton.cudagraphs": True})
    with pytest.raises(Exception, match="incompatible with CUDA graphs"):
        program(*args)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "saved"}, "offload must be a bool"),
        ({"host_bandwidth": 0}, "bytes per second, such as 25e9"),
        ({"host_bandwidth": "25GB"}, "bytes per second, such as 25e9"),
        ({"host_bandwith": 1e9}, "Did you mean 'host_bandwidth'"),
    ],
)
def test_wrong_options(options, says):
    with pytest.raises(ConfigError, match=says):
        Config(**options)


@pytest.mark.long
def test_explain_reports_where_tensors_are(tmp_path):
    torch._dynamo.reset()
    model, args = decoder()
    explanation = explain(model, *args, config=config(), frontier=True)
    text, data = str(explanation), explanation.to_dict()
    plan = data["graphs"][0]
    assert "saved in host memory" in text
    assert "MiB on host" in text
    assert "Saved in host memory:" in text
    assert plan["host_bytes"] == sum(c["bytes"] for c in plan["offload"]["copies"]) > 0
    assert any(p["host_bytes"] for p in plan["frontier"])
    explanation.save(tmp_path / "report.html")
    assert "in host memory" in (tmp_path / "report.html").read_text()


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_on_a_gpu_offloaded_tensors_take_no_memory(compiler, monkeypatch):
    """Allocated bytes equal the plan, and the numbers equal a step without copies."""
    monkeypatch.undo()
    models = benchmark_models()
    torch.manual_seed(0)
    model = models.Stack(4, 1024, 8, 2816).cuda().bfloat16()
    x = torch.randn(4, 2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    args = (x, *models.rope_tables(2048, 128, x.device))
    # The test has its own link, since other processes may use the link of the machine.
    options = Config(compiler=compiler, memory_budget=0.4, offload=True, host_bandwidth=4e11)

    def run(disabled):
        torch._dynamo.reset()
        monkeypatch.setenv("FP8PASS_DISABLE_PASSES", disabled)
        program, spy = compiled(model, options)
        found = step(program, model, args)
        del found.outputs[:]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = program(*args)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - y.nbytes
        del y
        return found, held, spy.plan

    got, held, plan = run("")
    want, held_without, without = run("offload_saved")
    assert plan.offload.bytes > 0.2 * without.saved_bytes
    assert held <= plan.saved_bytes * 1.03 + 2**21
    assert held_without - held > 0.95 * plan.offload.bytes
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < (1e-3 if compiler == "eager" else 0.05)
