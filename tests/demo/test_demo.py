"""The demo trains both variants, prints measured numbers, and refuses invalid options."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import stock_eager

import fp8pass
from fp8pass import compat
from fp8pass.demo import data as text
from fp8pass.demo.compare import run_demo, summarize
from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import new_model
from fp8pass.demo.options import SIZES, add_options
from fp8pass.demo.show import list_conclusions, make_table, write_plot
from fp8pass.demo.train import Run, learning_rate
from fp8pass.option_checks import bytes_text
from fp8pass.tools.cli import main
from fp8pass.tools.cli.parsing import Parser

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
COMPILE = torch.compile


def compile_without_inductor(model, backend=stock_eager, options=None, **kwargs):
    """Compile like `torch.compile`, but run graphs op by op, which saves a minute."""
    options = options and {**options, "compiler": "eager"}
    return COMPILE(model, backend=backend, options=options, **kwargs)


@dataclass
class Outcome:
    stock: Run
    ours: Run
    other_seed: Run
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("demo") / "out"
    parser = Parser()
    add_options(parser)
    options = parser.parse_args(["--device", "cpu", "--size", "tiny", "--out", str(folder)])
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        mock.patch.object(torch, "compile", compile_without_inductor),
    ):
        runs = run_demo(options)
    return Outcome(*runs, folder, printed.getvalue())


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_dtype_of_weights_depends_on_the_cpu(has_bf16, monkeypatch) -> None:
    monkeypatch.setattr(compat, "multiplies_bf16_on_cpu", lambda: has_bf16)
    model = new_model(TINY, 0, CPU)
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    assert all(p.dtype is dtype for p in model.parameters())
    assert (" in BF16, " if has_bf16 else " in FP32, ") in summarize(model, TINY)


def test_both_losses_fall(outcome: Outcome) -> None:
    for run in (outcome.stock, outcome.ours):
        assert len(run.losses) == TINY.steps
        assert run.losses[0] > 5
        assert sum(run.losses[-8:]) / 8 < 3.5
        assert run.held_out_loss < 4


def test_both_start_from_the_same_weights_and_batches(outcome: Outcome) -> None:
    assert outcome.ours.losses[0] == pytest.approx(outcome.stock.losses[0], rel=0.01)


@pytest.mark.long
def test_measured_bytes_equal_the_plan(outcome: Outcome) -> None:
    data = Data.of(read_text(None), TINY, CPU)
    model = new_model(TINY, 0, CPU)
    explanation = fp8pass.explain(model, *next(data.train_batches(TINY, 0)))
    assert outcome.ours.saved_bytes < 0.6 * outcome.stock.saved_bytes
    assert outcome.ours.saved_bytes == explanation.saved_bytes
    assert outcome.stock.saved_bytes == explanation.stock_bytes


def test_the_other_seed_has_other_weights_and_batches(outcome: Outcome) -> None:
    assert outcome.other_seed.losses[0] != outcome.stock.losses[0]
    assert outcome.other_seed.saved_bytes == outcome.stock.saved_bytes


def test_the_last_lines_are_the_result(outcome: Outcome) -> None:
    """At most 25 lines are printed, and the table and conclusions are in the last 15."""
    lines = outcome.printed.splitlines()
    assert len(lines) <= 25
    result = "\n".join(lines[-15:])
    for expected in (
        "held-out loss",
        "fp8pass coat",
        "torch.compile, seed 1",
        "Memory: ",
        "Loss: ",
        "A CPU emulates FP8",
        "loss.png",
        "report.html",
    ):
        assert expected in result


def test_the_only_baseline_is_stock_torch_compile(outcome: Outcome) -> None:
    """The line that fp8pass logs, which compares with other bytes, is hidden."""
    assert "kept for the backward" not in outcome.printed
    assert set(re.findall(r"[\d.]+ [KM]iB", outcome.printed)) == {
        bytes_text(outcome.stock.saved_bytes),
        bytes_text(outcome.ours.saved_bytes),
    }


def make_run(variant: str, loss: float, peak_bytes: int | None = None) -> Run:
    return Run(variant, [loss], loss, 1000.0, 2**20, peak_bytes)


@pytest.mark.parametrize(
    ("loss", "expected"), [(2.01, "+0.5%, no more than"), (2.1, "+5.0%, more")]
)
def test_the_loss_is_compared_with_another_seed(loss: float, expected: str) -> None:
    runs = [make_run("stock", 2.0), make_run("fp8pass", loss), make_run("seed 1", 1.98)]
    _, about_loss, _ = list_conclusions(runs, CPU)
    assert f"fp8pass changes the loss by {expected}" in about_loss
    assert "(-1.0%)" in about_loss


@pytest.mark.parametrize("peak_bytes", [None, 2**30])
def test_peak_memory_is_shown_where_it_is_counted(peak_bytes: int | None) -> None:
    headers = [column.header for column in make_table([make_run("stock", 2.0, peak_bytes)]).columns]
    assert ("peak" in headers) == (peak_bytes is not None)


@pytest.mark.long
def test_without_a_cpp_compiler_one_sentence_names_the_fix(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fp8pass",
            "demo",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "out"),
        ],
        env={**os.environ, "CXX": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "apt install g++" in line
    assert "CXX" in line
    assert not (tmp_path / "out").exists()


def test_writes_the_loss_curves(outcome: Outcome) -> None:
    path = outcome.folder / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in outcome.printed


def test_writes_the_report(outcome: Outcome) -> None:
    assert (outcome.folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert f"Report: {outcome.folder / 'report.html'}" in outcome.printed


def test_missing_matplotlib_prints_how_to_install_it(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runs = [outcome.stock, outcome.ours, outcome.other_seed]
    assert "pip install 'fp8pass[demo]'" in write_plot(runs, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "coats"], "Did you mean 'coat'?"),
        (["--size", "tinny"], "Did you mean 'tiny'?"),
        (["--device", "cud"], "Did you mean 'cuda'?"),
        (["--device", "cuda:99"], "--device cuda:99 does not exist"),
        (["--step", "3"], "Did you mean '--steps'?"),
        (["--steps", "1"], "must be at least 2"),
        (["--steps", "many"], "must be at least 2"),
        (["--seed", "x"], "invalid int value"),
        (["--data", "/no/such/place"], "no such file or folder"),
        (["--data", "{tmp}/short.txt"], "too few for sequences"),
        (["--out", "{tmp}/short.txt"], "File exists"),
    ],
)
def test_bad_options_exit_with_a_hint(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *(a.replace("{tmp}", str(tmp_path)) for a in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_reads_a_folder_without_its_binary_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text("one ")
    (tmp_path / "two.md").write_text("two ")
    (tmp_path / "image.bin").write_bytes(b"\0\1\2")
    assert sorted(read_text(tmp_path).split()) == [b"one", b"two"]


def test_batches_follow_the_seed_and_stay_inside_the_text() -> None:
    size = replace(TINY, steps=3)
    data = Data.of(bytes(range(256)) * 20, size, CPU)

    def batches(seed: int) -> torch.Tensor:
        return torch.stack([tokens for tokens, _ in data.train_batches(size, seed)])

    assert torch.equal(batches(0), batches(0))
    assert not torch.equal(batches(0), batches(1))
    held_out = list(data.held_out_batches(size))
    assert len(held_out) == text.HELD_OUT_BATCHES
    assert held_out[-1][1][-1, -1] == data.held_out[-1]
    for tokens, targets in held_out:
        assert torch.equal((tokens + 1) % 256, targets)


def test_learning_rate_warms_up_and_decays() -> None:
    size = replace(TINY, steps=100, peak_lr=1.0)
    rates = [learning_rate(step, size) for step in range(size.steps)]
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == rates[20] == 1.0
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
