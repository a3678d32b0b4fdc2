"""The command line: what it prints, its exit codes, and what it says when something is wrong."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fp8pass
from fp8pass import Config
from fp8pass.cli import COMMANDS, main

ROOT = Path(fp8pass.__file__).parents[1]

FACTORIES = """
import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x, scale=1.0):
        print("forward")
        return self.down(F.gelu(self.up(x))) * scale


class WithLoss(MLP):
    def forward(self, x):
        return super().forward(x).square().mean()


class Broken(MLP):
    def forward(self, x):
        raise RuntimeError("it broke\\nin two lines")


def x():
    return torch.randn(32, 64)


def model():
    return MLP()


def with_args():
    return MLP(), (x(), 2.0)


def with_kwargs():
    return MLP(), {"x": x()}


def with_both():
    return MLP(), [x()], {"scale": torch.tensor(2.0)}


def with_tensor():
    print("built")
    return MLP(), x()


def with_loss():
    return MLP(), (x(),), lambda output: output.square().mean()


def with_wrong_loss():
    return MLP(), (x(),), lambda output: output.square()


def compiled():
    options = {"recipe": "linear", "skip": ("up",)}
    return torch.compile(MLP(), backend="fp8pass", options=options), (x(),)


def broken():
    return Broken(), x()


def fails():
    return 1 / 0


def with_argument(size):
    return MLP()


def number():
    return 3


ready = MLP()
constant = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with a module `factories`."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("factories", "needs_more"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def run(here, capsys):
    """Run a command line: (exit code, stdout, stderr)."""

    def run(*argv):
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def ok(result) -> str:
    """stdout of a command that did what it should."""
    code, out, err = result
    assert code == 0, err
    return out


def without_times(data):
    """An explanation as data, without the only numbers that differ from run to run."""
    for graph in data["graphs"]:
        del graph["pass_seconds"]
    return data


# --- explain ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["with_args", "with_kwargs", "with_both", "with_tensor", "with_loss"]
)
def test_explains_what_a_factory_returns(run, name):
    out = ok(run("explain", f"factories:{name}"))
    assert "2 of 2 linear layers in FP8" in out
    assert "graph 0: kept for the backward" in out


@pytest.mark.parametrize("name", ["model", "MLP", "ready"])
def test_inputs_from_the_command_line(run, name):
    assert "float32 32×128" in ok(run("explain", f"factories:{name}", "--input", "32x64"))


def test_inputs_replace_those_of_the_factory(run):
    out = ok(run("explain", "factories:with_args", "--input", "x=48x64"))
    assert "48×128" in out


def test_json_is_all_that_stdout_has_and_equals_to_dict(run):
    out = ok(run("explain", "factories:with_tensor", "--json", "--rules"))
    from factories import MLP, x

    want = fp8pass.explain(MLP(), x(), rules=True)
    assert without_times(json.loads(out)) == without_times(json.loads(want.to_json()))


def test_progress_is_shown_on_a_terminal_only(run, monkeypatch):
    assert "building" not in run("explain", "factories:with_args")[2]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for a terminal
    code, out, err = run("explain", "factories:with_args", "--json")
    assert code == 0
    assert json.loads(out)
    stages = ("building factories:with_args", "without fp8pass", "fp8pass.explain")
    assert all(stage in err for stage in stages)


def test_what_the_model_prints_goes_to_stderr(run):
    code, out, err = run("explain", "factories:with_tensor", "--json")
    assert code == 0
    assert "built" in err
    assert "forward" in err
    assert json.loads(out)


def test_files_can_import_their_neighbours(run, here):
    (here / "folder").mkdir()
    (here / "folder" / "beside.py").write_text("from factories import with_args as build\n")
    (here / "folder" / "my-model.py").write_text("from beside import build\n")
    assert "2 of 2" in ok(run("explain", "./folder/my-model.py:build"))


def test_options_become_a_config(run):
    words = ("--recipe", "agoq", "--option", "skip=up,*.gate", "--option", "memory_budget=0.9")
    words += ("--option", "tolerance=inf", "--option", "group_size=64")
    data = json.loads(ok(run("explain", "factories:with_args", "--json", *words)))
    want = Config.recipe(
        "agoq", skip=("up", "*.gate"), memory_budget=0.9, tolerance=float("inf"), group_size=64
    )
    assert data["config"] == json.loads(json.dumps(vars(want))) | {"tolerance": "inf"}


def test_without_options_those_the_model_was_compiled_with(run):
    data = json.loads(ok(run("explain", "factories:compiled", "--json")))
    assert (data["config"]["save_format"], data["config"]["skip"]) == ("none", ["up"])
    data = json.loads(ok(run("explain", "factories:compiled", "--json", "--recipe", "coat")))
    assert (data["config"]["save_format"], data["config"]["skip"]) == ("e4m3", [])


def test_dtype_is_that_of_model_and_inputs(run):
    words = "factories:with_args", "--dtype", "bfloat16", "--device", "cpu"
    assert "bfloat16 32×128" in ok(run("explain", *words))
    words = "factories:model", "--dtype", "bfloat16", "--input", "32x64"
    assert "bfloat16 32×128" in ok(run("explain", *words))


def test_frontier(run):
    assert "memory against time" in ok(run("explain", "factories:with_args", "--frontier"))


def test_html_is_saved(run, here):
    assert "2 of 2" in ok(run("explain", "factories:with_args", "--html", here / "report.html"))
    assert (here / "report.html").read_text().startswith("<!DOCTYPE html>")


# --- Hugging Face -------------------------------------------------------------------------------


def llama_config(folder: Path, **changes) -> Path:
    """A folder with the config.json of a tiny Llama."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 176}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"], **changes}
    LlamaConfig(**sizes, **heads, **config).save_pretrained(folder)
    return folder


def vit_config(folder: Path, **changes) -> Path:
    """A folder with the config.json of a tiny ViT."""
    from transformers import ViTConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128}
    image = {"image_size": 32, "patch_size": 8, "num_attention_heads": 4}
    ViTConfig(**sizes, **image, **changes).save_pretrained(folder)
    return folder


def test_llama_from_its_config(run, here):
    folder = llama_config(here / "llama", dtype="bfloat16")
    out = ok(run("explain", folder / "config.json", "--option", "quantize_lm_head=True"))
    assert "8 of 8 linear layers in FP8" in out
    assert "bfloat16 2×64×176" in out


def test_input_replaces_the_default_ones(run, here):
    folder = llama_config(here / "llama")
    words = "--recipe", "linear", "--input", "input_ids=3x16:int64:96"
    data = json.loads(ok(run("explain", folder, "--json", *words)))
    assert data["graphs"][0]["linears"][0]["rows"] == "48"


def test_vit_from_its_config(run, here):
    folder = vit_config(here / "vit", architectures=["ViTForImageClassification"], num_labels=10)
    data = json.loads(ok(run("diagnose", folder, "--json")))
    assert {"classifier", "vit.layers.0.mlp.fc1"} & {y["module"] for y in data["layers"]}


@pytest.mark.parametrize(
    ("write", "head"), [(llama_config, "lm_head"), (vit_config, "")], ids=["llama", "vit"]
)
def test_without_an_architecture_a_language_model_or_a_base(run, here, write, head):
    folder = write(here / "model", architectures=None)
    data = json.loads(ok(run("explain", folder, "--json", "--recipe", "linear")))
    assert (data["graphs"][0]["linears"][-1]["module"] == head) == bool(head)


def test_no_inputs_known(run, here):
    from transformers import WhisperConfig

    sizes = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 96}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    WhisperConfig(
        **sizes, **ids, architectures=["WhisperForConditionalGeneration"]
    ).save_pretrained(here / "whisper")
    code, _, err = run("explain", here / "whisper")
    assert code == 2
    assert "--input input_features=" in err


def test_configs_that_transformers_cannot_read(run, here):
    (here / "config.json").write_text("{}")
    code, _, err = run("explain", "config.json")
    assert code == 1
    assert "model_type" in err


def test_without_transformers(run, here, monkeypatch):
    (here / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run("explain", "config.json")
    assert code == 1
    assert "pip install 'fp8pass[huggingface]'" in err


# --- diagnose and bisect ------------------------------------------------------------------------


def test_diagnose_by_the_factory_s_loss(run, here):
    out = ok(run("diagnose", "factories:with_loss"))
    assert "gradient error by layer" in out
    assert "down" in out


def test_diagnose_a_model_that_returns_its_loss(run, here):
    pytest.importorskip("matplotlib")
    words = ("--input", "32x64", "--plot", "errors.png", "--json")
    data = json.loads(ok(run("diagnose", "factories:WithLoss", *words)))
    assert {y["module"] for y in data["layers"]} >= {"up", "down"}
    assert (here / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_diagnose_a_model_with_a_loss_in_its_output(run, here):
    data = json.loads(ok(run("diagnose", llama_config(here / "llama"), "--json")))
    assert "model.layers.0.mlp.down_proj" in {y["module"] for y in data["layers"]}


@pytest.mark.parametrize("command", ["diagnose", "bisect"])
@pytest.mark.parametrize(
    ("words", "returned"),
    [
        (["factories:with_args"], "the model returned float32 32x64"),
        (["factories:with_wrong_loss"], "the loss function returned float32 32x64"),
        (["llama", "--input", "input_ids=2x8:int64:96"], "the model returned CausalLM"),
    ],
)
def test_without_a_loss(run, here, command, words, returned):
    llama_config(here / "llama")
    code, out, err = run(command, *words)
    assert (code, out) == (2, "")
    assert returned in err
    assert "return a loss function last" in err
    assert "--input labels=" in err


def test_plots_need_matplotlib_before_anything_runs(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("diagnose", "factories:with_loss", "--plot", "errors.png")
    assert code == 1
    assert "pip install 'fp8pass[demo]'" in err


class Found:
    """What a stand-in for `fp8pass.bisect` returns."""

    def __str__(self):
        return "the culprit\n"

    def to_json(self):
        return '{"culprit": 1}'


def test_bisect_gets_model_loss_batch_and_config(run, monkeypatch):
    calls = []

    def stand_in(model, loss_fn, batch, *, config=None):
        loss = loss_fn(model, batch)
        loss.backward()
        calls.append((model, loss.shape, config))
        return Found()

    monkeypatch.setattr(fp8pass, "bisect", stand_in, raising=False)
    assert ok(run("bisect", "factories:with_loss", "--recipe", "agoq")) == "the culprit\n"
    assert ok(run("bisect", "factories:with_loss", "--json")) == '{"culprit": 1}\n'
    (model, shape, config), (*_, without) = calls
    assert model.up.weight.grad is not None
    assert shape == ()
    assert (config, without) == (Config.recipe("agoq"), None)


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explian"], "Unknown command 'explian'. Did you mean 'explain'?"),
        (["explain"], "required: TARGET"),
        (["explain", "factories:model", "--recipee", "coat"], "Did you mean '--recipe'?"),
        (["explain", "factories:model", "other"], "Unknown argument 'other'."),
        (["explain", "factories:model", "--recipe", "coats"], "Did you mean 'coat'?"),
        (["explain", "factories:model", "--option", "skp=up"], "Did you mean 'skip'?"),
        (["explain", "factories:model", "--option", "name=1"], "Unknown option 'name'"),
        (["explain", "factories:model", "--option", "skip"], "is not KEY=VALUE"),
        (["explain", "factories:model", "--option", "group_size=17"], "multiple of 16"),
        (["explain", "factories:model", "--option", "memory_budget=7GX"], "such as '24GiB'"),
        (["explain", "factories:model", "--dtype", "bfloat"], "Did you mean 'bfloat16'?"),
        (["explain", "factories:model", "--dtype", "int8"], "Unknown dtype"),
        (["explain", "factories:model", "--device", "cud"], "Did you mean 'cuda'?"),
        (["explain", "factories:model", "--device", "cuda:99"], "no such GPU"),
        (["explain", "factories:model", "--input", "4,8"], "is not [NAME=]SHAPE[:DTYPE[:BELOW]]"),
        (["explain", "factories:model", "--input", "4x8:int46:9"], "Did you mean 'int64'?"),
        (["explain", "factories:model", "--input", "4x8:int64"], "integers need a bound"),
        (["explain", "factories:model", "--input", "4x8:float16:3"], "only integers have a bound"),
        (["explain", "factories:model", "--html", "no/where.html"], "no folder 'no' to write to"),
        (["diagnose", "factories:model", "--plot", "."], "a file is needed"),
        (["explain", "factories"], "TARGET is module:function"),
        (["explain", "no.json"], "No file no.json"),
        (["explain", "."], "No config.json in the folder ."),
        (["explain", "no.py:build"], "No file 'no.py'"),
        (["explain", "factories.py"], "Give factories.py:NAME"),
        (["explain", "factory:model"], "Unknown module 'factory'. Did you mean 'factories'?"),
        (["explain", "not/a.module:model"], "is no module"),
        (["explain", "factories:modle"], "Did you mean 'model'?"),
        (["explain", "factories:constant"], "is a int; it should be a function"),
        (["explain", "factories:with_argument"], "missing a required argument: 'size'"),
        (["explain", "factories:number"], "TARGET returned (int); it should return a model"),
        (["explain", "factories:model"], "missing a required argument: 'x'; its forward takes x"),
        (["explain", "factories:model", "--input", "y=4x64"], "its forward takes x, scale"),
        (["demo", "--steps", "1"], "from 2 up"),
        (["demo", "--recipe", "coats"], "Did you mean 'coat'?"),
        (["env", "--jsn"], "Did you mean '--json'?"),
    ],
    ids=" ".join,
)
def test_wrong_usage(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["factories:fails"], "building factories:fails failed: ZeroDivisionError: division"),
        (["needs_more:build"], "No module named 'no_such_dependency'"),
        (["factories:broken"], "running the model without fp8pass failed: RuntimeError: it broke."),
        (["factories:model", "--input", "3x5"], "Its inputs are float32 3x5; --input gives others"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_failures_take_one_line(run, words, message):
    code, out, err = run("explain", *words)
    assert (code, out) == (1, "")
    (line,) = [x for x in err.splitlines() if x != "forward"]
    assert line.startswith("fp8pass explain: error: ")
    assert message in line


def test_failures_of_fp8pass_say_how_to_report_them(run, monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "plan_saved_value")
    code, _, err = run("explain", "factories:with_args")
    assert code == 1
    assert "fp8pass.explain failed: ConfigError: Unknown pass" in err
    assert "'plan_saved_value'. Did you mean 'plan_saved_values'?" in err
    assert "fp8pass env" in err


def test_traceback(run):
    code, _, err = run("explain", "factories:fails", "--traceback")
    assert code == 1
    assert "ZeroDivisionError" in err
    assert "return 1 / 0" in err
    assert err.splitlines()[-1].startswith("fp8pass explain: error: ")


def test_interrupted(run, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(fp8pass, "explain", interrupt)
    assert run("explain", "factories:with_args")[0] == 130


# --- help ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_and_exit_codes(run, name):
    out = ok(run(name, "--help"))
    assert f"examples:\n  fp8pass {name}" in out
    assert re.search(r"exit codes:\n  0 .*\n  1 .*\n  2 ", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_can_be_parsed(name):
    from fp8pass.cli import _parsers

    for example in COMMANDS[name].examples:
        _, *words = example.split()
        assert _parsers()[0].parse_args(words).command == name


def test_help_without_a_command(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert all(command.summary.split()[0] in err for command in COMMANDS.values())


def test_help_and_version_do_not_load_pytorch():
    script = f"""
        import sys
        from fp8pass.cli import main
        for words in (["--version"], ["--help"], *([n, "--help"] for n in {list(COMMANDS)})):
            try:
                main(words)
            except SystemExit as stopped:
                assert stopped.code == 0
        assert "torch" not in sys.modules
    """
    out = python("-c", textwrap.dedent(script)).stdout
    assert out.startswith(f"fp8pass {fp8pass.__version__}\n")


# --- env ----------------------------------------------------------------------------------------


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a fresh Python process prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=True
    )


def test_env_as_a_process():
    done = python("-m", "fp8pass", "env", "--json", TORCH_LOGS="dynamo", FP8PASS_CHECK="1")
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["fp8pass"] == fp8pass.__version__
    assert found["versions"]["torch_supported"] == fp8pass.compat.SUPPORTED
    assert found["devices"]["cpu"]["fp8_product"] == "ok"
    assert found["variables"]["TORCH_LOGS"] == "dynamo"
    assert found["variables"]["FP8PASS_CHECK"] == "1"


def test_env_without_pytorch():
    """And without anything else that may be missing."""
    missing = ("torch", "triton", "transformers", "torchao", "rich")
    script = f"""
        import sys
        from fp8pass.cli import main
        sys.modules.update(dict.fromkeys({missing}))
        main(["env"])
    """
    out = python("-c", textwrap.dedent(script), PATH="").stdout
    assert "fp8_product      ModuleNotFoundError" in out
    assert "torch_supported  ModuleNotFoundError" in out


def test_env_lists_why_not(run, monkeypatch):
    monkeypatch.setattr("fp8pass.hardware.why_no_fp8_gemm", lambda device: "too old")
    monkeypatch.setattr("fp8pass.compat.get_cpp_compiler", lambda: 1 / 0)
    out = ok(run("env"))
    assert "fp8_gemms        too old" in out
    assert "fp8_product      not run: too old" in out
    assert "cpp_compiler     ZeroDivisionError" in out


@pytest.mark.gpu
def test_env_on_a_gpu(run):
    gpu = json.loads(ok(run("env", "--json")))["devices"]["cuda:0"]
    assert gpu["name"] == torch.cuda.get_device_name()
    assert re.fullmatch(r"sm\d+", gpu["capability"])
    assert re.fullmatch(r"\d+\.\d GiB", gpu["memory"])
    paths = {"fp8_gemms", "fp8_casts", "triton_kernels", "fp8_product"}
    assert {gpu[name] for name in paths} == {"yes", "ok"}


def test_env_notices_a_wrong_product(run, monkeypatch):
    lower = importlib.import_module("fp8pass.codegen.lowering").lower_dialect

    def spoil(gm):
        lower(gm)
        output = next(iter(reversed(gm.graph.nodes)))
        with gm.graph.inserting_before(output):
            output.replace_input_with(
                output.args[0],
                gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0], 2)),
            )
        gm.recompile()

    monkeypatch.setattr("fp8pass.codegen.lowering.lower_dialect", spoil)
    assert "fp8_product      wrong by 100%" in ok(run("env"))


# --- the package --------------------------------------------------------------------------------


def test_public_names_are_what_their_modules_define():
    for name, module in fp8pass._MODULES.items():
        assert getattr(fp8pass, name) is getattr(
            importlib.import_module(f"fp8pass.{module}"), name
        ), name
    assert set(fp8pass.__all__) <= set(dir(fp8pass))
    with pytest.raises(AttributeError, match="no attribute 'explan'"):
        _ = fp8pass.explan


def test_modules_do_not_hide_functions_of_the_same_name(monkeypatch):
    """As fp8pass.backend would, which Dynamo loads before anyone uses fp8pass.backend()."""
    monkeypatch.delitem(sys.modules, "fp8pass.diagnose")
    monkeypatch.delitem(vars(fp8pass), "diagnose", raising=False)
    module = importlib.import_module("fp8pass.diagnose")
    assert fp8pass.diagnose is module.diagnose


def test_the_script_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert declared == {"fp8pass": "fp8pass.cli:main"}
