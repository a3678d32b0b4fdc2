"""What `make test` draws: a part of the long tests, the same for the same sources."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What decides which tests there are and what they do.
SOURCES = ("fp8pass", "tests", "benchmarks", "examples", "docs")
SUFFIXES = (".py", ".md")
# The long tests take four fifths of the time that all tests take.
LONG_SHARE = 0.1


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
    """Whether all long tests run: under `make test-all` and `make test-long`."""
    return "FP8PASS_ALL" in os.environ or os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def is_drawn(test: str, asked_for: list[str]) -> bool:
    """Whether a long test runs: one that was named, all if there is time, or a part of them."""
    if draws_all() or any("::" in name and test.startswith(name) for name in asked_for):
        return True
    return random.Random(f"{os.environ['FP8PASS_SEED']} {test}").random() < LONG_SHARE
