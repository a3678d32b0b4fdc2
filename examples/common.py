"""Shared by the examples: a Llama that predicts bytes, and Python's own library as its data.

On a GPU the model has 160M parameters in BF16, on a CPU one tiny layer, enough to try the script.
Replace both with your model and your data.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

CUDA = torch.cuda.is_available()
LENGTH = 1024 if CUDA else 32  # tokens of a row
BATCH = 16 if CUDA else 8
STEPS = 200 if CUDA else 8
RATE = 3e-4 if CUDA else 1e-2


def llama() -> LlamaForCausalLM:
    """Return a new model, on the CPU."""
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    tiny = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 16 if CUDA else 4, "num_key_value_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, use_cache=False, **(large if CUDA else tiny), **heads)
    )
    return model.bfloat16() if CUDA else model


def rows() -> list[dict[str, Tensor]]:
    """Return rows of `input_ids` and `labels` for `STEPS` steps."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: STEPS * BATCH * LENGTH]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in tokens.split(LENGTH)]
