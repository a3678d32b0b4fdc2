"""Benchmarks run with small models on the CPU, and their tables are right.

Benchmarks that need a GPU are tested only for finding the measured kernels and layers.
"""

import json
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

OURS = "fp8pass coat + fp8pass step_in_backward"
PEERS = "torchao tensorwise + torchao AdamW8bit"


@pytest.fixture
def benchmark(load, monkeypatch):
    """Import benchmarks/model.py without torchao."""
    monkeypatch.setitem(sys.modules, "torchao", None)
    module = load("model")
    # Inductor would take most of the time.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setitem(module.COMPILED, "fp8pass coat", module.with_fp8pass(compiler="eager"))
    return module


def run(benchmark, monkeypatch, out, *options):
    monkeypatch.setattr(sys, "argv", ["model.py", "--tiny", "--out", str(out), *options])
    benchmark.main()
    return json.loads(out.read_text())


@pytest.mark.long
def test_models_train_whole_and_by_blocks_and_failures_are_recorded(
    benchmark, monkeypatch, tmp_path
):
    out = tmp_path / "model.json"
    record = run(benchmark, monkeypatch, out, "--variants", OURS, PEERS)
    results = {(r["model"], r["variant"]): r for r in record["results"]}
    assert len(results) == 2 * len(benchmark.MODELS)
    for model in benchmark.MODELS:
        ours = results[model, "fp8pass coat"]
        assert ours["error"] is None
        assert ours["tokens_per_second"] > 0
        assert ours["loss"] < 5.5  # a new model has log 256
        assert "torchao" in results[model, "torchao tensorwise"]["error"]
    # A second run repeats only failed variants.
    monkeypatch.setattr(benchmark, "measure", lambda *_: {"loss": 1.0, "tokens_per_second": 2.0})
    again = run(benchmark, monkeypatch, out, "--variants", OURS, PEERS)
    assert len(again["results"]) == len(results)
    peers = [r["loss"] for r in again["results"] if r["variant"] == "torchao tensorwise"]
    assert peers == [1] * len(benchmark.MODELS)
    ours = [r for r in record["results"] if r["variant"] == "fp8pass coat"]
    assert [r for r in again["results"] if r["variant"] == "fp8pass coat"] == ours


@pytest.mark.long
def test_steps_of_many_micro_batches(load, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchao", None)
    llmq, out = load("llmq"), tmp_path / "llmq.json"
    ours = llmq.with_fp8pass(compiler="eager"), "fp8pass AdamW"
    monkeypatch.setitem(llmq.VARIANTS, "fp8pass coat", ours)
    variants = ("fp8pass coat", "torchao tensorwise")
    options = ["--tiny", "--models", "Qwen2.5-3B", "--variants", *variants, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["llmq.py", *options])
    llmq.main()
    record = json.loads(out.read_text())
    (result, failed) = record["results"]
    assert "torchao" in failed["error"]
    size = llmq.TINY["Qwen2.5-3B"]
    steps = size.tokens_per_step / result["tokens_per_second"]
    micro_batches = size.tokens_per_step / (size.batch * size.seq)
    assert steps == pytest.approx(micro_batches * result["micro_batch_s"] + result["update_s"])
    rows = llmq.llmq_table(record)
    assert [row[0] for row in rows] == ["", "**Qwen2.5-3B**", *variants]


@pytest.mark.long
def test_blocks_share_code(benchmark):
    torch._dynamo.utils.counters.clear()
    benchmark.measure(benchmark.TINY["7B"], *benchmark.VARIANTS[OURS], torch.device("cpu"))
    # One graph for all layers, one for the loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.long
@pytest.mark.parametrize("variant", [OURS, PEERS])
def test_variants_do_not_affect_each_other(benchmark, monkeypatch, variant):
    made = []
    new_llama = benchmark.new_llama

    def spied(*args):
        llama = new_llama(*args)
        made.extend(weakref.ref(p) for p in llama.parameters())
        return llama

    monkeypatch.setattr(benchmark, "new_llama", spied)
    result = benchmark.attempt("7B", benchmark.TINY["7B"], variant, torch.device("cpu"))
    assert (result.error is None) == (variant == OURS)
    assert made
    assert all(p() is None for p in made)


def test_the_table_compares_with_torchao_on_the_same_model(benchmark):
    def result(model, variant, speed, peak, error=None):
        return {
            "model": model,
            "variant": variant,
            "optimizer": "AdamW",
            "tokens_per_second": speed,
            "peak_bytes": peak and peak << 30,
            "loss": 0.5,
            "error": error,
        }

    data = {
        "settings": {"warm_up": 4, "timed": 8},
        "results": [
            result("7B", "torchao tensorwise", 10_000, 40),
            result("7B", "fp8pass coat", 12_000, 30),
            result("1B", "torchao tensorwise", None, None, error="OutOfMemoryError: full\nmore"),
            result("1B", "fp8pass coat", 50_000, None),
        ],
    }
    header, *rows = benchmark.model_table(data)
    assert header[-1] == "loss after 12 steps"
    assert rows == [
        ["**1B**", *[""] * 6],
        ["torchao tensorwise", "AdamW", "OutOfMemoryError: full", "", "", "", ""],
        ["fp8pass coat", "AdamW", "50,000", "", "", "", "0.5000"],
        ["**7B**", *[""] * 6],
        ["torchao tensorwise", "AdamW", "10,000", "1.000", "40.0", "1.000", "0.5000"],
        ["fp8pass coat", "AdamW", "12,000", "1.200", "30.0", "0.750", "0.5000"],
    ]


@pytest.mark.parametrize("compared", [True, False])
def test_the_table_compares_step_times_and_floors_with_torchao(load, compared):
    """torchao is optional."""

    def breakdown(case, ms):
        kernels = [("gemm", 4.0, 0.0), ("attention", 1.0, 0.0), ("ours", 2.0, 1e9)]
        named = [dict(zip(("kind", "ms", "bytes"), k, strict=True)) for k in kernels]
        return {
            "case": case,
            "step_ms": ms,
            "idle_ms": 0.5,
            "gemm_flops": 1e12,
            "attention_flops": 1e12,
            "kernels": [{**k, "name": k["kind"], "calls": 1.0} for k in named],
        }

    results = [breakdown("a", 8.0), breakdown("a, torchao tensorwise", 10.0)]
    limits = {"copy_bandwidth": 1e12, "fp8_flops": 1e15}
    data = {"limits": limits, "results": results[: 2 if compared else 1]}
    rows = {row[0]: row[1:] for row in load("tables").kernels_table(data)}
    assert rows["**a**"][-1] == ("0.800, floor 0.600 × torchao" if compared else "")
    assert rows["floor"][1] == "6.00"


def test_depths_are_measured_as_far_as_time_allows(load, monkeypatch):
    """Depths increase. A depth that takes too long ends the series."""
    module, clock = load("compile_time"), [0.0]

    def measure(variant, layers, hidden, cache, timeout, **variables):
        took = layers * (3 if variant == "fp8pass agoq" else 1)
        clock[0] += min(took, timeout)
        if took > timeout:
            raise module.subprocess.TimeoutExpired(variant, timeout)
        return {"cpu_seconds": 1.0 * layers, "passes": 0.0 if variant == "bf16 compile" else 0.1}

    monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    results = module.by_depth((40, 20, 10), module.DEEP_VARIANTS, limit=100.0, jobs=1)
    found = [(r["layers"], r["variant"]) for r in results]
    assert found == [
        *((10, variant) for variant in module.DEEP_VARIANTS),
        *((20, variant) for variant in module.DEEP_VARIANTS[:2]),
    ]
    header, ten, twenty = load("tables").depths_table({"results": results})
    assert len(header) == len(ten) == len(twenty)
    assert ten[1:] == ["10.0 (1.00)", "10.0 (1.00)", "10.0 (1.00)", "10, 10"]
    assert twenty[1:] == ["20.0 (1.00)", "20.0 (1.00)", "", "5"]


# --- adapters -----------------------------------------------------------------------------------


@pytest.mark.long
def test_adapters_are_trained_with_quantized_weights(load, monkeypatch):
    lora, layer = load("lora"), load("layer")
    eager = partial(layer.with_fp8pass, compiler="eager")
    for name, value in {"with_fp8pass": eager, "WARM_UP": 1, "TIMED": 2}.items():
        monkeypatch.setattr(lora, name, value)
    torch._dynamo.utils.counters.clear()
    size = lora.replace(lora.TINY["7B"], batch=1, vocabulary=512)
    found = lora.measure(f"{lora.LLAMA}, {lora.FROZEN}", size, torch.device("cpu"))
    # One graph for all layers, one for head and loss.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert found["loss"] == pytest.approx(6.24, abs=0.1)  # a new model has log 512
    linears, adapters = 4 * 128 * 128 + 3 * 128 * 256, 16 * (4 * 2 * 128 + 3 * (128 + 256))
    embeddings = 2 * 2 * 512 * 128
    expected = 2 * (linears + 2 * adapters) + embeddings
    assert expected < found["weight_bytes"] < 1.05 * expected


def test_the_table_of_adapters_is_right(load):
    def result(variant, speed, peak, error=None):
        return {
            "variant": variant,
            "tokens_per_second": speed,
            "peak_bytes": peak and peak << 30,
            "weight_bytes": 6 << 30,
            "loss": 0.5,
            "error": error,
        }

    results = [
        result("7B, BF16", 10_000, 20),
        result("7B, fp8pass", 15_000, 10),
        result("7B, x", None, None, "OutOfMemoryError: full. More"),
        result("8B, fp8pass", 12_000, 10),
    ]
    _, *rows = load("tables").lora_table({"results": results})
    assert rows == [
        ["7B, BF16", "10,000", "1.000", "20.0", "1.000", "6.0"],
        ["7B, fp8pass", "15,000", "1.500", "10.0", "0.500", "6.0"],
        ["7B, x", "OutOfMemoryError: full", *[""] * 4],
        ["8B, fp8pass", "12,000", "", "10.0", "", "6.0"],
    ]


def test_the_mixture_of_experts_is_balanced_by_its_gradient(load):
    models, size = load("models"), load("quality").TINY
    model = models.MoEDecoder(size)
    tokens = torch.randint(256, (2, size.batch, size.seq)).unbind()
    loss = model(*tokens)
    torch.testing.assert_close(loss, models.Decoder.forward(model, *tokens))
    loss.backward()
    router = model.experts[0].router.weight
    found, router.grad = router.grad, None
    models.Decoder.forward(model, *tokens).backward()
    plain, router.grad = router.grad, None
    models.Decoder.forward(model, *tokens)
    (0.01 * model.experts[0].imbalance + 0.01 * model.experts[1].imbalance).backward()
    torch.testing.assert_close(found, plain + router.grad)
    assert router.grad.norm() > 1e-3 * plain.norm()


@pytest.mark.long
def test_the_error_of_a_failed_variant_is_recorded_and_it_runs_again(load, tmp_path):
    alone = load("alone")
    script, path = tmp_path / "script.py", tmp_path / "results.json"
    benchmarks = Path(alone.__file__).parent
    script.write_text(
        f"import sys; sys.path.insert(0, {str(benchmarks)!r})\n"
        "from pathlib import Path\n"
        "from alone import print_result\n"
        "def measure(device):\n"
        "    with open(sys.argv[0] + '.calls', 'a') as calls: print(sys.argv[-1], file=calls)\n"
        "    print('something else')\n"
        "    if sys.argv[-1] == 'bad' and not Path(__file__).with_name('mended').exists():\n"
        "        raise RuntimeError('no room')\n"
        "    return {'loss': 1.0}\n"
        "assert sys.argv[-2] == '--child'\n"
        "if sys.argv[-1] == 'gone': sys.exit(3)\n"
        "print_result(measure)\n"
    )
    record = {"results": []}
    alone.measure_each(record, path, ["good", "bad", "gone"], [str(script)])
    good = {"variant": "good", "loss": 1.0, "error": None}
    assert record["results"] == [
        good,
        {"variant": "bad", "error": "RuntimeError: no room"},
        {"variant": "gone", "error": "ended with code 3"},
    ]
    assert json.loads(path.read_text()) == record
    (tmp_path / "mended").touch()
    alone.measure_each(record, path, ["good", "bad"], [str(script)])
    assert {"variant": "bad", "loss": 1.0, "error": None} in record["results"]
    assert (tmp_path / "script.py.calls").read_text().split() == ["good", "bad", "bad"]


def test_a_record_with_a_note_is_resumed(load, tmp_path):
    report, path, settings = load("report"), tmp_path / "record.json", {"steps": 8}
    record = report.resume(path, settings) | {"note": "two seeds", "results": [{"loss": 1.0}]}
    report.write_json(path, record)
    assert report.resume(path, settings) == record
    assert "two seeds" in load("tables").caption(record)
    with pytest.raises(SystemExit, match="other settings"):
        report.resume(path, {"steps": 9})


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("pipelines", ["--schedules", "Interleaved1F1B", "--variants", "fp8pass, budgets"]),
        ("large_models", ["--setups", "14B fp8pass", "14B CPUOffloadPolicy"]),
    ],
)
def test_scripts_of_several_ranks_train(load, monkeypatch, tmp_path, script, options):
    """Without compilation, which would take minutes."""
    module, out = load(script), tmp_path / "record.json"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    arguments = ["--tiny", "--ranks", "2", "--out", str(out), *options]
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    module.main()
    results = json.loads(out.read_text())["results"]
    assert len(results) == len(options) - 1 - ("--variants" in options) * 2
    for result in results:
        assert result["error"] is None
        assert result["tokens_per_second"] > 0
        assert 0 < result["loss"] < 10
