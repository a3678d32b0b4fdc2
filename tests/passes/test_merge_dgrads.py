"""One GEMM computes the gradient of an input that layers share."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
from helpers import capture_joint
from hypothesis import given
from hypothesis import strategies as st
from kernel_helpers import both_devices, counts, run_batch
from torch import nn

import fp8pass
from fp8pass import backend as make_backend
from fp8pass.codegen.kernels import tile_kernel
from fp8pass.codegen.program.ir import Load, Program, Store
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.config import Config
from fp8pass.graph.nodes import aten
from fp8pass.passes import JOINT_PASSES
from fp8pass.passes.joint.merge_dgrads import merge_dgrads

fp8 = torch.ops.fp8pass
ALL = ("forward", "dgrad", "wgrad")


class Parallel(nn.Module):
    """Layers of several widths with the same input and weighted outputs."""

    def __init__(self, widths=(64, 32, 32), factors=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, width, bias=False) for width in widths)
        self.factors = factors or [1.0] * len(widths)

    def forward(self, x):
        x = torch.tanh(x)
        return [f * torch.sin(layer(x)) for f, layer in zip(self.factors, self.layers, strict=True)]


def dgrads(model, x, config=None) -> list[int]:
    """The contractions of the GEMMs that compute gradients of inputs."""
    joint = capture_joint(model, x, config=config or Config())
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
    gemms = [n for n in joint.calls(fp8.scaled_mm.default) if n.meta["fp8pass_role"] == "dgrad"]
    return [n.args[0].meta["val"].shape[1] for n in gemms]


def input_gradient(model, x, config, compiler="eager") -> torch.Tensor:
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    program = torch.compile(model, backend=make_backend(replace(config, compiler=compiler)))
    sum(y.sum() for y in program(x)).backward()
    return x.grad


def relative(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


def inputs() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, 48, requires_grad=True)


def test_one_gemm_for_all():
    assert dgrads(Parallel(), inputs()) == [128]


def test_a_merged_gemm_accumulates_by_its_own_length():
    for longest, merged, fast in ((128, True, ALL), (127, False, ("forward", "wgrad"))):
        joint = capture_joint(Parallel(), inputs(), config=Config(longest_fast=longest))
        for pass_ in JOINT_PASSES:
            pass_(joint.gm, joint.ctx)
        gemms = joint.calls(fp8.scaled_mm.default)
        assert [n.args[6] for n in gemms if n.meta["fp8pass_role"] == "dgrad"] == [merged]
        assert {y.fast for y in joint.ctx.plan.linears} == {fast}


def test_exact_formats_are_not_merged():
    assert sorted(dgrads(Parallel(), inputs(), Config.recipe("exact"))) == [32, 32, 64]


class Added(Parallel):
    """Layers with the same output gradient."""

    def forward(self, x):
        x = torch.tanh(x)
        return [sum(layer(x) for layer in self.layers).sin()]


def test_layers_with_the_same_gradient_have_a_gemm_each():
    model, x = Added((32, 32)), inputs().detach().requires_grad_()
    want = torch.autograd.grad(model(x)[0].sum(), x)[0]
    assert dgrads(model, x) == [32, 32]
    assert relative(input_gradient(model, x.detach(), Config()), want) < 0.06


def test_rows_next_to_larger_gradients():
    """Smaller entries of the sum are as exact as before, too."""
    torch.manual_seed(2)
    model, x = Parallel((64, 64)), inputs().detach().requires_grad_()

    def loss(outputs):
        return 1e4 * outputs[0][0, 0].sum() + outputs[1].sum()

    want = torch.autograd.grad(loss(model(x)), x)[0]
    program = torch.compile(model, backend=make_backend(Config()), options={"compiler": "eager"})
    got = torch.autograd.grad(loss(program(x)), x)[0]
    assert relative(got[1:], want[1:]) < 0.06


@pytest.mark.long
def test_dynamic_shapes_add_no_guard(interpreted):
    model, x = Parallel(), inputs().detach()
    torch._dynamo.reset()
    program = torch.compile(model, backend="fp8pass", dynamic=True)
    torch._dynamo.utils.counters.clear()
    for batch in (4, 3, 2):
        y = x[:batch].clone().requires_grad_()
        sum(out.sum() for out in program(y)).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_saved_weights_are_not_merged():
    joint = capture_joint(Parallel(), inputs())
    for pass_ in JOINT_PASSES[: JOINT_PASSES.index(merge_dgrads)]:
        pass_(joint.gm, joint.ctx)
    gemms = [n for n in joint.calls(fp8.scaled_mm.default) if n.meta["fp8pass_role"] == "dgrad"]
    joint.ctx.saved.append(gemms[0].args[2])
    merge_dgrads(joint.gm, joint.ctx)
    assert gemms[0] in joint.calls(fp8.scaled_mm.default)
    (merged,) = joint.ctx.plan.merged
    assert len(merged) == 2


def test_other_terms_of_the_sum_remain():
    class Residual(Parallel):
        def forward(self, x):
            x = torch.tanh(x)
            return [x.sin(), *(layer(x) for layer in self.layers)]

    model, x = Residual(), inputs().detach().requires_grad_()
    want = torch.autograd.grad(sum(y.sum() for y in model(x)), x)[0]
    assert dgrads(model, x) == [128]
    assert relative(input_gradient(model, x.detach(), Config()), want) < 0.06


def test_long_contractions_are_not_merged(monkeypatch):
    module = import_module("fp8pass.passes.joint.merge_dgrads")
    monkeypatch.setattr(module, "LONGEST_CONTRACTION", 100)
    assert dgrads(Parallel(), inputs()) == [64, 64]  # two of three


@pytest.mark.long
def test_explain_counts_them():
    explanation = fp8pass.explain(Parallel(), inputs())
    (merged,) = explanation.graphs[0].plan.merged
    assert sorted(merged) == ["layers.0", "layers.1", "layers.2"]
    assert "Merged the input-gradient GEMMs of 3 layers into one GEMM." in str(explanation)


@pytest.mark.long
@given(st.lists(st.integers(-30, 30), min_size=3, max_size=3))
def test_gradients_of_any_magnitudes(exponents):
    """The sum is as exact as its largest term, however small the other terms are."""
    torch.manual_seed(1)
    model, x = Parallel(factors=[2.0**e for e in exponents]), inputs().detach()
    x.requires_grad_()
    want = torch.autograd.grad(sum(y.sum() for y in model(x)), x)[0]
    assert relative(input_gradient(model, x.detach(), Config()), want) < 0.06


@pytest.mark.drawn(1)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_of_zeros(zero):
    factors = [1.0, 1e-3, 1e-3]
    factors[zero] = 0.0
    model, x = Parallel(factors=factors), inputs().detach().requires_grad_()
    want = torch.autograd.grad(sum(y.sum() for y in model(x)), x)[0]
    assert relative(input_gradient(model, x.detach(), Config()), want) < 0.06


def test_gradients_that_are_all_zeros():
    nothing = Parallel(factors=[0.0] * 3)
    assert not input_gradient(nothing, inputs().detach(), Config()).any()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_non_finite_values_reach_the_user(value):
    model = Parallel(factors=[1.0, value, 1.0])
    assert not input_gradient(model, inputs().detach(), Config()).isfinite().all()


@pytest.mark.long
def test_compiled_as_interpreted():
    model, x = Parallel((64, 32)).bfloat16(), inputs().detach().bfloat16()
    a, b = (input_gradient(model, x, Config(), compiler) for compiler in ("inductor", "eager"))
    assert relative(a.float(), b.float()) < 0.01


class Wide(nn.Module):
    """Layers with the same input. The gradient of each is ten times smaller than the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, width, bias=False) for width in (128, 256, 384))

    def forward(self, x):
        x = torch.tanh(x)
        return [10**-i * torch.sin(layer(x)) for i, layer in enumerate(self.layers)]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_blocks_keep_their_data_and_scales(compiler, graphs):
    """The merged GEMM differs from three GEMMs by the rounding of their results to BF16.

    Kernels store the merged operands in place.
    """
    torch.manual_seed(0)
    model, x = Wide().bfloat16(), torch.randn(256, 128, dtype=torch.bfloat16)
    config = Config.recipe("block", save_format="none")
    assert dgrads(model, x.clone().requires_grad_(), config) == [768]
    with patch.dict(os.environ, FP8PASS_DISABLE_PASSES="merge_dgrads"):
        apart = input_gradient(model, x, config, compiler).float()
    merged = input_gradient(model, x, config, compiler).float()
    assert 0 < relative(merged, apart) < 2**-8
    if compiler == "inductor":
        *_, backward = graphs
        assert not [n for n in backward.nodes if n.target is fp8.joined.default]
        assert counts([backward])["quantize"] == 0


def test_blocks_with_dynamic_shapes(graphs):
    """The number of tokens is symbolic, also in the scales that are concatenated."""
    torch.manual_seed(0)
    model, config = Wide().bfloat16(), Config.recipe("block", save_format="none")
    torch._dynamo.reset()
    program = torch.compile(model, backend=make_backend(config), dynamic=True)
    for tokens in (256, 144, 80):
        x = torch.randn(tokens, 128, dtype=torch.bfloat16, requires_grad=True)
        (got,) = torch.autograd.grad(sum(y.sum() for y in program(x)), x)
        (want,) = torch.autograd.grad(sum(y.sum() for y in model(x)), x)
        assert relative(got.float(), want.float()) < 0.06
    assert len(graphs) == 2
    joined = [n for n in graphs[-1].nodes if n.target is aten.cat.default]
    assert len(joined) == 2


def check_concatenation(device, programs, operands, shape) -> None:
    batch = Batch(tuple(programs))
    operands = [x.to(device) for x in operands]
    got = run_batch(tile_kernel, batch, operands)
    want = batch.reference(operands)
    assert got[0].shape == shape
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).abs().amax() <= 2.0**-3 * b.float().abs().amax()
        assert (a.float() != b.float()).float().mean() < 0.01
    if device == "cuda":
        for a, b in zip(tile_kernel.tiles(operands, batch.dumps()), got, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@both_devices
@pytest.mark.parametrize(("rows", "widths"), [(32, (128, 256)), (48, (64, 16, 208))])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_kernels_that_write_a_concatenation(device, layout, rows, widths):
    """Matrices with the same number of rows; their FP8 data is concatenated."""
    torch.manual_seed(0)
    programs, operands, offset = [], [], 0
    for width in widths:
        size = (rows, width) if layout == "rows" else (width, rows)
        loads = Load("s", "scalar"), Load("x", "full")
        joined = Store("x", (layout,), "s", "e4m3", width=sum(widths), offset=offset)
        other = "columns" if layout == "rows" else "rows"
        programs.append(Program(loads, (), (Store("x", (other,), "s", "e4m3"), joined)))
        operands += [torch.rand(()).add(0.1), torch.randn(size)]
        offset += width
    check_concatenation(device, programs, operands, (rows, sum(widths)))


@both_devices
@pytest.mark.parametrize(
    ("block", "layout", "rows"),
    [("1×128", "rows", 40), ("128×128", "rows", 256), ("128×128", "columns", 256)],
)
def test_kernels_that_write_a_concatenation_of_blocks(device, block, layout, rows):
    torch.manual_seed(0)
    programs, operands, offset, widths = [], [], 0, (128, 384)
    for width in widths:
        size = (rows, width) if layout == "rows" else (width, rows)
        joined = Store("x", (layout,), "", "e4m3", block=block, width=sum(widths), offset=offset)
        programs.append(Program((Load("x", "full"),), (), (joined,)))
        operands.append(torch.randn(size) * torch.logspace(-2, 2, size[1]))
        offset += width
    check_concatenation(device, programs, operands, (rows, sum(widths)))
