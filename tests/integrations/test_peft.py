"""Adapters of PEFT on frozen weights in FP8: variants of LoRA, saving, resuming, generation."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import COAT_EAGER, llama, relative, tokens
from torch import nn

import fp8pass
from fp8pass.graph.split_adapters import split_adapters

peft = pytest.importorskip("peft")
VARIANTS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.1},
}


def adapted(**options) -> nn.Module:
    """Return a Llama with FP8 weights and adapters, whose matrices B are not zero."""
    torch.manual_seed(0)
    model = fp8pass.quantize_frozen(llama().bfloat16().requires_grad_(False))
    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def gradients(model, program) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    program(input_ids=tokens(), labels=tokens()).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.long
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_gradients_of_adapters(variant):
    model = adapted(**VARIANTS[variant])
    want = gradients(model, model)
    got = gradients(model, torch.compile(model, backend=fp8pass.backend(COAT_EAGER)))
    assert len(got) == len(want) >= 14
    for a, b in zip(got, want, strict=True):
        # Compiled code draws other random numbers for dropout.
        assert 0 < a.norm() < 2 * b.norm() if variant == "dropout" else relative(a, b) < 0.25


def test_training_saving_and_resuming(tmp_path):
    """One of two adapters is trained, saved, and loaded into a new model."""
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=8, target_modules="all-linear"))
    model.compile(backend=fp8pass.backend(COAT_EAGER))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(model(input_ids=tokens(), labels=tokens()).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[1] < losses[0]
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(adapted().unload(), tmp_path)
    loaded.compile(backend=fp8pass.backend(COAT_EAGER))
    loaded.eval()
    model.eval()
    with torch.no_grad():
        a, b = (m(input_ids=tokens()).logits for m in (model, loaded))
    assert torch.equal(a, b)
    ids = loaded.generate(input_ids=tokens()[:1, :4], max_new_tokens=4, do_sample=False)
    assert ids.shape == (1, 8)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "block"])
def test_packed_sequences_are_trained_like_separate_ones(recipe):
    """Positions restart with each sequence. No attention mask is passed (padding-free)."""
    model = adapted()
    sequences = [tokens(1, length) for length in (24, 40)]
    predicted = sum(x.shape[1] - 1 for x in sequences)
    for x in sequences:
        loss = model(input_ids=x, labels=x).loss * (x.shape[1] - 1) / predicted
        loss.backward()
    want = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    batch = {
        "input_ids": torch.cat(sequences, 1),
        "position_ids": torch.cat([torch.arange(x.shape[1]) for x in sequences])[None],
        "labels": torch.cat([x.index_fill(1, torch.tensor([0]), -100) for x in sequences], 1),
    }
    options = {"recipe": recipe, "compiler": "eager", "fp8_gemms": "all"}
    torch._dynamo.reset()
    torch.compile(model, backend="fp8pass", options=options, fullgraph=True)(
        **batch
    ).loss.backward()
    got = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.25


def test_merging_is_refused():
    with pytest.raises(RuntimeError, match="adapters"):
        adapted().merge_and_unload()


@pytest.mark.long
def test_gradient_checkpointing():
    model = adapted()
    want = gradients(model, model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = gradients(model, torch.compile(model, backend=fp8pass.backend(COAT_EAGER)))
    assert all(relative(a, b) < 0.25 for a, b in zip(got, want, strict=True))


def adapted_experts(*, rank: int = 8, quantize: bool = True, **options) -> nn.Module:
    """Return a Qwen3-MoE with adapters on attention and on the stacked weights of experts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    base = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    base.set_experts_implementation("grouped_mm")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(
        r=rank, target_modules=["q_proj"], target_parameters=parameters, **options
    )
    model = peft.get_peft_model(base, lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return fp8pass.quantize_frozen(model) if quantize else model


def prepared(**options) -> nn.Module:
    from fp8pass.integrations.peft import prepare_experts

    return prepare_experts(adapted_experts(**options))


def test_prepared_experts_compute_the_same_without_compilation():
    model = adapted_experts(quantize=False)
    want = gradients(model, model)
    model = prepared(quantize=False)
    got = gradients(model, model)
    assert len(got) == len(want) == 6
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


OPTIONS = [
    {},
    {"recipe": "agoq"},
    {"recipe": "block"},
    {"return_logits": False},
    {"fp8_gemms": "where_faster"},
]
WAYS = ["plain", "autocast", "checkpointing"]
# Checkpointing leaves too little for a budget to divide.
BUDGETS = [(way, {"memory_budget": 0.5}) for way in WAYS[:2]]
BESIDE = [*itertools.product(WAYS, OPTIONS), *BUDGETS]


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(("way", "options"), BESIDE, ids=str)
def test_gradients_of_adapters_of_experts(way, options, quantize):
    """Compared with PEFT's own forward in FP32."""
    model = adapted_experts(quantize=False).float()
    want = gradients(model, model)
    model = prepared(quantize=quantize)
    if way == "checkpointing":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    options = {"compiler": "eager", "fp8_gemms": "all", **options}
    program = torch.compile(model, backend="fp8pass", options=options)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        got = gradients(model, program)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.35


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_of_experts_are_not_added_to_weights(checkpointing):
    """There are three grouped GEMMs for each of two weights."""
    counts = {"baddbmm": 0, "grouped_mm": 0}

    def backend(gm, _inputs):
        split_adapters(gm)
        parts = [m for m in gm.modules() if isinstance(m, torch.fx.GraphModule)]
        targets = [str(n.target) for part in parts for n in part.graph.nodes]
        for name in counts:
            counts[name] += sum(name in target for target in targets)
        return gm.forward

    model = prepared()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    program = torch.compile(model, backend=backend, fullgraph=not checkpointing)
    program(input_ids=tokens(), labels=tokens())
    assert counts == {"baddbmm": 0, "grouped_mm": 6}


@pytest.mark.long
def test_experts_with_several_adapters_saved_and_switched(tmp_path):
    model = prepared()
    model.add_adapter("other", model.peft_config["default"])
    from fp8pass.integrations.peft import prepare_experts

    prepare_experts(model)
    model.compile(backend=fp8pass.backend(COAT_EAGER))
    inputs = {"input_ids": tokens(), "labels": tokens()}
    first = model(**inputs).loss
    first.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / parameter.grad.norm()
    trained = model(**inputs).loss
    assert trained < first
    model.set_adapter("other")
    assert model(**inputs).loss != trained
    with model.disable_adapter():
        alone = model(**inputs).loss
    assert alone != trained
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    copy = prepared()
    copy.load_adapter(tmp_path, "saved")
    copy.set_adapter("saved")
    copy.compile(backend=fp8pass.backend(COAT_EAGER))
    torch.testing.assert_close(copy(**inputs).loss, trained, rtol=1e-3, atol=0.0)


def test_models_without_adapters_of_experts_are_refused():
    from fp8pass.integrations.peft import prepare_experts

    with pytest.raises(fp8pass.ConfigError, match="target_parameters"):
        prepare_experts(adapted())
