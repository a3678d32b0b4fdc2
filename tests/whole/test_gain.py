"""fp8pass warns if FP8 is expected to save little time, and is silent otherwise."""

from __future__ import annotations

import importlib
import json
import logging
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import MLP
from torch import nn
from torch.nn import functional as F

import fp8pass
from fp8pass import Config
from fp8pass.hardware import GPUS, known_gpu
from fp8pass.plan import Plan
from fp8pass.progress import gain
from fp8pass.progress import log as compile_log
from fp8pass.tools import tables
from fp8pass.tools.fitting.planned import plan_region
from fp8pass.tools.fitting.step import compute_own_loss, record_step

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H100 = "NVIDIA H100 80GB HBM3"
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Make the device an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: H100)


@pytest.fixture
def models(monkeypatch):
    """Import models.py, layer.py and gpt2.py of benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("models", "layer", "gpt2")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def plans(model, *args, loss_of=compute_own_loss, config=None) -> list[Plan]:
    """Return the plans of a model on the meta device, which equal its plans on a GPU."""
    step = record_step(model, ("",), (args, {}), loss_of)
    return [plan_region(r, config or Config()).plan for r in step.regions if r.gm is not None]


def autocast(run, args, kwargs):
    with torch.autocast("cpu", torch.bfloat16):
        return run(*args)


@cache
def gpt(benchmarks, layers: int = 2) -> list[Plan]:
    """Return the plans of GPT-2 124M with few layers."""
    size = benchmarks.FULL
    with torch.device("meta"):
        model = importlib.import_module("models").GPT(
            layers, size.hidden, size.heads, size.vocabulary, size.seq
        )
        ids = torch.empty(size.batch, size.seq, dtype=torch.long)
    return plans(model, ids, ids.clone(), loss_of=autocast)


def decoder(benchmarks, hidden: int, heads: int, ffn: int, batch: int, seq: int) -> list[Plan]:
    """Return the plans of a decoder layer of Llama."""
    with torch.device("meta"):
        model = benchmarks.Stack(1, hidden, heads, ffn).bfloat16()
        tables = (torch.empty(seq, hidden // heads, dtype=torch.bfloat16) for _ in range(2))
        x = torch.empty(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
    return plans(model, x, *tables, loss_of=lambda run, args, _: run(*args).float().sum())


def measured(file: str, key: str, suffix: str = "", case: str | None = None) -> dict[str, float]:
    """Return the milliseconds that variants of a benchmark save compared with BF16."""
    record = json.loads((BENCHMARKS / "results" / f"{file}.json").read_text())
    assert "H200" in record["gpu"]
    ms = {r["variant"]: r.get(key) for r in record["results"] if r.get("case") == case}
    found = {name.removesuffix(suffix): x for name, x in ms.items() if name.endswith(suffix)}
    return {name: found["bf16 compile"] - x for name, x in found.items() if x is not None}


@pytest.mark.long
@pytest.mark.parametrize(("name", "suffix"), [("h2048", ", CUDA graphs"), ("h4096", "")])
def test_fast_layers_cause_no_warning_and_match_measurements(models, name, suffix):
    """The estimate does not include launches by the CPU, which limit the smaller layer."""
    case = next(c for c in models.layer.CASES if c.name == name)
    size = case.hidden, case.heads, case.ffn, case.batch, case.seq
    found = decoder(models.models, *size)
    saved = 1e3 * gain.estimate_gain(found, GPUS["H200"]).saved
    of = measured("layer", "ms", suffix, name)
    assert saved == pytest.approx(of["fp8pass coat"], rel=0.35)
    assert not gain.slowdown_warning(found, CUDA)


@pytest.mark.long
def test_gpt2_breaks_even_and_causes_a_warning(models):
    found = gpt(models.gpt2)
    saved = 1e3 * gain.estimate_gain(found, GPUS["H200"]).saved * models.gpt2.FULL.layers / 2
    of = measured("gpt2", "gpu_ms")
    assert of["fp8pass linear"] < saved < of["fp8pass coat"] + 1
    message = gain.slowdown_warning(found, CUDA)
    assert "estimates that FP8 adds " in message  # on an H100, with slower memory
    assert f"that 8 linear layers take in BF16 on {H100}" in message
    assert "such as blocks.0.out (768 → 768)" in message


@pytest.mark.long
def test_gpt2_saves_little_on_an_h200(models, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert "FP8 saves only 0.16 ms of the 2.05 ms" in gain.slowdown_warning(gpt(models.gpt2), CUDA)


@pytest.mark.long
def test_large_layers_are_faster_on_every_gpu(models):
    found = decoder(models.models, 4096, 32, 11008, batch=1, seq=8192)
    assert all(gain.estimate_gain(found, gpu).is_clear for gpu in GPUS.values() if gpu.has_fp8)


@pytest.mark.long
def test_few_rows_cause_a_warning(models):
    assert gain.slowdown_warning(decoder(models.models, 4096, 32, 11008, batch=1, seq=256), CUDA)


def small(dtype=torch.bfloat16, config=None) -> list[Plan]:
    x = torch.empty(64, 64, dtype=dtype, device="meta", requires_grad=True)
    model = MLP((64, 64, 64)).to("meta", dtype)
    return plans(model, x, loss_of=lambda run, args, _: run(*args).sum(), config=config)


@pytest.mark.long
def test_other_devices_and_unknown_gpus_cause_no_warning(monkeypatch):
    found = small()
    assert gain.slowdown_warning(found, CUDA)
    assert not gain.slowdown_warning(found, torch.device("cpu"))
    assert not gain.slowdown_warning(found, None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA of tomorrow")
    assert not gain.slowdown_warning(found, CUDA)


@pytest.mark.parametrize("config", [Config(skip="*"), Config.recipe("exact")])
def test_models_without_fp8_cause_no_warning(config):
    assert not gain.slowdown_warning(small(config=config), CUDA)


def test_gemms_in_fp32_cause_no_warning():
    """BF16 would not be the alternative."""
    assert not gain.slowdown_warning(small(torch.float32), CUDA)


class Head(nn.Module):
    """An output head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(64, 256, bias=False)

    def forward(self, x, targets):
        return F.cross_entropy(self.lm_head(x).float(), targets)


@pytest.mark.long
def test_a_chunked_head_counts_all_its_chunks():
    with torch.device("meta"):
        model = Head().bfloat16()
        x = torch.empty(512, 64, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(512, dtype=torch.long)
    whole, chunked = (
        plans(model, x, targets, config=Config(quantize_lm_head=True, head_chunks=count))[0]
        for count in (1, 4)
    )
    assert chunked.heads[0].chunks == 4
    assert whole.fp8_work.fp8_flops == chunked.fp8_work.fp8_flops == 3 * 2 * 512 * 64 * 256
    assert chunked.fp8_work.bytes >= whole.fp8_work.bytes


def test_device_names_are_mapped_to_known_gpus():
    assert known_gpu(H100) is GPUS["H100"]
    assert known_gpu("NVIDIA GeForce RTX 4090") is GPUS["RTX 4090"]
    assert known_gpu("NVIDIA A100-SXM4-80GB") is GPUS["A100"]
    assert known_gpu("Tesla T4") is None
    assert known_gpu("NVIDIA L40") is None


def as_on_a_gpu(monkeypatch, module):
    """Judge a model on the CPU as if it were on a GPU."""
    monkeypatch.setattr(
        module,
        "slowdown_warning",
        lambda plans, device: gain.slowdown_warning(plans, device and CUDA),
    )


@pytest.mark.long
def test_training_warns_once_and_explain_reports_it(monkeypatch, caplog):
    as_on_a_gpu(monkeypatch, compile_log)
    as_on_a_gpu(monkeypatch, tables)
    model = MLP((64, 64, 64)).bfloat16()
    program = torch.compile(model, backend="fp8pass", options={"compiler": "eager"})
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    for _ in range(3):
        program(x).sum().backward()
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    (message,) = [text for text in texts if "A roofline estimates" in text]
    text = str(fp8pass.explain(program, x))
    assert " ".join(message.split()) in " ".join(text.split())
