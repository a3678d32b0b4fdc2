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


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Set up this process, unless it is the one of pytest-xdist that only hands out tests.

    pytest calls this hook before it imports the conftest files of folders. These files import
    Triton, which reads an environment variable that `worker.py` sets.
    """
    options = pluginmanager.get_plugin("pytestconfig").known_args_namespace
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(options, "numprocesses", None):
        pluginmanager.import_plugin("worker")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"FP8PASS_SEED={os.environ['FP8PASS_SEED']} draws the same programs and models again"
    )
