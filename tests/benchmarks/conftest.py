"""Fixture to import benchmarks, which are scripts in a folder."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def load(monkeypatch):
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module
