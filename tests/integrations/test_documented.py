"""The examples of docs/frameworks.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers import llama, tokens

import fp8pass

PAGE = (Path(fp8pass.__file__).parents[1] / "docs/frameworks.md").read_text()


def examples() -> dict[str, str]:
    """Return the Python code of the page by section and number."""
    found = {}
    for section in PAGE.split("\n## "):
        title = section.partition("\n")[0].removeprefix("# ")
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL)):
            found[f"{title}, {number}"] = code
    return found


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(94)} | {"<pad>": 94, "<eos>": 95}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", examples())
def test_documented_example_runs(name, plans, monkeypatch, tmp_path):
    code = examples()[name].replace(
        '"out",', '"out", use_cpu=True,'
    )  # required by SFTConfig on CPUs
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.chdir(tmp_path)
    model = llama(num_hidden_layers=1)
    names = set(model.state_dict())
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    namespace = {"model": model, "data": rows, "tokenizer": tokenizer()}
    try:
        exec(code, namespace)
    except ModuleNotFoundError as error:  # an optional package
        pytest.skip(str(error))
    trains = re.search(r"train\(\)|fit\(|backward\(", code) is not None
    assert any(y.fp8 for plan in plans for y in plan.linears) == trains
    if "peft" not in code:
        assert set(model.state_dict()) == names
