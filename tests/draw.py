"""What `make test` draws: the same for the same sources.

Of all cases of tests marked `long` a sixteenth. Of other functions with many cases two of them, or
three where the function is marked `drawn(3)`.
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
# What decides which tests there are and what they do.
SOURCES = ("fp8pass", "tests", "benchmarks", "examples", "docs")
SUFFIXES = (".py", ".md")
# The long tests take four fifths of the time that all tests take.
LONG_SHARE = 1 / 16
# Of a function that is not marked.
CASES = 2
# Files of which all cases run, because each takes milliseconds.
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
    """Return a number below a million that follows from the sources alone.

    A commit runs the same tests wherever it is checked out, and other commits run others.
    """
    digest = hashlib.sha256()
    paths = (path for folder in SOURCES for path in (ROOT / folder).rglob("*"))
    for path in sorted(path for path in paths if path.suffix in SUFFIXES):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return int(digest.hexdigest(), 16) % 10**6


def draws_all() -> bool:
    """Whether all tests run: under `make test-all` and `make test-long`."""
    return "FP8PASS_ALL" in os.environ or os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def undrawn(tests: Iterable[pytest.Item], asked_for: list[str]) -> Iterator[pytest.Item]:
    """Yield the tests that are left out: most long ones, and most cases of functions with many.

    Args:
        tests: all there are in the files that run.
        asked_for: arguments of the command line. A test that is named there is not left out.
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
