"""The package: its public names, and the script that it installs."""

from __future__ import annotations

import importlib
import pkgutil
import re

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


# --- the documents ------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"^::: fp8pass\.([\w.]+)", (ROOT / "docs/api.md").read_text(), re.M))
    modules = {
        f"{name}.{public}"
        for name, module in (("optim", fp8pass.optim), ("distributed", fp8pass.distributed))
        for public in module.__all__
    }
    assert named == {*fp8pass._MODULES, *modules, "pipeline_parallel.configs"}


def test_the_links_of_the_readme_lead_somewhere():
    """Those of docs/ are checked when the site is built."""
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", (ROOT / "README.md").read_text())
    assert links
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
