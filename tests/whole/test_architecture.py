"""Architecture: imports between rooms go one way, and each room keeps its responsibility."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import fp8pass
from fp8pass.compilation import hashed_files
from fp8pass.passes import ALL_PASSES, INFERENCE_PASSES

ROOT = Path(fp8pass.__file__).parent
# From the bottom to the top. A module imports from its own room and from earlier rooms.
ROOMS = (
    "compat",
    "hardware",
    "dialect",
    "option_checks",
    "config",
    "plan",
    "runtime",
    "graph",
    "error_analysis",
    "activation_memory",
    "codegen",
    "weights",
    "optim",
    "passes",
    "hooks",
    "compilation",
    "partition",
    "compiler",
    "stability",
    "compile_log",
    "dynamo",
    "distributed",
    "testing",
    "tools",
    "integrations",
    "",  # the package itself: its public names
    "cli and demo",
)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__")


FILES = {module_of(path).rstrip("."): path for path in sorted(ROOT.rglob("*.py"))}


def room(module: str) -> str:
    if module.startswith(("tools.cli", "demo", "__main__")):
        return "cli and demo"
    return module.split(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Yield all modules of the package that a file imports, also late or for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ("" for alias in node.names if alias.name == "fp8pass")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp8pass"):
            base = (node.module or "").removeprefix("fp8pass").lstrip(".")
            for alias in node.names:
                if alias.name == "__version__":  # any room may import it
                    continue
                below = f"{base}.{alias.name}".lstrip(".")
                yield below if below in FILES else base


@pytest.fixture(scope="module")
def arrows() -> nx.DiGraph:
    found = nx.DiGraph()
    for module, path in FILES.items():
        found.add_edges_from((module, other) for other in imports(path) if other != module)
    return found


def test_imports_go_to_lower_rooms(arrows):
    order = {name: i for i, name in enumerate(ROOMS)}
    upwards = [(a, b) for a, b in arrows.edges if order[room(b)] > order[room(a)]]
    assert not upwards


def test_modules_do_not_import_each_other_in_circles(arrows):
    assert not [c for c in nx.strongly_connected_components(arrows) if len(c) > 1]


def test_keys_of_caches_cover_what_the_compiler_imports(arrows):
    needed = {FILES[module] for module in nx.descendants(arrows, "compiler") | {"compiler"}}
    assert needed <= set(hashed_files())


def test_the_compiler_does_not_import_its_observers(arrows):
    rooms = {room(module) for module in nx.descendants(arrows, "compiler")}
    assert not rooms & {"stability", "compile_log", "tools", "optim", "distributed", "testing"}


def test_few_modules_are_outside_of_rooms():
    assert len(list(ROOT.glob("*.py"))) <= 12


def test_a_pass_has_the_name_of_its_file():
    files = {path.stem for path in (ROOT / "passes").glob("*/*.py")} - {"__init__"}
    assert {p.__name__ for p in ALL_PASSES} == files
    assert set(INFERENCE_PASSES) <= set(ALL_PASSES)


# Those whose files are their own list: a pass each, and the modules at the top.
WITHOUT_INDEX = {"", "passes", "passes/joint", "passes/lowering"}
INDEXED = sorted(p.parent for p in ROOT.rglob("__init__.py"))


def test_the_docstring_of_a_package_lists_its_modules():
    missing = []
    for package in INDEXED:
        if str(package.relative_to(ROOT)).strip(".") not in WITHOUT_INDEX:
            index = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
            modules = [path for path in package.glob("*.py") if not path.name.startswith("__")]
            missing += [path for path in modules if path.name not in index]
    assert not missing


def test_files_that_the_documentation_names_exist():
    folder = ROOT.parent
    there = [str(p.relative_to(folder)) for p in folder.rglob("*.py") if ".venv" not in p.parts]
    texts = {p: p.read_text() for p in (*folder.glob("*.md"), *(folder / "docs").glob("*.md"))}
    named = {m for text in texts.values() for m in re.findall(r"`(\w[\w/]*/\w+\.py)`", text)}
    assert {name for name in named if not any(path.endswith(name) for path in there)} == set()
    assert len(named) > 30


def names(node: ast.AST) -> list[str]:
    """Return a chain such as `torch._ops.OpOverload` as a list; empty for other nodes."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*parts, node.id][::-1] if isinstance(node, ast.Name) else []


def private_symbols(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = [*(node.module or "").split("."), *(a.name for a in node.names)]
        elif isinstance(node, ast.Import):
            found = node.names[0].name.split(".")
        else:
            found = names(node)
        operators = found[:2] == ["torch", "ops"]
        private = any(x.startswith("_") and not x.startswith("__") for x in found)
        if found[:1] == ["torch"] and private and not operators:
            yield ".".join(found)
        if isinstance(node, ast.Attribute) and node.attr == "_schema":
            yield node.attr


def test_private_symbols_of_pytorch_are_in_compat():
    others = {module: path for module, path in FILES.items() if room(module) != "compat"}
    found = {m: list(private_symbols(ast.parse(path.read_text()))) for m, path in others.items()}
    assert not {module: symbols for module, symbols in found.items() if symbols}


def test_nothing_is_mocked_outside_of_tests():
    others = {module: path for module, path in FILES.items() if room(module) != "testing"}
    assert not [module for module, path in others.items() if "unittest" in path.read_text()]
