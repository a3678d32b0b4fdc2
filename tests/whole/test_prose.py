"""The check of prose in `make lint`."""

from __future__ import annotations

import prose
import pytest


@pytest.mark.parametrize(
    ("text", "riddles"),
    [
        ("Return the sum of what is kept.", 1),
        ("What the GPU does takes a second. Nothing knows of it.", 2),
        ("Return the bytes of the saved tensors. What is the limit?", 0),
    ],
)
@pytest.mark.parametrize("form", ["page.md", "module.py"])
def test_riddles_are_counted(tmp_path, monkeypatch, form, text, riddles):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    file = tmp_path / form
    file.write_text(text if form == "page.md" else f'"""{text}"""\n')
    rate, found = prose.rate(file)
    assert len(found) == riddles
    assert (rate > prose.LIMIT) == bool(riddles)
