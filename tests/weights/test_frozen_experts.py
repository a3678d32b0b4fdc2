"""`quantize_frozen` of experts: stacked weights [E, N, K] in BF16 or from an FP8 checkpoint."""

from __future__ import annotations

import copy
import io
import logging
from dataclasses import replace

import pytest
import torch
from helpers import COAT_EAGER, compiled, relative
from torch import Tensor, nn

import fp8pass
from fp8pass import Config
from fp8pass.dynamo import Backend
from fp8pass.weights.fp8_checkpoint import from_checkpoint
from fp8pass.weights.quantized_parameter import QuantizedWeight

EXPERTS, WIDTH, HIDDEN = 4, 64, 96
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Experts(nn.Module):
    """Two grouped GEMMs of frozen weights, plus one adapter for all experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {"up": (EXPERTS, HIDDEN, WIDTH), "down": (EXPERTS, WIDTH, HIDDEN)}
        for name, shape in shapes.items():
            weight = torch.randn(shape) * torch.logspace(-1, 1, shape[1])[:, None] / 8
            setattr(self, name, nn.Parameter(weight.bfloat16(), requires_grad=False))
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        h = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)
        y = torch._grouped_mm(nn.functional.silu(h), self.down.transpose(-2, -1), offs=ends)
        return y + self.adapter(x)


def inputs(device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    return x.to(device), torch.tensor([32, 48, 48, 128], dtype=torch.int32, device=device)


def config(device: str) -> Config:
    return Config(fp8_gemms="all") if device == "cuda" else COAT_EAGER


@pytest.mark.parametrize("device", DEVICES)
def test_the_forward_does_not_change_and_gradients_are_close(device):
    model = Experts().to(device)
    frozen = fp8pass.quantize_frozen(copy.deepcopy(model))
    assert isinstance(frozen.up, QuantizedWeight)
    assert frozen.up.shape == model.up.shape
    assert frozen.up.fp8_data.nbytes == model.up.nbytes // 2
    found = []
    for each in (model, frozen):
        torch._dynamo.reset()
        x, ends = inputs(device)
        x.requires_grad_()
        y = torch.compile(each, backend=Backend(config(device)))(x, ends)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad, each.adapter.weight.grad))
    (want, *gradients), (got, *others) = found
    assert torch.equal(got, want)
    for a, b in zip(others, gradients, strict=True):
        assert relative(a, b) < 0.01


def test_frozen_data_are_read_as_they_are():
    frozen = fp8pass.quantize_frozen(Experts())
    run, spy = compiled(frozen, replace(COAT_EAGER, skip=("adapter",)))
    x, ends = inputs()
    run(x.requires_grad_(), ends).sum().backward()
    layers = [layer for layer in spy.plan.linears if layer.experts]
    assert [layer.fp8 for layer in layers] == [("forward", "dgrad")] * 2
    (record,) = [r for r in spy.passes[0] if r.name == "quantize_experts"]
    # Forward and dgrad quantize tokens, and dgrad rescales both weights.
    assert record.after.count("fp8pass.quantize.default") == 4 + 2


@pytest.mark.parametrize("index", [0, -1])
def test_eager_code_and_slices(index):
    model = Experts()
    frozen = fp8pass.quantize_frozen(copy.deepcopy(model))
    values = frozen.up.dequantize()
    assert relative(values, model.up) < 0.04
    assert torch.equal(frozen.up[index] + 0, values[index])
    assert torch.equal(frozen.up[torch.tensor(index)] + 0, values[index])
    with pytest.raises(RuntimeError, match="writes to a part or a view"):
        frozen.up[0].mul_(2)
    x, ends = inputs()
    assert relative(frozen(x, ends), model(x, ends)) < 0.05


def test_copies_states_and_moves():
    model = Experts()
    frozen = fp8pass.quantize_frozen(model)
    state = frozen.state_dict()
    assert state["up"].shape == (EXPERTS, HIDDEN, WIDTH)
    assert torch.equal(state["up"], frozen.up.dequantize())
    buffer = io.BytesIO()
    torch.save(frozen, buffer)
    buffer.seek(0)
    other = fp8pass.quantize_frozen(Experts())
    other.up.copy_(torch.zeros_like(state["up"]))
    other.load_state_dict(state)
    moved = copy.deepcopy(frozen).float().bfloat16()
    for each in (copy.deepcopy(frozen), torch.load(buffer, weights_only=False), other, moved):
        assert isinstance(each.up, QuantizedWeight)
        assert torch.equal(each.up.dequantize(), frozen.up.dequantize())


def test_skip_trained_and_unsuitable_experts(caplog):
    model = Experts()
    model.up.requires_grad_()
    model.odd = Experts()
    model.odd.down = nn.Parameter(torch.zeros(2, 24, 16).bfloat16(), requires_grad=False)
    model.conv = nn.Conv1d(16, 16, 16).bfloat16().requires_grad_(False)
    model.one_expert = nn.Parameter(torch.zeros(1, 64, 64).bfloat16(), requires_grad=False)
    with caplog.at_level(logging.INFO, logger="fp8pass"):
        fp8pass.quantize_frozen(model, skip="odd.up")
    other = nn.Module()
    other.positions = nn.Parameter(torch.zeros(8, 64, 64).bfloat16(), requires_grad=False)
    with pytest.raises(fp8pass.ConfigError, match="No linear layer of the model is frozen"):
        fp8pass.quantize_frozen(other)
    quantized = [n for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)]
    assert quantized == ["down"]
    assert "odd.down" in caplog.text


@pytest.mark.parametrize("rows", [256, 192])
@pytest.mark.parametrize("kind", ["blocks", "experts"])
def test_scales_of_a_checkpoint(kind, rows):
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3, rows, 256, generator=generator).to(torch.float8_e4m3fn)
    shape = (3, -(-rows // 128), 2) if kind == "blocks" else (3, 1, 1)
    scales = torch.rand(shape, generator=generator) + 0.5
    found = from_checkpoint(data, scales, "up_scale_inv", torch.float32)
    assert isinstance(found, QuantizedWeight)
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows]
    spread = spread if kind == "blocks" else scales
    assert torch.equal(found.dequantize(), data.float() * spread)
    assert torch.equal(found[1] + 0, found.dequantize()[1])
    assert torch.equal(found.checkpoint.collapse(found.scales), scales)


def test_experts_are_used_as_a_whole_or_not_at_all(caplog):
    """Their forward in 16 bits cannot read FP8 data without scales."""

    class FP8Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, width in (("up", 256), ("down", 192)):
                data = torch.zeros(2, 256, width).to(torch.float8_e4m3fn)
                setattr(self, name, nn.Parameter(data, requires_grad=False))
                scales = torch.ones(2, 2, -(-width // 128))
                setattr(self, f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))

    model = nn.Module()
    model.experts = FP8Experts()
    with pytest.raises(fp8pass.ConfigError, match="its input size 192 is not a multiple"):
        fp8pass.quantize_frozen(model)
    assert model.experts.up.dtype is torch.float8_e4m3fn
    assert "forward" not in vars(model.experts)


@pytest.mark.long
def test_a_checkpoint_of_transformers(tmp_path, monkeypatch):
    """FP8 experts of transformers train, and are saved with the same bytes."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # Otherwise, without a GPU, the loader dequantizes.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    torch.manual_seed(0)
    sizes = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=128,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    plain = transformers.AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    fp8 = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    load(tmp_path / "plain", quantization_config=fp8).save_pretrained(tmp_path / "fp8")
    model = load(tmp_path / "fp8", experts_implementation="grouped_mm")
    fp8pass.quantize_frozen(model)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, QuantizedWeight)
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    ids = torch.randint(96, (2, 64), generator=torch.Generator().manual_seed(0))
    run, spy = compiled(model)
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    want = plain(input_ids=ids, labels=ids).loss
    assert relative(loss.detach(), want.detach()) < 0.01
    assert sum(layer.experts > 0 for layer in spy.plan.linears if layer.fp8) == 2
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    model.save_pretrained(tmp_path / "saved")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("fp8", "saved"))
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert torch.equal(x.view(torch.uint8), after[name].view(torch.uint8)), name
