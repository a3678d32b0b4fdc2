"""Helpers of the tests of the command line: model factories, and functions that run commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8pass
from fp8pass.tools.cli import main

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


class Scaled(MLP):
    def forward(self, x, scale):
        return super().forward(x, scale).square().mean()


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
    return MLP(), (x(),), lambda model, batch: model(*batch).square().mean()


def with_loss_of_a_tensor():
    return MLP(), x(), lambda model, batch: model(batch).square().mean()


def with_loss_of_a_dict():
    return MLP(), {"x": x()}, lambda m, b: m(**b).square().mean()


def with_loss_of_the_output():
    return MLP(), (x(),), lambda output: output.square().mean()


def loss_of_kwargs():
    return Scaled(), {"x": x(), "scale": torch.tensor(2.0)}


def loss_of_both():
    return Scaled(), [x()], {"scale": torch.tensor(2.0)}


def loss_of_a_tensor_and_kwargs():
    return Scaled(), x(), {"scale": torch.tensor(2.0)}


def with_wrong_loss():
    return MLP(), (x(),), lambda model, batch: model(*batch).square()


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
def workdir(tmp_path, monkeypatch):
    """Change to a new directory with a module `factories`, and return it."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("factories", "needs_more"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def run(workdir, capsys):
    """Return a function that runs a command line: (exit code, stdout, stderr)."""

    def run(*argv):
        try:
            code = main([str(word) for word in argv])
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def expect_ok(result) -> str:
    """Check that a command succeeded, and return its stdout."""
    code, out, err = result
    assert code == 0, err
    return out


def run_python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a new Python process, which must succeed, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=True
    )
