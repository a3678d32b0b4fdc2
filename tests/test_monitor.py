"""`Monitor` measures what is quantized, names it, warns of it, and changes nothing."""

from __future__ import annotations

import csv
import logging
import math
import timeit
from dataclasses import replace

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
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fp8pass
from fp8pass import Config, ConfigError, Monitor, compat
from fp8pass.backend import Backend, _either
from fp8pass.formats import FORMATS
from fp8pass.measure import saved_bytes
from fp8pass.monitor import statistics
from fp8pass.monitor.statistics import COLUMNS, Quantized, measure, merged, row_of

fp8 = torch.ops.fp8pass
NAME = Quantized("m", "input", "row", "e4m3", torch.float32)
AGOQ_EAGER = Config.recipe("agoq", compiler="eager", tolerance=math.inf)


def monitored(model, monitor, config=COAT_EAGER, **options):
    return torch.compile(model, backend=fp8pass.backend(config, monitor=monitor), **options)


def train(run, model, batches, monitor=None):
    """Parameters after plain SGD steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, batch in enumerate(batches):
        torch.manual_seed(i)
        run(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
    return [p.detach().clone() for p in model.parameters()]


def batches(count=3, rows=32, features=64):
    return torch.randn(count, rows, features, dtype=torch.bfloat16)


# --- statistics ---------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1e-40, 3e-39, 6e4, math.inf, -math.inf, math.nan, 1e30]


@st.composite
def matrices(draw):
    """Values of many magnitudes, some of them special, in fp32, bf16 or fp16."""
    rows, columns = draw(st.integers(1, 5)), draw(st.sampled_from([16, 32, 64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    spread = draw(st.sampled_from([0.0, 4.0, 12.0]))
    exponents = torch.randn(rows, columns, generator=generator) * spread
    x = torch.randn(rows, columns, generator=generator) * exponents.exp2()
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    if draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = 0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


def reference(x, dequantized, codes, fmt):
    """The statistics in float64, one by one."""
    finite = x.isfinite()
    exact, back = x.double()[finite], dequantized.double()[finite]
    signal, noise = exact.square().sum(), (exact - back).square().sum()
    nonzero = exact != 0
    return {
        "elements": x.numel(),
        "amax": exact.abs().max().item() if len(exact) else 0.0,
        "saturated": (codes[finite].abs() == fmt.max).sum().item() / x.numel(),
        "underflow": (nonzero & (codes[finite] == 0)).sum().item() / max(nonzero.sum().item(), 1),
        "sqnr_db": math.inf if noise == 0 else (10 * torch.log10(signal / noise)).item(),
        "nonfinite": (~finite).sum().item(),
    }


# Above, noise is the rounding of fp32.
HIGH = 90.0


def check(totals, expected):
    row = row_of(0, "m", NAME, totals.tolist())
    for field, value in expected.items():
        got = getattr(row, field)
        if field == "sqnr_db" and got > HIGH:
            assert value > HIGH
        else:
            allowed = fp32_rounding(got) if field == "sqnr_db" else None
            assert got == pytest.approx(value, rel=1e-5, abs=allowed, nan_ok=True), field


def fp32_rounding(sqnr_db):
    """By how many dB the last bits of values may move it: noise is the smaller the higher it is."""
    return 20 / math.log(10) * 2**-22 * 10 ** (sqnr_db / 20)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@given(x=matrices())
def test_statistics_of_linear_operands(x, format, by_row):
    scale = fp8.scale(fp8.row_amax(x) if by_row else fp8.amax(x), format)
    codes = fp8.quantize(x, scale, format).float()
    expected = reference(x, codes * scale, codes, FORMATS[format])
    check(measure(x, scale, FORMATS[format], x.shape[-1]), expected)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("format", ["e4m3", "e4m3_bytes", "e2m3", "e2m2", "e2m1"])
@given(x=matrices())
def test_statistics_of_groups(x, format, group):
    fmt, group = FORMATS[format], min(group, x.shape[-1])
    scales = fp8.group_scale(x, format, group)
    planes = [fp8.quantize_groups(x, scales, format, group, i) for i in range(len(fmt.planes))]
    back = fp8.dequantize_groups(planes, scales, format, group, torch.float32)
    ones = torch.ones_like(scales)
    codes = fp8.dequantize_groups(planes, ones, format, group, torch.float32)
    check(measure(x, scales, fmt, group), reference(x, back, codes, fmt))


@given(x=matrices(), y=matrices())
def test_statistics_of_parts_merge(x, y):
    """Chunks, and micro-batches."""
    parts = []
    for part in (x, y):
        flat = part.float().reshape(-1, 16)
        parts.append((flat, fp8.scale(fp8.row_amax(flat), "e4m3")))
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    expected = measure(*whole, FORMATS["e4m3"], 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "CPU_CHUNK", 48)
        (a, b), fmt = parts, FORMATS["e4m3"]
        torch.testing.assert_close(
            merged(measure(*a, fmt, 16), measure(*b, fmt, 16)), expected, equal_nan=True
        )


def test_no_elements():
    row = row_of(
        0, "m", NAME, measure(torch.empty(0, 16), torch.ones(0, 1), FORMATS["e4m3"], 16).tolist()
    )
    assert (row.elements, row.amax, row.saturated, row.underflow) == (0, 0.0, 0.0, 0.0)


@given(x=matrices())
def test_finite_values_have_a_good_sqnr(x):
    """Why there is no warning of a low one."""
    x = x.float().nan_to_num(1.0, 1.0, 1.0)
    x[x.abs() < 1e-30] = 0  # below, scales are no longer proportional to the amax
    scale = fp8.scale(fp8.amax(x), "e4m3")
    row = row_of(0, "m", NAME, measure(x, scale, FORMATS["e4m3"], x.shape[-1]).tolist())
    assert row.sqnr_db > 24 or row.amax == 0


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [COAT_EAGER, AGOQ_EAGER, Config.recipe("linear", compiler="eager")]
)
def test_every_tensor_of_a_llama_is_named(config):
    spy, monitor = Spy(), Monitor()
    model = llama(num_hidden_layers=1).bfloat16()
    run = torch.compile(model, backend=Backend(config, spy, monitor=monitor))
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
    low_bit = [s for s in plan.saved if "1×" in s.kept_as]
    assert sorted((r.module, f"{r.format} {r.scales}") for r in saved) == sorted(
        (s.module, s.kept_as) for s in low_bit
    )
    assert len({(r.module, r.tensor, r.scales) for r in monitor.latest}) == len(monitor.latest)


def test_operands_are_what_they_are_called():
    """Also where weights are stored [in, out], as in GPT-2."""
    for model in (gpt2(n_layer=1), llama(num_hidden_layers=1)):
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


def test_blocks_compiled_on_their_own_are_told_apart():
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


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP((64, 64, 64)), MLP((64, 64, 64))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_graph_breaks():
    monitor = Monitor()
    model = Broken().bfloat16()
    monitored(model, monitor)(batches(1)[0]).sum().backward()
    monitor.step()
    modules = {r.module for r in monitor.latest if r.tensor == "gradient"}
    assert modules == {"first.up", "first.down", "second.up", "second.down"}


# --- nothing changes ----------------------------------------------------------------------------


class Mixed(nn.Module):
    """Dropout, a buffer that is updated, and a size that may vary."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.mlp = MLP(dropout=0.3)

    def forward(self, x):
        return self.mlp(self.norm(x))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("make", [Mixed, Broken])
def test_interpreted_steps_are_the_same_whether_sampled_or_not(make, dynamic):
    def run(monitor):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make().bfloat16()
        backend = Backend(COAT_EAGER, monitor=monitor)
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        parameters = train(compiled, model, BATCHES, monitor)
        return parameters, [b.clone() for b in model.buffers()]

    monitor = Monitor(every=2)
    (got, got_buffers), (want, want_buffers) = run(monitor), run(None)
    assert monitor.latest
    assert all(map(identical, got, want))
    assert all(map(identical, got_buffers, want_buffers))


torch.manual_seed(1)
BATCHES = batches(4)


def test_compiled_steps_between_samples_are_the_same():
    model = Mixed().bfloat16().train()
    state = {k: v.clone() for k, v in model.state_dict().items()}

    def run(monitor):
        torch._dynamo.reset()
        compat.counters.clear()
        model.load_state_dict(state)
        compiled = torch.compile(model, backend=Backend(Config(), monitor=monitor))
        steps = [step(compiled, model, (x,)) for x in (BATCHES[0], BATCHES[1])]
        kept = saved_bytes(compiled, BATCHES[0])
        return steps, kept, compat.counters["stats"]["unique_graphs"]

    monitor = Monitor()
    monitor.resume(1)
    got, got_kept, got_graphs = run(monitor)
    want, want_kept, want_graphs = run(None)
    for a, b in zip(got, want, strict=True):
        assert_same_step(a, b)
    assert (got_kept, got_graphs) == (want_kept, want_graphs)
    monitor.step()
    assert not monitor.latest


def test_a_compiled_sampled_step_is_close():
    model = MLP().bfloat16()
    monitor = Monitor()
    run = torch.compile(model, backend=Backend(Config(), monitor=monitor))
    sampled = step(run, model, (BATCHES[0],))
    monitor.step()
    normal = step(run, model, (BATCHES[0],))
    assert monitor.latest
    for name, gradient in normal.gradients.items():
        assert relative(sampled.gradients[name], gradient) < 0.1


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


def test_exact_formats_have_nothing_to_measure():
    model, monitor = MLP(), Monitor()
    monitored(model, monitor, EXACT_EAGER)(BATCHES[0].float()).sum().backward()
    monitor.step()
    assert not monitor.latest
    assert str(monitor) == "Nothing sampled yet."


def test_backends_with_other_monitors_differ():
    first, second = Monitor(), Monitor()
    assert fp8pass.backend(Config(), monitor=first) == fp8pass.backend(Config(), monitor=first)
    assert fp8pass.backend(Config(), monitor=first) != fp8pass.backend(Config(), monitor=second)
    assert fp8pass.backend(Config(), monitor=first) != fp8pass.backend(Config())
    hash(fp8pass.backend(Config(), monitor=first))


def test_explain_and_diagnose_leave_the_monitor_alone():
    model, monitor = MLP().bfloat16(), Monitor()
    run = monitored(model, monitor)
    assert "up" in str(fp8pass.explain(run, BATCHES[0]))
    assert fp8pass.diagnose(run, lambda m, x: m(x).sum(), BATCHES[0]).layers
    monitor.step()
    assert not monitor.latest


def test_a_choice_between_samples_costs_next_to_nothing():
    """A microsecond a graph; it takes a tenth of one."""
    monitor = Monitor()
    monitor.resume(1)
    run = _either(monitor, pytest.fail, lambda: None)
    assert min(timeit.repeat(run, number=10_000, repeat=5)) / 10_000 < 1e-6


# --- when ---------------------------------------------------------------------------------------


def test_the_first_step_and_every_nth(tmp_path):
    model, monitor = MLP().bfloat16(), Monitor(every=3, csv=tmp_path / "health.csv")
    train(monitored(model, monitor), model, batches(8), monitor)
    with (tmp_path / "health.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert sorted(set(steps)) == [0, 3, 6]
    assert monitor.steps == 8


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
    run(BATCHES[2, :16]).sum().backward()  # another shape: compiled anew, nothing left of before
    monitor.step()
    (row,) = (r for r in monitor.latest if (r.module, r.tensor, r.scales) == ("up", "input", "row"))
    assert row.elements == BATCHES[2, :16].numel()


def test_resuming_and_closing():
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


# --- warnings -----------------------------------------------------------------------------------


def warnings_of(caplog):
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "fp8pass" and r.levelno >= logging.WARNING
    ]


def sampled_step(model, x, monitor, config=COAT_EAGER):
    run = monitored(model, monitor, config)
    run(x).float().mean().backward()
    monitor.step()


def test_healthy_tensors_do_not_warn(caplog):
    sampled_step(MLP().bfloat16(), BATCHES[0], Monitor())
    assert not warnings_of(caplog)


def test_near_overflow_warns_once_with_the_path(caplog):
    model, monitor = nn.Sequential(MLP(), MLP((32, 64, 32))).half(), Monitor(every=1)
    with torch.no_grad():
        model[0].down.bias[3] = 20_000.0
    for _ in range(2):
        sampled_step(model, BATCHES[0].half(), monitor)
    (message,) = warnings_of(caplog)
    assert "near overflow" in message
    assert "1.up input (amax 2e+04 in float16)" in message
    assert "bfloat16" in message


def test_mostly_zero_warns_with_the_path_and_what_to_do(caplog):
    model, monitor = MLP().bfloat16(), Monitor(every=1)
    with torch.no_grad():
        model.down.weight.mul_(1e-7)
        model.down.weight[0, 0] = 1.0
    sampled_step(model, BATCHES[0], monitor)
    (message,) = [m for m in warnings_of(caplog) if "down weight" in m]
    assert "mostly zero" in message
    assert "skip=('down',)" in message
    caplog.clear()
    torch._dynamo.reset()
    sampled_step(model, BATCHES[0], Monitor(), replace(COAT_EAGER, skip=("down",)))
    assert not [m for m in warnings_of(caplog) if "down weight" in m]


def test_advice_for_gradients(caplog):
    model, monitor = MLP().bfloat16(), Monitor()
    run = monitored(model, monitor)
    incoming = torch.full((32, 32), 1e-7, dtype=torch.bfloat16)
    incoming[0] = 1.0
    run(BATCHES[0]).backward(incoming)
    monitor.step()
    (message,) = warnings_of(caplog)
    assert "down gradient (97%)" in message
    assert "gradient_format='e5m2'" in message


def test_what_is_not_finite_warns_of_the_first(caplog):
    model, monitor = Broken().bfloat16(), Monitor()
    x = BATCHES[0].clone()
    x[0, 0] = math.inf
    sampled_step(model, x, monitor)
    message = next(m for m in warnings_of(caplog) if "not finite" in m)
    assert "not finite: first.up input (1 of 2048)" in message
    assert "more in monitor.latest" in message
    assert "nan" in str(monitor)


# --- records ------------------------------------------------------------------------------------


def test_csv_has_a_header_once_and_a_line_for_each_tensor(tmp_path):
    path = tmp_path / "new" / "health.csv"
    for _ in range(2):  # a second run goes on
        torch._dynamo.reset()
        monitor = Monitor(csv=path)
        sampled_step(MLP().bfloat16(), BATCHES[0], monitor)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        found = list(reader)
    assert reader.fieldnames == list(COLUMNS)
    assert len(found) == 2 * len(monitor.latest)
    for line, row in zip(found[len(monitor.latest) :], monitor.latest, strict=True):
        assert (line["module"], line["tensor"], int(line["elements"])) == (
            row.module,
            row.tensor,
            row.elements,
        )
        assert float(line["sqnr_db"]) == row.sqnr_db


@pytest.mark.parametrize("given_as", ["folder", "writer"])
def test_tensorboard(tmp_path, given_as):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path)) if given_as == "writer" else None
    model, monitor = MLP().bfloat16(), Monitor(every=2, tensorboard=writer or tmp_path)
    train(monitored(model, monitor), model, batches(3), monitor)
    monitor.close()
    if writer:
        writer.add_scalar("still open", 1.0)
        writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = events.Scalars("fp8pass sqnr_db/up weight row")
    (row,) = (
        r for r in monitor.latest if (r.module, r.tensor, r.scales) == ("up", "weight", "row")
    )
    assert [s.step for s in scalars] == [0, 2]
    assert scalars[-1].value == pytest.approx(row.sqnr_db)


def test_the_table_shows_the_worst_first():
    model, monitor = MLP().bfloat16(), Monitor()
    with torch.no_grad():
        model.down.weight.mul_(1e-7)
        model.down.weight[0, 0] = 1.0
    sampled_step(model, BATCHES[0], monitor)
    lines = [line for line in str(monitor).splitlines() if "e4m3" in line]
    assert "down" in lines[0]
    assert "weight" in lines[0]
    assert len(lines) == len(monitor.latest)


# --- training loops -----------------------------------------------------------------------------


def test_hugging_face_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, monitor = llama(num_hidden_layers=1), Monitor(every=2, csv=tmp_path / "health.csv")
    model.compile(backend=fp8pass.backend(COAT_EAGER, monitor=monitor))
    data = [{"input_ids": t, "labels": t} for t in tokens(12)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=[monitor.hugging_face()]
    )
    trainer.train()
    assert monitor.steps == 3
    assert {r.step for r in monitor.latest} == {2}
    first = next(r for r in monitor.latest if r.tensor == "input")
    assert first.module == "model.layers.0.self_attn.q_proj"
    # Two micro-batches, quantized in forward and backward, and no evaluation.
    assert first.elements == 2 * 2 * (2 * 16 * 64)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = MLP((64, 64, 64))
            self.net.compile(backend=fp8pass.backend(COAT_EAGER, monitor=monitor))

        def training_step(self, batch):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monitor = Monitor(every=2)
    trainer = lightning.Trainer(
        max_steps=3,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor.lightning()],
        default_root_dir=tmp_path,
    )
    data = torch.utils.data.DataLoader(BATCHES.float().flatten(0, 1), batch_size=16)
    trainer.fit(Module(), data)
    assert monitor.steps == 3
    assert {r.step for r in monitor.latest} == {2}
    (row,) = (r for r in monitor.latest if (r.module, r.tensor) == ("net.up", "input"))
    assert row.elements == 2 * (16 * 64)


# --- wrong options ------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_every_is_a_number_of_steps(every):
    with pytest.raises(ConfigError, match="every is a number of steps"):
        Monitor(every=every)


def test_other_wrong_arguments(tmp_path):
    (tmp_path / "notes.csv").write_text("name,value\n")
    with pytest.raises(ConfigError, match="no record of a Monitor"):
        Monitor(csv=tmp_path / "notes.csv")
    with pytest.raises(ConfigError, match="folder or a SummaryWriter, got int"):
        Monitor(tensorboard=3)
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, got str"):
        Monitor(model="model")
    with pytest.raises(TypeError, match=r"monitor is a fp8pass\.Monitor, got int"):
        fp8pass.backend(Config(), monitor=250)


@pytest.mark.parametrize(
    ("make", "missing", "message"),
    [
        (lambda: Monitor().hugging_face(), ["transformers"], "pip install transformers"),
        (
            lambda: Monitor().lightning(),
            ["lightning.pytorch", "pytorch_lightning"],
            "needs lightning or pytorch-lightning: pip install lightning",
        ),
        (
            lambda: Monitor(tensorboard="runs"),
            ["torch.utils.tensorboard"],
            "pip install tensorboard",
        ),
    ],
)
def test_what_is_not_installed_is_named(monkeypatch, make, missing, message):
    for name in missing:
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match=message):
        make()
