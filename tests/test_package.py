"""The package: its public names, and the script that it installs."""

from __future__ import annotations

import importlib
import sys

import pytest
from cli_helpers import ROOT

import fp8pass


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
