"""`fit`: the lines of code that it prints can be pasted."""

from __future__ import annotations

import pytest
import torch
from fit_helpers import make_on_cpu

import fp8pass
from fp8pass import Config
from fp8pass.tools.fitting.candidates import STATE_PLACES
from fp8pass.tools.fitting.setup import Setup, format_config


def run_lines(text: str, accumulate: int) -> None:
    """Run the printed lines and train a model for a step, on the CPU."""
    model, ids = make_on_cpu()
    names = {"fp8pass": fp8pass, "torch": torch, "model": model}
    exec(text.replace('"cuda"', '"cpu"').replace(", fused=True", ""), names)
    before = [p.detach().clone() for p in model.lm_head.parameters()]
    for _ in range(accumulate):
        names["model"](ids).backward()
    names["optimizer"].step()
    after = list(model.lm_head.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("place", STATE_PLACES, ids=str)
def test_lines_of_blocks_are_accepted(place):
    lines = Setup(Config(compiler="eager", memory_budget=0.9), *place).lines(2, ("blocks.*",))
    assert "memory_budget=0.9" in lines
    run_lines(lines, 2)


@pytest.mark.long
def test_lines_of_a_whole_model_are_accepted():
    run_lines(Setup(Config(compiler="eager"), *STATE_PLACES[-1]).lines(2, ()), 2)


def test_budgets_apply_to_blocks_of_a_list():
    lines = Setup(Config(memory_budget=0.5)).lines(1, ("blocks.*", "lm_head"))
    assert "block.compile(backend=fp8pass.backend(config))" in lines
    assert '("lm_head").compile(backend=fp8pass.backend(fp8pass.Config()))' in lines
    assert '("lm_head").compile(backend=fp8pass.backend(config))' in Setup().lines(1, ("lm_head",))


@pytest.mark.long
def test_lines_of_a_part_of_a_block_are_accepted():
    run_lines(Setup(Config(compiler="eager")).lines(1, ("blocks.0.mlp",)), 1)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config.recipe("agoq"),
        Config.recipe("linear", skip=("a", "b")),
        Config(error_tolerance=2),
        Config(simulate="e8m3"),
    ],
    ids=format_config,
)
def test_a_configuration_is_printed_as_python(config):
    assert eval(format_config(config), {"fp8pass": fp8pass}) == config
