"""`fit`: its search, the model that it must not change, and invalid arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from fit_helpers import MIB, make_on_cpu, make_on_meta, trace_step
from helpers import MLP
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import fp8pass
from fp8pass import Config, ConfigError, fit, hardware
from fp8pass.activation_memory.budget import BudgetProblem
from fp8pass.activation_memory.planner import BudgetTooSmall
from fp8pass.hardware import GPUS, Work
from fp8pass.plan import Head
from fp8pass.tools.fitting.candidates import Candidates, estimate_step
from fp8pass.tools.fitting.fitting import _describe_heads, find_gpu
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.planned import REGION_KINDS
from fp8pass.tools.fitting.setup import Setup


@pytest.fixture(scope="module")
def fitted() -> fp8pass.Fit:
    """A fit on a GPU that is too small for all candidates, so that all are tried."""
    model, ids = make_on_meta()
    with patch("fp8pass.hardware.rates_of", lambda device: None):  # as for layers that gain by FP8
        return fit(model, ids, gpu="H200, 1MiB", host="8GiB", accumulate=2, blocks="blocks")


@pytest.mark.long
def test_batches_of_several_sizes_in_one_process():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=64, num_attention_heads=2, use_cache=False, **sizes
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    for batch in (2, 4):
        ids = torch.empty(batch, 64, dtype=torch.long, device="meta")
        assert fit(model, input_ids=ids, labels=ids, gpu="H200", host="64GiB").fits


# --- the search ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_kinds_of_memory_add_up_to_the_total(fitted):
    assert fitted.tried
    for candidate, why_not in fitted.tried:
        assert candidate.allocated == sum(candidate.gpu.values()) < candidate.gpu_bytes
        assert min(candidate.gpu.values()) >= 0
        assert set(REGION_KINDS) < set(candidate.gpu)
        assert "too much for the GPU" in why_not
        s = candidate.seconds
        assert s.total == pytest.approx(s.forward + s.backward + s.update + s.waiting)
    times = [c.seconds.total for c, _ in fitted.tried if c.setup.config.save_format == "e4m3"]
    assert all(a <= 1.02 * b for a, b in pairwise(times))


def test_smaller_budgets_save_less_and_take_longer(fitted):
    of_place = [
        c
        for c, _ in fitted.tried
        if not c.setup.step_in_backward
        and not c.setup.offload
        and c.setup.config.save_format == "e4m3"
    ]
    of_place.sort(key=lambda c: c.seconds.total)
    assert len(of_place) > 2
    compute = [c.setup.config.memory_budget or 1.0 for c in of_place]
    assert compute == sorted(compute, reverse=True)


@pytest.mark.long
def test_the_first_that_fits_is_taken(fitted):
    model, ids = make_on_meta()
    sizes = [c.gpu_bytes for c, _ in fitted.tried]
    room = int(min(sizes) * 1.001)
    found = fit(model, ids, gpu=room, host="8GiB", accumulate=2, blocks="blocks")
    assert found.fits
    assert found.best.gpu_bytes <= room
    assert all(why for candidate, why in found.tried if candidate is not found.best)
    roomy = fit(model, ids, gpu="H200", host="8GiB", accumulate=2, blocks="blocks")
    assert roomy.best.setup == Setup()
    assert any("This is tight" in note for note in found.notes)
    assert not any("This is tight" in note for note in roomy.notes)
    assert len(roomy.tried) == 1


def test_nothing_fits(fitted):
    assert not fitted.fits
    least = min(c.gpu_bytes for c, _ in fitted.tried) / MIB
    with pytest.raises(
        ConfigError, match=rf"least GPU memory takes {least:.0f} MiB .* too much for the GPU"
    ):
        _ = fitted.lines
    assert fitted.why_not in " ".join(str(fitted).split())
    assert json.loads(fitted.to_json())["fits"] is False


class FakeStep:
    """Stand-in for a traced step with an output head. Budgets below 0.7 are too small."""

    def __init__(self, head: Head) -> None:
        self.head, self.configs = head, []

    def plans(self, config):
        return [SimpleNamespace(heads=[replace(self.head, chunks=config.head_chunks or 1)])]

    def work(self, config):
        self.configs.append(config)
        if (config.memory_budget or 1) < 0.7:
            raise BudgetTooSmall("cannot be met")
        return Work(bf16_flops=1e9), Work(bf16_flops=1e9)


class FakeStepWithWholeHead(FakeStep):
    """A step with a head that cannot be chunked."""

    def plans(self, config):
        return [SimpleNamespace(heads=[self.head])]


@pytest.mark.parametrize(
    ("kind", "chunks"), [(FakeStep, {None, 8}), (FakeStepWithWholeHead, {None})]
)
def test_candidates_that_cannot_help_are_not_tried(kind, chunks):
    """Budgets below an impossible budget, and chunks of a head that cannot be chunked."""
    traced = kind(Head("head", "64×640", 1 << 20, 1, "the head has too few tokens"))
    candidates = Candidates(traced, Parameters(make_on_meta()[0]), Config(), 1, GPUS["H200"])
    for config in candidates._list_configs(Config()):
        candidates._time(config)
    assert {config.head_chunks for config in traced.configs} == chunks
    assert {config.memory_budget for config in traced.configs} == {None, 0.8, 0.6}
    assert {config.memory_budget for config in candidates.impossible} == {0.6}


@pytest.mark.long
def test_one_note_explains_why_budgets_are_left_out(monkeypatch):
    monkeypatch.setattr(BudgetProblem, "within", lambda self, budget: None)
    monkeypatch.setattr(BudgetProblem, "least", lambda self: 1e9)
    monkeypatch.setattr("fp8pass.hardware.rates_of", lambda device: None)  # see `fitted`
    model, ids = make_on_meta(layers=8)
    found = fit(model, ids, gpu="H200, 1MiB", host="8GiB")
    (note,) = (note for note in found.notes if "budgets, such as 0.8, cannot be met" in note)
    assert "With only some of the 8 layers of blocks: memory_budget of" in note
    assert all(candidate.setup.config.memory_budget is None for candidate, _ in found.tried)


def heads_of(module: str, size: int) -> list[SimpleNamespace]:
    return 2 * [SimpleNamespace(heads=[Head(module, "8192×32000", size, 1, "there are few")])]


def test_one_note_reports_large_logits_of_all_tokens(fitted):
    plans = heads_of("small", 100) + heads_of("head", 8 * MIB)
    (note,) = set(_describe_heads(plans, fitted))
    assert note.startswith("Logits of head, 8192×32000, 8 MiB, exist for all tokens at once")


def test_a_host_that_is_too_small_is_reported():
    model, ids = make_on_meta()
    options = {"config": Config(memory_budget=0.9), "blocks": "blocks"}
    found = fit(model, ids, gpu="H200, 1MiB", host="4GiB", **options)
    reasons = [why for candidate, why in found.tried if candidate.host]
    assert reasons
    assert all("too much for the host" in why for why in reasons)


def test_a_host_that_is_too_small_for_the_process_is_reported():
    model, ids = make_on_meta()
    found = fit(model, ids, gpu="H200", host="2GiB", blocks="blocks")
    assert len(found.tried) == 1
    assert "a host of 2 GiB: Python, PyTorch and the driver alone take 4 GiB." in found.why_not


def test_offloading_over_a_slow_link_takes_time():
    parameters = Parameters(make_on_meta()[0])
    setup = Setup(step_in_backward=True, offload=("states", "gradients"))
    slow = fp8pass.Gpu("slow", 1e12, 1e15, 1e15, 1e15, 1e12, link=1e6)
    work = Work(bf16_flops=1e9), Work(bf16_flops=2e9)
    found = estimate_step(work, parameters, setup, 4, slow)
    _, host = parameters.place(setup, 4)
    assert found.link == pytest.approx((host.states + 4 * host.sums) / 1e6)
    assert found.waiting == pytest.approx(found.link, rel=0.01)
    fast = fp8pass.Gpu("fast", 1e12, 1e9, 1e9, 1e9, 1e12, link=1e12)
    assert estimate_step(work, parameters, setup, 4, fast).waiting == 0


def test_the_time_of_copies_is_reported():
    model, ids = make_on_meta()
    slow = fp8pass.Gpu("slow", 690 * MIB, 1e15, 1e15, 1e15, 1e12, link=1e6)
    found = fit(model, ids, gpu=slow, host="8GiB", accumulate=4, blocks="blocks")
    if found.shown.setup.offload:
        assert any("the GPU waits" in note for note in found.notes)


# --- unchanged models and invalid arguments -------------------------------------------------------


@pytest.mark.parametrize("make", [make_on_meta, make_on_cpu])
def test_the_model_does_not_change(make):
    model, ids = make()
    before = dict(model.named_parameters())
    values = [p.detach().clone() for p in before.values()]
    fit(model, ids, gpu="H200", host="8GiB", blocks="blocks")
    after = dict(model.named_parameters())
    assert all(after[name] is p and p.grad is None for name, p in before.items())
    assert not any(isinstance(p, FakeTensor) for p in after.values())
    assert all("forward" not in vars(m) for m in model.modules())
    if make is make_on_cpu:
        assert all(torch.equal(a, b) for a, b in zip(values, after.values(), strict=True))


def test_configuration_and_loss_of_the_model():
    model, ids = make_on_meta()
    for block in model.blocks:
        block.compile(backend="fp8pass", options={"skip": ("down",), "memory_budget": 0.9})
    found = fit(
        model,
        ids,
        gpu="H200",
        host="8GiB",
        loss_fn=lambda model, batch: model(*batch).square(),
        blocks="blocks",
    )
    assert found.best.setup.config == Config(skip=("down",), memory_budget=0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "RTX 409"}, r"Unknown gpu 'RTX 409'. Did you mean 'RTX 4090'"),
        ({"gpu": "16GiB, 8GiB"}, "a name, a size or both"),
        ({"gpu": 16}, "For GiB write gpu='16GiB'"),
        ({"host": "much"}, r"host must be a size such as '24GiB'"),
        ({"accumulate": 0}, "accumulate must be a positive int"),
        ({"blocks": "block"}, r"blocks='block' matches no module .*Did you mean 'blocks'"),
    ],
)
def test_wrong_options_are_refused(changes, message):
    model, ids = make_on_meta()
    with pytest.raises(ConfigError, match=message):
        fit(model, ids, **{"gpu": "16GiB", "host": "8GiB", **changes})


def test_a_model_without_a_loss_is_refused():
    with torch.device("meta"):
        model, x = MLP((64, 128, 64)), torch.empty(32, 64)
    with pytest.raises(ValueError, match=r"instead of a loss. Pass a loss function to fit"):
        fit(model, x, gpu="16GiB", host="8GiB")


def test_a_loss_function_without_a_loss_is_refused():
    model, ids = make_on_meta()
    with pytest.raises(TypeError, match=r"must return a tensor.* it returned NoneType"):
        fit(model, ids, gpu="16GiB", host="8GiB", loss_fn=lambda model, batch: None)
    with pytest.raises(ValueError, match="does not depend on a trainable parameter"):
        fit(model.requires_grad_(False), ids, gpu="16GiB", host="8GiB")


class Positive(nn.Module):
    """Selects the rows that begin above zero."""

    def forward(self, x):
        return x[x[:, 0] > 0]


class Positives(MLP):
    """Reads values, in a part or in its own forward."""

    def __init__(self, *parts):
        super().__init__((64, 128, 64))
        self.parts = nn.Sequential(*parts)

    def forward(self, x):
        x = self.parts(super().forward(x))
        return x.square().mean() * (1 if self.parts else x.sum().item())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([nn.Identity(), Positive()], r"but aten.nonzero.default in parts.1 reads values"),
        (
            [],
            r"but aten._local_scalar_dense.default in Positives or its loss reads values, ",
        ),
    ],
)
def test_a_model_that_reads_values_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        fit(Positives(*parts), torch.randn(32, 64), gpu="16GiB", host="8GiB")


@pytest.mark.parametrize("text", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "RTX4090,8GiB"])
def test_gpus_by_name(text):
    found = find_gpu(text)
    assert found.bandwidth == GPUS["RTX 4090"].bandwidth
    assert found.memory == (8 << 30 if "8GiB" in text else GPUS["RTX 4090"].memory)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("A100", "A100"),
        ("A100 80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_the_most_specific_name_of_a_gpu_wins(text, known):
    assert find_gpu(text) is GPUS[known]


def test_the_first_line_states_what_was_planned(fitted):
    line = str(fitted).splitlines()[0]
    assert line == (
        "Layered 854K, bfloat16 · micro-batch 4 × 64 tokens × 2 · H200 of 1 MiB (rates: measured)"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_times_of_an_unnamed_gpu_are_marked():
    model, ids = make_on_meta()
    text = str(fit(model, ids, gpu="24GiB", host="8GiB", blocks="blocks"))
    assert "tokens · unnamed GPU of 24 GiB (speed unknown: no GPU was named; times are" in text
    assert "s per step (H200)" in text


def test_times_of_an_unknown_gpu_are_marked(fitted):
    gpu = replace(GPUS["H200"], name="RTX 9090", capability=(7, 5), rates="assumed")
    line = replace(fitted, gpu=gpu)._planned_text
    assert "(speed unknown: fit does not know this GPU; times are for an H200; no FP8" in line


@pytest.mark.long
@pytest.mark.parametrize("name", ["A100", "A100 40GB", "RTX 3090"])
def test_gpus_without_fp8_run_linear_layers_in_16_bits(name):
    model, ids = make_on_meta()
    options = {"config": Config(fp8_gemms="all"), "host": "8GiB", "blocks": "blocks"}
    found = fit(model, ids, gpu=name, **options)
    assert "(rates: datasheet; no FP8 tensor cores: linear layers in 16 bits)" in str(found)
    fast = fit(model, ids, gpu=replace(GPUS[name], capability=(8, 9)), **options)
    assert found.best.seconds.forward != fast.best.seconds.forward
    assert hardware.why_no_fp8_gemm(torch.device("cpu")) is None


def test_a_gpu_without_fp8_decides_the_plan():
    model, ids = make_on_meta()
    with hardware.planning_for(GPUS["A100"]):
        (plan, *_) = trace_step(model, ("blocks.0",), ids).plans(Config())
    assert not any(y.fp8 for y in plan.linears)
    assert {y.reason for y in plan.linears} == {
        "A100 (sm80) has no FP8 tensor cores: FP8 needs sm89 or newer"
    }


def test_repr_is_one_short_line(fitted):
    assert repr(fitted).startswith("<fp8pass.Fit: Layered on H200: does not fit, ")
    assert len(repr(fitted)) < 200
    assert "┃" in fitted._repr_html_()
    assert fitted._repr_html_().startswith("<pre>Layered ")


def test_plot(fitted, tmp_path):
    fitted.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="'xyz' is not supported"):
        fitted.plot(tmp_path / "memory.xyz")
