"""One line about a model when all of it is compiled; a warning where users can change something."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import pytest
import torch
from helpers import MLP
from torch import nn

from fp8pass import backend, bisect, compat
from fp8pass.config import Config
from fp8pass.progress import settled

WIDTH = 64
ALL_OF_TWO = "2 of 2 linear layers in FP8"
compiled = partial(torch.compile, backend="fp8pass", options={"compiler": "eager"})


@pytest.fixture(autouse=True)
def fresh():
    """What waits to be said of graphs of other tests is not there."""
    torch._dynamo.reset()
    settled._waiting.clear()
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


@pytest.mark.parametrize("steps", [1, 3])
def test_parameters_may_be_swapped(steps):
    """PyTorch moves DTensors and frozen codes so, and refuses it of what has weak references."""
    model = Blocks()
    train(compiled(model), steps)
    assert not any(weakref.getweakrefcount(p) for p in model.parameters())
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


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


@pytest.mark.parametrize("way", WAYS)
def test_one_line_for_a_model(way, said):
    model = WAYS[way]()
    train(model, steps=1)
    assert not said()
    train(model)
    ((level, line),) = said()
    assert level == "INFO"
    assert line.startswith("8 of 8 linear layers in FP8, ")
    assert " kept for the backward instead of " in line


def test_equal_blocks_count_as_often_as_they_are_there(monkeypatch):
    plans = []
    monkeypatch.setattr(settled, "_say", plans.append)
    train(compiled(MLP((WIDTH, 128, WIDTH))))
    torch._dynamo.reset()
    train(by_blocks())
    one, four = plans
    assert (4 * len(one.linears), 4 * one.saved_bytes) == (len(four.linears), four.saved_bytes)


def test_evaluation_and_other_sizes_say_no_more(said):
    model = in_place()
    for rows in (32, 48):
        with torch.no_grad():
            model.eval()(torch.randn(rows, WIDTH))
        train(model.train(), rows=rows)
    assert len(said()) == 1


def test_each_model_has_a_line(said):
    for width in (64, 96):
        train(compiled(MLP((width, 128, width))), width=width)
    assert [line[: len(ALL_OF_TWO)] for _, line in said()] == [ALL_OF_TWO] * 2


def test_a_model_that_is_gone_is_not_counted(said):
    train(by_blocks(), steps=1)
    torch._dynamo.reset()
    gc.collect()  # a module that is compiled in place refers to itself
    train(compiled(MLP((96, 128, 96))), width=96)
    assert [line[: len(ALL_OF_TWO)] for _, line in said()] == [ALL_OF_TWO]


def test_what_was_compiled_twice_counts_once(said):
    """As by `bisect` before training, or for a batch of another size."""
    model = MLP((WIDTH, 128, WIDTH))
    x = torch.randn(32, WIDTH)
    bisect(model, lambda m, b: m(b).square().mean(), x, config=Config(compiler="eager"), most=1)
    assert not said()
    train(compiled(model))
    assert [line[: len(ALL_OF_TWO)] for _, line in said()] == [ALL_OF_TWO]


class Normalized(nn.Module):
    """Blocks with a graph of no parameters behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP((WIDTH, 128, WIDTH)) for _ in range(2))
        self.shared = compiled(lambda x: x.sin().exp())

    def forward(self, x):
        for block in self.blocks:
            x = self.shared(block(x))
        return x


def test_a_graph_of_no_parameters_ends_no_forward(said):
    model = Normalized()
    for block in model.blocks:
        block.compile(backend="fp8pass", options={"compiler": "eager"})
    train(model, steps=1)
    assert not said()
    train(model)
    assert [line[:27] for _, line in said()] == ["4 of 4 linear layers in FP8"]


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
def test_a_warning_is_about_what_users_can_change(width, classes, warns, said):
    train(compiled(Headed(width, classes)), width=width)
    ((level, line),) = said()
    assert level == ("WARNING" if warns else "INFO")
    assert ("though nobody asked for it, such as classes: weight 100×64" in line) == warns


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


@pytest.mark.parametrize("option", [{"simulate": "e3m1"}, {"recipe": "exact"}])
def test_a_model_with_other_options_is_no_part_of_another(option, caplog, said):
    """One that has run once, before the other trains."""
    options = {"compiler": "eager", **option}
    other = torch.compile(MLP((WIDTH, 96, WIDTH)), backend="fp8pass", options=options)
    train(other, steps=1)
    train(compiled(MLP((WIDTH, 128, WIDTH))))
    assert [line[: len(ALL_OF_TWO)] for _, line in said()] == [ALL_OF_TWO]
    assert "e3m1" not in caplog.text


def test_one_rank_says_it(monkeypatch, said):
    monkeypatch.setattr(settled, "is_later_rank", lambda: True)
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


# --- parameters that each step makes -------------------------------------------------------------


def with_new_parameters(model, run, x):
    """A step of `torch.func.functional_call`, with parameters that die with it."""
    made = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    run(made, x).backward()


def with_moved_parameters(model, run, x):
    """A step with the model's parameters, whose memory is another one each time."""
    for p in model.parameters():
        p.data = p.data.clone()
    run(dict(model.named_parameters()), x).backward()


def with_some_new_parameters(model, run, x):
    made = dict(model.named_parameters())
    last = next(reversed(made))
    run(made | {last: nn.Parameter(made[last].detach().clone())}, x).backward()


@pytest.mark.parametrize(
    "step", [with_new_parameters, with_moved_parameters, with_some_new_parameters]
)
def test_steps_with_new_parameters_are_not_remembered(step, said):
    """The second step has freed those of the first: all graphs have run, and the line is said."""
    model = MLP((WIDTH, 128, WIDTH))

    def loss_of(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    run = torch.compile(loss_of, backend="fp8pass", options={"compiler": "eager"})
    (x,) = (torch.randn(32, WIDTH),)
    for _ in range(4):
        step(model, run, x)
    assert [level for level, _ in said()] == ["INFO"]
    assert ALL_OF_TWO in said()[0][1]
    for _ in range(4):
        step(model, run, x)
    assert not settled._waiting
    assert len(said()) == 1


def test_parts_that_wait_forget_parameters_that_are_no_more():
    part = settled._Part(plan=None, config=Config())
    kept = nn.Parameter(torch.randn(4))
    assert not part.note([kept])
    assert not part.note([nn.Parameter(torch.randn(4))])
    assert part.note([nn.Parameter(torch.randn(4))])
    assert len(part.runs) == 2
    assert part.note([kept])
