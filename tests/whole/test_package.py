"""The package: its public names, its script, wheel and sdist, and the reference."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from cli_helpers import ROOT, run_python

import fp8pass


def test_public_names_are_what_their_modules_define():
    for name, module in fp8pass._MODULES.items():
        assert getattr(fp8pass, name) is getattr(
            importlib.import_module(f"fp8pass.{module}"), name
        ), name
    for name in fp8pass._SUBMODULES:
        assert getattr(fp8pass, name) is importlib.import_module(f"fp8pass.{name}")
    assert set(fp8pass.__all__) <= set(dir(fp8pass))
    with pytest.raises(AttributeError, match="no attribute 'explan'"):
        _ = fp8pass.explan


def test_names_of_public_modules_are_suggested():
    for name, module in fp8pass._ELSEWHERE.items():
        assert name in getattr(fp8pass, module).__all__
        with pytest.raises(AttributeError, match=f"Use fp8pass.{module}.{name}"):
            getattr(fp8pass, name)


def test_warnings_name_fp8pass():
    """A warning shows a line of the caller, or of PyTorch, but not who speaks."""
    for path in (ROOT / "fp8pass").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn":
                text = ast.unparse(node.args[0])
                assert re.match(r"f?['\"]fp8pass: ", text), f"{path}: {text}"


def test_log_lines_name_fp8pass_if_logging_is_not_configured():
    script = "import logging, fp8pass; logging.getLogger('fp8pass').warning('%d of %d', 1, 2)"
    done = run_python("-c", script)
    assert done.stderr == "fp8pass: 1 of 2\n"
    configured = run_python("-c", f"import logging; logging.basicConfig(); {script}")
    assert configured.stderr == "WARNING:fp8pass:1 of 2\n"


def test_no_module_has_the_name_of_a_function():
    """A module fp8pass.backend, imported by Dynamo, would replace the function fp8pass.backend."""
    modules = {module.name for module in pkgutil.iter_modules(fp8pass.__path__)}
    assert modules & set(fp8pass.__all__) == {"distributed", "optim", "testing"}


def test_the_script_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert declared == {"fp8pass": "fp8pass.tools.cli:main"}


# PyTorch for CPUs does not include Triton. The tests install it for its interpreter.
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None

import torch
from torch import nn
import fp8pass.tools.cli
import fp8pass.demo.compare
from expert_helpers import Experts

for name in fp8pass.__all__:
    getattr(fp8pass, name)
model = nn.Sequential(Experts(), nn.Linear(32, 32)).bfloat16()
optimizer = fp8pass.optim.AdamW(model.parameters(), lr=1e-3)
fp8pass.optim.step_in_backward(model, optimizer, accumulate=2)
run = torch.compile(model, backend="fp8pass")
for _ in range(2):
    run(torch.randn(4, 24, 32).bfloat16()).float().sum().backward()
print(fp8pass.explain(run, torch.randn(4, 24, 32).bfloat16()))
"""


@pytest.mark.long  # CI runs the demo without Triton
def test_the_package_works_without_triton():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        cwd=ROOT / "tests", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in FP8" in done.stdout


# --- wheel and sdist ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, list[str]]:
    """The names of all files in a wheel and an sdist, built from a copy of the repository."""
    pytest.importorskip("setuptools", minversion="77")
    copy, out = (tmp_path_factory.mktemp(name) for name in ("copy", "out"))
    for path in ("fp8pass", "tests", "benchmarks"):
        shutil.copytree(ROOT / path, copy / path, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / path, copy)
    code = "from setuptools import build_meta as b; [f(%r) for f in (b.build_wheel, b.build_sdist)]"
    done = subprocess.run(
        [sys.executable, "-c", code % str(out)], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    assert sdist.name == f"fp8pass-{fp8pass.__version__}.tar.gz"
    return {
        "wheel": zipfile.ZipFile(wheel).namelist(),
        "sdist": [name.partition("/")[2] for name in tarfile.open(sdist).getnames()],
        "README": zipfile.ZipFile(wheel)
        .read(f"fp8pass-{fp8pass.__version__}.dist-info/METADATA")
        .decode(),
    }


@pytest.mark.parametrize("of", ["wheel", "sdist"])
def test_all_of_the_package_is_built_and_nothing_else(built, of):
    files = [p for p in (ROOT / "fp8pass").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    package = {p.relative_to(ROOT).as_posix() for p in files}
    assert "fp8pass/py.typed" in package
    assert package == {name for name in built[of] if name.startswith("fp8pass/") and "." in name}
    tops = {name.split("/")[0] for name in built[of]}
    assert not tops & {"tests", "benchmarks", "docs"}
    assert any(name.endswith("LICENSE") for name in built[of])


RELATIVE = re.compile(r"\]\((?!https?://|#)[^)]*\)")


def test_pypi_shows_no_link_to_a_file_of_the_repository(built):
    """On PyPI links of the README must be absolute or plain text."""
    assert RELATIVE.search((ROOT / "README.md").read_text())
    assert "Description-Content-Type: text/markdown" in built["README"]
    assert "## First example" in built["README"]
    assert "| Quickstarts | pretrain" in built["README"] or "[pretrain](https://" in built["README"]
    assert not RELATIVE.search(built["README"])


def test_links_of_the_readme_lead_to_the_tag_of_the_version():
    for_pypi = runpy.run_path(str(ROOT / "setup.py"))["for_pypi"]
    text = "[![A page](docs/a.png)](docs/a.md#b), [x](https://x.org), [y](#y) and [z](z/)"
    at = "https://host/us"
    assert for_pypi(text, at, "v1") == (
        f"[![A page]({at}/raw/v1/docs/a.png)]({at}/blob/v1/docs/a.md#b), [x](https://x.org), "
        f"[y](#y) and [z]({at}/blob/v1/z/)"
    )
    assert for_pypi(text, None, "v1") == ", [x](https://x.org), [y](#y) and z"


# --- the documents ------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"^::: fp8pass\.([\w.]+)", (ROOT / "docs/api.md").read_text(), re.M))
    modules = {
        f"{name}.{public}"
        for name in ("optim", "distributed", "testing")
        for public in getattr(fp8pass, name).__all__
    }
    assert named == {*fp8pass._MODULES, *modules}


def test_targets_of_the_readmes_links_exist():
    """The build of the site checks the links of docs/."""
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", (ROOT / "README.md").read_text())
    assert links
    for path, anchor in links:
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
