"""`fp8pass env --check`: all checks pass, and a broken kernel fails."""

from __future__ import annotations

import pytest
import torch
from cli_helpers import expect_ok
from kernel_helpers import both_devices
from torch import Tensor

from fp8pass import hardware
from fp8pass.codegen import tuned_lowerings
from fp8pass.codegen.kernels import kernel_operator, tile_kernel, tile_source
from fp8pass.tools import self_check

pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def all_kernels(monkeypatch):
    """Run Triton kernels in the interpreter on a CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
        found = {
            name: (lambda device: None, check) for name, (_, check) in self_check.CHECKS.items()
        }
        monkeypatch.setattr(self_check, "CHECKS", found)


@both_devices
@pytest.mark.parametrize("name", self_check.CHECKS)
def test_all_checks_pass(name, device, monkeypatch):
    monkeypatch.setattr(self_check, "CHECKS", {name: self_check.CHECKS[name]})
    outcomes = list(self_check.check_device(torch.device(device)))
    assert outcomes
    assert not [(x.case, x.problem) for x in outcomes if x.problem]


def only(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> list[str]:
    """Return the problems that one check finds."""
    monkeypatch.setattr(self_check, "CHECKS", {name: self_check.CHECKS[name]})
    return [x.problem for x in self_check.check_device(device) if x.problem]


@both_devices
def test_a_broken_kernel_fails(monkeypatch, device):
    """The kernel rounds one more time, to BF16."""
    right = tile_source.divide_by_scale
    monkeypatch.setattr(
        tile_source,
        "divide_by_scale",
        lambda x, s: f"({right(x, s)}).to(tl.bfloat16).to(tl.float32)",
    )
    tile_kernel.write.cache_clear()
    problems = only("tile kernel", monkeypatch, torch.device(device))
    tile_kernel.write.cache_clear()
    assert problems
    assert "elements are wrong, first" in problems[0]


def test_a_wrong_gemm_fails(monkeypatch):
    def wrong(*args: object) -> Tensor:
        return 1.05 * right(*args)

    lowering = tuned_lowerings.LOWERINGS[torch.ops.fp8pass.scaled_mm.default]
    right = lowering.function
    wrong_lowering = tuned_lowerings.Lowering(wrong)
    monkeypatch.setitem(
        tuned_lowerings.LOWERINGS, torch.ops.fp8pass.scaled_mm.default, wrong_lowering
    )
    assert len(only("GEMM, row scales", monkeypatch, CPU)) == 6


def test_errors_and_missing_hardware_are_outcomes(monkeypatch):
    def fail(*args: object) -> None:
        raise RuntimeError("no such instruction\nmore")

    monkeypatch.setattr(kernel_operator, "run", fail)
    assert only("row kernel", monkeypatch, CPU) == ["RuntimeError: no such instruction"]
    (check,) = (check for _, check in self_check.CHECKS.values())
    monkeypatch.setattr(self_check, "CHECKS", {"rows": (lambda device: "old GPU", check)})
    (outcome,) = self_check.check_device(CPU)
    assert (outcome.skipped, outcome.problem) == ("old GPU", "")


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((12, 0), "2.13.0", "no FP8 GEMM with row scales"),
        ((8, 9), "2.11.0", "ignore CUDA streams"),
        ((8, 9), "2.12.0", None),
        ((9, 0), "2.11.0", None),
        ((10, 0), "2.11.0", None),
    ],
)
def test_gpus_without_row_scales(capability, version, reason, monkeypatch):
    monkeypatch.setattr(hardware, "_capability", lambda index: capability)
    monkeypatch.setattr(hardware, "name_of", lambda device: "a GPU")
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    found = hardware.why_no_row_scales(torch.device("cuda:0"))
    assert reason in found if reason else found is None


def test_the_command_needs_a_gpu_and_reports_failures(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, _, error = run("env", "--check")
    assert code == 1
    assert "No GPU was found, so nothing was checked" in error
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    outcomes = [self_check.Outcome("tiles", "1×16"), self_check.Outcome("AdamW", "", skipped="old")]
    monkeypatch.setattr(self_check, "check_device", lambda device: outcomes)
    out = expect_ok(run("env", "--check"))
    assert "All checks passed." in out
    assert "not run: old" in out
    outcomes.append(self_check.Outcome("GEMM", "16×16", "wrong"))
    code, _, error = run("env", "--check")
    assert code == 1
    assert "1 checks failed" in error
