"""Messages about compilations: lines, warnings, a spinner."""

from __future__ import annotations

import io
import logging
from functools import partial

import pytest
import torch
from helpers import MLP
from rich.console import Console
from torch import nn

from fp8pass import backend, bisect, compat
from fp8pass.config import Config
from fp8pass.progress import log as compile_log

WIDTH = 64
ALL_OF_TWO = "2 of 2 linear layers in FP8"
compiled = partial(torch.compile, backend="fp8pass", options={"compiler": "eager"})


@pytest.fixture(autouse=True)
def fresh():
    """No graph comes from a cache."""
    torch._dynamo.reset()
    with compat.fresh_compilation():
        yield


@pytest.fixture
def said(caplog):
    """The lines that were logged for users, with their levels."""

    def lines() -> list[tuple[str, str]]:
        found = [r for r in caplog.records if "linear layers in FP8" in r.getMessage()]
        return [(r.levelname, r.getMessage()) for r in found if r.levelno >= logging.INFO]

    return lines


def train(program, steps=3, width=WIDTH, rows=32):
    x = torch.randn(rows, width, requires_grad=True)
    for _ in range(steps):
        program(x * 1).sum().backward()


class Blocks(nn.Module):
    """Four equal blocks, with or without a graph break behind each."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP((WIDTH, 128, WIDTH)) for _ in range(4))
        self.breaks = breaks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def in_place() -> nn.Module:
    model = Blocks()
    model.compile(backend="fp8pass", options={"compiler": "eager"})
    return model


def by_blocks() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        block.compile(backend="fp8pass", options={"compiler": "eager"})
    return model


WAYS = {
    "whole": lambda: compiled(Blocks()),
    "in place": in_place,
    "by blocks": by_blocks,
    "graph breaks": lambda: compiled(Blocks(breaks=True)),
}


# How many linear layers each graph has that is compiled. Equal blocks share a graph, or its code.
LAYERS = {"whole": [8], "in place": [8], "by blocks": [2], "graph breaks": [2]}


@pytest.mark.parametrize("way", WAYS)
def test_a_line_for_each_graph_when_it_is_compiled(way, said):
    model = WAYS[way]()
    train(model, steps=1)
    lines = said()
    train(model)
    assert said() == lines
    assert {level for level, _ in lines} == {"INFO"}
    starts = [f"{n} of {n} linear layers in FP8, " for n in LAYERS[way]]
    assert [line[: len(start)] for (_, line), start in zip(lines, starts, strict=True)] == starts
    assert all(" saved for the backward instead of " in line for _, line in lines)


def test_evaluation_logs_nothing(said):
    with torch.no_grad():
        in_place().eval()(torch.randn(32, WIDTH))
    assert not said()


def test_a_tool_logs_nothing(said):
    model, x = MLP((WIDTH, 128, WIDTH)), torch.randn(32, WIDTH)
    bisect(model, lambda m, b: m(b).square().mean(), x, config=Config(compiler="eager"), most=1)
    assert not said()


class Headed(nn.Module):
    """Two layers, and a head of some classes."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.classes = MLP((width, 4 * width, width)), nn.Linear(width, classes)

    def forward(self, x):
        return self.classes(self.body(x))


@pytest.mark.parametrize(
    ("width", "classes", "warns"), [(16, 10, False), (64, 10, False), (64, 100, True)]
)
def test_a_warning_is_about_what_users_can_change(width, classes, warns, caplog):
    train(compiled(Headed(width, classes)), width=width)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == warns
    assert all("of the weights of a graph unexpectedly stay in" in text for text in warnings)
    assert all("for example classes: weight 100×64" in text for text in warnings)


class HeadedBlocks(nn.Module):
    """Blocks with heads that stay in high precision, and graph breaks behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Headed(WIDTH, size) for size in (100, 200))

    def forward(self, x):
        results = []
        for block in self.blocks:
            results.append(block(x).sum())
            torch._dynamo.graph_break()
        return sum(results)


def test_a_model_is_warned_about_once(said, caplog):
    for count in (1, 2):
        torch._dynamo.reset()
        train(compiled(HeadedBlocks()))
        assert len(said()) == 2 * count
        assert sum(r.levelno == logging.WARNING for r in caplog.records) == count


class Adapted(nn.Module):
    """A frozen layer with a trained product of low rank beside it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_an_adapter_of_rank_8_is_no_warning(said):
    train(compiled(Adapted(8)))
    ((level, line),) = said()
    assert (level, line[:27]) == ("INFO", "1 of 3 linear layers in FP8")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING, logging.INFO])
def test_on_stderr_unless_somebody_set_up_logging(level, monkeypatch, capsys, said):
    log = logging.getLogger("fp8pass")
    monkeypatch.setattr(log, "hasHandlers", lambda: False)
    monkeypatch.setattr(log, "level", level)
    log.manager._clear_cache()
    train(compiled(MLP((WIDTH, 128, WIDTH))))
    printed = capsys.readouterr().err
    if level == logging.NOTSET:
        assert printed.startswith(f"fp8pass: {ALL_OF_TWO}")
        assert printed.count("linear layers") == 1
    else:
        assert "fp8pass: " not in printed
        assert len(said()) == (level == logging.INFO)


def test_one_rank_says_it(monkeypatch, said):
    monkeypatch.setattr(compile_log, "is_later_rank", lambda: True)
    train(in_place())
    assert not said()


def test_a_configured_backend_says_it(said):
    train(torch.compile(MLP((WIDTH, 128, WIDTH)), backend=backend(Config(compiler="eager"))))
    assert [line[: len(ALL_OF_TWO)] for _, line in said()] == [ALL_OF_TWO]


def test_a_plan_with_a_remark_is_counted(said):
    """Here that there is no budget to meet by offloading."""
    options = {"compiler": "eager", "offload": True}
    train(torch.compile(MLP((WIDTH, 128, WIDTH)), backend="fp8pass", options=options))
    ((_, line),) = said()
    assert ALL_OF_TWO in line
    assert line.endswith("; offload=True has no memory_budget to meet")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_what_is_compiled(monkeypatch, is_terminal):
    text = io.StringIO()
    console = partial(Console, file=text, force_terminal=is_terminal, width=100)
    monkeypatch.setattr(compile_log, "Console", lambda stderr: console())
    monkeypatch.setattr(
        compat, "compile_fx_inner", lambda gm, inputs, **kwargs: compat.interpret(gm)
    )
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
            compile_log, "Console", lambda stderr, to=text: Console(file=to, force_terminal=True)
        )
        with compile_log.CompileLog().while_compiling("something is done"):
            pass
        assert bool(text.getvalue()) == (rank == 0)
