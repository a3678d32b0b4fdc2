"""The benchmark of the guard: what goes wrong does, and the table counts it."""

import importlib
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch


@pytest.fixture
def benchmark(monkeypatch):
    """The module benchmarks/guard.py, whose models are not compiled."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("guard")
    monkeypatch.setattr(module.Trained, "version", lambda self, format: self.model)
    return module


@pytest.fixture
def trained(benchmark):
    return benchmark.Trained(replace(benchmark.TINY, steps=160, batch=4), torch.device("cpu"))


@pytest.fixture
def data(benchmark, trained):
    text = bytes(range(256)) * 64 + Path(__file__).read_bytes() * 8
    return benchmark.Data.of(text, trained.size, torch.device("cpu"))


def test_a_scaled_layer_is_named_and_counted(benchmark, trained, data):
    number, case = next((i, c) for i, c in enumerate(benchmark.CASES) if c.detail == "lm_head")
    results = [
        asdict(benchmark.run(trained, case, number, 0, mode, data)) for mode in benchmark.MODES
    ]
    quiet, watched, acting = results
    assert quiet["planted"] is None
    assert watched["planted"] < watched["warned"] <= watched["planted"] + 5
    assert watched["suspects"][0] == "lm_head weight"
    assert "high precision" in " ".join(acting["events"])
    rows = benchmark.guard_table({"results": results})
    figures = {row[0]: row[1] for row in rows}
    assert figures["warned"] == "1 of 1"
    assert figures["the scaled layer is the first suspect"] == "1 of 1"
    assert figures["alarms in quiet runs"] == f"{quiet['alarms']} in 1"
    header, row = benchmark.guard_cases_table({"results": results})
    assert len(header) == len(row)
    assert row[4] == "lm_head weight"


def test_what_goes_wrong(benchmark):
    def trouble(kind, detail):
        return benchmark.Trouble(benchmark.Case(kind, detail), planted=10, seed=0)

    growing = trouble("lr", "1.5")
    assert [growing.rate(step) for step in (9, 10, 12, 100)] == [1, 1, 1.5**2, benchmark.MOST]
    coarse = trouble("format", "e4m2")
    assert [coarse.format(step) for step in (9, 10)] == [None, "e4m2"]
    poison, targets = trouble("poison", "1.0 20"), torch.full((64, 8), 256)
    changed = [(poison.targets(step, targets) != targets).float().mean() for step in range(9, 31)]
    assert changed[0] == changed[-1] == 0
    assert changed[3] < 0.5 < changed[15]


def test_a_loss_has_doubled_where_the_median_has(benchmark):
    losses = [1.0] * 50 + [1.5, math.nan, *[1.5] * 18] + [2.5] * 20
    assert benchmark.doubled_at(losses, 50) == 75
    assert benchmark.doubled_at(losses[:70], 50) is None
