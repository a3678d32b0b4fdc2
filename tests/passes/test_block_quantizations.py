"""Block quantizations: a new quantization needs only an entry in `Config.quantizations`."""

from __future__ import annotations

from unittest.mock import PropertyMock, patch

import pytest
import torch
from helpers import FFN, capture_joint, relative, step
from torch import nn

from fp8pass.config import Config
from fp8pass.dialect.quantization import parse
from fp8pass.dynamo import Backend
from fp8pass.graph import spec
from fp8pass.graph.tags import ROLE
from fp8pass.passes.joint.quantize_linears import quantize_linears

fp8 = torch.ops.fp8pass
OPERANDS = {"forward": "input weight", "dgrad": "gradient weight", "wgrad": "gradient input"}


def table(by_operand: dict[str, str]) -> dict[tuple[str, str], str]:
    return {(gemm, x): by_operand[x] for gemm, xs in OPERANDS.items() for x in xs.split()}


MX = table(dict.fromkeys(("input", "weight", "gradient"), "e4m3 1×32 e8m0"))
BLOCKS = table(
    {"input": "e4m3 1×64 fp32", "weight": "e4m3 64×64 fp32", "gradient": "e4m3 1×64 fp32"}
)


@pytest.mark.parametrize("quantizations", [MX, BLOCKS], ids=["mxfp8", "blocks"])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_layer_trains_with_blocks(quantizations, compiler):
    torch.manual_seed(0)
    model = nn.Sequential(FFN(64, 128), FFN(64, 128)).bfloat16()
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    plain = step(model, model, (x,))
    config = Config(compiler=compiler)
    with patch.object(Config, "quantizations", PropertyMock(return_value=quantizations)):
        torch._dynamo.reset()
        got = step(torch.compile(model, backend=Backend(config)), model, (x,))
    for name, gradient in plain.gradients.items():
        assert 1e-3 < relative(got.gradients[name], gradient) < 0.2


@pytest.mark.parametrize("quantizations", [MX, BLOCKS], ids=["mxfp8", "blocks"])
def test_each_operand_has_the_quantization_of_the_table(quantizations):
    """Square blocks are transposed; blocks of rows are quantized in both layouts."""
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    joint = capture_joint(FFN(64, 128).bfloat16(), x)
    with patch.object(Config, "quantizations", PropertyMock(return_value=quantizations)):
        quantize_linears(joint.gm, joint.ctx)
    spec.verify(joint.gm.graph)
    gemms = joint.calls(fp8.scaled_mm.default)
    assert len(gemms) == 9
    for gemm in gemms:
        wanted = [quantizations[gemm.meta[ROLE], x] for x in OPERANDS[gemm.meta[ROLE]].split()]
        assert sorted(gemm.args[7:]) == sorted(wanted)
    squares = quantizations is BLOCKS
    assert len(joint.calls(fp8.transpose.default)) == (3 if squares else 0)


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
