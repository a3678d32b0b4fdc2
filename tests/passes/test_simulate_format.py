"""Linear layers in a simulated format: masked GEMMs, shared masks, and the numbers."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from helpers import (
    EXACT_EAGER,
    MLP,
    JointGraph,
    assert_same_step,
    capture_joint,
    compiled,
    gpt2,
    identical,
    llama,
    step,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import backend, bisect, explain
from fp8pass.config import GEMMS, Config, Simulation
from fp8pass.dynamo import Backend
from fp8pass.graph.nodes import aten
from fp8pass.passes.joint.quantize_linears import quantize_linears
from fp8pass.passes.joint.simulate_format import simulate_format

fp8 = torch.ops.fp8pass
E8M3 = Config(simulate="e8m3", compiler="eager")


def simulated(model, *args, config=E8M3, **options) -> JointGraph:
    """The joint graph after the passes that rewrite linear layers."""
    joint = capture_joint(model, *args, config=config, **options)
    quantize_linears(joint.gm, joint.ctx)
    simulate_format(joint.gm, joint.ctx)
    joint.gm.graph.lint()
    return joint


def masks(joint: JointGraph) -> int:
    return len(joint.calls(fp8.mask_format.default))


def rows(count=32, features=64, dtype=torch.bfloat16) -> Tensor:
    return torch.randn(count, features, dtype=dtype, requires_grad=True)


def linear(bias=False, dtype=torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48, bias=bias, dtype=dtype))


class MaskedLinear(torch.autograd.Function):
    """The listing of the paper, extended to both GEMMs of the backward."""

    @staticmethod
    def forward(ctx, x, weight, how):
        ctx.save_for_backward(x, weight)
        ctx.mask = lambda y: fp8.mask_format(y, *how)
        return ctx.mask(ctx.mask(x) @ ctx.mask(weight).t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = ctx.mask(gradient)
        dx = ctx.mask(gradient @ ctx.mask(weight))
        return dx, ctx.mask(gradient.t() @ ctx.mask(x)), None


# --- the rewrite --------------------------------------------------------------------------------


def test_operands_once_each_and_results():
    """x, W and dY are masked once, and so are the results of three GEMMs."""
    joint = simulated(linear(), rows())
    (layer,) = joint.ctx.plan.linears
    assert (layer.module, layer.simulated, layer.fp8, layer.reason) == ("0", GEMMS, (), "")
    assert masks(joint) == 6
    assert len(joint.calls(aten.mm.default)) == 3
    assert not joint.calls(fp8.scaled_mm.default)


def test_layers_that_share_an_input_share_its_mask():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            return self.a(x) * self.b(x)

    # x; for each layer W, dY, and three results.
    assert masks(simulated(Two(), rows())) == 1 + 2 * (2 + 3)


@pytest.mark.parametrize(
    ("gemms", "expected"),
    [(("forward",), 3), (("dgrad",), 3), (("wgrad",), 3), (("dgrad", "wgrad"), 5), ((), 0)],
)
def test_only_the_configured_gemms(gemms, expected):
    config = replace(E8M3, simulate=Simulation("e8m3", gemms))
    joint = simulated(linear(), rows(), config=config)
    assert masks(joint) == expected
    assert joint.ctx.plan.linears[0].simulated == gemms


def test_a_bias_is_added_before_the_mask():
    joint = simulated(linear(bias=True), rows())
    (gemm,) = joint.calls(aten.addmm.default)
    bias, *operands = gemm.args
    assert bias.op == "placeholder"
    assert [n.target for n in gemm.users] == [fp8.mask_format.default]
    assert sum(n.target is fp8.mask_format.default for n in operands) == 1  # x; W is transposed


def test_inner_and_outer_reach_the_masks():
    joint = simulated(
        linear(), rows(), config=replace(E8M3, simulate=Simulation("e5m7", inner_clamp=False))
    )
    assert {n.args[1:] for n in joint.calls(fp8.mask_format.default)} == {("e5m7", False, True)}


def test_skipped_layers_stay_as_they_are():
    config = replace(E8M3, skip=("down",))
    joint = simulated(MLP(), rows(dtype=torch.float32), config=config)
    reasons = {y.module: (y.reason, y.simulated) for y in joint.ctx.plan.linears}
    assert reasons["down"] == ("matches skip pattern 'down'", ())
    assert all(gemms == GEMMS for name, (_, gemms) in reasons.items() if name != "down")


def test_output_heads_are_masked_and_can_be_skipped():
    model = nn.Sequential(OrderedDict(lm_head=nn.Linear(64, 48)))
    for config, expected in ((E8M3, GEMMS), (replace(E8M3, skip=("lm_head",)), ())):
        joint = simulated(model, rows(dtype=torch.float32), config=config)
        (layer,) = joint.ctx.plan.linears
        assert (layer.module, layer.simulated) == ("lm_head", expected)


def test_float64_stays_as_it_is():
    joint = simulated(linear(dtype=torch.float64), rows(dtype=torch.float64))
    assert joint.ctx.plan.linears[0].reason == "float64 operands"
    assert masks(joint) == 0


def test_any_sizes():
    model = nn.Sequential(nn.Linear(7, 5, dtype=torch.bfloat16))
    assert masks(simulated(model, rows(3, 7))) == 6


@pytest.mark.parametrize(
    ("name", "dtype"), [("e8m7", torch.bfloat16), ("e8m23", torch.float32)], ids=str
)
def test_without_anything_to_mask_the_graph_stays(name, dtype):
    joint = capture_joint(linear(dtype=dtype), rows(dtype=dtype), config=Config(simulate=name))
    before = joint.code
    simulate_format(joint.gm, joint.ctx)
    assert joint.code == before
    assert joint.ctx.plan.linears[0].simulated == GEMMS


def test_without_the_option_the_graph_stays():
    joint = capture_joint(linear(), rows(), config=Config())
    before = joint.code
    simulate_format(joint.gm, joint.ctx)
    assert (joint.code, joint.ctx.plan.linears) == (before, [])


def test_deterministic():
    model, x = linear(), rows()
    assert simulated(model, x).code == simulated(model, x).code


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [("e8m3", True, True), ("e5m2", True, False)], ids=str)
def test_forward_and_backward_are_the_papers(how):
    config = Config(simulate=Simulation(how[0], GEMMS, *how[1:]), compiler="eager")
    model, x = linear(), rows()
    program, _ = compiled(model, config)
    got = step(program, model, (x,))
    want = step(lambda x: MaskedLinear.apply(x, model[0].weight, how), model, (x,))
    assert_same_step(got, want)


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "name", "dtype"),
    [(llama, "e8m7", torch.bfloat16), (gpt2, "e8m23", torch.float32)],
    ids=["llama", "gpt2"],
)
def test_formats_that_change_nothing_are_bit_equal_to_exact(make, name, dtype):
    model, ids = make().to(dtype), tokens()
    exact, _ = compiled(model, EXACT_EAGER)
    got, _ = compiled(model, Config(simulate=name, compiler="eager"))
    assert_same_step(step(got, model, (ids,)), step(exact, model, (ids,)))


@pytest.mark.long
def test_inductor_is_bit_equal_to_exact_and_masks():
    model, x = MLP().bfloat16(), rows()
    config = Config(simulate="e8m7")
    exact, _ = compiled(model, Config.recipe("exact"))
    want = step(exact, model, (x,))
    assert_same_step(step(compiled(model, config)[0], model, (x,)), want)
    coarse = step(compiled(model, replace(config, simulate="e8m2"))[0], model, (x,))
    assert not identical(coarse.outputs[0], want.outputs[0])
    assert identical(coarse.outputs[0], fp8.mask_format(coarse.outputs[0], "e8m2", True, True))


@pytest.mark.long
def test_fewer_bits_are_further_away():
    model, x = MLP(), rows(dtype=torch.float32)
    want = step(model, model, (x,)).gradients

    def error(name):
        program, _ = compiled(model, Config(simulate=name, compiler="eager"))
        got = step(program, model, (x,)).gradients
        return max(float((got[n] - g).norm() / g.norm()) for n, g in want.items())

    errors = [error(f"e8m{bits}") for bits in (1, 3, 5, 7, 15, 23)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


def test_nan_and_inf_reach_the_user():
    model = linear(dtype=torch.float32)
    program, _ = compiled(model, replace(E8M3, simulate="e4m3"))
    x = rows(dtype=torch.float32)
    with torch.no_grad():
        x[0, 0], x[1, 0] = float("nan"), float("inf")
    y = program(x)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert y[2:].isfinite().all()


def test_evaluation_is_masked_as_training_is():
    model, x = linear(), rows()
    program, _ = compiled(model, E8M3)
    trained = program(x)
    with torch.no_grad():
        assert identical(program(x), trained)


def test_dynamic_shapes():
    model = linear()
    program, spy = compiled(model, E8M3, dynamic=True)
    for count in (16, 24):
        x = rows(count)
        want = step(
            lambda x: MaskedLinear.apply(x, model[0].weight, ("e8m3", True, True)), model, (x,)
        )
        assert_same_step(step(program, model, (x,)), want)
    assert len(spy.plans) == 1


@pytest.mark.long
def test_the_head_in_chunks_is_masked():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(32, 64, bias=False)

        def forward(self, x, y):
            return F.cross_entropy(self.lm_head(x), y)

    model, x, y = Head(), rows(64, 32, torch.float32), torch.randint(0, 64, (64,))
    found = []
    for chunks in (1, 2):
        program, spy = compiled(model, replace(E8M3, head_chunks=chunks))
        # With a tangent of one: chunks multiply masked gradients by other tangents.
        found.append(torch.autograd.grad(program(x, y), x)[0])
    (layer,) = spy.plan.linears
    assert (layer.rows, layer.simulated) == ("2 × 32", GEMMS)
    torch.testing.assert_close(*found)


# --- messages ------------------------------------------------------------------------------------


def test_explain_and_the_log(caplog):
    model, x = MLP(), rows(dtype=torch.float32)
    config = replace(E8M3, skip=("down",), compiler="eager")
    text = str(explain(model, x, config=config))
    with caplog.at_level(logging.INFO, "fp8pass"):
        torch.compile(model, backend=backend(config))(x)
    assert "1 of 2 linear layers in simulated e8m3" in caplog.text
    assert "1 of 2 linear layers in simulated e8m3" in text
    assert "simulated e8m3 GEMMs" in text
    assert "matches skip pattern 'down'" in text


def test_saved_activations_stay_exact():
    plan = explain(MLP(), rows(dtype=torch.float32), config=E8M3).graphs[0].plan
    assert plan.saved
    assert all(s.saved_as == "exact" and not s.expected_error for s in plan.saved)


@pytest.mark.long
def test_bisect_names_the_layer_that_suffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    with torch.no_grad():
        model[2].weight.mul_(1e-6)  # below the range of E4M3: it becomes 2^-6
    x = torch.randn(16, 32)
    found = bisect(
        torch.compile(model, backend=Backend(replace(E8M3, simulate="e4m12"))),
        lambda m, b: m(b).square().sum(),
        x,
    )
    assert "2" in str(found)
