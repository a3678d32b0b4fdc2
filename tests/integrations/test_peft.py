"""Adapters of PEFT on frozen weights in FP8: variants of LoRA, saving, resuming, generation."""

from __future__ import annotations

import pytest
import torch
from helpers import COAT_EAGER, llama, relative, tokens
from torch import nn

import fp8pass

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


def test_merging_is_refused():
    with pytest.raises(RuntimeError, match="adapters"):
        adapted().merge_and_unload()


def test_gradient_checkpointing():
    model = adapted()
    want = gradients(model, model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = gradients(model, torch.compile(model, backend=fp8pass.backend(COAT_EAGER)))
    assert all(relative(a, b) < 0.25 for a, b in zip(got, want, strict=True))
