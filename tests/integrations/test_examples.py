"""The examples train, on a CPU and op by op instead of with Inductor."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from helpers import Residuals

import fp8pass

EXAMPLES = Path(fp8pass.__file__).parents[1] / "examples"
# tests/distributed/test_frameworks.py runs the example of FSDP2 on two ranks.
SCRIPTS = {path.stem for path in EXAMPLES.glob("*.py")} - {"common", "fsdp2"}


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_example_trains(name, plans, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # tiny models
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.chdir(tmp_path)
    try:
        losses = importlib.import_module(name).main()
    except ModuleNotFoundError as error:  # an optional package
        pytest.skip(str(error))
    assert any(layer.fp8 for plan in plans for layer in plan.linears)
    assert len(losses) >= 6
    assert min(losses[-2:]) < losses[0] - 0.1


def test_the_lines_for_nanogpt_run(plans):
    """nanoGPT is not installed, so only the added lines run."""
    lines = (EXAMPLES / "nanogpt.diff").read_text().splitlines()
    added = [line[1:].strip() for line in lines if line.startswith("+") and line[:3] != "+++"]
    assert len(added) == 3
    model = Residuals(1)
    stock = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    namespace = {"torch": torch, "model": model, "optimizer": stock}
    exec("\n".join(added), namespace)
    assert isinstance(namespace["optimizer"], fp8pass.optim.AdamW)
    assert namespace["optimizer"].param_groups[0]["betas"] == (0.9, 0.95)
    namespace["model"](torch.randn(32, 64)).square().mean().backward()
    namespace["optimizer"].step()
    assert [sum(bool(layer.fp8) for layer in plan.linears) for plan in plans] == [2]
