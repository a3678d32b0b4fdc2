"""Values are saved in low bits as long as this takes no more time than FP8 GEMMs save."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import capture_joint, compiled, stock_eager
from torch import nn
from torch.nn import functional as F

from fp8pass import Config, hardware
from fp8pass.activation_memory.added_time import AddedTime
from fp8pass.activation_memory.cuts import cheapest_plan
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.activation_memory.needs import find_needs
from fp8pass.activation_memory.stock import partition_stock
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.graph.nodes import tensor
from fp8pass.hardware import Gpu
from fp8pass.partition import cut
from fp8pass.passes import JOINT_PASSES
from fp8pass.passes.joint.plan_saved_values import PRICES, plan_saved_values
from fp8pass.passes.runner import run_passes

# On this GPU, layers of 512 features are as fast in FP8 as layers of 4096 on an H200.
SLOW = Gpu("slow", 1e12, 160e9, 85e9, 66e9, 4.27e9, 1e10)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let CPU tensors stand for `SLOW`, with launches of 1 ms that the CPU does not limit."""
    monkeypatch.setattr(hardware, "rates_of", lambda device: SLOW)
    monkeypatch.setattr(hardware, "LAUNCH", 1e-3)
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 0.0)


class Block(nn.Module):
    """A gated MLP with a norm and a residual sum."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate, self.up = nn.Linear(hidden, ffn), nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Heads(nn.Module):
    """Attention that reads views."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(1, 2, 0, 3)
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def block(hidden, ffn, count=2):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(hidden, ffn) for _ in range(count)]).bfloat16()


def rows(count, features):
    return torch.randn(count, features, dtype=torch.bfloat16, requires_grad=True)


def planned(model, *args, passes=JOINT_PASSES, **options):
    joint = capture_joint(model, *args, config=Config(compiler="eager", **options))
    run_passes(passes, joint.gm, joint.ctx)
    return joint


def low_bit(joint):
    return [s for s in joint.ctx.plan.saved if s.is_low_bit]


def test_a_cpu_saves_everything_in_few_bytes():
    one, other = (
        planned(block(64, 128), rows(64, 64), compact_saves=c) for c in ("where_free", "all")
    )
    assert [s.saved_as for s in one.ctx.plan.saved] == [s.saved_as for s in other.ctx.plan.saved]
    assert low_bit(one)


def test_gemms_in_bf16_pay_for_no_saves(on_a_gpu):
    """In BF16 the operands of a wgrad are dequantized or recomputed by kernels of their own."""
    model, x = block(64, 64), rows(2048, 64)
    fast, small = (planned(model, x, compact_saves=c) for c in ("where_free", "all"))
    assert not any(y.fp8 for y in fast.ctx.plan.linears)
    assert fast.ctx.spare_seconds == 0
    assert len(low_bit(fast)) < len(low_bit(small))
    assert small.ctx.plan.saved_bytes < 0.8 * fast.ctx.plan.saved_bytes
    reasons = [s.reason for s in fast.ctx.plan.saved]
    assert any("would free" in reason and "µs more" in reason for reason in reasons)


def test_large_gemms_pay_for_all_saves(on_a_gpu):
    model, x = block(512, 1024, 1), rows(2048, 512)
    fast, small = (planned(model, x, compact_saves=c) for c in ("where_free", "all"))
    assert all(y.fp8 for y in fast.ctx.plan.linears)
    assert fast.ctx.spare_seconds > 0
    assert fast.ctx.plan.saved_bytes <= small.ctx.plan.saved_bytes


@pytest.mark.parametrize("options", [{"compact_saves": "all"}, {"memory_budget": 2.0}])
def test_options_ask_for_few_bytes(options, on_a_gpu):
    model, x = block(64, 64), rows(2048, 64)
    assert len(low_bit(planned(model, x, **options))) > len(low_bit(planned(model, x)))


class Modulated(nn.Module):
    """Multiplies values of all tokens by a vector of each image, as DiT does."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale, self.up = nn.Linear(features, features), nn.Linear(features, features)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x)) * self.scale(c)[:, None]


def test_small_tensors_are_saved_exactly(on_a_gpu):
    """The kernel that quantizes them would take longer than their bytes are worth."""
    torch.manual_seed(0)
    model, x = Modulated(512).bfloat16(), rows(2048, 512).detach().view(8, 256, 512)
    forms = {}
    for choice in ("where_free", "all"):
        joint = planned(model, x, rows(8, 512).detach(), compact_saves=choice)
        vectors = [s for s in joint.ctx.plan.saved if s.shape in ("8×512", "8×1×512")]
        forms[choice] = {s.saved_as for s in vectors if "placeholder" not in s.value}
        assert any(s.shape == "8×256×512" and s.is_low_bit for s in joint.ctx.plan.saved)
    assert forms == {"where_free": {"exact"}, "all": {"e4m3 1×128"}}


@pytest.mark.parametrize("launch", [0.0, 1e-4, 1e-2])
@pytest.mark.parametrize("hidden", [32, 128, 256, 512])
def test_saves_take_no_longer_than_gemms_save(hidden, launch, on_a_gpu, monkeypatch):
    """By the estimates of the model."""
    monkeypatch.setattr(hardware, "LAUNCH", launch)
    before = JOINT_PASSES[: JOINT_PASSES.index(plan_saved_values)]
    joint = planned(block(hidden, 2 * hidden), rows(512, hidden), passes=before)
    gm, ctx = joint.gm, joint.ctx
    rules = Rules(gm.graph, ctx.config, ctx.facts)
    time = AddedTime(SLOW, rules.backward, PRICES[-1])
    choices = FormatChoices(rules, time)
    least = time.total(cheapest_plan(find_needs(choices), choices))
    plan_saved_values(gm, ctx)
    assert time.total(ctx.decisions) <= (least + ctx.spare_seconds) * (1 + 1e-9)


def test_a_step_that_the_cpu_limits_saves_what_stock_saves(on_a_gpu, monkeypatch):
    """Low-bit formats add launches. Only a budget or `compact_saves='all'` uses them."""
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 10.0)
    model, x = nn.Sequential(block(512, 1024), Heads(512)), rows(64, 512)
    joint = capture_joint(model, x, config=Config(compiler="eager"))
    stock = partition_stock(joint.gm, (), joint.ctx.facts)
    run_passes(JOINT_PASSES, joint.gm, joint.ctx)
    plan = joint.ctx.plan
    assert plan.saved_bytes == stock.bytes
    assert {n.name for n in joint.ctx.saved} == stock.crossing
    for ours, theirs in zip(cut(joint.gm, joint.ctx), stock.halves, strict=True):
        assert ours.print_readable(print_output=False) == theirs.print_readable(print_output=False)
    assert not any(s.is_low_bit for s in plan.saved)
    assert all("the CPU launches the kernels in" in s.reason for s in plan.saved if s.bytes)
    for options in ({"memory_budget": 0.5}, {"compact_saves": "all"}):
        assert any(s.is_low_bit for s in planned(model, x, **options).ctx.plan.saved)


def test_views_of_an_input_that_the_graph_overwrites_are_copied(on_a_gpu, monkeypatch):
    """Stock PyTorch saves the view, which then has new values. So its graphs are not used."""
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 10.0)

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64).bfloat16()

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            a, b = w.t().clone(), w.view(-1, 64).clone()
            y = (self.layer(x) * a).sin() @ b.t()
            w.mul_(2)
            return y

    model, x, w = Doubled(), rows(64, 64), torch.randn(64, 64, dtype=torch.bfloat16)
    program, _ = compiled(model, Config(compiler="eager"))
    got, want = (torch.autograd.grad(f(x, w.clone()).sum(), x)[0] for f in (program, model))
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.1)


def test_a_graph_without_linear_layers_can_be_limited_by_the_cpu(on_a_gpu, monkeypatch):
    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x.exp()) * x

    for launch, is_limited in ((0.0, False), (10.0, True)):
        monkeypatch.setattr(hardware, "CPU_LAUNCH", launch)
        joint = planned(Activation(), rows(64, 512))
        assert (joint.ctx.stock is not None) == is_limited


def test_a_part_that_others_broadcast_is_quantized_by_a_kernel_of_its_own(on_a_gpu):
    """The kernels that read the part run over more elements. It pays only if the part is large."""

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.up = nn.Linear(64, 512), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return self.up(x.sin() * self.scale(c).sin()[:, None])

    x = torch.randn(8, 64, 512, dtype=torch.bfloat16, requires_grad=True)
    joint = capture_joint(Modulated().bfloat16(), x, rows(8, 64))
    time = AddedTime(SLOW, Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts).backward)
    sines = joint.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    own = {tensor(sine).shape: time._has_own_kernel(sine) for sine in sines}
    assert own == {(8, 64, 512): False, (8, 512): True}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_step_that_the_cpu_limits_has_the_results_of_stock(dropout, on_a_gpu, monkeypatch):
    monkeypatch.setattr(hardware, "CPU_LAUNCH", 10.0)
    model, x = nn.Sequential(block(128, 256), nn.Dropout(dropout), block(128, 256)), rows(64, 128)
    results = []
    for program in (
        compiled(model, Config(compiler="eager"))[0],
        torch.compile(copy.deepcopy(model), backend=stock_eager),
    ):
        torch.manual_seed(1)
        y = program(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_are_right(on_a_gpu):
    model, x = block(64, 128), rows(512, 64)
    program, spy = compiled(model, Config(compiler="eager"))
    program(x).float().square().mean().backward()
    assert any("would free" in s.reason for s in spy.plan.saved)
    got = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).float().square().mean().backward()
    for mine, own in zip(got, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        assert (mine - own).norm() <= 0.05 * own.norm()


def forms_of(joint_or_spy):
    return [(s.value, s.saved_as) for s in joint_or_spy.plan.saved]


MODELS = {
    "block": lambda: block(64, 128),
    "norm": lambda: nn.Sequential(nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64)).bfloat16(),
}


@pytest.mark.long
@pytest.mark.parametrize("name", list(MODELS))
def test_the_first_batch_does_not_matter(on_a_gpu, name):
    """Cache keys contain no hints of dynamic sizes."""
    found = []
    for count in (16, 2048, 65536):
        torch._dynamo.reset()
        program, spy = compiled(MODELS[name](), Config(compiler="eager"), dynamic=True)
        program(rows(count, 64)).float().square().mean()
        found.append(forms_of(spy))
    assert found[0] == found[1] == found[2]


@pytest.mark.long
def test_batch_and_length_count_like_their_product(on_a_gpu):
    model, x = block(64, 128), rows(256, 64).detach()
    seconds = []
    for shape in ((256, 64), (8, 32, 64)):
        torch._dynamo.reset()
        joint = capture_joint(
            model, x.view(shape).requires_grad_(), config=Config(compiler="eager"), dynamic=True
        )
        run_passes(JOINT_PASSES, joint.gm, joint.ctx)
        time = AddedTime(SLOW, Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts).backward)
        seconds.append(time.total(joint.ctx.decisions))
    assert seconds[1] <= 2 * seconds[0]


def test_an_output_is_no_operand_of_a_gemm(on_a_gpu):
    """A graph between two graph breaks returns values that its backward also needs."""
    joint = planned(nn.Tanh(), rows(2048, 512), passes=JOINT_PASSES)
    assert not any("would free" in s.reason for s in joint.ctx.plan.saved)


def test_values_of_parameters_are_recomputed(on_a_gpu):
    """Otherwise ranks with different sizes could gather a parameter different numbers of times."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))

        def forward(self, x):
            return F.linear(torch.tanh(x), torch.tanh(self.weight))

    model, x = Tied(), rows(2048, 64)
    small, fast = (planned(model, x, compact_saves=c) for c in ("all", "where_free"))
    shapes = [[s.shape for s in j.ctx.plan.saved if s.shape == "64×64"] for j in (small, fast)]
    assert shapes[0] == shapes[1] == []


def test_a_simulation_saves_like_the_default(on_a_gpu):
    model, x = block(512, 1024, 1), rows(2048, 512)
    plain, simulated = (planned(model, x, **o) for o in ({}, {"simulate": "e4m3"}))
    assert plain.ctx.spare_seconds > 0
    assert simulated.ctx.spare_seconds == float("inf")
