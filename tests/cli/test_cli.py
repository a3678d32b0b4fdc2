"""The command line: inputs and outputs of explain, diagnose, bisect and fit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
from cli_helpers import expect_ok

import fp8pass
from fp8pass import Config
from fp8pass.tools.cli.target import parse_beside

SIZES = ("--gpu", "H200,2GiB", "--host", "8GiB")  # required by fit


def remove_times(data):
    """Remove the times from an explanation as data, because they differ between runs."""
    for graph in data["graphs"]:
        del graph["pass_seconds"]
    return data


# --- explain ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["with_args", "with_kwargs", "with_both", "with_tensor", "with_loss"]
)
def test_explains_what_a_factory_returns(run, name):
    out = expect_ok(run("explain", f"factories:{name}"))
    assert "2 of 2 linear layers in FP8" in out
    assert "graph 0: saved for the backward" in out


@pytest.mark.parametrize("name", ["model", "MLP", "ready"])
def test_inputs_can_be_given_on_the_command_line(run, name):
    assert "float32 32×128" in expect_ok(run("explain", f"factories:{name}", "--input", "32x64"))


def test_inputs_replace_inputs_of_the_factory(run):
    out = expect_ok(run("explain", "factories:with_args", "--input", "x=48x64"))
    assert "48×128" in out


@pytest.mark.long
def test_stdout_has_only_json(run):
    out = expect_ok(run("explain", "factories:with_tensor", "--json", "--rules"))
    from factories import MLP, x

    want = fp8pass.explain(MLP(), x(), rules=True)
    assert remove_times(json.loads(out)) == remove_times(json.loads(want.to_json()))


@pytest.mark.long
def test_progress_is_shown_on_a_terminal_only(run, monkeypatch):
    assert "building" not in run("explain", "factories:with_args")[2]
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's variable for a terminal
    code, out, err = run("explain", "factories:with_args", "--json")
    assert code == 0
    assert json.loads(out)
    stages = ("building factories:with_args", "without fp8pass", "fp8pass.explain")
    assert all(stage in err for stage in stages)


def test_output_of_the_model_goes_to_stderr(run):
    code, out, err = run("explain", "factories:with_tensor", "--json")
    assert code == 0
    assert "built" in err
    assert "forward" in err
    assert json.loads(out)


def test_files_can_import_their_neighbours(run, workdir):
    (workdir / "folder").mkdir()
    (workdir / "folder" / "neighbour.py").write_text("from factories import with_args as build\n")
    (workdir / "folder" / "my-model.py").write_text("from neighbour import build\n")
    assert "2 of 2" in expect_ok(run("explain", "./folder/my-model.py:build"))


def test_options_become_a_config(run):
    words = ("--recipe", "agoq", "--option", "skip=up,*.gate", "--option", "memory_budget=0.9")
    words += ("--option", "fast_accumulation=")
    words += ("--option", "error_tolerance=inf", "--option", "group_size=64")
    words += ("--option", "keep_exact=down", "--option", "quantize_lm_head=True")
    data = json.loads(expect_ok(run("explain", "factories:with_args", "--json", *words)))
    want = Config.recipe(
        "agoq",
        skip=("up", "*.gate"),
        fast_accumulation=(),
        memory_budget=0.9,
        error_tolerance=float("inf"),
        group_size=64,
        keep_exact=("down",),
        quantize_lm_head=True,
    )
    assert data["config"] == json.loads(json.dumps(vars(want))) | {"error_tolerance": "inf"}


@pytest.mark.long
def test_default_options_are_the_options_of_the_compiled_model(run):
    data = json.loads(expect_ok(run("explain", "factories:compiled", "--json")))
    assert (data["config"]["save_format"], data["config"]["skip"]) == ("none", ["up"])
    data = json.loads(expect_ok(run("explain", "factories:compiled", "--json", "--recipe", "coat")))
    assert (data["config"]["save_format"], data["config"]["skip"]) == ("e4m3", [])


@pytest.mark.long
def test_dtype_applies_to_model_and_inputs(run):
    words = "factories:with_args", "--dtype", "bfloat16", "--device", "cpu"
    assert "bfloat16 32×128" in expect_ok(run("explain", *words))
    words = "factories:model", "--dtype", "bfloat16", "--input", "32x64"
    assert "bfloat16 32×128" in expect_ok(run("explain", *words))


@pytest.mark.long
def test_the_frontier_is_printed(run):
    assert "memory against time" in expect_ok(run("explain", "factories:with_args", "--frontier"))


def test_html_is_saved(run, workdir):
    assert "2 of 2" in expect_ok(
        run("explain", "factories:with_args", "--html", workdir / "report.html")
    )
    assert (workdir / "report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        ((), "coat", "agoq"),
        (("--option", "skip=down"), "skip", "agoq"),
    ],
)
def test_the_page_compares_another_recipe(run, workdir, arguments, first, second):
    words = "--html", workdir / "report.html", *arguments, "--beside", "recipe=agoq"
    expect_ok(run("explain", "factories:with_args", *words))
    page = (workdir / "report.html").read_text()
    heading = page[page.index("Side by side") :]
    assert first in heading
    assert second in heading


def test_the_compared_configuration_keeps_other_options():
    arguments = argparse.Namespace(option=[("skip", ("a",))], beside=[("memory_budget", 0.5)])
    own = fp8pass.Config.recipe("agoq", skip=("a",))
    assert parse_beside(arguments, own) == fp8pass.Config.recipe(
        "agoq", skip=("a",), memory_budget=0.5
    )
    arguments.beside.append(("recipe", "linear"))
    want = fp8pass.Config.recipe("linear", skip=("a",), memory_budget=0.5)
    assert parse_beside(arguments, own) == want


# --- Hugging Face -------------------------------------------------------------------------------


def llama_config(folder: Path, **changes) -> Path:
    """Write the config.json of a tiny Llama to a folder, and return the folder."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 176}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"], **changes}
    LlamaConfig(**sizes, **heads, **config).save_pretrained(folder)
    return folder


def vit_config(folder: Path, **changes) -> Path:
    """Write the config.json of a tiny ViT to a folder, and return the folder."""
    from transformers import ViTConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128}
    image = {"image_size": 32, "patch_size": 8, "num_attention_heads": 4}
    ViTConfig(**sizes, **image, **changes).save_pretrained(folder)
    return folder


@pytest.mark.long
def test_llama_from_its_config(run, workdir):
    folder = llama_config(workdir / "llama", dtype="bfloat16")
    out = expect_ok(run("explain", folder / "config.json", "--option", "quantize_lm_head=True"))
    assert "8 of 8 linear layers in FP8" in out
    assert "bfloat16 2×64×176" in out


@pytest.mark.long
def test_input_replaces_the_default_ones(run, workdir):
    folder = llama_config(workdir / "llama")
    words = "--recipe", "linear", "--input", "input_ids=3x16:int64:96"
    data = json.loads(expect_ok(run("explain", folder, "--json", *words)))
    assert data["graphs"][0]["linears"][0]["rows"] == "48"


@pytest.mark.long
def test_vit_from_its_config(run, workdir):
    folder = vit_config(workdir / "vit", architectures=["ViTForImageClassification"], num_labels=10)
    data = json.loads(expect_ok(run("diagnose", folder, "--json")))
    assert {"classifier", "vit.layers.0.mlp.fc1"} & {y["module"] for y in data["layers"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("write", "head"), [(llama_config, "lm_head"), (vit_config, "")], ids=["llama", "vit"]
)
def test_the_default_architecture_is_a_language_or_base_model(run, workdir, write, head):
    folder = write(workdir / "model", architectures=None)
    data = json.loads(expect_ok(run("explain", folder, "--json", "--recipe", "linear")))
    assert (data["graphs"][0]["linears"][-1]["module"] == head) == bool(head)


def test_unknown_inputs_are_an_error(run, workdir):
    from transformers import WhisperConfig

    sizes = {"d_model": 48, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 96}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    WhisperConfig(
        **sizes, **ids, architectures=["WhisperForConditionalGeneration"]
    ).save_pretrained(workdir / "whisper")
    code, _, err = run("explain", workdir / "whisper")
    assert code == 2
    assert "--input input_features=" in err


def test_configs_that_transformers_cannot_read(run, workdir):
    (workdir / "config.json").write_text("{}")
    code, _, err = run("explain", "config.json")
    assert code == 1
    assert "model_type" in err


def test_missing_transformers_is_an_error(run, workdir, monkeypatch):
    (workdir / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run("explain", "config.json")
    assert code == 1
    assert "pip install 'fp8pass[huggingface]'" in err


# --- diagnose and bisect ------------------------------------------------------------------------


@pytest.mark.parametrize("factory", ["with_loss", "with_loss_of_a_dict"])
def test_diagnose_uses_the_loss_of_the_factory(run, workdir, factory):
    """It has the signature of `loss_fn` in `fp8pass.diagnose`."""
    out = expect_ok(run("diagnose", f"factories:{factory}"))
    assert "gradient error by layer" in out
    assert "down" in out


def test_a_loss_of_the_output_is_refused(run, workdir):
    code, _, err = run("diagnose", "factories:with_loss_of_the_output")
    assert code == 2
    assert "loss_fn that TARGET returns must accept two arguments, the model and the batch" in err
    assert "lambda model, batch:" in err


def test_diagnose_a_model_that_returns_its_loss(run, workdir):
    pytest.importorskip("matplotlib")
    words = ("--input", "32x64", "--plot", "errors.png", "--json")
    data = json.loads(expect_ok(run("diagnose", "factories:WithLoss", *words)))
    assert {y["module"] for y in data["layers"]} >= {"up", "down"}
    assert (workdir / "errors.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_diagnose_a_model_with_a_loss_in_its_output(run, workdir):
    data = json.loads(expect_ok(run("diagnose", llama_config(workdir / "llama"), "--json")))
    assert "model.layers.0.mlp.down_proj" in {y["module"] for y in data["layers"]}


@pytest.mark.parametrize("command", ["diagnose", "bisect", "fit"])
@pytest.mark.parametrize(
    ("words", "returned"),
    [
        (["factories:with_args"], "the model returned float32 32x64"),
        (["factories:with_wrong_loss"], "loss_fn returned float32 32x64"),
        (["llama", "--input", "input_ids=2x8:int64:96"], "the model returned CausalLM"),
    ],
)
def test_a_missing_loss_is_an_error(run, workdir, command, words, returned):
    llama_config(workdir / "llama")
    code, out, err = run(command, *words, *(SIZES if command == "fit" else ()))
    assert (code, out) == (2, "")
    assert returned in err
    assert "Return a loss_fn at the end" in err
    assert "--input labels=" in err


@pytest.mark.parametrize("command", ["diagnose", "fit"])
def test_plots_need_matplotlib_before_anything_runs(run, monkeypatch, command):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run(command, "factories:fails", "--plot", "errors.png")
    assert code == 1
    assert "pip install 'fp8pass[demo]'" in err


@pytest.mark.parametrize("command", ["diagnose", "fit"])
@pytest.mark.parametrize("file", ["errors.xyz", "errors"])
def test_plots_of_other_extensions_are_refused_before_anything_runs(run, command, file):
    pytest.importorskip("matplotlib")
    code, out, err = run(command, "factories:fails", "--plot", file)
    assert (code, out) == (2, "")
    assert f"--plot {file}: the name must end in one of matplotlib's formats, eps, " in err


class Found:
    """The result of a stand-in for `fp8pass.bisect`."""

    def __str__(self):
        return "the culprit\n"

    def to_json(self):
        return '{"culprit": 1}'


def test_bisect_receives_model_loss_batch_and_config(run, monkeypatch):
    calls = []

    def stand_in(model, loss_fn, batch, *, config=None):
        loss = loss_fn(model, batch)
        loss.backward()
        calls.append((model, loss.shape, config))
        return Found()

    monkeypatch.setattr(fp8pass, "bisect", stand_in, raising=False)
    assert expect_ok(run("bisect", "factories:with_loss", "--recipe", "agoq")) == "the culprit\n"
    assert expect_ok(run("bisect", "factories:with_loss", "--json")) == '{"culprit": 1}\n'
    (model, shape, config), (*_, without) = calls
    assert model.up.weight.grad is not None
    assert shape == ()
    assert (config, without) == (Config.recipe("agoq"), None)


# --- fit ----------------------------------------------------------------------------------------


def test_fit_prints_lines_to_paste(run, tmp_path):
    out = expect_ok(
        run("fit", "factories:with_loss", *SIZES, "--plot", str(tmp_path / "memory.png"))
    )
    assert out.startswith("MLP ")
    assert "· H200 of 2 GiB (rates: measured)\ndefault · AdamW" in out
    assert "◀ fits" in out
    assert "optimizer = fp8pass.optim.AdamW(model.parameters())" in out
    assert (tmp_path / "memory.png").stat().st_size


def test_fit_accepts_a_batch_of_one_tensor(run):
    assert "◀ fits" in expect_ok(run("fit", "factories:with_loss_of_a_tensor", *SIZES))


@pytest.mark.parametrize(
    "name", ["WithLoss", "loss_of_kwargs", "loss_of_both", "loss_of_a_tensor_and_kwargs"]
)
def test_fit_uses_the_loss_that_a_model_returns(run, workdir, name):
    words = ("--input", "32x64") if name == "WithLoss" else ()
    assert "◀ fits" in expect_ok(run("fit", f"factories:{name}", *SIZES, *words))


def test_errors_of_a_model_are_not_reported_as_errors_of_fit(run):
    code, _, err = run("fit", "factories:broken", *SIZES)
    assert code == 1
    assert (
        "it broke. --traceback shows where. If the error is not in the model or its loss_fn" in err
    )


@pytest.mark.long
def test_fit_notes_the_default_dtype(run, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
    sizes = {"intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 2}
    config |= {**sizes, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    note = "Weights are in float32, because the config names no dtype"
    assert note in expect_ok(run("fit", str(tmp_path), *SIZES))
    inputs = ("--input", "input_ids=2x64:int64:256", "--input", "labels=2x64:int64:256")
    out = expect_ok(run("fit", str(tmp_path), *SIZES, "--dtype", "bfloat16", *inputs))
    assert note not in out
    assert "made up" not in out
    assert "micro-batch 2 × 64 tokens · H200" in out


@pytest.mark.long
def test_fit_of_a_hugging_face_config_allocates_nothing(run, tmp_path):
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_hidden_layers": 60}  # 24 GB of weights
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes, **heads}))
    words = ("--blocks", "model.layers", "--option", "memory_budget=0.9", "--json")
    code, out, err = run("fit", str(tmp_path), *SIZES, *words)
    assert code == 1
    found = json.loads(out)
    assert not found["fits"]
    assert "does not fit a GPU of 2 GiB and a host of 8 GiB" in found["why_not"]
    usual = "--input input_ids=4x2048:int64:32000 --input labels=4x2048:int64:32000"
    assert "The inputs are made up: 2 x 128 tokens." in found["notes"][0]
    assert found["notes"][0].endswith(usual)
    assert found["blocks"] == ["model.layers.*"]
    assert found["tried"][0]["gpu"]["weights"] > 24e9
    assert "the model does not fit; " in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "H20"), "Unknown gpu 'H20'"),
        (("--blocks", "layers"), "matches no module"),
        (("--accumulate", "0"), "accumulate must be a positive int"),
    ],
)
def test_wrong_options_of_fit(run, words, message):
    code, out, err = run("fit", "factories:with_loss", *SIZES, *words)
    assert (code, out) == (2, "")
    assert message in err
