"""`compress` in training loops that distribute the model themselves."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import MLP
from torch import distributed as dist
from torch import nn

import fp8pass
from fp8pass import Config, compat

ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "WORLD_SIZE": "2"}


def train_with_hugging_face(device: str, folder: str) -> None:
    """Train twice with a Hugging Face Trainer and DDP, in the existing process group."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback
    from transformers import TrainingArguments as Arguments

    class Compress(TrainerCallback):
        compressed = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.compressed is not trainer.model_wrapped:
                self.compressed = trainer.model_wrapped
                self.done = fp8pass.distributed.compress(self.compressed)

    os.environ |= ENVIRONMENT | dict.fromkeys(("RANK", "LOCAL_RANK"), str(dist.get_rank()))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, vocab_size=128))
    model.compile(backend=fp8pass.backend(Config(compiler="eager")))
    rows = (torch.arange(16) + i for i in range(32))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = Arguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=device == "cpu",
        ddp_backend="gloo" if device == "cpu" else "nccl",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    callback = Compress()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < 0.95 * float(losses[0])
    assert callback.done.modules == ("",)
    assert 0.5 < callback.done.gradients.ratio <= 0.53
    sent = callback.done.gradients.bytes
    trainer.train()
    assert callback.done.gradients.bytes > sent


@pytest.mark.long
def test_a_hugging_face_trainer_compresses(two, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    two(train_with_hugging_face, str(tmp_path))


def run_example(device: str, folder: str) -> list[float]:
    """Run examples/fsdp2.py op by op in the existing process group."""
    sys.path.insert(0, folder)
    interpreted = lambda gm, inputs, **kwargs: compat.interpret(gm)  # noqa: E731
    with patch.object(compat, "compile_fx_inner", interpreted):
        importlib.import_module("common").STEPS = 12  # enough for tiny models
        return importlib.import_module("fsdp2").train()


@pytest.mark.long
def test_the_example_of_fsdp2(two):
    pytest.importorskip("transformers")
    losses = two(run_example, str(Path(fp8pass.__file__).parents[1] / "examples"))
    for rank in losses:
        assert rank[-1] < rank[0] - 0.1


def explain_blocks(device: str) -> None:
    """Weights that FSDP2 gathers are not memory saved for the backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    totals = []
    for shards in (False, True):
        torch._dynamo.reset()
        model = nn.Sequential(*(MLP((64, 128, 64)) for _ in range(2))).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model:
            if shards:
                fully_shard(block, mesh=mesh)
            block.compile(backend="fp8pass", options={"compiler": "eager"})
        x = torch.ones(32, 64, device=device)
        found = fp8pass.explain(model, x)
        totals.append((found.saved_bytes, found.outside_bytes, found.eager_bytes))
    assert totals[0] == totals[1]


@pytest.mark.long
def test_explain_counts_no_gathered_weights(two):
    two(explain_blocks)


def explain_whole(device: str) -> None:
    """The whole model is compiled, so that Dynamo traces the hooks of FSDP2."""
    from torch.distributed.fsdp import fully_shard

    blocks, unraisable = [MLP((64, 128, 64)) for _ in range(2)], []
    model = nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 64)).to(device)
    for block in blocks:
        fully_shard(block)
    fully_shard(model).compile(backend="fp8pass", options={"compiler": "eager"})
    with patch.object(sys, "unraisablehook", unraisable.append):
        text = str(fp8pass.explain(model, torch.ones(32, 64, device=device)))
        gc.collect()
    assert not unraisable, unraisable[0].exc_value
    assert "graph 0 of 1, 2 (runs 2×)" in text or "graph 0 of * (runs 2×)" in text, text
    assert "2 linear layers run outside of compiled graphs, in high precision: *." in text, text


@pytest.mark.long
def test_explain_of_a_whole_model_causes_no_warning(two):
    two(explain_whole)
