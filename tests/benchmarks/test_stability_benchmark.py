"""The benchmark of formats and learning rates: measured runs and their table."""

import json
import sys

import pytest
import torch


@pytest.fixture
def stability(load, monkeypatch):
    """Import benchmarks/stability.py, and replace Inductor."""
    module = load("stability")
    compile_ = torch.compile

    def eager(model, backend="eager", options=None):
        return compile_(
            model, backend=backend, options=options and {**options, "compiler": "eager"}
        )

    monkeypatch.setattr(torch, "compile", eager)
    return module


def stability_run(variant, rate, seed, loss, diverged_at=None, sharpness=()):
    return {
        "variant": variant,
        "rate": rate,
        "seed": seed,
        "losses": [5.0, loss],
        "diverged_at": diverged_at,
        "sharpness": list(sharpness),
        "ms_per_step": 2.0,
    }


@pytest.mark.long
def test_runs_of_simulated_formats_are_measured(stability, monkeypatch, tmp_path):
    out = tmp_path / "stability.json"
    options = ["--variants", "bf16", "e8m3", "--rates", "1e-2", "--seeds", "0", "--steps", "20"]
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--out", str(out), *options])
    stability.main()
    stability.main()  # nothing remains to do
    bf16, e8m3 = json.loads(out.read_text())["results"]
    assert (bf16["variant"], e8m3["variant"]) == ("bf16", "e8m3")
    assert bf16["losses"] != e8m3["losses"]
    for result in (bf16, e8m3):
        assert len(result["sharpness"]) == 10
        for _, corner, searched in result["sharpness"]:
            assert corner == pytest.approx(searched, rel=0.02)


def test_the_table_of_stability_is_right(load):
    tables = load("tables")
    at_divergence = [(10, 0.2, 0.2), (20, 1.5, 1.4)]
    data = {
        "settings": {"rise": 0.5, "holds": 0.5},
        "results": [
            stability_run("bf16", 0.01, 0, 2.0, sharpness=[(10, 0.1, 0.1)]),
            stability_run("bf16", 0.1, 0, 2.4),
            stability_run("e8m3", 0.01, 0, 2.2),
            stability_run("e8m3", 0.1, 0, None, 20, at_divergence),
        ],
    }
    header, bf16, e8m3 = tables.stability_table(data)
    column = header.index("sensitivity")
    assert bf16.pop(column) == "0.200"  # 0 and 0.4 above the best
    assert e8m3.pop(column) == "1.873"  # 0.2, and log 256 - 2
    assert header[1:4] == ["0.01", "0.1", "highest rate that holds"]
    assert bf16[:4] == ["bf16", "2.000 (1 of 1)", "2.400 (1 of 1)", "0.1"]
    held = "0.01", ""
    ends = "0.2%", "1.5%", "2.00"
    assert e8m3 == ["e8m3", "2.200 (1 of 1)", "not finite (0 of 1)", *held, *ends]
    assert bf16[4] == "0.1%"
    assert tables.stability_ranks(data)[1] == ["3", "1.0000", "7.14%"]
    load("plots").stability(data)


def test_sensitivities_use_runs_that_all_variants_have(load):
    runs = [("bf16", 0.01, 2.0), ("bf16", 0.1, 4.0), ("e8m3", 0.01, 2.2)]
    results = [stability_run(variant, rate, 0, loss) for variant, rate, loss in runs]
    data = {"settings": {"rise": 0.5, "holds": 0.1}, "results": results}
    header, *rows = load("tables").stability_table(data)
    assert [row[header.index("sensitivity")] for row in rows] == ["0.000", "0.200"]
