"""`Monitor` names and measures quantized tensors in sampled steps, and changes no result."""

from __future__ import annotations

import csv
import gc
import itertools
import math
import timeit

import pytest
import torch
from helpers import (
    COAT_EAGER,
    EXACT_EAGER,
    MLP,
    Spy,
    assert_same_step,
    gpt2,
    identical,
    llama,
    relative,
    step,
    tokens,
)
from monitor_helpers import BATCHES, Broken, batches, monitored, train
from torch import nn
from torch._dynamo.utils import counters

import fp8pass
from fp8pass import Config, Monitor, compat
from fp8pass.dialect import ops
from fp8pass.dialect.quantization import parse
from fp8pass.dynamo import Backend
from fp8pass.stability.monitor import sampler
from fp8pass.stability.monitor.sampler import Versions, dispatch
from fp8pass.tools.saved_bytes import saved_bytes

AGOQ_EAGER = Config.recipe("agoq", compiler="eager", error_tolerance=math.inf)

# --- names --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "config", [COAT_EAGER, AGOQ_EAGER, Config.recipe("linear", compiler="eager")]
)
def test_every_tensor_of_a_llama_is_named(config):
    spy, monitor = Spy(), Monitor()
    model = llama().bfloat16()
    run = torch.compile(model, backend=Backend(config, spy, hooks=(Versions(monitor),)))
    run(input_ids=tokens(), labels=tokens()).loss.backward()
    monitor.step()
    plan = spy.plan
    of_linears = {(r.module, r.tensor) for r in monitor.latest if "saved" not in r.tensor}
    expected = {
        (y.module, operand)
        for y in plan.linears
        if y.fp8
        for operand in ("input", "weight", "gradient")
    }
    assert len(expected) == 7 * 3
    assert of_linears == expected
    saved = [r for r in monitor.latest if "saved" in r.tensor]
    low_bit = [s for s in plan.saved if "1×" in s.saved_as]
    assert sorted((r.module, f"{r.format} {r.scales}") for r in saved) == sorted(
        (s.module, s.saved_as) for s in low_bit
    )
    assert len({(r.module, r.tensor, r.scales) for r in monitor.latest}) == len(monitor.latest)


def test_noise_of_blocks_is_that_of_their_quantization():
    """Weights have a scale for 128×128 elements, and inputs a scale for 1×128 elements."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 384, bias=False).bfloat16()
    x = torch.randn(128, 256).bfloat16() * torch.logspace(-3, 3, 256).bfloat16()
    with torch.no_grad():
        layer.weight *= torch.logspace(-3, 3, 256).bfloat16()
    monitor, config = Monitor(), Config.recipe("block", fp8_gemms="all", compiler="eager")
    torch.compile(layer, backend=fp8pass.backend(config, monitor=monitor))(x).sum().backward()
    monitor.step()
    rows = {(r.tensor, r.scales): r for r in monitor.latest}
    for name, tensor, block in (("weight", layer.weight, "128×128"), ("input", x, "1×128")):
        how = parse(f"e4m3 {block} fp32")
        scale = how.scale(how.amax(tensor.detach()))
        found = ops.quantize(tensor.detach(), scale, str(how))
        back = ops.dequantize([found], scale, str(how), torch.float32).double()
        noise = (tensor.double() - back).square().sum() / tensor.double().square().sum()
        assert rows[name, block].sqnr_db == pytest.approx(-10 * noise.log10().item(), abs=0.01)


@pytest.mark.long
def test_names_of_operands_are_right():
    """This includes weights that are stored as [in, out], as in GPT-2."""
    for model in (gpt2(), llama()):
        monitor = Monitor()
        run = monitored(model, monitor)
        run(input_ids=tokens(), labels=tokens()).loss.backward()
        monitor.step()
        weights = {
            name.rpartition(".")[0]: p for name, p in model.named_parameters() if p.ndim == 2
        }
        rows = [r for r in monitor.latest if r.tensor == "weight"]
        assert rows
        for row in rows:
            assert row.elements % weights[row.module].numel() == 0
            assert row.amax == weights[row.module].abs().max().item()
        torch._dynamo.reset()


@pytest.mark.long
def test_blocks_compiled_separately_have_different_names():
    monitor = Monitor()
    model = llama(num_hidden_layers=3).bfloat16()
    monitor.model = model
    for layer in model.model.layers:
        layer.compile(backend=fp8pass.backend(COAT_EAGER, monitor=monitor))
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    monitor.step()
    gradients = {r.module: r for r in monitor.latest if r.tensor == "gradient"}
    assert {m.split(".mlp")[0] for m in gradients if "mlp" in m} == {
        f"model.layers.{i}" for i in range(3)
    }
    for module, row in gradients.items():
        rows, (features, _) = tokens().numel(), model.get_submodule(module).weight.shape
        assert row.elements == rows * features
    assert any(r.module.startswith("model.layers.2") for r in monitor.latest if "saved" in r.tensor)


@pytest.mark.long
def test_layers_are_named_across_graph_breaks():
    monitor = Monitor()
    model = Broken().bfloat16()
    monitored(model, monitor)(batches(1)[0]).sum().backward()
    monitor.step()
    modules = {r.module for r in monitor.latest if r.tensor == "gradient"}
    assert modules == {"first.up", "first.down", "second.up", "second.down"}


# --- nothing changes ----------------------------------------------------------------------------


class Mixed(nn.Module):
    """Dropout and a buffer that is updated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.mlp = MLP(dropout=0.3)

    def forward(self, x):
        return self.mlp(self.norm(x))


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", [Mixed, Broken])
def test_sampling_does_not_change_interpreted_steps(make, dynamic):
    def run(monitor):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make().bfloat16()
        backend = Backend(COAT_EAGER, hooks=(Versions(monitor),) if monitor else ())
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        parameters = train(compiled, model, BATCHES, monitor)
        return parameters, [b.clone() for b in model.buffers()]

    monitor = Monitor(every=2)
    (got, got_buffers), (want, want_buffers) = run(monitor), run(None)
    assert monitor.latest
    assert all(map(identical, got, want))
    assert all(map(identical, got_buffers, want_buffers))


@pytest.mark.long
def test_a_monitor_does_not_change_compiled_steps_between_samples():
    model = Mixed().bfloat16().train()
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def run(monitor):
        torch._dynamo.reset()
        counters.clear()
        model.load_state_dict(state)
        compiled = torch.compile(
            model, backend=Backend(Config(), hooks=(Versions(monitor),) if monitor else ())
        )
        steps = [step(compiled, model, (x,)) for x in (BATCHES[0], BATCHES[1])]
        saved = saved_bytes(compiled, BATCHES[0])
        return steps, saved, counters["stats"]["unique_graphs"]

    monitor = Monitor()
    monitor.resume(1)
    got, got_bytes, got_graphs = run(monitor)
    want, want_bytes, want_graphs = run(None)
    for a, b in zip(got, want, strict=True):
        assert_same_step(a, b)
    assert (got_bytes, got_graphs) == (want_bytes, want_graphs)
    monitor.step()
    assert not monitor.latest


@pytest.mark.long
def test_a_sampled_step_is_close_to_a_compiled_step(interpreted):
    model = MLP().bfloat16()
    monitor = Monitor()
    run = torch.compile(model, backend=Backend(Config(), hooks=(Versions(monitor),)))
    sampled = step(run, model, (BATCHES[0],))
    monitor.step()
    normal = step(run, model, (BATCHES[0],))
    assert monitor.latest
    for name, gradient in normal.gradients.items():
        assert relative(sampled.gradients[name], gradient) < 0.1


@pytest.mark.long
def test_a_backward_is_sampled_if_its_forward_was():
    model, monitor = MLP().bfloat16(), Monitor()
    run = monitored(model, monitor)
    loss = run(BATCHES[0]).sum()
    monitor.sampling = False
    loss.backward()
    monitor.sampling = True
    monitor.step()
    assert "gradient" in {r.tensor for r in monitor.latest}
    loss = run(BATCHES[0]).sum()  # not sampled
    monitor.sampling = True
    loss.backward()
    before = monitor.latest
    monitor.step()
    assert monitor.latest is before


def test_evaluation_is_not_sampled():
    model, monitor = MLP().bfloat16(), Monitor()
    run = monitored(model, monitor)
    with torch.no_grad():
        run(BATCHES[0])
    monitor.step()
    assert not monitor.latest


def test_exact_formats_are_not_measured():
    model, monitor = MLP(), Monitor()
    monitored(model, monitor, EXACT_EAGER)(BATCHES[0].float()).sum().backward()
    monitor.step()
    assert not monitor.latest
    assert "other than 'exact'" in str(monitor)
    assert "no step has run" in str(Monitor())


def test_backends_with_other_monitors_differ():
    first, second = Monitor(), Monitor()
    assert fp8pass.backend(Config(), monitor=first) == fp8pass.backend(Config(), monitor=first)
    assert fp8pass.backend(Config(), monitor=first) != fp8pass.backend(Config(), monitor=second)
    assert fp8pass.backend(Config(), monitor=first) != fp8pass.backend(Config())
    hash(fp8pass.backend(Config(), monitor=first))


@pytest.mark.long
def test_explain_and_diagnose_do_not_affect_the_monitor():
    model, monitor = MLP().bfloat16(), Monitor()
    run = monitored(model, monitor)
    assert "up" in str(fp8pass.explain(run, BATCHES[0]))
    assert fp8pass.diagnose(run, lambda m, x: m(x).sum(), BATCHES[0]).layers
    monitor.step()
    assert not monitor.latest


def test_dispatch_between_samples_is_fast():
    """The limit is one microsecond for each graph, ten times the usual time."""
    monitor = Monitor()
    monitor.resume(1)
    run = dispatch(monitor, pytest.fail, pytest.fail, lambda: None)
    assert min(timeit.repeat(run, number=10_000, repeat=5)) / 10_000 < 1e-6


# --- when ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_first_and_every_nth_step_is_sampled(tmp_path):
    model, monitor = MLP().bfloat16(), Monitor(every=3, csv=tmp_path / "health.csv")
    train(monitored(model, monitor), model, batches(8), monitor)
    with (tmp_path / "health.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert sorted(set(steps)) == [0, 3, 6]
    assert monitor.steps == 8


@pytest.mark.long
def test_micro_batches_count_together():
    model, monitor = MLP().bfloat16(), Monitor(every=2)
    run = monitored(model, monitor)
    for x in (BATCHES[0], 4 * BATCHES[1]):
        run(x).sum().backward()
    monitor.step()
    (row,) = (r for r in monitor.latest if (r.module, r.tensor, r.scales) == ("up", "input", "row"))
    assert row.elements == 2 * BATCHES[0].numel()
    assert row.amax == 4 * BATCHES[1].abs().max().item()
    monitor.step()
    run(BATCHES[2, :16]).sum().backward()  # another shape is recompiled, without old statistics
    monitor.step()
    (row,) = (r for r in monitor.latest if (r.module, r.tensor, r.scales) == ("up", "input", "row"))
    assert row.elements == BATCHES[2, :16].numel()


@pytest.mark.long
def test_a_monitor_can_be_resumed_and_closed():
    model, monitor = MLP().bfloat16(), Monitor(every=10)
    monitor.resume(19)
    assert not monitor.sampling
    monitor.step()
    assert monitor.sampling
    monitor.close()
    run = monitored(model, monitor)
    run(BATCHES[0]).sum().backward()
    monitor.step()
    assert not monitor.latest
    assert not monitor.sampling


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def in_order(losses):
    for loss in losses:
        loss.backward()


def interleaved(losses):
    for i in (1, 0, 2):
        losses[i].backward()


def twice(losses):
    losses[0].backward(retain_graph=True)
    losses[2].backward()
    losses[0].backward()
    losses[1].backward()


def with_forwards_that_have_no_backward(losses):
    losses[1].backward()
    losses[0].backward()


ORDERS = [in_order, interleaved, twice, with_forwards_that_have_no_backward]


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", ["coat", "linear"])
def test_gradients_belong_to_their_block_in_any_order(order, recipe):
    """Blocks share compiled code, and have losses of different magnitude."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.ModuleList(Half() for _ in range(3))
    monitor = Monitor(every=1, model=model)
    backend = fp8pass.backend(Config.recipe(recipe, compiler="eager"), monitor=monitor)
    for block in model:
        block.compile(backend=backend)
    x = torch.randn(32, 64)
    losses = [
        scale * block(x).square().mean() for scale, block in zip((1e3, 1, 1e-3), model, strict=True)
    ]
    order(losses)
    monitor.step()
    found = {r.module: r.amax for r in monitor.latest if r.tensor == "gradient"}
    amax = [found[f"{i}.down"] for i in range(3) if f"{i}.down" in found]
    assert len(amax) == (2 if order is with_forwards_that_have_no_backward else 3)
    assert all(one > 100 * other for one, other in itertools.pairwise(amax))


def references() -> int:
    """Return the number of weak references to storages. They keep StorageImpl objects alive."""
    gc.collect()
    return sum(type(x) is compat.StorageWeakRef for x in gc.get_objects())


def forwards_alone(run, model):
    run(BATCHES[0].float())


def evaluations_with_gradients(run, model):
    model.eval()
    run(BATCHES[0].float())
    model.train()


def steps_with_new_weights(run, model):
    for p in model.parameters():
        p.data = p.data.clone()
    run(BATCHES[0].float()).square().mean().backward()


def steps(run, model):
    run(BATCHES[0].float()).square().mean().backward()


@pytest.mark.long
@pytest.mark.parametrize(
    "step", [forwards_alone, evaluations_with_gradients, steps_with_new_weights, steps]
)
def test_a_sample_without_an_end_does_not_leak_memory(step):
    """A forward with freed results cannot have a backward any more."""
    torch._dynamo.reset()
    monitor, model = Monitor(), Half()
    run = monitored(model, monitor, Config(compiler="eager"))
    found = []
    for _ in range(3):
        for _ in range(sampler.COMPACT_EVERY):
            step(run, model)
        found.append(references())
    assert found[1] == found[2]
    assert found[2] < found[0] + 64


@pytest.mark.long
def test_forwards_that_wait_for_their_backward_are_remembered():
    """Many forwards without a backward ran in between."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.ModuleList(Half() for _ in range(2))
    monitor = Monitor(every=1, model=model)
    backend = fp8pass.backend(Config(compiler="eager"), monitor=monitor)
    for block in model:
        block.compile(backend=backend)
    x = torch.randn(32, 64)
    losses = [scale * model[i](x).square().mean() for i, scale in enumerate((1e3, 1e-3))]
    for _ in range(2 * sampler.COMPACT_EVERY):
        model[1](x)
    for loss in losses:
        loss.backward()
    monitor.step()
    found = {r.module: r.amax for r in monitor.latest if r.tensor == "gradient"}
    assert found["0.down"] > 100 * found["1.down"]
