"""Options of every process of a test run. `worker.py` sets up the processes that run tests."""

from __future__ import annotations

import os

import pytest
from draw import seed_of_sources

os.environ["FP8PASS_CHECK"] = "1"
# Seed of all random draws. Processes of pytest-xdist, and processes that tests start, inherit it.
if "FP8PASS_SEED" not in os.environ:
    os.environ["FP8PASS_SEED"] = str(seed_of_sources())
# Threads that spin while they wait are slow if other processes use the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# pytest uses all cores already: a pool of compile processes in each process would not help.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Import PyTorch, but not in the process of pytest-xdist that only hands out tests."""
    if getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.import_plugin("worker")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"FP8PASS_SEED={os.environ['FP8PASS_SEED']} draws the same programs and models again"
    )
