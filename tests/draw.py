"""Draw the tests that `make test` runs.

The draw depends on the sources alone. It takes one in 24 cases of tests marked `long`, and two
cases of every other function, or three cases if the function is marked `drawn(3)`.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from bisect import insort
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Folders whose files define the tests and the code under test.
SOURCES = ("fp8pass", "tests", "benchmarks", "examples", "docs")
SUFFIXES = (".py", ".md")
# Long tests take nine tenths of the time of all tests.
LONG_SHARE = 1 / 24
# Cases of a function without a mark.
CASES = 2
# All cases in these files run, because each takes milliseconds.
CHEAP = (
    "tests/cli/test_cli_usage.py",
    "tests/codegen/test_verify.py",
    "tests/dialect/",
    "tests/graph/",
    "tests/optim/test_optim_checkpoints.py",
    "tests/whole/test_architecture.py",
    "tests/whole/test_config.py",
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
    functions: dict[str, list[pytest.Item]] = {}
    for test in tests:
        if draws_all() or any("::" in name and test.nodeid.startswith(name) for name in asked_for):
            continue
        if test.get_closest_marker("long"):
            if _draw(test) >= LONG_SHARE:
                yield test
            continue
        function = functions.setdefault(test.nodeid.split("[")[0], [])
        insort(function, test, key=_draw)
        if len(function) > _cases(test):
            yield function.pop()


def _cases(test: pytest.Item) -> float:
    """Return how many cases of the function run."""
    if marker := test.get_closest_marker("drawn"):
        return marker.args[0]
    return math.inf if test.nodeid.startswith(CHEAP) else CASES


def _draw(test: pytest.Item) -> float:
    """Draw a number between 0 and 1 for a test, which does not depend on other tests."""
    return random.Random(f"{os.environ['FP8PASS_SEED']} {test.nodeid}").random()
