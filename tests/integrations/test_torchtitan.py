"""torchtitan: its check of backends, and its trainer if it is installed on a machine with GPUs."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from importlib import metadata, util
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

NAME = "fp8pass.integrations.torchtitan"
STEPS = 10


def strict(model, backend):
    """The check of torchtitan 0.3 for a model with FlexAttention."""
    if backend != "inductor":
        raise ValueError(f"{backend} is neither")
    return backend


@pytest.fixture
def titan(monkeypatch):
    """Replace torchtitan by a module with its check."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    for name in ("torchtitan", "torchtitan.distributed", "torchtitan.distributed.compile"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module = sys.modules["torchtitan.distributed.compile"]
    monkeypatch.setattr(sys.modules["torchtitan"], "distributed", ModuleType(""), raising=False)
    monkeypatch.setattr(sys.modules["torchtitan"].distributed, "compile", module, raising=False)
    return module


def test_the_check_accepts_fp8pass_and_no_other_backend(titan):
    titan._maybe_regional_inductor_backend = strict
    integration = importlib.import_module(NAME)
    once = titan._maybe_regional_inductor_backend
    integration.register()
    assert titan._maybe_regional_inductor_backend is once
    assert [once(None, name) for name in ("fp8pass", "inductor")] == ["fp8pass", "inductor"]
    with pytest.raises(ValueError, match="aot_ts is neither"):
        once(None, "aot_ts")


def test_a_torchtitan_without_the_check_does_not_change(titan):
    before = dict(vars(titan))
    importlib.import_module(NAME)
    assert vars(titan) == before


def test_a_torchtitan_without_the_module_does_not_change(titan, monkeypatch):
    monkeypatch.delitem(sys.modules, titan.__name__)
    importlib.import_module(NAME).register()
    assert titan.__name__ not in sys.modules


class Trainer:
    """A trainer that builds a model of two parts."""

    def __init__(self, config):
        self.config, self.model_parts = config, ["part 0", "part 1"]


@pytest.mark.parametrize("version", ["0.2", "0.3"])
@pytest.mark.parametrize(
    ("options", "ranks", "compressed"), [([], 2, 0), (["--compress"], 2, 2), (["--compress"], 1, 0)]
)
def test_an_option_compresses_the_parts_of_the_model(
    titan, monkeypatch, version, options, ranks, compressed
):
    """Since 0.3 the trainer is in another module, and `main` has no argument."""
    kind, done, built = type("Trainer", (Trainer,), {}), [], []
    train = ModuleType("torchtitan.train")
    train.main = (
        (lambda cls: built.append(cls(sys.argv)))
        if version == "0.2"
        else (lambda: built.append(kind(sys.argv)))
    )
    modules = {"torchtitan.train": train}
    if version == "0.3":
        modules["torchtitan.trainer"] = ModuleType("torchtitan.trainer")
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    list(modules.values())[-1].Trainer = kind
    monkeypatch.setattr(sys, "argv", ["torchtitan", *options, "--training.steps", "4"])
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    monkeypatch.setattr("fp8pass.distributed.compress", done.append)
    importlib.import_module(NAME).main()
    assert [x.config for x in built] == [["torchtitan", "--training.steps", "4"]]
    assert done == built[0].model_parts[:compressed]


# --- its own trainer ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The tokenizer and text of torchtitan's debug model, in a folder with the expected names."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = "the model reads a small text of a few words until it knows all of them"
    words = ["<pad>", "<bos>", "<eos>", *dict.fromkeys(text.split())]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assets = tmp_path / "tests/assets/tokenizer"
    assets.mkdir(parents=True)
    tokenizer.save(str(assets / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (assets / "tokenizer_config.json").write_text(json.dumps(special))
    data = tmp_path / "tests/assets/c4_test/data.json"
    data.parent.mkdir()
    line = json.dumps({"text": f"{text} " * 20})
    data.write_text("\n".join([line] * 2000))
    return tmp_path


def losses(folder, backend: str, ranks: int, *options: str) -> list[float]:
    """Train Llama 3's debug model with a backend, and return the losses that are printed."""
    new = metadata.version("torchtitan") >= "0.3"
    model = ["--module", "llama3", "--config", "llama3_debugmodel"]
    if not new:
        model = ["--model.name", "llama3", "--model.flavor", "debugmodel_flex_attn"]
        model += ["--training.dataset", "c4_test", "--metrics.log_freq", "1"]
        model += ["--model.hf_assets_path", "tests/assets/tokenizer"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", str(ranks), "--local-ranks-filter", "0", "-m", NAME]
    arguments = {"compile.backend": backend, "training.steps": STEPS, "debug.seed": 1}
    arguments["lr_scheduler.warmup_steps"] = 2
    settings = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    command = [*launch, *model, "--compile.enable", *settings, *options]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    output = re.sub(r"\x1b\[\d+m", "", done.stdout + done.stderr)
    assert done.returncode == 0, output[-3000:]
    if backend == "fp8pass":
        assert "linear layers in FP8" in output
    return [float(x) for x in re.findall(r"loss:\s+([\d.]+)", output)]


COMPRESSED = ("--compress",)
TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2")


@pytest.mark.gpu
@pytest.mark.skipif(not util.find_spec("torchtitan"), reason="needs torchtitan")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, (), id="one GPU"),
        pytest.param(1, ("--activation_checkpoint.mode", "none"), id="nothing checkpointed"),
        pytest.param(2, (), id="FSDP2"),
        pytest.param(2, COMPRESSED, id="FSDP2, compressed"),
        pytest.param(2, TENSOR_PARALLEL, id="TP"),
        pytest.param(
            2, (*TENSOR_PARALLEL, "--parallelism.enable_async_tensor_parallel"), id="async TP"
        ),
    ],
)
def test_torchtitans_trainer_trains_on_gpus(folder, ranks, options):
    if metadata.version("torchtitan") >= "0.3" and not hasattr(torch.distributed, "set_timeout"):
        pytest.skip("torchtitan 0.3 needs PyTorch 2.14's torch.distributed.set_timeout")
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    want = losses(folder, "inductor", ranks, *(() if options == COMPRESSED else options))
    got = losses(folder, "fp8pass", ranks, *options)
    assert len(got) == len(want) == STEPS
    for a, b in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=0.02)
    assert got[-1] < got[0] / 2
