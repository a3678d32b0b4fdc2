"""GEMMs run in FP8 where they save more time than their casts take, and nowhere else."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_helpers import ALL
from helpers import MLP, capture_joint, compiled
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._inductor import config as inductor_config

import fp8pass
from fp8pass import Config, hardware
from fp8pass.compilation import Compilation, Inputs
from fp8pass.compile_log import StoredMessages
from fp8pass.hardware import GPUS, Gpu, known_gpu, planning_for
from fp8pass.passes import JOINT_PASSES, gemm_choice, quantizer
from fp8pass.passes.gemm_choice import Choice, choose_gemms
from fp8pass.passes.runner import run_passes
from fp8pass.plan import Plan
from fp8pass.tools.fitting.planned import plan_region
from fp8pass.tools.fitting.step import compute_own_loss, record_step

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
fp8 = torch.ops.fp8pass


# --- the cut --------------------------------------------------------------------------------------

seconds = st.integers(0, 5).map(float)


@given(st.data(), st.lists(seconds, min_size=1, max_size=5), st.lists(seconds, max_size=4))
def test_the_choice_is_the_best_of_all_choices(data, gains, costs):
    keys = st.sets(st.integers(0, len(costs) - 1)) if costs else st.just(set())
    needs = [data.draw(keys) for _ in gains]
    done = data.draw(keys)
    choice = Choice(gains=dict(enumerate(gains)), done=set(done))  # type: ignore[arg-type]
    choice.casts = {i: {k: costs[k] for k in need} for i, need in enumerate(needs)}  # type: ignore
    gemms = list(range(len(gains)))
    for group in gemm_choice._independent(gemms, choice):  # type: ignore[arg-type]
        gemm_choice._choose(group, choice)

    def value(chosen):
        casts = set().union(*(needs[i] for i in chosen)) - done
        return sum(gains[i] for i in chosen) - sum(costs[k] for k in casts)

    subsets = [set(c) for n in range(len(gains) + 1) for c in itertools.combinations(gemms, n)]
    best = max(map(value, subsets))
    assert value(choice.in_fp8) == pytest.approx(best)
    smallest = min(len(s) for s in subsets if value(s) == best)
    assert len(choice.in_fp8) == smallest  # a GEMM that gains nothing stays in BF16


# --- small layers, and a GPU on which they are mixed ----------------------------------------------

# With these rates, layers of 256 × 256 pay in FP8, and layers of 64 × 64 do not.
SMALL = Gpu("small", 1e12, 20e12, 10e12, 10e12, 4e11, 1e10)


@pytest.fixture
def on_a_small_gpu(monkeypatch):
    """Let CPU tensors stand for `SMALL`, without the time of launches."""
    monkeypatch.setattr(hardware, "rates_of", lambda device: SMALL)
    monkeypatch.setattr(hardware, "LAUNCH", 0.0)
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 0.0)


def rows(count=512, features=256, dtype=torch.bfloat16):
    return torch.randn(count, features).to(dtype).requires_grad_()


def mlp(*sizes: int, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return MLP(sizes).to(dtype)


SMALLEST = {"compiler": "eager", "compact_saves": "all"}


def plan_of(model, *args, config=None, passes=JOINT_PASSES, **options) -> Plan:
    joint = capture_joint(model, *args, config=config or Config(compiler="eager"), **options)
    run_passes(passes, joint.gm, joint.ctx)
    return joint.ctx.plan


def roles(plan: Plan) -> list[tuple[str, ...]]:
    return [y.fp8 for y in plan.linears]


def test_every_gemm_runs_in_fp8_on_a_cpu_and_an_unknown_gpu():
    assert roles(plan_of(mlp(64, 64, 64), rows(64, 64))) == [ALL, ALL]
    unknown = replace(GPUS["H200"], name="GPU of tomorrow")
    with planning_for(unknown):
        assert roles(plan_of(mlp(64, 64, 64), rows(64, 64))) == [ALL, ALL]


def test_small_gemms_stay_in_bf16_on_a_gpu_unless_the_option_forces_fp8(caplog):
    model, x = mlp(64, 64, 64), rows(64, 64)
    with planning_for(GPUS["H200"]):
        plan = plan_of(model, x)
        forced = plan_of(model, x, config=Config(compiler="eager", fp8_gemms="all"))
    assert roles(plan) == [(), ()]
    assert roles(forced) == [ALL, ALL]
    assert all(y.reason == f"FP8 is not faster: {y.slower}" for y in plan.linears)
    assert "0 of 2 linear layers in FP8, 2 in BF16 because FP8 is not faster" in plan.summary()
    assert not plan.unexpected  # no warning
    assert not forced.linears[0].slower


def test_no_gemm_runs_in_fp8_if_the_cpu_limits_the_step(on_a_small_gpu, monkeypatch):
    """Unless CUDA graphs launch the kernels, or the option forces FP8."""
    model, x = mlp(256, 256, 256), rows()
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 1.0)
    plan = plan_of(model, x)
    assert roles(plan) == [(), ()]
    assert plan.linears[0].reason.startswith("FP8 is not faster: the CPU launches the kernels in ")
    assert roles(plan_of(model, x, config=Config(compiler="eager", fp8_gemms="all"))) == [ALL, ALL]
    with inductor_config.patch({"triton.cudagraphs": True}):
        assert roles(plan_of(model, x)) == [ALL, ALL]


def test_a_gemm_in_bf16_rounds_nothing(on_a_small_gpu, monkeypatch):
    monkeypatch.setattr(hardware, "LAUNCH", 1.0)  # nothing pays
    model, x = mlp(64, 64, 64), rows(64, 64)
    config = Config(compiler="eager", save_format="none")
    program, spy = compiled(model, config)
    program(x).sum().backward()
    got = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).sum().backward()
    for mine, own in zip(got, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=0)
    assert roles(spy.plan) == [(), ()]


def casts_and_gains(layers, choice):
    """Return for each layer the sums that `explain` shows, from its text."""
    for layer in layers:
        words = choice.explain(layer).split()
        if words:
            yield float(words[2]), float(words[7])


@pytest.mark.parametrize("recipe", ["coat", "linear", "agoq"])
@pytest.mark.parametrize("features", [32, 64, 128, 192, 256, 512])
def test_layers_may_run_partly_in_fp8_and_train(on_a_small_gpu, features, recipe, monkeypatch):
    """GEMMs in BF16 never gain more than their casts cost."""
    found = []

    def spy(g, layers, casts_of, config):
        found.append((list(layers), choose_gemms(g, list(layers), casts_of, config)))
        return found[-1][1]

    monkeypatch.setattr(quantizer, "choose_gemms", spy)
    model, x = mlp(features, features, 256), rows(512, features)
    program, seen = compiled(model, Config.recipe(recipe, compiler="eager"))
    program(x).sum().backward()
    assert x.grad.isfinite().all()
    for layers, choice in found:
        assert all(casts >= gain * 0.99 for casts, gain in casts_and_gains(layers, choice))
    for y in seen.plan.linears:
        assert bool(y.slower) == (y.fp8 != ALL)


def test_wgrad_may_stay_in_bf16_while_the_forward_is_in_fp8(on_a_small_gpu, monkeypatch):
    gain = gemm_choice._gain
    monkeypatch.setattr(
        gemm_choice,
        "_gain",
        lambda gemm, layer, *rest: (
            0.0 if gemm.meta["fp8pass_role"] == "wgrad" else 1 + gain(gemm, layer, *rest)
        ),
    )
    model, x = mlp(64, 128, 64), rows(64, 64)
    for recipe in ("coat", "agoq", "linear"):
        joint = capture_joint(model, x, config=Config.recipe(recipe, compiler="eager"))
        run_passes(JOINT_PASSES, joint.gm, joint.ctx)
        assert roles(joint.ctx.plan) == [("forward", "dgrad")] * 2
        assert len(joint.calls(fp8.scaled_mm.default)) == 4
        assert len(joint.calls(torch.ops.aten.mm.default)) == 2
        assert "2 of 2 linear layers in FP8 (2 in part), " in joint.ctx.plan.summary()


@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_layers_in_bf16_save_in_low_bits_like_layers_in_fp8(recipe):
    model, x = mlp(64, 256, 64), rows(64, 64)
    with planning_for(GPUS["H200"]):
        plan, forced = (
            plan_of(model, x, config=Config.recipe(recipe, **SMALLEST, fp8_gemms=which))
            for which in ("where_faster", "all")
        )
    assert roles(plan) == [(), ()]
    assert any(s.is_low_bit for s in plan.saved)
    # Groups have scales; the scale of a GEMM operand is a single number.
    assert plan.saved_bytes <= 1.05 * forced.saved_bytes


# --- what must stay in FP8, and what must not change ----------------------------------------------


def test_frozen_weights_in_fp8_stay_in_fp8():
    model = mlp(64, 64, 64)
    model.requires_grad_(False)
    fp8pass.quantize_frozen(model)
    with planning_for(GPUS["H200"]):
        (first, second) = plan_of(model, rows(64, 64)).linears
    assert first.fp8 == second.fp8 == ("forward", "dgrad")


def test_gemms_in_fp32_run_in_fp8():
    """BF16 is not the alternative."""
    with planning_for(GPUS["H200"]):
        found = plan_of(mlp(64, 64, 64, dtype=torch.float32), rows(64, 64, torch.float32))
    assert roles(found) == [ALL, ALL]


@pytest.mark.parametrize("features", [64, 128, 256])
def test_evaluation_decides_like_the_forward_of_training(on_a_small_gpu, features):
    """Graphs without a backward have no dgrad and wgrad, and must not decide by them."""
    model, x = mlp(features, features, features), rows(512, features)
    program, spy = compiled(model)
    program(x).sum().backward()
    with torch.no_grad():
        program(x.detach())
    train, infer = spy.plans
    assert infer.inference
    assert [y.fp8[:1] for y in infer.linears] == [
        y.fp8[:1] if "forward" in y.fp8 else () for y in train.linears
    ]


def test_recipe_exact_and_simulation_choose_nothing():
    for config in (Config.recipe("exact"), Config(simulate="e8m3")):
        with planning_for(GPUS["H200"]):
            plan = plan_of(mlp(64, 64, 64), rows(64, 64), config=config)
        assert not any(y.slower for y in plan.linears)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_choice_for_dynamic_shapes_does_not_depend_on_the_first_batch(dynamic):
    """Cache keys contain no hints, and a short last batch makes shapes dynamic."""
    found = []
    for count in (64, 8192):
        torch._dynamo.reset()
        x = torch.empty(count, 2048, dtype=torch.bfloat16, device="cpu", requires_grad=True)
        with torch.device("cpu"):
            model = nn.Sequential(nn.Tanh(), nn.Linear(2048, 2048, bias=False).bfloat16())
        with planning_for(GPUS["H200"]):
            joint = capture_joint(model, x, dynamic=dynamic)
            run_passes(JOINT_PASSES, joint.gm, joint.ctx)
        found += roles(joint.ctx.plan)
    assert found == [ALL if dynamic else (), ALL]


def test_merged_dgrads_contain_only_gemms_in_fp8(on_a_small_gpu):
    """The gradient of `x` is a sum of three dgrads, and one dgrad stays in BF16."""

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = (nn.Linear(256, 512, bias=False) for _ in range(2))
            self.v = nn.Linear(256, 16, bias=False)

        def forward(self, x):
            x = x.tanh()
            return self.q(x).sin().sum() + self.k(x).sin().sum() + self.v(x).sin().sum()

    plan = plan_of(Three().bfloat16(), rows(512, 256))
    assert [y.fp8 for y in plan.linears] == [ALL, ALL, ("forward",)] or not plan.linears[2].fp8
    assert plan.merged == [("q", "k")] or plan.merged == [("k", "q")]


# --- caches, logs, reports ------------------------------------------------------------------------


def test_cache_keys_contain_the_gpu():
    x, keys = torch.empty(2), set()
    joint = capture_joint(mlp(64, 64, 64), rows(64, 64))
    for name in ("H200", "H100"):
        with planning_for(GPUS[name]):
            key = Compilation(Config(), Inputs.of([x])).cache_key()
            stored = StoredMessages.find(_with_example(joint.gm), Config()).key
        keys |= {key, stored}
    keys |= {Compilation(Config(), Inputs.of([x])).cache_key()}
    assert len(keys) == 5


def _with_example(gm):
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = node.meta["val"]
    return gm


def test_explain_and_the_log_give_the_reason(on_a_small_gpu, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fp8pass")
    monkeypatch.setattr(hardware, "LAUNCH", 1e-3)
    program, _ = compiled(mlp(64, 64, 64))
    text = " ".join(str(fp8pass.explain(program, rows(64, 64))).split())
    assert "FP8 is not faster: casts take" in text
    assert "0 of 2 linear layers in FP8" in text


# --- recorded measurements ------------------------------------------------------------------------


@pytest.fixture
def models(monkeypatch):
    """Import models.py, layer.py and moe.py of benchmarks/."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return {name: importlib.import_module(name) for name in ("models", "layer", "moe")}


def planned(monkeypatch, gpu: str, model, *args, loss_of=None):
    """Return the plans of a model on the meta device, and the milliseconds that FP8 would save."""
    found: list[Choice] = []

    def spy(*args):
        found.append(choose_gemms(*args))
        return found[-1]

    monkeypatch.setattr(quantizer, "choose_gemms", spy)
    torch._dynamo.reset()
    with planning_for(GPUS[gpu]):
        step = record_step(model, ("",), (args, {}), loss_of or (lambda run, a, _: run(*a).sum()))
        plans = [plan_region(r, Config()).plan for r in step.regions if r.gm is not None]
    casts = [{k: s for d in c.casts.values() for k, s in d.items()} for c in found]
    saved = sum(sum(c.gains.values()) - sum(k.values()) for c, k in zip(found, casts, strict=True))
    return [y for plan in plans for y in plan.linears], 1e3 * saved


def decoder(models, hidden, heads, ffn, batch, seq):
    with torch.device("meta"):
        model = models["models"].Stack(1, hidden, heads, ffn).bfloat16()
        tables = [torch.empty(seq, hidden // heads, dtype=torch.bfloat16) for _ in range(2)]
        x = torch.empty(batch, seq, hidden, dtype=torch.bfloat16, requires_grad=True)
    return model, x, *tables


def measured(file: str, case: str | None, bf16: str, ours: str, key: str = "ms") -> float:
    """Return the milliseconds that a variant of a benchmark saves."""
    record = json.loads((BENCHMARKS / "results" / f"{file}.json").read_text())
    ms = {r["variant"]: r.get(key) for r in record["results"] if r.get("case") == case}
    return ms[bf16] - ms[ours]


@pytest.mark.long
@pytest.mark.parametrize(("name", "suffix"), [("h2048", ", CUDA graphs"), ("h4096", "")])
def test_large_layers_run_in_fp8_and_save_the_measured_time(models, monkeypatch, name, suffix):
    case = next(c for c in models["layer"].CASES if c.name == name)
    sizes = case.hidden, case.heads, case.ffn, case.batch, case.seq
    linears, saved = planned(monkeypatch, "H200", *decoder(models, *sizes))
    assert {y.fp8 for y in linears} == {ALL}
    of = measured("layer", name, f"bf16 compile{suffix}", f"fp8pass coat{suffix}")
    # Launches are priced as on a mean host, and take less with CUDA graphs.
    assert saved == pytest.approx(of, rel=0.45)


@pytest.mark.long
@pytest.mark.parametrize(("name", "expected"), [("mixtral", ALL), ("qwen3", ())])
def test_experts_run_in_fp8_if_they_are_large(models, monkeypatch, name, expected):
    moe = models["moe"]
    case = next(c for c in moe.CASES if c.name == name)
    with torch.device("meta"):
        model = moe.MoELayer(case).bfloat16()
        size = case.batch, case.seq, case.hidden
        x = torch.empty(*size, dtype=torch.bfloat16, requires_grad=True)
    linears, saved = planned(monkeypatch, "H100", model, x)
    experts = [y for y in linears if y.experts]
    assert {y.fp8 for y in experts} == {expected}
    assert all(y.slower for y in experts if not expected)
    of = measured("moe", name, "bf16 compile", "fp8pass coat")
    assert saved == pytest.approx(of, rel=0.55)


@pytest.mark.long
def test_gpt2_runs_partly_in_fp8(models, monkeypatch):
    """Forward and backward of GPT-2 124M gain 1.4 ms in FP8, of 30 ms, and launch 338 kernels."""
    layers, traced = 12, 2
    with torch.device("meta"):
        model = models["models"].GPT(traced, 768, 12, vocabulary=50304, length=1024)
        ids = torch.empty(16, 1024, dtype=torch.long)

    def loss_of(run, args, kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return compute_own_loss(run, args, kwargs)

    linears, saved = planned(monkeypatch, "H200", model, ids, ids.clone(), loss_of=loss_of)
    by_name = {y.module.rpartition(".")[2]: y.fp8 for y in linears}
    assert by_name["out"] == ()
    assert "wgrad" not in by_name["qkv"]
    of = measured("gpt2", None, "bf16 compile", "fp8pass coat", "gpu_ms")
    assert saved * layers / traced == pytest.approx(of, abs=1.0)


def recorded_gemms():
    """Yield the FLOPs, length and measured milliseconds of FP8 GEMMs on an H200."""
    record = json.loads((BENCHMARKS / "results" / "gemms.json").read_text())
    for row in record["results"]:
        m, n, k = row["size"]
        yield 2 * m * n * k, k, row["cublaslt_ms"][0]


def test_the_time_of_fp8_gemms_is_within_a_fifth_of_the_measured_time():
    for flops, length, ms in recorded_gemms():
        slower = 1 + gemm_choice.OVERHEAD / length
        estimate = 1e3 * slower * flops / GPUS["H200"].fp8_flops
        assert estimate == pytest.approx(ms, rel=0.2)


def test_device_names_are_mapped_to_known_gpus():
    assert known_gpu("NVIDIA H100 80GB HBM3") is GPUS["H100"]
    assert known_gpu("NVIDIA GeForce RTX 4090") is GPUS["RTX 4090"]
    assert known_gpu("NVIDIA A100-SXM4-80GB") is GPUS["A100"]
    assert known_gpu("Tesla T4") is None
    assert known_gpu("NVIDIA L40") is None
    assert known_gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert hardware.rates_of(torch.device("cpu")) is None
    assert math.isfinite(GPUS["H200"].bandwidth)


def test_emulated_gemms_gain_nothing(on_a_small_gpu, monkeypatch):
    """On a GPU without tensor cores for MX, they run only if the options ask for it."""
    monkeypatch.setattr(hardware, "why_emulated", lambda device, scales: "no cores for MX")
    for options, expected in (({"scales": "mx"}, ()), ({"recipe": "mxfp8"}, ALL)):
        config = Config.recipe(options.pop("recipe", "coat"), **options, compiler="eager")
        joint = capture_joint(mlp(256, 256, 256), rows(64, 256), config=config)
        run_passes(JOINT_PASSES, joint.gm, joint.ctx)
        assert roles(joint.ctx.plan) == [expected] * 2
        assert joint.ctx.plan.emulated == "no cores for MX"
        assert "GEMMs are emulated: no cores for MX" in joint.ctx.plan.summary()
