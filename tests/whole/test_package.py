"""The package: its public names, and the script that it installs."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from cli_helpers import ROOT

import fp8pass


def test_public_names_are_what_their_modules_define():
    for name, module in fp8pass._MODULES.items():
        assert getattr(fp8pass, name) is getattr(
            importlib.import_module(f"fp8pass.{module}"), name
        ), name
    for name, module in fp8pass._SUBMODULES.items():
        assert getattr(fp8pass, name) is importlib.import_module(f"fp8pass.{module}")
    assert set(fp8pass.__all__) <= set(dir(fp8pass))
    with pytest.raises(AttributeError, match="no attribute 'explan'"):
        _ = fp8pass.explan


def test_no_module_has_the_name_of_a_function():
    """As fp8pass.backend would, which Dynamo loads before anyone uses fp8pass.backend()."""
    modules = {module.name for module in pkgutil.iter_modules(fp8pass.__path__)}
    assert modules & set(fp8pass.__all__) == {"distributed", "optim", "testing"}


def test_the_script_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert declared == {"fp8pass": "fp8pass.cli:main"}
