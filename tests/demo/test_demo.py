"""The demo trains both variants, prints measured numbers, and refuses invalid options."""

from __future__ import annotations

import contextlib
import io
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
from fp8pass.demo.__main__ import main
from fp8pass.demo.compare import summary
from fp8pass.demo.data import Data, read_text
from fp8pass.demo.model import new_model
from fp8pass.demo.show import write_plot
from fp8pass.demo.sizes import SIZES
from fp8pass.demo.train import Run, learning_rate

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
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("demo") / "out"
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(torch, "compile", compile_without_inductor),
    ):
        stock, ours = main(["--device", "cpu", "--size", "tiny", "--out", str(folder)])
    return Outcome(stock, ours, folder, printed.getvalue())


@pytest.mark.parametrize("has_bf16", [False, True])
def test_the_dtype_of_weights_depends_on_the_cpu(has_bf16, monkeypatch) -> None:
    monkeypatch.setattr(compat, "multiplies_bf16_on_cpu", lambda: has_bf16)
    model = new_model(TINY, 0, CPU)
    dtype = torch.bfloat16 if has_bf16 else torch.float32
    assert all(p.dtype is dtype for p in model.parameters())
    assert (" in BF16, " if has_bf16 else " in FP32, ") in summary(model, TINY)


def test_both_losses_fall(outcome: Outcome) -> None:
    for run in (outcome.stock, outcome.ours):
        assert len(run.losses) == TINY.steps
        assert run.losses[0] > 5
        assert run.final_loss < 3.5
        assert run.held_out_loss < 4


def test_both_start_from_the_same_weights_and_batches(outcome: Outcome) -> None:
    assert outcome.ours.losses[0] == pytest.approx(outcome.stock.losses[0], rel=0.01)


@pytest.mark.long
def test_measured_bytes_equal_the_plan(outcome: Outcome) -> None:
    data = Data.of(read_text(None), TINY, CPU)
    model = new_model(TINY, 0, CPU)
    explanation = fp8pass.explain(model, *next(data.train_batches(TINY, 0)))
    assert outcome.ours.activation_bytes < 0.6 * outcome.stock.activation_bytes
    assert outcome.ours.activation_bytes == explanation.saved_bytes
    assert outcome.stock.activation_bytes == explanation.stock_bytes


def test_prints_the_table_and_the_explanation(outcome: Outcome) -> None:
    for expected in (
        "torch.compile",
        "fp8pass coat",
        "n/a",
        "emulates FP8",
        "layers.0.mlp.up_proj",
    ):
        assert expected in outcome.printed


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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'fp8pass[demo]'" in write_plot([outcome.stock, outcome.ours], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "coats"], "Did you mean 'coat'?"),
        (["--size", "tinny"], "Did you mean 'tiny'?"),
        (["--device", "cud"], "Did you mean 'cuda'?"),
        (["--device", "cuda:99"], "no such GPU"),
        (["--step", "3"], "Did you mean '--steps'?"),
        (["--steps", "1"], "at least 2 steps"),
        (["--steps", "many"], "at least 2 steps"),
        (["--seed", "x"], "invalid int value"),
        (["--data", "/no/such/place"], "no such file or folder"),
        (["--data", "{tmp}/short.txt"], "too little"),
        (["--out", "{tmp}/short.txt"], "File exists"),
    ],
)
def test_bad_options_exit_with_a_hint(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit) as stopped:
        main([a.replace("{tmp}", str(tmp_path)) for a in arguments])
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
