"""`fp8pass env`: installed versions, and available FP8 paths and their checks."""

from __future__ import annotations

import json
import re
import textwrap

import pytest
import torch
from cli_helpers import expect_ok, run_python

import fp8pass
from fp8pass.codegen import lowering


@pytest.mark.long
def test_env_prints_versions():
    done = run_python("-m", "fp8pass", "env", "--json", TORCH_LOGS="dynamo", FP8PASS_CHECK="1")
    found = json.loads(done.stdout)
    # The metadata of a package may omit the local version label.
    assert found["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["versions"]["fp8pass"] == fp8pass.__version__
    assert found["versions"]["torch_supported"] == fp8pass.compat.SUPPORTED
    assert found["devices"]["cpu"]["fp8_product"] == "ok"
    assert found["variables"]["TORCH_LOGS"] == "dynamo"
    assert found["variables"]["FP8PASS_CHECK"] == "1"


@pytest.mark.long
@pytest.mark.skipif(bool(torch.version.cuda), reason="about PyTorch without CUDA")
def test_env_without_cuda_reports_no_error():
    out = run_python("-m", "fp8pass", "env").stdout
    assert "no GPU" in out
    assert "Error" not in out


def test_env_without_a_driver_reports_no_error(run, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("torch.utils.collect_env.get_nvidia_driver_version", lambda run: None)
    out = expect_ok(run("env"))
    assert "cuda:\n  name             no GPU" in out
    monkeypatch.setattr("torch.utils.collect_env.get_nvidia_driver_version", lambda run: "580")
    assert "AssertionError: Torch not compiled with CUDA" in expect_ok(run("env"))


def test_env_works_without_pytorch():
    """All other optional packages are missing, too."""
    missing = ("torch", "triton", "transformers", "torchao", "rich")
    script = f"""
        import sys
        from fp8pass.tools.cli import main
        sys.modules.update(dict.fromkeys({missing}))
        main(["env"])
    """
    out = run_python("-c", textwrap.dedent(script), PATH="").stdout
    assert "fp8_product      ModuleNotFoundError" in out
    assert "torch_supported  ModuleNotFoundError" in out


def test_env_lists_reasons_against_paths(run, monkeypatch):
    monkeypatch.setattr("fp8pass.hardware.why_no_fp8_gemm", lambda device: "too old")
    monkeypatch.setattr("fp8pass.compat.get_cpp_compiler", lambda: 1 / 0)
    out = expect_ok(run("env"))
    assert "fp8_gemms        too old" in out
    assert "fp8_product      not run: too old" in out
    assert "cpp_compiler     ZeroDivisionError" in out


@pytest.mark.gpu
def test_env_checks_all_paths_on_a_gpu(run):
    gpu = json.loads(expect_ok(run("env", "--json")))["devices"]["cuda:0"]
    assert gpu["name"] == torch.cuda.get_device_name()
    assert re.fullmatch(r"sm\d+", gpu["capability"])
    assert re.fullmatch(r"\d+\.\d GiB", gpu["memory"])
    paths = {"fp8_gemms", "fp8_casts", "triton_kernels", "fp8_product"}
    assert {gpu[name] for name in paths} == {"yes", "ok"}


def test_env_reports_a_wrong_product(run, monkeypatch):
    lower = lowering.lower

    def spoil(gm):
        lower(gm)
        output = next(iter(reversed(gm.graph.nodes)))
        with gm.graph.inserting_before(output):
            output.replace_input_with(
                output.args[0],
                gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0], 2)),
            )
        gm.recompile()

    monkeypatch.setattr(lowering, "lower", spoil)
    assert "fp8_product      wrong by 100%" in expect_ok(run("env"))
