"""The examples of docs/checkpoints.md run, and do not change the keys of the model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import llama, tokens

import fp8pass

PAGE = (Path(fp8pass.__file__).parents[1] / "docs/checkpoints.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("code", [code for code in EXAMPLES if "peft" not in code])
def test_documented_example_runs(code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = llama(num_hidden_layers=1)
    names = set(model.state_dict())
    batch = {"input_ids": tokens(2), "labels": tokens(2)}
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch).loss.backward()
    optimizer.step()
    exec(code, {"model": model, "optimizer": optimizer, "batch": batch})
    assert set(model.state_dict()) == names
