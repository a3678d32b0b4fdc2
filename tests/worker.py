"""Setup of all tests: graphs are verified between passes, and each test starts without caches."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():  # tests run kernels in Triton's interpreter
    os.environ["TRITON_INTERPRET"] = "1"

# Fixtures of the tests of the command line and of kernels.
from cli_helpers import run as run
from cli_helpers import workdir as workdir
from draw import undrawn
from interpreter import patch_interpreter
from kernel_helpers import graphs as graphs
from kernel_helpers import interpreted as interpreted
from kernel_helpers import kernels_on_cpu as kernels_on_cpu

from fp8pass import compat, hardware
from fp8pass.compilation import Compilation

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    patch_interpreter()

# A compilation allocates millions of objects and frees few of them. With Python's default
# thresholds garbage collection takes an eighth of the time.
gc.set_threshold(100_000, 20, 20)

# PyTorch formats every graph and guard if its trace logger has a handler, and pytest adds a handler
# to all loggers that do not propagate.
if "TORCH_TRACE" not in os.environ:
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True

_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", **_COMMON, max_examples=25)
settings.register_profile("ci", **_COMMON, max_examples=8, derandomize=True, print_blob=True)
settings.register_profile("thorough", **_COMMON, max_examples=500)  # make test-long
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return "needs FP8 tensor cores (sm89)"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    if reason is None:  # on a GPU all tests run
        return
    runnable = []
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
        else:
            runnable.append(item)
    left_out = set(undrawn(runnable, config.args))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(autouse=True)
def lower_only_observed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the passes on forward and backward graphs for observers with `halves` only.

    Most tests that observe plans do not need these graphs.
    """
    shows_halves = Compilation.shows_halves.fget

    def shows_if_observed(compilation: Compilation) -> bool:
        observers = (getattr(hook, "observer", None) for hook in compilation.hooks)
        return shows_halves(compilation) and all(getattr(x, "halves", True) for x in observers)

    monkeypatch.setattr(Compilation, "shows_halves", property(shows_if_observed))


@pytest.fixture(autouse=True)
def all_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all GEMMs in FP8 on a GPU, because the models of tests are too small to gain."""
    rates_of = hardware.rates_of
    monkeypatch.setattr(hardware, "rates_of", lambda x: None if x.type == "cuda" else rates_of(x))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Disable caches, because a cached graph would not run the passes."""
    monkeypatch.setenv("FP8PASS_CHECK", "1")
    torch._dynamo.reset()
    torch.manual_seed(0)
    with compat.fresh_compilation():
        yield
    torch._dynamo.reset()
