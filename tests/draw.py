"""Draw the tests that `make test` runs.

The draw depends on the sources alone. It takes one in 96 cases of tests marked `long`. It takes one
case of every third function of each file, and three cases of a function marked `drawn(3)`.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folders whose files define the tests and the code under test.
SOURCES = ("fp8pass", "tests", "benchmarks", "examples", "docs")
SUFFIXES = (".py", ".md")
# Long tests take nine tenths of the time of all tests.
LONG_SHARE = 1 / 96
# All cases in these files run, because each takes milliseconds.
CHEAP = (
    "tests/activation_memory/test_budget_option.py",
    "tests/benchmarks/test_quality_benchmark.py",
    "tests/cli/test_cli_usage.py",
    "tests/codegen/test_programs.py",
    "tests/codegen/test_verify.py",
    "tests/dialect/",
    "tests/graph/test_classify.py",
    "tests/graph/test_order.py",
    "tests/graph/test_patterns.py",
    "tests/graph/test_pointwise.py",
    "tests/optim/test_optim_checkpoints.py",
    "tests/optim/test_optim_protocols.py",
    "tests/passes/test_fuse_tiles.py",
    "tests/passes/test_pin_layouts.py",
    "tests/runtime/",
    "tests/stability/test_callbacks.py",
    "tests/stability/test_lower_rate.py",
    "tests/tools/test_landscape.py",
    "tests/whole/test_architecture.py",
    "tests/whole/test_cache.py",
    "tests/whole/test_config.py",
    "tests/whole/test_draw.py",
    "tests/whole/test_inductor_options.py",
)


def seed_of_sources() -> int:
    """Return a number below a million that depends on the sources alone.

    A commit runs the same tests on every machine. Another commit runs other tests.
    """
    digest = hashlib.sha256()
    paths = (path for folder in SOURCES for path in (ROOT / folder).rglob("*"))
    for path in sorted(path for path in paths if path.suffix in SUFFIXES):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return int(digest.hexdigest(), 16) % 10**6


def draws_all() -> bool:
    """Whether all tests run, as in `make test-all` and `make test-long`."""
    return "FP8PASS_ALL" in os.environ or os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def undrawn(tests: Iterable[pytest.Item], asked_for: list[str]) -> Iterator[pytest.Item]:
    """Yield the tests that do not run: most long tests, and most cases of other functions.

    Args:
        tests: all tests of the collected files.
        asked_for: arguments of the command line. A test that is named there runs.
    """
    plain: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for test in tests:
        if draws_all() or any("::" in name and test.nodeid.startswith(name) for name in asked_for):
            continue
        if test.get_closest_marker("long"):
            if _draw(test.nodeid) >= LONG_SHARE:
                yield test
        elif test.get_closest_marker("drawn") or not test.nodeid.startswith(CHEAP):
            function = test.nodeid.split("[")[0]
            plain[function.split("::")[0]][function].append(test)
    for functions in plain.values():
        for place, function in enumerate(sorted(functions, key=_draw)):
            cases = sorted(functions[function], key=lambda case: _draw(case.nodeid))
            marker = cases[0].get_closest_marker("drawn")
            yield from cases[marker.args[0] if marker else place % 3 == 0 :]


def _draw(name: str) -> float:
    """Draw a number between 0 and 1, which depends on the seed and the name only."""
    return random.Random(f"{os.environ['FP8PASS_SEED']} {name}").random()
