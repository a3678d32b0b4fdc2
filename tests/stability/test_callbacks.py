"""`Guard` in the training loops of other libraries."""

import json
import sys

import pytest
import torch
from guard_helpers import event_kinds
from helpers import MLP, llama, tokens

from fp8pass import Guard


def trainer_of(transformers, folder, guard, **options):
    data = [{"input_ids": t, "labels": t} for t in tokens(40)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        restore_callback_states_from_checkpoint=True,
        **options,
    )
    model = llama()
    return transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[guard.hugging_face()]
    )


@pytest.mark.long
def test_a_hugging_face_trainer_calls_the_guard(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    guard = Guard(act=("lower lr", "roll back"), every=2, quiet=10)
    trainer_of(transformers, tmp_path, guard, max_steps=22).train()
    assert guard.steps == 22
    assert not guard.events
    assert not caplog.records  # no gradient was missing
    # Losses and gradient norms of all steps but the last have arrived.
    trends = guard.state_dict()["signals"]["trends"]
    seen = {name: len(t["past"]) + len(t["recent"]) for name, t in trends.items()}
    assert seen["loss"] == seen["gradient norm"] == 21


@pytest.mark.long
def test_a_resumed_trainer_loads_the_guards_history(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    first = Guard(every=2)
    trainer_of(transformers, tmp_path, first, max_steps=20).train()
    saved = json.loads((tmp_path / "checkpoint-20" / "trainer_state.json").read_text())
    assert "TrainerGuardCallback" in saved["stateful_callbacks"]
    second = Guard(every=2)
    trainer = trainer_of(transformers, tmp_path, second, max_steps=24)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    assert second.steps == 24
    trend = second.state_dict()["signals"]["trends"]["loss"]
    assert len(trend["past"]) + len(trend["recent"]) > 20


def test_a_lightning_trainer_calls_the_guard(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = MLP((64, 64, 64))

        def training_step(self, batch):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    guard = Guard(every=2)
    trainer = lightning.Trainer(
        max_steps=6,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[guard.lightning()],
        default_root_dir=tmp_path,
    )
    data = torch.utils.data.DataLoader(torch.randn(192, 64), batch_size=16)
    trainer.fit(Module(), data)
    assert guard.steps == 6
    trend = guard.state_dict()["signals"]["trends"]["loss"]
    assert len(trend["past"]) + len(trend["recent"]) == 6


class LightningLike:
    """Stand-in for a Lightning `Trainer` and its module."""

    class Callback:
        pass

    def __init__(self, optimizer):
        self.optimizers, self.global_step = [optimizer], 0


def test_the_lightning_callback_counts_optimizer_steps_and_keeps_state(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", LightningLike)
    model = MLP()
    trainer = LightningLike(torch.optim.SGD(model.parameters()))
    guard = Guard(every=1)
    callback = guard.lightning()
    callback.on_train_start(trainer, model)
    for batch, loss in enumerate([1.0, 2.0, 3.0, torch.nan]):
        trainer.global_step = (batch + 1) // 2  # two micro-batches a step
        callback.on_train_batch_end(trainer, model, {"loss": loss}, None, batch)
    assert guard.steps == 2
    assert event_kinds(guard)[0] == "alarm"
    other = Guard(every=1)
    other.lightning().load_state_dict(json.loads(json.dumps(callback.state_dict())))
    assert event_kinds(other) == event_kinds(guard)


@pytest.mark.parametrize(
    ("make", "missing", "message"),
    [
        (Guard.hugging_face, ["transformers"], "pip install transformers"),
        (Guard.lightning, ["lightning.pytorch", "pytorch_lightning"], "pip install lightning"),
    ],
)
def test_a_missing_package_is_named_in_the_error(monkeypatch, make, missing, message):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=message):
        make(Guard())
