"""`fp8pass.export` and `served_weights`: layouts that transformers loads."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers import COAT_EAGER, gpt2, llama, relative, tokens
from torch import nn

import fp8pass
from fp8pass.dynamo import Backend

pytest.importorskip("transformers")
from safetensors.torch import load_file

HIGH = {"skip": ("q_proj",)}


@pytest.fixture(scope="module")
def trained():
    """A tiny Llama with rows of weights that differ in magnitude."""
    model = llama().bfloat16()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight *= torch.logspace(-2, 2, len(module.weight))[:, None]
                module.weight *= 0.02 / module.weight.std()
    return model


@pytest.mark.parametrize("compiled", [False, True])
def test_the_files_have_the_format(trained, tmp_path, compiled):
    model = torch.compile(trained, backend="fp8pass", options=HIGH) if compiled else trained
    before = {name: x.clone() for name, x in trained.state_dict().items()}
    layers = fp8pass.export(model, tmp_path)
    assert len(layers) == 7 - compiled
    found = load_file(tmp_path / "model.safetensors")
    names = {f"{layer}.weight_scale" for layer in layers}
    assert found.keys() == before.keys() | names
    for name, weight in before.items():
        layer = name.removesuffix(".weight")
        if layer not in layers:
            assert torch.equal(found[name], weight)
            continue
        data, scales = found[name], found[f"{layer}.weight_scale"]
        assert (data.dtype, data.shape) == (torch.float8_e4m3fn, weight.shape)
        assert (scales.dtype, scales.shape) == (torch.float32, (len(weight), 1))
        assert data.float().abs().amax(1).ge(224).all()  # at least half of the largest value
        error = (data.float() * scales - weight.float()).abs()
        assert (error <= weight.float().abs() / 16 + scales * 2**-10 + 1e-12).all()
    assert all(torch.equal(x, before[name]) for name, x in trained.state_dict().items())
    assert not hasattr(trained.config, "quantization_config")

    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["format"]) == ("compressed-tensors", "float-quantized")
    skipped = ["model.layers.0.self_attn.q_proj"] * compiled
    assert written["ignore"] == sorted(["lm_head", *skipped])


def test_fp8_data_are_the_operands_of_training(trained, tmp_path):
    """The forward of a compiled model has the same FP8 data and scales by row."""
    fp8pass.export(trained, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weight = trained.state_dict()[name]
    scale = torch.ops.fp8pass.scale(torch.ops.fp8pass.amax(weight, "row"), "e4m3 row")
    data = torch.ops.fp8pass.quantize(weight, scale, "e4m3 tensor")
    assert torch.equal(found[name].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(found[f"{name}_scale"], scale)


@pytest.fixture
def in_fp32():
    """Weights in FP32, trained under autocast."""
    return llama()


@pytest.mark.long
@pytest.mark.parametrize("weights", ["trained", "in_fp32"])
def test_served_weights_give_the_forward_of_training(weights, request, tmp_path):
    """A compiled forward quantizes a weight and the exported weight to the same FP8 data."""
    model = request.getfixturevalue(weights)
    layers = fp8pass.export(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    served = copy.deepcopy(model)
    for layer in layers:
        data, scales = found[f"{layer}.weight"], found[f"{layer}.weight_scale"]
        weight = served.get_submodule(layer).weight
        assert not torch.equal(data.float() * scales, weight.float())
        weight.data = (data.float() * scales).to(weight.dtype)
    logits = []
    for each in (model, served):
        program = torch.compile(each, backend=Backend(COAT_EAGER))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits.append(program(tokens()).logits)
    assert torch.equal(*logits)


def test_other_weights_keep_their_dtype(in_fp32, tmp_path):
    layers = fp8pass.export(in_fp32, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    others = [x for name, x in found.items() if name.removesuffix(".weight") not in layers]
    assert {x.dtype for x in others} == {torch.float32}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("weights", ["trained", "in_fp32"])
def test_transformers_loads_it(weights, request, tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    trained = request.getfixturevalue(weights)
    layers = fp8pass.export(trained, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        error = relative(loaded(ids).logits.float(), trained(ids).logits.float())
    assert 0.001 < error < 0.1  # an error of FP8, but not more
    found = load_file(tmp_path / "model.safetensors")
    for layer in layers:
        dequantized = found[f"{layer}.weight"].float() * found[f"{layer}.weight_scale"]
        assert relative(loaded.get_submodule(layer).weight.float(), dequantized) < 0.005


def test_layers_too_narrow_for_fp8_are_not_quantized(tmp_path):
    model = llama()
    narrow = nn.Sequential(nn.Linear(64, 1024, bias=False), nn.Linear(1024, 64, bias=False))
    model.model.layers[0].adapter = narrow
    layers = fp8pass.export(model, tmp_path)
    assert layers
    assert not any("adapter" in layer for layer in layers)


def test_models_that_cannot_be_exported_are_refused(trained, tmp_path):
    with pytest.raises(fp8pass.ConfigError, match=r"got Sequential.*merge_and_unload"):
        fp8pass.export(nn.Sequential(nn.Linear(16, 16)), tmp_path)
    with pytest.raises(fp8pass.ConfigError, match="No layer of GPT2LMHeadModel"):
        fp8pass.export(gpt2(), tmp_path)  # it has Conv1D layers
    with pytest.raises(fp8pass.ConfigError, match="No layer of LlamaForCausalLM"):
        fp8pass.export(trained, tmp_path, config=fp8pass.Config(skip="model"))
    broken = llama()
    broken.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight has a NaN"):
        fp8pass.export(broken, tmp_path)
    assert not list(tmp_path.iterdir())


# --- experts --------------------------------------------------------------------------------------


def mixture(kind: str, **changes: int) -> nn.Module:
    """Return a tiny model with experts."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "num_hidden_layers": 1, "hidden_size": 256}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    if kind == "GptOss":
        sizes |= {"intermediate_size": 256, "num_local_experts": 2, "pad_token_id": 0}
    elif kind == "Mixtral":
        sizes |= {"intermediate_size": 256, "num_local_experts": 4}
    else:
        sizes |= {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{kind}Config")(**(sizes | changes))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("format", ["row", "block"])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
def test_experts_are_separate_layers(kind, format, tmp_path):
    model = mixture(kind)
    layers = fp8pass.export(model, tmp_path, format=format)
    assert [x for x in layers if "experts" in x] == [
        f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    ]
    found = load_file(tmp_path / "model.safetensors")
    served = dict(fp8pass.served_weights(model, format=format))
    assert served.keys() == found.keys()
    for name, x in served.items():
        assert torch.equal(x.view(torch.uint8), found[name].view(torch.uint8))
    names = ("w1", "w3", "w2") if kind == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    prefix = "block_sparse_moe" if kind == "Mixtral" else "mlp"
    experts = model.model.layers[0].mlp.experts
    for i in range(4):
        weights = [*experts.gate_up_proj[i].chunk(2), experts.down_proj[i]]
        for name, weight in zip(names, weights, strict=True):
            path = f"model.layers.0.{prefix}.experts.{i}.{name}.weight"
            scales = found[f"{path}_scale" if format == "row" else f"{path}_scale_inv"]
            sizes = [n // s for n, s in zip(weight.shape, scales.shape, strict=True)]
            assert sizes == ([1, weight.shape[1]] if format == "row" else [128, 128])
            spread = scales.repeat_interleave(sizes[0], 0).repeat_interleave(sizes[1], 1)
            assert relative(found[path].float() * spread, weight.float()) < 0.04


def test_blocks_of_experts_are_loaded_by_transformers(tmp_path):
    """Without a GPU, transformers dequantizes."""
    import transformers

    model = mixture("Qwen3Moe")
    fp8pass.export(model, tmp_path, format="block")
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded, info = load(tmp_path, output_loading_info=True, dtype=torch.bfloat16)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys"))
    for name, weight in model.named_parameters():
        assert relative(loaded.get_parameter(name).float(), weight.float()) < 0.04


@pytest.mark.parametrize(("hidden", "skip"), [(384, ()), (256, "*.down_proj")])
def test_experts_are_in_fp8_as_a_whole_or_not_at_all(hidden, skip, tmp_path):
    """Otherwise transformers would expect scales of weights that have none."""
    model = mixture("Qwen3Moe", hidden_size=hidden, head_dim=hidden // 4)
    config = fp8pass.Config(skip=skip)
    layers = fp8pass.export(model, tmp_path, format="block", config=config)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    is_left = "model.layers.0.mlp.experts" in written["modules_to_not_convert"]
    assert is_left == (skip != ())
    assert sum("experts" in x for x in layers) == (0 if is_left else 2)
    fp8 = {n for n, x in load_file(tmp_path / "model.safetensors").items() if x.itemsize == 1}
    assert any("experts" in n for n in fp8) != is_left


def llava() -> nn.Module:
    """Return a tiny model. Its checkpoints have other prefixes than its parameters."""
    import transformers

    text = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        image_size=32, patch_size=16,
    )  # fmt: skip
    config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    return transformers.LlavaForConditionalGeneration(config).bfloat16()


def test_names_and_shapes_are_those_of_save_pretrained(tmp_path):
    model = llava()
    model.save_pretrained(tmp_path / "plain")
    fp8pass.export(model, tmp_path / "fp8")
    want, found = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "fp8"))
    shapes = {n: x.shape for n, x in found.items() if not n.endswith("weight_scale")}
    assert shapes == {n: x.shape for n, x in want.items()}
    scales = {n for n in found if n.endswith("weight_scale")}
    assert scales
    assert {n.removesuffix("_scale") for n in scales} <= shapes.keys()
    assert dict(fp8pass.served_weights(model)).keys() == found.keys()


def test_experts_that_checkpoints_stack_stay_in_16_bits(tmp_path):
    model = mixture("GptOss")
    layers = fp8pass.export(model, tmp_path, format="block")
    assert not any("experts" in x for x in layers)
    found = load_file(tmp_path / "model.safetensors")
    assert found["model.layers.0.mlp.experts.down_proj"].dtype is torch.bfloat16
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts" in written["modules_to_not_convert"]


@pytest.mark.parametrize("format", ["row", "block"])
def test_quantized_frozen_weights_can_be_exported(format, tmp_path):
    model = mixture("Qwen3Moe").requires_grad_(False)
    want = dict(fp8pass.served_weights(model, format="row"))
    fp8pass.quantize_frozen(model)
    fp8pass.export(model, tmp_path, format=format)
    for name, x in load_file(tmp_path / "model.safetensors").items():
        if x.dtype is not torch.float8_e4m3fn:
            continue
        scales = [s for n, s in want.items() if n.startswith(f"{name}_scale")]
        assert relative(_values(tmp_path, name), want[name].float() * scales[0]) < 0.04


def _values(folder, name):
    found = load_file(folder / "model.safetensors")
    (scales,) = (s for n, s in found.items() if n.startswith(f"{name}_scale"))
    sizes = [n // s for n, s in zip(found[name].shape, scales.shape, strict=True)]
    return found[name].float() * scales.repeat_interleave(sizes[0], 0).repeat_interleave(
        sizes[1], 1
    )


# --- blocks of 128×128 elements -------------------------------------------------------------------

VALUES, WEIGHTS = "e4m3 1×128 fp32", "e4m3 128×128 fp32"


@pytest.fixture
def wide():
    """A Llama whose sizes are multiples of 128, with magnitudes that differ among blocks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    model = llama(**sizes, num_key_value_heads=2, head_dim=64).bfloat16()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:128] *= 30
    return model


def rounded(x: torch.Tensor, quantization: str) -> torch.Tensor:
    """Round to E4M3 as the manuals of DeepGEMM describe it: scales are powers of two."""
    rows, columns = (1, 128) if quantization == VALUES else (128, 128)
    blocks = x.float().reshape(-1, x.shape[-1]).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).reshape(x.shape)


def test_blocks_have_the_layout_of_deepseek(wide, tmp_path):
    layers = fp8pass.export(wide, tmp_path, format="block")
    assert len(layers) == 7
    found = load_file(tmp_path / "model.safetensors")
    for layer in layers:
        weight = wide.get_submodule(layer).weight
        data, scales = found[f"{layer}.weight"], found[f"{layer}.weight_scale_inv"]
        assert (data.dtype, data.shape) == (torch.float8_e4m3fn, weight.shape)
        assert scales.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(data.float() * spread, rounded(weight, WEIGHTS))
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "fp8"
    assert written["weight_block_size"] == [128, 128]
    assert written["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.long
def test_transformers_loads_blocks(wide, tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    layers = fp8pass.export(wide, tmp_path, format="block")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    for layer in layers:
        want = rounded(wide.get_submodule(layer).weight, WEIGHTS)
        assert torch.equal(loaded.get_submodule(layer).weight.float(), want)


@pytest.mark.parametrize(("format", "recipe"), [("block", "block"), ("row", "coat")])
def test_served_logits_are_those_of_the_compiled_forward(wide, format, recipe):
    """A server multiplies FP8 weights with inputs that it quantizes by the same rule."""
    weights = dict(fp8pass.served_weights(wide, format=format))
    server = copy.deepcopy(wide)
    for name, layer in server.named_modules():
        if f"{name}.weight_scale_inv" in weights or f"{name}.weight_scale" in weights:
            scales = weights.get(f"{name}.weight_scale_inv", weights.get(f"{name}.weight_scale"))
            data = weights[f"{name}.weight"].float()
            if format == "block":
                scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            layer.weight.data = (data * scales).to(torch.bfloat16)
            layer.register_forward_pre_hook(lambda _, args: round_inputs(args[0], format))
    config = fp8pass.Config.recipe(recipe, compiler="eager")
    program = torch.compile(wide, backend=Backend(config))
    with torch.no_grad():
        got, want = program(tokens()).logits.float(), server(tokens()).logits.float()
        exact = wide(tokens()).logits.float()
    assert relative(got, want) < 0.5 * relative(exact, want)
    assert relative(got, want) < 0.01


def round_inputs(x: torch.Tensor, format: str) -> torch.Tensor:
    if format == "block":
        return rounded(x, VALUES).to(x.dtype)
    scales = torch.exp2(torch.ceil(torch.log2(x.float().abs().amax(-1, keepdim=True) / 448)))
    return ((x.float() / scales).to(torch.float8_e4m3fn).float() * scales).to(x.dtype)


@pytest.mark.parametrize("format", ["row", "block"])
def test_served_weights_are_the_exported_tensors(wide, format, tmp_path):
    fp8pass.export(wide, tmp_path, format=format)
    found, served = (
        load_file(tmp_path / "model.safetensors"),
        fp8pass.served_weights(wide, format=format),
    )
    served = dict(served)
    assert served.keys() == found.keys()
    for name, tensor in found.items():
        assert served[name].dtype == tensor.dtype
        assert torch.equal(served[name].float(), tensor.float())


def test_invalid_formats_and_sizes_are_refused(trained, tmp_path):
    with pytest.raises(fp8pass.ConfigError, match=r"'rows'.*format is one of 'row', 'block'"):
        fp8pass.export(trained, tmp_path, format="rows")
    with pytest.raises(fp8pass.ConfigError, match="sizes in multiples of 128"):
        fp8pass.served_weights(trained, format="block")
    with pytest.raises(fp8pass.ConfigError, match="served_weights takes a PreTrainedModel"):
        fp8pass.served_weights(nn.Linear(16, 16))
