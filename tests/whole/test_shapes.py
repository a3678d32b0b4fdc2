"""Matrices of any size, layout and dtype, padded or copied: results are close to eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    COAT_EAGER,
    FFN,
    MLP,
    capture_joint,
    compiled,
    pad_gemms,
    relative,
    step,
)
from kernel_helpers import interpret_halves
from torch import nn
from torch.nn import functional as F

from fp8pass.config import Config
from fp8pass.graph.tags import OPERAND_OF
from fp8pass.passes.joint.quantize_linears import quantize_linears


@pytest.fixture(params=["reference", "lowered"])
def config(request, monkeypatch) -> Config:
    """Run the operators of the dialect, or their lowering, op by op."""
    if request.param == "reference":
        return COAT_EAGER
    interpret_halves(monkeypatch)
    return Config()


def assert_close_to_eager(model, x, tolerance=0.12, config=COAT_EAGER):
    """Check that output and gradients are within FP8's error of eager PyTorch."""
    want = step(model, model, (x,))
    program, spy = compiled(model, config)
    got = step(program, model, (x,))
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert b.numel() == 0 or relative(a, b) < tolerance
    for name, b in want.gradients.items():
        a = got.gradients[name]
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if not b.any():
            assert not a.any(), name
        else:
            assert relative(a, b) < tolerance, f"{name}: {relative(a, b)}"
    return got, want, spy


@pytest.mark.long
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_any_number_of_rows_works(rows, config):
    x = torch.randn(rows, 64, requires_grad=True)
    _, _, spy = assert_close_to_eager(FFN(64, 128), x, config=config)
    assert all(bool(y.fp8) == (rows > 0) for y in spy.plan.linears)


@pytest.mark.parametrize("rows", [1, 17, 1000])
def test_rows_may_be_padded_by_inductor(monkeypatch, rows):
    """On a GPU Inductor pads a GEMM if that makes it faster in BF16."""
    pad_gemms(monkeypatch)
    x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    _, _, spy = assert_close_to_eager(MLP((64, 128, 64)).bfloat16(), x)
    assert all(y.fp8 == ("forward", "dgrad", "wgrad") for y in spy.plan.linears)
    assert {y.rows for y in spy.plan.linears} == {str(-(-rows // 8) * 8 if rows > 1 else 1)}


class OwnGradient(torch.autograd.Function):
    """A linear layer that copies or pads the operands of its wgrad with `prepare`."""

    @staticmethod
    def forward(ctx, x, weight, prepare):
        ctx.save_for_backward(x, weight)
        ctx.prepare = prepare
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        a, b = ctx.prepare(gradient.t(), x)
        return gradient @ weight, a @ b, None


def pad_both(a, b, *, value=0.0):
    return F.pad(a, (0, 7), value=value), F.pad(b, (0, 0, 0, 7), value=value)


PREPARATIONS = {
    "copied": lambda a, b: (a.contiguous(), b),
    "padded": pad_both,
    "padded with ones": lambda a, b: pad_both(a, b, value=1.0),
    "padded at the start": lambda a, b: (F.pad(a, (7, 0)), F.pad(b, (0, 0, 7, 0))),
    "padded by two lengths": lambda a, b: (F.pad(a[:, :15], (0, 9)), F.pad(b, (0, 0, 0, 7))),
}


class OneWeight(nn.Module):
    """A module with a weight that computes `run(x, weight)`."""

    def __init__(self, run, *shape, dtype=torch.float32) -> None:
        super().__init__()
        self.run, self.weight = run, nn.Parameter(torch.randn(shape, dtype=dtype) / 8)

    def forward(self, x):
        return self.run(x, self.weight)


def prepared(name):
    return OneWeight(lambda x, w: OwnGradient.apply(x, w, PREPARATIONS[name]), 128, 64)


@pytest.mark.parametrize("name", PREPARATIONS)
def test_operands_of_wgrad_may_be_copied_or_padded(name):
    assert_close_to_eager(prepared(name), torch.randn(17, 64, requires_grad=True))


def test_a_copied_gradient_is_quantized_as_a_gradient():
    """It has the format of gradients for any number of rows."""
    config = Config(gradient_format="e5m2", compiler="eager")
    formats = []
    for rows in (16, 17):
        x = torch.randn(rows, 64, requires_grad=True)
        joint = capture_joint(prepared("copied"), x, config=config)
        quantize_linears(joint.gm, joint.ctx)
        quantized = joint.calls(torch.ops.fp8pass.quantize.default)
        formats.append(sorted(node.args[2] for node in quantized))
        operands = {name for node in quantized for _, name in node.meta[OPERAND_OF]}
        assert operands == {"input", "weight", "gradient"}
    assert formats[0] == formats[1]
    assert formats[0].count("e5m2 tensor") == 2


def test_a_view_of_a_weight_with_a_short_contraction_stays_exact(config):
    model = OneWeight(lambda x, w: x @ w.view(512, 8).t(), 256, 16, dtype=torch.bfloat16)
    x = torch.randn(32, 8, dtype=torch.bfloat16, requires_grad=True)
    _, _, spy = assert_close_to_eager(model, x, config=config)
    (layer,) = spy.plan.linears
    assert layer.reason == "weight 512×8: both sizes must be multiples of 16"


def test_padded_features_are_not_mistaken_for_padded_rows():
    model = OneWeight(lambda x, w: F.pad(x, (0, 16)) @ F.pad(w, (0, 0, 0, 16)), 48, 32)
    _, _, spy = assert_close_to_eager(model, torch.randn(32, 48, requires_grad=True))
    assert not any(y.fp8 for y in spy.plan.linears)


def test_layers_with_other_sizes_than_multiples_of_16_stay_exact(config):
    x = torch.randn(32, 24, requires_grad=True)
    _, _, spy = assert_close_to_eager(MLP((24, 48, 32)), x, config=config)
    assert [bool(y.fp8) for y in spy.plan.linears] == [False, True]


LAYOUTS = {
    "transposed": lambda: torch.randn(64, 40).t(),
    "transposed, of odd length": lambda: torch.randn(64, 17).t(),
    "expanded rows": lambda: torch.randn(1, 64).expand(40, 64),
    "expanded columns": lambda: torch.randn(40, 1).expand(40, 64),
    "sliced": lambda: torch.randn(80, 128)[::2, ::2],
    "three dimensions": lambda: torch.randn(5, 64, 8).transpose(1, 2),
    "expanded batch": lambda: torch.randn(1, 8, 64).expand(5, 8, 64),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_input_may_have_any_layout(layout, config):
    x = LAYOUTS[layout]().requires_grad_()
    assert_close_to_eager(FFN(64, 128), x, config=config)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["transposed", "expanded rows", "three dimensions"])
def test_the_input_may_have_any_layout_in_generated_code(layout):
    """The 40 rows are padded to 48 for wgrad, and are columns of a transposed dgrad."""
    assert_close_to_eager(nn.Linear(64, 32), LAYOUTS[layout]().requires_grad_(), config=Config())


@pytest.mark.parametrize("layout", ["expanded", "transposed"])
def test_the_incoming_gradient_may_have_any_layout(layout):
    model, x = FFN(64, 128), torch.randn(32, 64, requires_grad=True)
    incoming = torch.randn(64).expand(32, 64) if layout == "expanded" else torch.randn(64, 32).t()
    results = []
    for program in (model, compiled(model)[0]):
        results.append(torch.autograd.grad(program(x), [x, *model.parameters()], incoming))
    for want, got in zip(*results, strict=True):
        assert relative(got, want) < 0.12


@pytest.mark.parametrize("gradient_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_dtypes_work(dtype, gradient_format):
    x = torch.randn(32, 64).to(dtype).requires_grad_()
    config = Config(gradient_format=gradient_format, compiler="eager")
    assert_close_to_eager(FFN(64, 128).to(dtype), x, tolerance=0.15, config=config)


@pytest.mark.parametrize("group_size", [16, 64, 128])
def test_group_size_is_used_and_small_columns_survive(group_size):
    """With one scale for columns of very different magnitude, small columns would become zero."""

    class Gate(nn.Module):
        def forward(self, x):
            return F.silu(x * 2) * x

    x = (torch.randn(64, 256) * 10.0 ** torch.linspace(-6, 2, 256)).requires_grad_()
    config = Config(compiler="eager", group_size=group_size)
    h = x * 1  # not a leaf, so autograd saves it
    program, spy = compiled(Gate(), config)
    (got,) = torch.autograd.grad(program(h).sum(), h)
    (want,) = torch.autograd.grad(Gate()(h).sum(), h)
    assert f"e4m3 1×{group_size}" in [s.saved_as for s in spy.plan.saved]
    small = slice(0, 32)
    if group_size == 16:
        assert relative(got[:, small], want[:, small]) < 0.1
    assert relative(got, want) < 0.1


@pytest.mark.long
def test_jagged_tensors_of_different_lengths_train():
    """PyTorch compiles the backward of such a graph in its first run, outside of tracing."""
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    program = torch.compile(model, backend="fp8pass")
    for lengths in ((5, 10), (3, 8), (7, 12)):
        parts = [torch.randn(n, 64) for n in lengths]
        program(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()
        got = [p.grad for p in model.parameters()]
        model.zero_grad()
        model(torch.cat(parts)).sum().backward()
        for gradient, p in zip(got, model.parameters(), strict=True):
            assert relative(gradient, p.grad) < 0.12
        model.zero_grad()
