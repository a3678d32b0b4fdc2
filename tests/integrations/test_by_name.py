"""Frameworks that select the backend by its name, in their documented ways."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import Residuals, llama, relative, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import fp8pass
from fp8pass import compat

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

import fp8pass.integrations.accelerate as integration

FOLDER = Path(fp8pass.__file__).parents[1]


# --- the name -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8pass", "FP8PASS"])
def test_the_enum_contains_fp8pass(name):
    integration.register()  # again after the import: nothing changes
    backend = DynamoBackend(name.upper())
    assert backend is DynamoBackend.FP8PASS is DynamoBackend(name)
    assert backend != DynamoBackend.NO
    assert str(backend) == backend.value == "FP8PASS"
    assert json.dumps({"backend": backend}) == '{"backend": "FP8PASS"}'
    assert pickle.loads(pickle.dumps(backend)) is backend
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="FP9PASS"):
        DynamoBackend("FP9PASS")


def test_other_extensions_of_the_enum_still_work(monkeypatch):
    """Other packages may extend the enum, too."""
    monkeypatch.setattr(
        DynamoBackend,
        "_missing_",
        classmethod(lambda cls, value: cls.INDUCTOR if value == "OTHER" else None),
    )
    monkeypatch.setattr(DynamoBackend, "FP8PASS", None)
    integration.register()
    assert DynamoBackend("OTHER") is DynamoBackend.INDUCTOR
    assert DynamoBackend("fp8pass").value == "FP8PASS"


# --- accelerate ---------------------------------------------------------------------------------


def by_argument(monkeypatch) -> Accelerator:
    return Accelerator(cpu=True, dynamo_backend="fp8pass")


def by_plugin(monkeypatch) -> Accelerator:
    plugin = TorchDynamoPlugin(backend="fp8pass", options={"recipe": "agoq"})
    return Accelerator(cpu=True, dynamo_plugin=plugin)


def by_environment(monkeypatch) -> Accelerator:
    monkeypatch.setenv(integration.VARIABLE, "fp8pass")
    return Accelerator(cpu=True)


def by_region(monkeypatch) -> Accelerator:
    plugin = TorchDynamoPlugin(backend="fp8pass", use_regional_compilation=True)
    return Accelerator(cpu=True, dynamo_plugin=plugin)


@pytest.mark.long
@pytest.mark.parametrize("make", [by_argument, by_plugin, by_environment, by_region])
def test_accelerate_compiles_with_fp8pass(make, monkeypatch, plans, tmp_path):
    accelerator = make(monkeypatch)
    model = Residuals(2)
    names = list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(prepared(torch.randn(32, 64)).square().mean())
    optimizer.step()
    fp8 = sum(bool(y.fp8) for plan in plans for y in plan.linears)
    assert fp8 == 4
    if make is by_plugin:
        recipe = fp8pass.explain(prepared, torch.randn(32, 64)).config
        assert recipe == fp8pass.Config.recipe("agoq")
    plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    assert list(plain.state_dict()) == names


# --- Trainers -----------------------------------------------------------------------------------


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": t, "labels": t} for t in tokens(count)]


@pytest.mark.long
def test_a_transformers_trainer_compiles_with_fp8pass(plans, tmp_path):
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path),
        torch_compile=True,
        torch_compile_backend="fp8pass",
        max_steps=2,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model = llama()
    names = set(model.state_dict())
    trainer = Trainer(model, arguments, train_dataset=rows())
    trainer.train()
    assert [sum(bool(y.fp8) for y in plan.linears) for plan in plans] == [7]
    trainer.save_model(str(tmp_path))
    assert set(load_file(tmp_path / "model.safetensors")) == names


# --- models that return logits ------------------------------------------------------------------

ROWS, LENGTH, VOCABULARY, CHUNKS = 8, 32, 512, 4


class Sizes(TorchDispatchMode):
    """Records the most elements of a floating-point tensor in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in compat.tensor_leaves(result):
            if x.is_floating_point():
                self.most = max(self.most, x.untyped_storage().nbytes() // x.itemsize)
        return result


@pytest.fixture
def sizes(monkeypatch) -> Sizes:
    """The sizes of all tensors that the forward and backward graphs compute."""
    found = Sizes()

    def compile_watched(gm, inputs, **kwargs):
        def run(arguments):
            with found:
                return gm(*arguments)

        return compat.interpret(gm, run)

    monkeypatch.setattr(compat, "compile_fx_inner", compile_watched)
    return found


def with_trainer(model, data, options, folder, bf16) -> list[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=ROWS,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        bf16=bf16,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    model.compile(backend="fp8pass", options=options)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_accelerate(model, data, options, folder, bf16) -> list[float]:
    plugin = TorchDynamoPlugin(backend="fp8pass", options=options)
    precision = "bf16" if bf16 else "no"
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        output = model(**batch)
        is_small = output.logits.untyped_storage().nbytes() <= 8  # also after casts by accelerate
        assert is_small != options["return_logits"]
        accelerator.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    return losses


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("train", [with_trainer, with_accelerate])
def test_without_logits_no_tensor_has_their_size(
    train, bf16, plans, sizes, forget_accelerate, tmp_path
):
    """The logits, their gradients and their casts by accelerate are never in memory at once."""
    data = [{"input_ids": t, "labels": t} for t in tokens(2 * ROWS, LENGTH, VOCABULARY)]
    most, losses, gradients = [], [], []
    for returns in (True, False):
        torch._dynamo.reset()
        forget_accelerate()
        model, found = llama(vocab_size=VOCABULARY), []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, found=found: found.append(p.grad.clone())
            )
        options = {"recipe": "exact", "head_chunks": CHUNKS, "return_logits": returns}
        sizes.most = 0
        with compat.fresh_compilation():
            losses.append(train(model, data, options, tmp_path, bf16))
        most.append(sizes.most)
        gradients.append(found)
    whole = ROWS * LENGTH * VOCABULARY
    assert most[0] >= whole
    assert most[1] < whole // 2  # the activations of the MLP are larger than a chunk of logits
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if bf16 else 1e-5)
    assert len(gradients[0]) == len(gradients[1]) > 0
    for ours, theirs in zip(*gradients, strict=True):
        assert relative(ours, theirs) < (2e-2 if bf16 else 1e-5)
    assert [head.chunks for plan in plans for head in plan.heads] == [1, CHUNKS]


# --- accelerate launch --------------------------------------------------------------------------


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from fp8pass import compat

compat.compile_fx_inner = lambda gm, inputs, **kwargs: compat.interpret(gm)  # no C++ compiler
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
accelerator.backward(model(torch.randn(16, 64)).sum())
print(accelerator.state.dynamo_plugin.backend, *sys.argv[1:])
"""


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(FOLDER), "CUDA_VISIBLE_DEVICES": ""} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_accelerate_launch_runs_a_script_with_fp8pass(tmp_path):
    """The script does not import fp8pass."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.yaml").write_text(
        "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(tmp_path / "config.yaml")]
    module = ["-m", "fp8pass.integrations.accelerate"]
    done = run([*launch, *module, str(tmp_path / "train.py"), "--lr", "1"])
    assert done.stdout.split() == ["FP8PASS", "--lr", "1"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "usage: python -m fp8pass.integrations.accelerate"),
        (["-m"], {}, "usage: "),
        (["train.py"], {integration.VARIABLE: "INDUCTOR"}, "the backend INDUCTOR, not fp8pass"),
    ],
)
def test_wrong_command_lines_are_refused(arguments, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=message):
        integration.run(arguments)


def test_a_module_is_run_as_main(tmp_path, monkeypatch, capsys):
    (tmp_path / "trains.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(integration.VARIABLE, "no")
    monkeypatch.setattr(sys, "argv", ["before"])
    integration.run(["-m", "trains", "a"])
    assert capsys.readouterr().out == "__main__ ['a']\n"
    assert os.environ[integration.VARIABLE] == "FP8PASS"
