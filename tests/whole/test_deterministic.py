"""Training is bitwise reproducible with `torch.use_deterministic_algorithms(True)`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

import fp8pass
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import SIZES

SIZE, VOCABULARY, BACKWARDS = SIZES["small"], 256, 8
RECIPES = ("coat", "agoq")


def train(recipe: str, device: str) -> str:
    """Train a decoder with clipping and micro-batches. Return a hash of the weights.

    Weights in BF16 are rounded stochastically. States and sums of gradients have 8 bits.
    """
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = Decoder(SIZE).to(device, torch.bfloat16)
    options = {"recipe": recipe, **({} if device == "cuda" else {"compiler": "eager"})}
    model.compile(backend="fp8pass", options=options)
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=1e-3)
    fp8pass.optim.step_in_backward(model, optimizer, accumulate=2, max_norm=1.0)
    for _ in range(BACKWARDS):
        ids = torch.randint(VOCABULARY, (SIZE.batch, SIZE.seq + 1), device=device)
        model(ids[:, :-1], ids[:, 1:]).backward()
    optimizer.join()
    weights = torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()])
    assert weights.isfinite().all()
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def run_in_new_process(recipe: str, device: str, folder: object) -> str:
    """Train in a process that compiles everything itself."""
    code = f"import test_deterministic as t; print(t.train({recipe!r}, {device!r}))"
    environment = os.environ | {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # PyTorch requires this for deterministic GEMMs
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_train_equal_weights_on_a_gpu(recipe, tmp_path):
    first, second = (run_in_new_process(recipe, "cuda", tmp_path / name) for name in "ab")
    assert first == second


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_train_equal_weights(recipe, tmp_path):
    first, second = (run_in_new_process(recipe, "cpu", tmp_path / name) for name in "ab")
    assert first == second
