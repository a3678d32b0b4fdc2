"""Recipes `block` and `mxfp8`: operands of GEMMs with a scale for each block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from expert_helpers import only_layer, rewritten, tokens
from helpers import FFN, capture_joint, relative, step
from kernel_helpers import counts
from torch import nn

import fp8pass
from fp8pass.config import Config
from fp8pass.dialect.quantization import parse
from fp8pass.graph import spec
from fp8pass.graph.tags import ROLE
from fp8pass.passes.joint.quantize_linears import quantize_linears

fp8 = torch.ops.fp8pass
OPERANDS = {"forward": "input weight", "dgrad": "gradient weight", "wgrad": "gradient input"}
BLOCK = {"input": "e4m3 1×128 fp32", "weight": "e4m3 128×128 fp32", "gradient": "e4m3 1×128 fp32"}
MX = dict.fromkeys(BLOCK, "e4m3 1×32 e8m0")
each_recipe = pytest.mark.parametrize("recipe", ["block", "mxfp8"])


@each_recipe
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_gradients_are_no_worse_than_those_of_coat(recipe, compiler):
    """Columns of very different sizes share the scale of a row or tensor in `coat`."""
    torch.manual_seed(0)
    model = nn.Sequential(FFN(256, 384), FFN(256, 384)).bfloat16()
    x = torch.randn(128, 256) * torch.logspace(-2, 2, 256)
    x = x.bfloat16().requires_grad_()
    plain = step(model, model, (x,))
    errors = {}
    for name in (recipe, "coat"):
        torch._dynamo.reset()
        config = Config.recipe(name, compiler=compiler, save_format="none")
        got = step(torch.compile(model, backend=fp8pass.backend(config)), model, (x,))
        errors[name] = {n: relative(got.gradients[n], g) for n, g in plain.gradients.items()}
    for name, error in errors[recipe].items():
        assert 1e-3 < error < 1.05 * errors["coat"][name]


@pytest.mark.parametrize(("recipe", "wanted"), [("block", BLOCK), ("mxfp8", MX)])
def test_each_operand_has_the_quantization_of_the_recipe(recipe, wanted):
    """Square blocks and tensors are transposed; groups are quantized in both layouts."""
    x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    joint = capture_joint(FFN(128, 256).bfloat16(), x, config=Config.recipe(recipe))
    quantize_linears(joint.gm, joint.ctx)
    spec.verify(joint.gm.graph)
    gemms = joint.calls(fp8.scaled_mm.default)
    assert len(gemms) == 9
    for gemm in gemms:
        operands = OPERANDS[gemm.meta[ROLE]].split()
        texts = [wanted[name] for name in operands]
        if recipe == "block" and gemm.meta[ROLE] == "wgrad":
            texts = ["e4m3 tensor"] * 2
        assert sorted(gemm.args[7:]) == sorted(texts)
    # Three weights, and in wgrad two inputs and three gradients.
    assert len(joint.calls(fp8.transpose.default)) == (8 if recipe == "block" else 0)


def test_gemms_of_experts_accumulate_like_those_of_coat():
    """Experts have row scales in recipe `block`, too. GEMMs of blocks always add in FP32."""
    everywhere = ("forward", "dgrad", "wgrad")
    x = torch.randn(128, 128, dtype=torch.bfloat16, requires_grad=True)
    for recipe, of_linear in (("coat", everywhere), ("block", ("wgrad",))):
        config = Config.recipe(recipe, compiler="eager")
        joint = rewritten(nn.Linear(128, 128).bfloat16(), x, config=config)
        assert joint.ctx.plan.linears[0].fast == of_linear
        args = (lambda w, x: torch.bmm(x, w)), (4, 32, 48), tokens(4, 24, 32)
        assert only_layer(*args, config=config).fast == everywhere


@pytest.mark.parametrize(
    ("sizes", "roles"),
    [
        ((100, 128, 256), ("forward", "dgrad")),
        ((128, 192, 256), ()),
        ((128, 128, 192), ()),
        ((100, 192, 320), ()),
    ],
    ids=str,
)
def test_gemms_whose_sizes_do_not_fit_have_tensor_scales(sizes, roles):
    tokens, inputs, outputs = sizes
    x = torch.randn(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
    model = nn.Linear(inputs, outputs).bfloat16()
    joint = capture_joint(model, x, config=Config.recipe("block"))
    quantize_linears(joint.gm, joint.ctx)
    spec.verify(joint.gm.graph)
    for gemm in joint.calls(fp8.scaled_mm.default):  # wgrad always has tensor scales
        tensor_scales = gemm.args[7:] == ("e4m3 tensor", "e4m3 tensor")
        assert tensor_scales == (gemm.meta[ROLE] not in roles)


@pytest.mark.parametrize("text", ["e4m3 1×32 e8m0", "e4m3 16×16 fp32", "e5m2 1×16 fp32"])
def test_quantize_and_dequantize_in_blocks(text):
    x = torch.randn(32, 64) * torch.tensor([1e-6, 1.0]).repeat_interleave(32)
    how = parse(text)
    rows, columns = how.block
    scales = fp8.scale(fp8.amax(x, f"{rows}×{columns}"), text)
    assert scales.shape == (32 // rows, 64 // columns)
    back = fp8.dequantize([fp8.quantize(x, scales, text)], scales, text, torch.float32)
    largest = x.abs().unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
    step_size = largest.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert ((back - x).abs() <= step_size * 2.0**-how.format.mantissa).all()


@pytest.mark.parametrize("text", ["e4m3", "e9m9 row", "e4m3 1x32", "e4m3 row fp64", ""])
def test_invalid_quantizations_are_refused(text):
    with pytest.raises(ValueError, match="not a quantization, such as 'e4m3 row'"):
        parse(text)


@pytest.mark.parametrize("text", ["e2m1 tensor", "e2m2 row", "e2m3 4×16"])
def test_packed_formats_have_groups(text):
    with pytest.raises(ValueError, match="needs a scale for each group"):
        parse(text)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(256), FFN(256, 384)

    def forward(self, x):
        return x + self.ffn(self.norm(x))


@pytest.mark.parametrize("budget", [None, 0.4])
def test_kernels_quantize_all_operands_in_blocks(budget, graphs):
    """Norm and SwiGLU with row kernels, weights and gradients with tile kernels.

    With a budget, the backward quantizes recomputed values with scales of the forward.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).bfloat16()
    x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for compiler in ("inductor", "eager"):
        torch._dynamo.reset()
        config = Config.recipe("block", compiler=compiler, memory_budget=budget)
        found.append(step(torch.compile(model, backend=fp8pass.backend(config)), model, (x,)))
    used = counts(graphs)
    assert used["quantize"] == 0
    assert used["rows"] >= 4
    got, want = found
    assert relative(got.outputs[0], want.outputs[0]) < 0.01
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.1, name


def mx_by_hand(x: np.ndarray) -> np.ndarray:
    """Round groups of 32 numbers to MXFP8, as the OCP specification describes E4M3 and E8M0.

    The scale is the smallest power of two by which no element exceeds 448.
    """
    groups = x.reshape(-1, 32)
    amax = np.abs(groups).max(1, keepdims=True)
    mantissa, exponent = np.frexp(amax / 448)  # mantissa in [0.5, 1)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    scale = np.exp2(np.clip(exponent, -126, 127))
    scaled = groups / scale
    _, power = np.frexp(scaled)
    step = np.exp2(np.maximum(power - 1, -6) - 3)  # E4M3: 3 mantissa bits, smallest exponent -6
    return (np.clip(np.rint(scaled / step) * step, -448, 448) * scale).reshape(x.shape)


def test_mx_equals_a_reference_by_hand_for_all_bf16_values():
    """In groups of neighboring values, and in groups of values of all magnitudes."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    finite = values[values.isfinite()]
    finite = torch.cat((finite, finite[: -len(finite) % 32])) if len(finite) % 32 else finite
    for order in (torch.arange(len(finite)), torch.randperm(len(finite))):
        x = finite[order].view(-1, 32)
        text = "e4m3 1×32 e8m0"
        scales = fp8.scale(fp8.amax(x, "1×32"), text)
        data = fp8.quantize(x, scales, text)
        got = fp8.dequantize([data], scales, text, torch.float32).numpy()
        with np.errstate(over="ignore"):  # the largest values round to 2^128
            want = mx_by_hand(x.double().numpy()).astype(np.float32)
        assert np.array_equal(got, want)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_group_with_nan_or_inf_is_nan_in_mx(value):
    x = torch.ones(2, 64)
    x[0, 40] = value
    text = "e4m3 1×32 e8m0"
    scales = fp8.scale(fp8.amax(x, "1×32"), text)
    back = fp8.dequantize([fp8.quantize(x, scales, text)], scales, text, torch.float32)
    assert back.isfinite().tolist()[1] == [True] * 64
    assert back[0, :32].isfinite().all()
    assert not back[0, 40].isfinite()
