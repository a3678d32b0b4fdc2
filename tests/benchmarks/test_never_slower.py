"""benchmarks/never_slower.py: tiny versions of its workloads train, and its table is right."""

from __future__ import annotations

import json
import sys

import pytest
import torch


@pytest.fixture
def benchmark(load):
    return load("never_slower")


@pytest.mark.long
@pytest.mark.parametrize("group", range(4))
def test_all_workloads_train(benchmark, monkeypatch, group):
    """Without Inductor, which would take most of the time."""
    monkeypatch.setattr(benchmark, "backend_of", lambda variant, planned: "eager")
    for name in list(benchmark.WORKLOADS)[group::4]:
        _, found = benchmark.measure(True, 1, [benchmark.STOCK], name, torch.device("cpu"))
        assert found["case"] == name
        assert found["ms"] > 0


@pytest.mark.long
def test_variants_are_compared_with_stock(benchmark, monkeypatch, tmp_path):
    out = tmp_path / "found.json"
    names = ["--cases", "recommender", "--variants", benchmark.STOCK, benchmark.DEFAULT]
    arguments = ["--tiny", "--rounds", "1", *names, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["never_slower.py", *arguments])
    benchmark.main()
    record = json.loads(out.read_text())
    stock, ours = record["results"]
    assert stock["planned_bytes"] is None
    assert ours["planned_bytes"] > 0
    _, first, second = benchmark.never_slower_table(record)
    assert first[3] == "1.000"
    assert float(second[3]) == pytest.approx(ours["ms"] / stock["ms"], abs=1e-3)
    # A second run repeats nothing.
    benchmark.main()
    assert json.loads(out.read_text()) == record
