"""`Monitor` in use: its warnings and records, in training loops, and with wrong arguments."""

from __future__ import annotations

import csv
import logging
import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers import COAT_EAGER, MLP, llama, tokens
from monitor_helpers import BATCHES, Broken, batches, monitored, train
from optim_helpers import single_process
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import fp8pass
from fp8pass import Config, ConfigError, Monitor
from fp8pass.stability.monitor.statistics import COLUMNS


def sampled_step(model, x, monitor, config=COAT_EAGER):
    run = monitored(model, monitor, config)
    run(x).float().mean().backward()
    monitor.step()


# --- warnings -----------------------------------------------------------------------------------


def warnings_of(caplog):
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "fp8pass" and r.levelno >= logging.WARNING
    ]


def test_healthy_tensors_do_not_warn(caplog):
    sampled_step(MLP().bfloat16(), BATCHES[0], Monitor())
    assert not warnings_of(caplog)


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_warnings_about_gradients_suggest_options(caplog):
    model, monitor = MLP().bfloat16(), Monitor()
    run = monitored(model, monitor)
    incoming = torch.full((32, 32), 1e-7, dtype=torch.bfloat16)
    incoming[0] = 1.0
    run(BATCHES[0]).backward(incoming)
    monitor.step()
    (message,) = warnings_of(caplog)
    assert "down gradient (97%)" in message
    assert "gradient_format='e5m2'" in message


@pytest.mark.long
def test_the_first_nonfinite_tensor_causes_a_warning(caplog):
    model, monitor = Broken().bfloat16(), Monitor()
    x = BATCHES[0].clone()
    x[0, 0] = math.inf
    sampled_step(model, x, monitor)
    message = next(m for m in warnings_of(caplog) if "not finite" in m)
    assert "not finite: first.up input (1 of 2048)" in message
    assert "more in monitor.latest" in message
    assert "nan" in str(monitor)


def test_shape_inference_of_pipelines_is_not_sampled(tmp_path, caplog):
    """The second stage infers its shapes on uninitialized memory, which is NaN here."""
    models = [nn.Linear(64, 64).bfloat16() for _ in range(2)]
    monitor = Monitor(model=nn.ModuleList(models))
    with single_process(tmp_path), nan_in_new_memory():
        stages = [
            PipelineStage(monitored(model, monitor), i, 2, torch.device("cpu"))
            for i, model in enumerate(models)
        ]
        schedule = ScheduleInterleaved1F1B(stages, 2, lambda y, want: (y - want).square().mean())
        schedule.step(BATCHES[0], target=torch.zeros_like(BATCHES[0]))
        monitor.step()
    inputs = {(row.module, row.elements) for row in monitor.latest if row.tensor == "input"}
    assert inputs == {("0", BATCHES[0].numel()), ("1", BATCHES[0].numel())}
    assert not any(row.nonfinite for row in monitor.latest)
    assert not warnings_of(caplog)


@contextmanager
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- records ------------------------------------------------------------------------------------


@pytest.mark.long
def test_csv_has_one_header_and_a_line_for_each_tensor(tmp_path):
    path = tmp_path / "new" / "health.csv"
    for _ in range(2):  # a second run appends
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


@pytest.mark.long
@pytest.mark.parametrize("given_as", ["folder", "writer"])
def test_samples_are_written_to_tensorboard(tmp_path, given_as):
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


@pytest.mark.long
def test_the_table_shows_the_worst_tensors_first():
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


@pytest.mark.long
def test_a_hugging_face_trainer_calls_the_monitor(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, monitor = llama(), Monitor(every=2, csv=tmp_path / "health.csv")
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


def test_a_lightning_trainer_calls_the_monitor(tmp_path):
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


# --- wrong arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_every_must_be_a_number_of_steps(every):
    with pytest.raises(ConfigError, match="every must be a whole number of steps"):
        Monitor(every=every)


def test_other_wrong_arguments_are_refused(tmp_path):
    (tmp_path / "notes.csv").write_text("name,value\n")
    with pytest.raises(ConfigError, match="not written by a Monitor"):
        Monitor(csv=tmp_path / "notes.csv")
    for path in (5, True, tmp_path):
        with pytest.raises(ConfigError, match="csv must be a file to append to"):
            Monitor(csv=path)
    with pytest.raises(ConfigError, match="folder or a SummaryWriter, got int"):
        Monitor(tensorboard=3)
    with pytest.raises(ConfigError, match=r"torch\.nn\.Module, got str"):
        Monitor(model="model")
    with pytest.raises(TypeError, match=r"monitor must be a fp8pass\.Monitor, got int"):
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
def test_a_missing_package_is_named_in_the_error(monkeypatch, make, missing, message):
    for name in missing:
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match=message):
        make()


# --- steps that are not counted -----------------------------------------------------------------


@pytest.mark.long
def test_a_forgotten_step_warns_once(caplog):
    model, monitor = MLP(), Monitor()
    train(monitored(model, monitor), model, batches(5).float())
    (message,) = warnings_of(caplog)
    assert "Monitor still measures step 0" in message
    assert "Call monitor.step() after each optimizer step" in message


def test_micro_batches_and_perturbed_weights_count_as_one_step(caplog):
    """Sharpness-aware minimization runs such steps."""
    model, monitor = MLP(), Monitor(every=1)
    run = monitored(model, monitor)
    for batch in batches(3).float():
        run(batch).mean().backward()
        with torch.no_grad():
            model.up.weight.add_(0.01)
        run(batch).mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        monitor.step()
    assert not warnings_of(caplog)
