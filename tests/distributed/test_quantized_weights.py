"""Quantized weights in one process: same forward, same kernels, no additional saved bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import COAT_EAGER, FFN, Spy, llama, relative, step
from kernel_helpers import counts
from torch import nn

import fp8pass
from fp8pass import Config
from fp8pass.dynamo import Backend
from fp8pass.weights.quantized_parameter import QuantizedWeight, quantize_rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(128), FFN(128, 256)

    def forward(self, x):
        return x + self.ffn(self.norm(x))


def quantize_weights(model: nn.Module) -> nn.Module:
    """Return a copy of a model with quantized weights in its linear layers."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            codes, scales = quantize_rows(layer.weight.detach(), layer.weight.dtype)
            layer.weight = nn.Parameter(QuantizedWeight(codes, scales, layer.weight.dtype))
    return model


def run_both(model: nn.Module, x: torch.Tensor, config: Config):
    """Return steps and plans with weights in BF16 and with quantized weights."""
    found = []
    for each in (model, quantize_weights(model)):
        torch._dynamo.reset()
        spy = Spy()
        program = torch.compile(each, backend=Backend(config, spy))
        found.append((step(program, each, (x,)), spy.plan))
    return found


@pytest.fixture
def model() -> nn.Module:
    return Block().bfloat16()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(32, 128).bfloat16().requires_grad_()


@pytest.mark.long
def test_the_forward_is_equal_and_saves_no_more_bytes(model, x):
    (want, plain), (got, planned) = run_both(model, x, COAT_EAGER)
    assert torch.equal(got.outputs[0], want.outputs[0])
    assert planned.saved_bytes <= plain.saved_bytes
    assert [y.fp8 for y in planned.linears] == [y.fp8 for y in plain.linears]
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.08, name
        assert type(got.gradients[name]) is torch.Tensor


@pytest.mark.long
def test_kernels_read_quantized_weights(model, x, graphs):
    """Kernels of the backward requantize the values with the scale of the backward."""
    (want, _), (got, _) = run_both(model, x, Config())
    assert torch.equal(got.outputs[0], want.outputs[0])
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.08, name
    _, plain, forward, backward = (counts([g]) for g in graphs)
    assert forward["quantize"] == 0
    assert backward["quantize"] == plain["quantize"] == 0
    assert backward["tiles"] == plain["tiles"]


@pytest.mark.long
@pytest.mark.parametrize("zeros", [slice(0, 16), slice(None)])
def test_rows_of_zeros_do_not_affect_other_rows(model, x, zeros):
    """Rows of zeros must not determine the scale of other rows."""
    with torch.no_grad():
        model.ffn.up.weight[zeros] = 0
    (want, _), (got, _) = run_both(model, x, COAT_EAGER)
    assert torch.equal(got.outputs[0], want.outputs[0])
    for name, gradient in want.gradients.items():
        torch.testing.assert_close(
            got.gradients[name], gradient, rtol=0, atol=0.08 * gradient.abs().max()
        )


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["linear", "agoq", "exact"])
def test_other_recipes_use_dequantized_weights(model, x, recipe):
    (want, _), (got, _) = run_both(model, x, Config.recipe(recipe, compiler="eager"))
    assert relative(got.outputs[0].detach(), want.outputs[0].detach()) < 0.08
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.3, name


def test_eager_pytorch_uses_dequantized_weights(model, x):
    want, got = (step(each, each, (x,)) for each in (model, quantize_weights(model)))
    assert relative(got.outputs[0].detach(), want.outputs[0].detach()) < 0.06
    assert all(relative(got.gradients[n], g) < 0.1 for n, g in want.gradients.items())


def test_writing_to_a_quantized_weight_raises_an_error(model):
    weight = quantize_weights(model).ffn.up.weight
    with torch.no_grad(), pytest.raises(RuntimeError, match="exact values no longer exist"):
        weight.mul_(2)


def serve_shards(device: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = llama().bfloat16().to(device)
    want = dict(fp8pass.served_weights(model))
    for block in (*model.model.layers, model):
        fully_shard(block)
    got = dict(fp8pass.served_weights(model))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype is tensor.dtype
        assert torch.equal(got[name].float(), tensor.float())
    with pytest.raises(fp8pass.ConfigError, match=r"is sharded\. Load the full state dict"):
        fp8pass.export(model, "unused")


def test_served_weights_are_gathered(two):
    pytest.importorskip("transformers")
    two(serve_shards)
