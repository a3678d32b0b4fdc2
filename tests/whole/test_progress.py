"""What is shown while Inductor compiles."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from helpers import MLP
from rich.console import Console

from fp8pass import compat
from fp8pass.progress import spinner


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_what_is_compiled(monkeypatch, is_terminal):
    text = io.StringIO()
    console = partial(Console, file=text, force_terminal=is_terminal, width=100)
    monkeypatch.setattr(spinner, "Console", lambda stderr: console())
    monkeypatch.setattr(
        compat, "compile_fx_inner", lambda gm, inputs, **kwargs: compat.interpret(gm)
    )
    with compat.fresh_compilation():
        program = torch.compile(MLP(), backend="fp8pass")
        program(torch.randn(32, 64)).sum().backward()
    for half in ("forward", "backward"):
        assert (f"fp8pass: Inductor compiles the {half}, " in text.getvalue()) == is_terminal
    assert is_terminal or not text.getvalue()


def test_one_rank_shows_it(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for rank in (0, 1):
        text = io.StringIO()
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(
            spinner, "Console", lambda stderr, to=text: Console(file=to, force_terminal=True)
        )
        with spinner.shown("something is done"):
            pass
        assert bool(text.getvalue()) == (rank == 0)
