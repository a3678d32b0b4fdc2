"""benchmarks/steps.py: tiny models train in all variants, and its table compares with stock."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.mark.long
def test_variants_are_compared_with_stock(load, monkeypatch, tmp_path):
    """Without Inductor, which would take most of the time."""
    benchmark, out = load("steps"), tmp_path / "found.json"
    names = benchmark.subject_of.__globals__
    monkeypatch.setitem(names, "backend_of", lambda variant, planned: "eager")
    arguments = ["--tiny", "--rounds", "1", "--cases", "GPT-2 124M", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["steps.py", *arguments])
    benchmark.main()
    record = json.loads(out.read_text())
    assert [r["variant"] for r in record["results"]] == list(*benchmark.ALTERNATING)
    assert all(r["ms"] > 0 for r in record["results"])
    assert benchmark.steps_table(record)[1][3] == "1.000"
