"""Benchmarks are scripts: their modules are imported from their folder."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module
