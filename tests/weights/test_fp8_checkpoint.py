"""FP8 checkpoints: weights keep their bytes, below adapters and in saved files."""

from __future__ import annotations

import copy
import io
import json
import logging

import pytest
import torch
from helpers import COAT_EAGER, compiled, llama, relative, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fp8pass
from fp8pass import Config, ConfigError
from fp8pass.dynamo import Backend
from fp8pass.weights.fp8_checkpoint import from_checkpoint
from fp8pass.weights.quantized_parameter import QuantizedWeight

BLOCK = 128


class FP8Linear(nn.Linear):
    """A layer as a loader leaves it: its own forward needs kernels that are not installed."""

    def forward(self, x):
        raise RuntimeError("no kernel")


def loaded(inputs: int, outputs: int, layout: str, bias: bool = False, seed: int = 0) -> FP8Linear:
    layer = FP8Linear(inputs, outputs, bias=bias).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    data, scales, name = stored(weight, layout)
    layer.weight = nn.Parameter(data, requires_grad=False)
    setattr(layer, name, nn.Parameter(scales, requires_grad=False))
    return layer


def stored(weight: Tensor, layout: str) -> tuple[Tensor, Tensor, str]:
    """Quantize a weight as other projects do, with scales that use the full range of FP8."""
    rows, columns = weight.shape
    if layout == "rows":
        scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    elif layout == "tensor":
        scales = weight.abs().amax() / 448
    else:
        counts = [-(-n // BLOCK) for n in (rows, columns)]
        padded = torch.zeros(*[n * BLOCK for n in counts])
        padded[:rows, :columns] = weight.abs()
        scales = padded.view(counts[0], BLOCK, counts[1], BLOCK).amax((1, 3)) / 448
        if layout == "e8m0":
            scales = scales.log2().ceil().exp2().to(torch.float8_e8m0fnu)
    data = (weight / spread(scales, weight.shape)).to(torch.float8_e4m3fn)
    return data, scales, "weight_scale" if layout == "rows" else "weight_scale_inv"


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    scales = scales.float()
    if scales.ndim == 2 and scales.shape[1] > 1:
        scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return scales[: shape[0], : shape[1]]
    return scales.expand(shape)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def assert_same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype is x.dtype
        assert torch.equal(bits(got[name]), bits(x)), name


LAYOUTS = ["blocks", "e8m0", "rows", "tensor"]


class Model(nn.Module):
    """Layers of an FP8 checkpoint, one with rows that blocks do not divide, and an adapter."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(256).bfloat16()
        self.up = loaded(256, 384, layout, bias=True)
        self.gate = loaded(256, 384, layout, seed=1)
        self.odd = loaded(384, 192, layout, seed=2)
        self.down = loaded(384, 256, layout, seed=3)
        self.a = nn.Linear(256, 16, bias=False).bfloat16()
        self.b = nn.Linear(16, 256, bias=False).bfloat16()

    def forward(self, x):
        h = self.norm(x)
        y = nn.functional.silu(self.gate(h)) * self.up(h)
        return self.down(y) + self.b(self.a(h)), self.odd(y)


def step(model: nn.Module, x: Tensor, owner: nn.Module) -> dict[str, Tensor]:
    owner.zero_grad()
    x = x.clone().requires_grad_()
    outputs = model(x)
    sum(y.float().square().mean() for y in outputs).backward()
    found = {"y": outputs[0], "odd": outputs[1], "x": x.grad}
    return {k: v.detach().clone() for k, v in {**found, "a": owner.a.weight.grad}.items()}


def dequantized(model: Model) -> Model:
    """Return a copy with plain layers."""
    model = copy.deepcopy(model)
    for name in ("up", "gate", "odd", "down"):
        layer = getattr(model, name)
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        scales = next(p for n, p in layer.named_parameters() if "scale" in n)
        values = layer.weight.float() * spread(scales, layer.weight.shape)
        plain.weight, plain.bias = nn.Parameter(values.bfloat16(), False), layer.bias
        setattr(model, name, plain)
    return model


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_trains_and_keeps_its_bytes(layout, device, caplog):
    model = Model(layout).to(device)
    want, plain = fp8_state(model), dequantized(model)
    with caplog.at_level(logging.INFO, logger="fp8pass"):
        fp8pass.quantize_frozen(model)
    assert "4 layers with the FP8 weights of their checkpoint" in caplog.text
    for name in ("up", "gate", "odd", "down"):
        assert type(getattr(model, name)) is nn.Linear
        weight = getattr(model, name).weight
        assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, False)
        exact = getattr(plain, name).weight
        assert torch.equal(weight.dequantize(), exact)
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    run = torch.compile(model, backend=Backend(config(device)))
    exact, got = step(plain, x, plain), step(run, x, model)
    rounded = step(torch.compile(plain, backend=Backend(config(device))), x, plain)
    for name in exact:  # no less exact than FP8 GEMMs of the dequantized model
        assert relative(got[name], exact[name]) < 1.2 * relative(rounded[name], exact[name]) + 0.01
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = sum(y.float().square().mean() for y in run(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_state(fp8_state(model), want)


def fp8_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all FP8 data and scales."""
    state = model.state_dict().items()
    return {k: v.cpu().clone() for k, v in state if "scale" in k or v.element_size() == 1}


def config(device: str) -> Config:
    return Config(fp8_gemms="all") if device == "cuda" else COAT_EAGER


def test_gemms_read_the_blocks_of_the_checkpoint():
    model = fp8pass.quantize_frozen(Model("blocks"))
    x = torch.randn(256, 256).bfloat16().requires_grad_()
    (graph,) = fp8pass.explain(model, x, config=COAT_EAGER).graphs
    layers = {layer.module: layer for layer in graph.plan.linears}
    assert layers["up"].fp8 == ("forward", "dgrad")
    assert layers["up"].fast == ()  # blocks accumulate precisely
    run, spy = compiled(model)
    step(run, x.detach(), model)
    (record,) = [r for r in spy.passes[0] if r.name == "quantize_linears"]
    for text in ("'e4m3 1×128 fp32', 'e4m3 128×128 fp32'", "scaled_mm"):
        assert text in record.after


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_can_be_loaded(layout):
    model = fp8pass.quantize_frozen(Model(layout))
    state = model.state_dict()
    other = Model(layout)
    for layer in (other.up, other.down):
        layer.weight.data = torch.zeros_like(layer.weight)
    fp8pass.quantize_frozen(other)
    assert other.load_state_dict(state).missing_keys == []
    assert_same_state(other.state_dict(), state)
    other.load_state_dict(state, assign=True)
    assert_same_state(other.state_dict(), state)
    values = dequantized(Model(layout)).state_dict()
    other.load_state_dict(values)
    again = fp8pass.quantize_frozen(Model(layout))
    again.load_state_dict(other.state_dict())  # what is saved is what is in memory
    for name in ("up", "odd"):
        weight = getattr(other, name).weight
        assert relative(weight.dequantize(), values[f"{name}.weight"]) < 0.04
        assert torch.equal(getattr(again, name).weight.dequantize(), weight.dequantize())
    for key in [k for k in state if "scale" in k]:
        del state[key]
    with pytest.raises(RuntimeError, match="weight is FP8 data without scales"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="FP8 data without scales cannot replace"):
        other.up.weight.copy_(state["up.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_pickles_and_moves(layout):
    model = fp8pass.quantize_frozen(Model(layout))
    want = model.state_dict()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(model).to(torch.float32).to(torch.bfloat16),
    ):
        assert_same_state(other.state_dict(), want)


def test_distributed_checkpoints(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = fp8pass.quantize_frozen(Model("blocks"))
    want = copy.deepcopy(model.state_dict())
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    other = fp8pass.quantize_frozen(Model("blocks"))
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state)
    assert_same_state(other.state_dict(), want)


def test_layers_that_cannot_be_used_are_named(caplog):
    model = nn.Sequential(loaded(256, 256, "blocks"), loaded(200, 256, "blocks"), nn.Linear(256, 8))
    with caplog.at_level(logging.INFO, logger="fp8pass"):
        fp8pass.quantize_frozen(model, skip="2")
    assert (
        "1 in high precision: its input size 200 is not a multiple of the block length 128"
        in caplog.text
    )
    assert isinstance(model[1], FP8Linear)
    assert type(model[2].weight) is nn.Parameter
    fp8pass.quantize_frozen(model)  # other layers keep their dtype
    assert type(model[2].weight) is nn.Parameter
    model = nn.Sequential(loaded(256, 256, "blocks"))
    del model[0].weight_scale_inv
    with pytest.raises(ConfigError, match="it has no scales: expected weight_scale_inv or"):
        fp8pass.quantize_frozen(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_the_values_of_a_weight_changes_nothing(layout):
    """DistributedDataParallel does this. If values change, scales become powers of two."""
    model = fp8pass.quantize_frozen(Model(layout))
    want = fp8_state(model)
    with torch.no_grad():
        for weight in (model.up.weight, model.odd.weight):
            weight.copy_(weight.dequantize())
            weight.data = weight.dequantize()
    assert_same_state(fp8_state(model), want)
    with torch.no_grad():
        model.up.weight.copy_(2 * model.up.weight.dequantize() + 0.1)
    assert not torch.equal(fp8_state(model)["up.weight"].float(), want["up.weight"].float())


@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_can_be_loaded(layout, other):
    model, source = (fp8pass.quantize_frozen(Model(x)) for x in (layout, other))
    with torch.no_grad():
        source.odd.weight.copy_(source.odd.weight.dequantize() * torch.rand(192, 1) + 0.01)
    state = {k: v for k, v in source.state_dict().items() if k.startswith("odd")}
    model.load_state_dict(state, strict=False)
    want = source.odd.weight.dequantize()
    assert relative(model.odd.weight.dequantize(), want) < 0.04
    fresh = fp8pass.quantize_frozen(Model(layout))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.odd.weight.dequantize(), model.odd.weight.dequantize())


def test_shared_layers_and_weights_stay_shared():
    model = nn.Module()
    model.a = model.b = loaded(256, 256, "blocks")
    model.c = loaded(256, 256, "blocks", seed=1)
    model.d = FP8Linear(256, 256, bias=False)
    model.d.weight, model.d.weight_scale_inv = model.c.weight, model.c.weight_scale_inv
    fp8pass.quantize_frozen(model)
    assert model.a is model.b
    assert isinstance(model.a.weight, QuantizedWeight)
    assert model.c.weight is model.d.weight


def test_layers_that_accelerate_moves_are_left(caplog):
    model = nn.Sequential(loaded(256, 256, "rows"), loaded(256, 256, "rows"))
    model[1]._hf_hook = object()
    with caplog.at_level(logging.INFO, logger="fp8pass"):
        fp8pass.quantize_frozen(model)
    assert isinstance(model[1], FP8Linear)
    assert "1 in high precision: accelerate moves it between devices" in caplog.text


def test_a_layer_alone_is_refused():
    with pytest.raises(ConfigError, match="pass the module that contains it"):
        fp8pass.quantize_frozen(loaded(256, 256, "blocks"))


def test_merging_is_refused_with_the_way_to_do_it():
    model = fp8pass.quantize_frozen(Model("rows"))
    with pytest.raises(RuntimeError, match="load the checkpoint in 16 bits"):
        model.up.weight += 1.0


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 400),
    groups=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 9),
)
def test_scales_survive_a_round_trip(rows, groups, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * BLOCK, generator=generator) + 1e-3
    data, scales, name = stored(weight, layout)
    found = from_checkpoint(data, scales, name, torch.float32)
    assert isinstance(found, QuantizedWeight)
    assert torch.equal(found.dequantize(), data.float() * spread(scales, data.shape))
    back = found.checkpoint.collapse(found.scales)
    assert (back.dtype, back.shape) == (scales.dtype, scales.shape)
    assert torch.equal(bits(back), bits(scales))


@pytest.mark.parametrize("format", ["block", "row"])
def test_models_of_transformers(format, tmp_path, monkeypatch):
    """Loaders of transformers read the files of `export`, and training saves equal files."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    from safetensors.torch import load_file
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # Otherwise, without a GPU, the loader dequantizes.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    model = llama(hidden_size=256, intermediate_size=384).bfloat16()
    layers = fp8pass.export(model, tmp_path / "base", format=format)
    settings = {}
    if format == "row":
        config = transformers.CompressedTensorsConfig(dequantize=False)
        settings["quantization_config"] = config
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **settings)
    fp8pass.quantize_frozen(found)
    assert sum(isinstance(p, QuantizedWeight) for p in found.parameters()) == len(layers)
    found.requires_grad_(False)
    found.model.embed_tokens.requires_grad_(True)
    ids = tokens(2, 64)
    run = torch.compile(found, backend=Backend(COAT_EAGER))
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    assert relative(loss.detach(), model(input_ids=ids, labels=ids).loss.detach()) < 0.01
    found.save_pretrained(tmp_path / "saved")
    names = "base", "saved"
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in names)
    if format == "row":  # this loader stores scales in BF16
        before = {k: v.bfloat16() if "scale" in k else v for k, v in before.items()}
    assert_same_state(after, before)
    before, after = (json.loads((tmp_path / n / "config.json").read_text()) for n in names)
    method = before["quantization_config"]["quant_method"]
    assert after["quantization_config"]["quant_method"] == method
