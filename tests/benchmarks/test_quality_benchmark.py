"""The benchmark of training quality: runs, jobs and tables."""

import json
import sys
import time

import pytest
import torch


@pytest.fixture
def quality(load, monkeypatch):
    """Import benchmarks/quality.py, and replace Inductor."""
    module = load("quality")
    compile_ = torch.compile

    def eager(model, backend="eager", options=None):
        if backend == "fp8pass":
            return compile_(model, backend=backend, options={**options, "compiler": "eager"})
        return compile_(model, backend="eager")

    monkeypatch.setattr(torch, "compile", eager)
    return module


def trained(module, monkeypatch, path, *options) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--out", str(path), "--steps", "8", *options])
    module.main()
    return json.loads(path.read_text())["results"]


@pytest.mark.long
def test_seeds_are_paired_and_runs_are_resumed(quality, monkeypatch, tmp_path):
    path = tmp_path / "quality.json"
    options = "--variants", "BF16", "exact", "coat", "coat, FP8 AdamW"
    results = trained(quality, monkeypatch, path, *options, "--seeds", "0")
    (first, *_) = results
    results = trained(quality, monkeypatch, path, *options, "--seeds", "0", "1")
    assert len(results) == 8
    assert first in results
    losses = {(r["variant"], r["seed"]): r["loss"] for r in results}
    for seed in (0, 1):
        assert losses["exact", seed] == pytest.approx(losses["BF16", seed], rel=5e-5)
        assert losses["coat", seed] == pytest.approx(losses["BF16", seed], rel=0.02)
        assert losses["coat", seed] != losses["exact", seed]  # rounding alone, with equal batches
        assert losses["coat, FP8 AdamW", seed] != losses["coat", seed]
    assert losses["BF16", 0] != losses["BF16", 1]
    assert not any(r["diverged"] for r in results)


@pytest.mark.long
def test_variants_continue_from_weights_trained_in_bf16(quality, monkeypatch, tmp_path):
    monkeypatch.setattr(quality.tempfile, "gettempdir", lambda: str(tmp_path))
    path = tmp_path / "quality.json"
    options = "--variants", "BF16", "coat", "--seeds", "0", "--start", "60"
    results = trained(quality, monkeypatch, path, *options)
    (start,) = {r["start"] for r in results}
    assert start
    bf16, coat = (r["loss"] for r in results)
    assert coat == pytest.approx(bf16, rel=0.02)
    (other,) = tmp_path.glob("fp8pass-quality/*.pt")
    assert trained(quality, monkeypatch, path, *options) == results
    other.unlink()  # like another machine with runs that are not comparable
    assert len(trained(quality, monkeypatch, path, *options)) == 4
    (scratch, *_) = trained(quality, monkeypatch, tmp_path / "x.json", *options[:-2])
    assert scratch["loss"] > bf16 + 0.1


@pytest.mark.long
def test_learning_rates_are_compared(quality, monkeypatch, tmp_path):
    options = "--variants", "BF16", "E8M3", "--seeds", "0", "--rates", "1e-3", "1e-2"
    results = trained(quality, monkeypatch, tmp_path / "x.json", *options)
    assert {(r["variant"], r["rate"]) for r in results} == {
        (variant, rate) for variant in ("BF16", "E8M3") for rate in (1e-3, 1e-2)
    }
    assert len({r["loss"] for r in results}) == 4


@pytest.mark.long
def test_experts_train(quality, monkeypatch, tmp_path):
    path = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["x", "experts", "--tiny", "--steps", "8", "--out", str(path)])
    quality.main()
    record = json.loads(path.read_text())
    losses = {(r["variant"], r["seed"]): r["held_out_loss"] for r in record["results"]}
    assert len(losses) == 6
    for seed in range(3):
        assert losses["coat", seed] == pytest.approx(losses["BF16", seed], rel=0.02)
        assert losses["coat", seed] != losses["BF16", seed]
    assert losses["BF16", 0] != losses["BF16", 1]
    stdlib = sum(file.stat().st_size for file in quality.standard_library())
    assert record["settings"]["text_bytes"] == stdlib


@pytest.mark.long
def test_adapters_are_trained_on_other_text(quality, load, monkeypatch, tmp_path):
    lora, path = load("lora"), tmp_path / "x.json"
    monkeypatch.setattr(quality, "TINY", quality.replace(quality.TINY, steps=8))
    argv = ["x", "losses", "--tiny", "--seeds", "0", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", argv)
    trained = []
    optimizers = quality.Trainer.optimizers

    def spied(trainer, rate):
        found = optimizers(trainer, rate)
        trained.append(sum(p.numel() for g in found[0].param_groups for p in g["params"]))
        return found

    monkeypatch.setattr(quality.Trainer, "optimizers", spied)
    lora.main()
    bf16, fp8, frozen = (r["held_out_loss"] for r in json.loads(path.read_text())["results"])
    assert fp8 == pytest.approx(bf16, rel=0.01)
    assert frozen == pytest.approx(bf16, rel=0.01)
    assert fp8 != bf16
    adapters = 2 * 16 * (4 * (64 + 64) + 3 * (64 + 256))  # two layers, rank 16
    assert trained[1:] == [adapters] * 3
    assert trained[0] > 2 * (4 * 64 * 64 + 3 * 64 * 256)


@pytest.mark.long
def test_ranks_share_a_batch(load):
    """Two ranks train with the batches and weights of one rank, and compile with Inductor."""
    quality = load("quality")
    size = quality.replace(quality.TINY, steps=8)
    variants = quality.BASELINE, "coat, FP8 AdamW, 8-bit wire, 2 ranks"
    found = []
    for variant, ranks in zip(variants, (1, 2), strict=True):
        of = quality.Experiment((), size)
        job = quality.Job(variant, size.peak_lr, (0,), of)
        found += quality.run_jobs(quality.train, [job], ranks=ranks)
    assert found[1].loss == pytest.approx(found[0].loss, rel=0.01)


@pytest.mark.long
def test_failures_of_jobs_are_raised(load):
    workers = load("workers")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(workers.run_jobs(_fail, [1], ranks=2))


def _fail(job, device):
    yield job / 0


@pytest.mark.long
def test_jobs_of_a_gpu_prepare_together_and_measure_alone(load):
    found, run_groups = [], load("workers")._run_groups
    with pytest.raises(RuntimeError, match="sleep"):  # a failure does not end the other jobs
        found.extend(run_groups(_measure_alone, [0.0, 0.5, -1.0], 3, shared=True))
    (ready_a, start_a, end_a), (ready_b, start_b, end_b) = found
    assert min(start_a, start_b) >= max(ready_a, ready_b)
    assert end_a <= start_b or end_b <= start_a


def _measure_alone(seconds, device):
    from workers import ALONE

    time.sleep(seconds)
    ready = time.monotonic()
    yield ALONE
    start = time.monotonic()
    time.sleep(0.3)
    yield ready, start, time.monotonic()


def test_a_run_diverges_if_its_loss_has_risen(load):
    first_divergence = load("report").first_divergence
    assert first_divergence([3.0, 2.5, 2.9]) is None
    assert first_divergence([3.0, 2.5, 3.1, 2.0]) == 2
    assert first_divergence([3.0, None]) == 1


def test_every_experiment_has_variants_and_a_table(load):
    quality, tables = load("quality"), load("tables")
    for name, experiment in quality.EXPERIMENTS.items():
        assert set(experiment.variants) <= set(quality.VARIANTS)
        record = quality.RECORDS.get(name, f"quality_{name}")
        assert tables.TABLES[record] in (experiment.table, tables.quality_rates_table)
    assert len(quality.ACCUMULATION) == 8


def result(variant, seed, loss, rate=1e-3, diverged=False):
    return {
        "variant": variant,
        "rate": rate,
        "seed": seed,
        "loss": loss,
        "held_out_loss": loss,
        "diverged": diverged,
        "tokens_per_second": 1000.0,
    }


def test_the_table_of_paired_losses_is_right(load):
    results = [result("coat", 0, 2.02), result("coat", 1, 1.02)]
    results += [result("BF16", 0, 2.0), result("BF16", 1, 1.0), result("agoq", 0, None)]
    _, coat, bf16, agoq = load("tables").TABLES["quality"]({"results": results})
    assert coat[:5] == ["coat", "2", "1.5200", "+1.50% ± 0.50", "+1.50% ± 0.50"]
    assert bf16[3] == ""
    assert agoq[2:4] == ["not finite", "not finite"]
    results.append(result("linear", 0, 2.0) | {"start": "other"})
    rows = load("tables").TABLES["quality"]({"results": results})
    assert "linear" not in [row[0] for row in rows]
    assert len(load("tables").TABLES["quality"]({"results": results[:2]})) == 1


def test_the_table_of_learning_rates_is_right(load):
    results = [result("BF16", 0, 2.0), result("BF16", 0, 3.0, 1e-2, diverged=True)]
    results += [result("coat", 0, 2.0), result("coat", 0, 2.5, 1e-2)]
    _, bf16, coat = load("tables").TABLES["quality_rates"]({"results": results})
    assert bf16 == ["BF16", "2.000", "3.000 (1 of 1 diverged)", "0.001"]
    assert coat == ["coat", "2.000", "2.500", "0.01"]


def test_the_table_of_accumulation_is_right(load):
    def gemm(role, length, fast_ms, precise_ms, experts=0):
        return {
            "case": "x", "role": role, "size": [64, 64, length], "experts": experts, "count": 2,
            "fast_ms": fast_ms, "precise_ms": precise_ms,
            "fast_error": length * 1e-6, "precise_error": 1e-4,
        }  # fmt: skip

    results = [gemm("forward", 4096, 1.0, 1.5), gemm("wgrad", 16384, 1.0, 1.1)]
    (_, row) = load("tables").TABLES["accumulation"]({"results": results})
    assert row == ["x", "4.00", "× 1.250", "× 1.000", "× 1.050", "× 1.300", "× 1.050",
                   "1.64%", "0.41%"]  # fmt: skip
    experts = [gemm("wgrad", 16384, 1.0, 1.1, experts=8)]  # 2048 tokens each
    (_, row) = load("tables").TABLES["accumulation"]({"results": experts})
    assert row[6] == "× 1.000"
