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

from fp8pass import backend, bisect, compat, compile_log
from fp8pass.config import Config

WIDTH = 64
ALL_OF_TWO = "2 of 2 linear layers in FP8"
compiled = partial(torch.compile, backend="fp8pass", options={"compiler": "eager"})


@pytest.fixture(autouse=True)
def fresh():
    """Disable caches, because a cached graph logs nothing."""
    torch._dynamo.reset()
    with compat.fresh_compilation():
        yield


@pytest.fixture
def logged_lines(caplog):
    """A function that returns the logged lines about layers, with their levels."""

    def lines() -> list[tuple[str, str]]:
        found = [r for r in caplog.records if "linear layers in FP8" in r.getMessage()]
        return [(r.levelname, r.getMessage()) for r in found if r.levelno >= logging.INFO]

    return lines


def train(program, steps=3, width=WIDTH, rows=32):
    x = torch.randn(rows, width, requires_grad=True)
    for _ in range(steps):
        program(x * 1).sum().backward()


class Blocks(nn.Module):
    """Four equal blocks, with or without a graph break after each block."""

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

# Linear layers of each compiled graph. Equal blocks share a graph.
LAYERS = {"whole": [8], "in place": [8], "by blocks": [2], "graph breaks": [2]}


@pytest.mark.parametrize("way", WAYS)
def test_each_graph_logs_a_line_when_it_is_compiled(way, logged_lines):
    model = WAYS[way]()
    train(model, steps=1)
    lines = logged_lines()
    train(model)
    assert logged_lines() == lines
    assert {level for level, _ in lines} == {"INFO"}
    starts = [f"{n} of {n} linear layers in FP8, " for n in LAYERS[way]]
    assert [line[: len(start)] for (_, line), start in zip(lines, starts, strict=True)] == starts
    assert all(" without low-bit formats)" in line for _, line in lines)


def test_evaluation_logs_nothing(logged_lines):
    with torch.no_grad():
        in_place().eval()(torch.randn(32, WIDTH))
    assert not logged_lines()


@pytest.mark.long
def test_a_tool_logs_nothing(logged_lines):
    model, x = MLP((WIDTH, 128, WIDTH)), torch.randn(32, WIDTH)
    bisect(model, lambda m, b: m(b).square().mean(), x, config=Config(compiler="eager"), most=1)
    assert not logged_lines()


class Headed(nn.Module):
    """Two layers, and an output head."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.classes = MLP((width, 4 * width, width)), nn.Linear(width, classes)

    def forward(self, x):
        return self.classes(self.body(x))


@pytest.mark.parametrize(
    ("width", "classes", "warns"), [(16, 10, False), (64, 10, False), (64, 100, True)]
)
def test_only_layers_that_users_can_change_cause_warnings(width, classes, warns, caplog):
    train(compiled(Headed(width, classes)), width=width)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == warns
    assert all("of the weights of a graph unexpectedly stay in" in text for text in warnings)
    assert all("for example classes: weight 100×64" in text for text in warnings)


class HeadedBlocks(nn.Module):
    """Blocks with heads that stay in high precision, each followed by a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Headed(WIDTH, size) for size in (100, 200))

    def forward(self, x):
        results = []
        for block in self.blocks:
            results.append(block(x).sum())
            torch._dynamo.graph_break()
        return sum(results)


@pytest.mark.long
def test_a_model_is_warned_about_once(logged_lines, caplog):
    for count in (1, 2):
        torch._dynamo.reset()
        train(compiled(HeadedBlocks()))
        assert len(logged_lines()) == 2 * count
        assert sum(r.levelno == logging.WARNING for r in caplog.records) == count


class Adapted(nn.Module):
    """A frozen layer with a trained adapter of low rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_an_adapter_of_rank_8_causes_no_warning(logged_lines):
    train(compiled(Adapted(8)))
    ((level, line),) = logged_lines()
    assert (level, line[:27]) == ("INFO", "1 of 3 linear layers in FP8")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING, logging.INFO])
def test_lines_go_to_stderr_unless_logging_is_configured(level, monkeypatch, capsys, logged_lines):
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
        assert len(logged_lines()) == (level == logging.INFO)


@pytest.mark.long
def test_only_the_first_rank_logs(monkeypatch, logged_lines):
    monkeypatch.setattr(compile_log, "is_later_rank", lambda: True)
    train(in_place())
    assert not logged_lines()


def test_a_configured_backend_logs(logged_lines):
    train(torch.compile(MLP((WIDTH, 128, WIDTH)), backend=backend(Config(compiler="eager"))))
    assert [line[: len(ALL_OF_TWO)] for _, line in logged_lines()] == [ALL_OF_TWO]


def test_a_line_can_end_with_a_remark(logged_lines):
    """The remark here is that offloading has no budget."""
    options = {"compiler": "eager", "offload": True}
    train(torch.compile(MLP((WIDTH, 128, WIDTH)), backend="fp8pass", options=options))
    ((_, line),) = logged_lines()
    assert ALL_OF_TWO in line
    assert line.endswith("; offload=True has no effect: set memory_budget, too")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_the_graph_that_inductor_compiles(monkeypatch, is_terminal):
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


def test_only_the_first_rank_shows_progress(monkeypatch):
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
