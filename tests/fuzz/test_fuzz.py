"""A few random programs, and tests of the fuzzer itself.

`make test` always runs the same programs, so that a failure is caused by a change. `make test-long`
and `python -m tests.fuzz` run new programs.
"""

from __future__ import annotations

import copy
import os
import time
from unittest.mock import patch

import pytest
import torch
from helpers import MLP, TrainingStep, step

from fp8pass.config import Config
from fp8pass.dialect import ops
from fp8pass.testing.closeness import Reference
from fp8pass.testing.noise import GRIDS, Formats

from . import checks
from .checks import Outcome, check
from .drawing import draw
from .events import EVENTS, TOOLS
from .found import FOUND
from .operators import OPERATORS
from .program import Input, Instruction, Parameter, Program
from .script import parse, save
from .shrinking import shrink
from .workers import Settings, check_safely, results

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SEED = int(os.environ["FP8PASS_SEED"]) if LONG else 7
PROGRAMS, SECONDS = (500, 1200.0) if LONG else (16, 8.0)


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread like the processes of the fuzzer, because programs are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def describe_failure(program: Program, outcome: Outcome, folder) -> str:
    """Shrink a failing program, and return a description with its script."""
    smaller = shrink(program, outcome.failure, lambda p: check_safely(p, "cpu"), 60)
    outcome = check_safely(smaller, "cpu")
    path = save(smaller, outcome, folder, f"FP8PASS_SEED={SEED}", "cpu")
    return f"{outcome.failure}: {outcome.message}\n{path.read_text()}"


@pytest.mark.long
def test_random_programs_pass(tmp_path):
    end = time.monotonic() + SECONDS
    for index in range(PROGRAMS):
        program = draw(SEED, index, inductor_share=1 / 30 if LONG else 0.0)
        outcome = check_safely(program, "cpu")
        assert not outcome.failure, describe_failure(program, outcome, tmp_path)
        if time.monotonic() > end:
            break


@pytest.mark.gpu
def test_random_programs_pass_on_a_gpu(tmp_path):
    for index in range(PROGRAMS):
        outcome = check_safely(draw(SEED, index, inductor_share=1 / 4), "cuda")
        assert not outcome.failure, outcome.message


def wrong_decode(codes, fmt):
    """Lose all rows but the first."""
    values = original_decode(codes, fmt)
    values[1:] = 0
    return values


original_decode = ops.decode


@pytest.mark.long
def test_a_planted_bug_is_found_and_shrunk(tmp_path):
    """The bug loses rows of quantized saved tensors."""
    with patch.object(ops, "decode", wrong_decode):
        for index in range(60):
            program = draw(3, index, recipe="coat").changed(compiler="eager")
            outcome = check(program)
            if outcome.failure:
                break
        assert outcome.failure == "close"
        smaller = shrink(program, "close", check, 3)
        found = check(smaller)
    assert found.failure == "close"
    assert len(smaller.code) < len(program.code)
    path = save(smaller, found, tmp_path, "A planted bug", "cpu")
    text = path.read_text()
    compile(text, str(path), "exec")
    again = parse(text.split('PROGRAM = """')[1].split('"""')[0].strip())
    assert again == smaller
    assert not check(again).failure  # without the bug


@pytest.mark.long
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_failed_once_pass(name):
    outcome = check(FOUND[name])
    assert not outcome.failure, outcome.message


def test_programs_are_the_same_for_the_same_seed():
    assert [draw(1, i) for i in range(5)] == [draw(1, i) for i in range(5)]
    assert parse(repr(draw(1, 0))) == draw(1, 0)


@pytest.mark.long
def test_every_operator_is_drawn():
    drawn = {i.operator for index in range(120) for i in draw(5, index).code}
    assert len(drawn) > 0.75 * len(OPERATORS), set(OPERATORS) - drawn


EVENTFUL = Program(
    seed=3,
    inputs={"x0": Input(("S", 64))},
    parameters={"w1": Parameter((64, 64)), "w2": Parameter((32, 64), trained=False)},
    code=(
        Instruction("v0", "linear", ("x0",), ("w1",)),
        Instruction("v1", "gelu", ("v0",)),
        Instruction("v2", "linear", ("v1",), ("w2",)),
    ),
    returned=("v2",),
    batches=({"S": 32}, {"S": 32}),
    recipe="coat",
)


@pytest.mark.parametrize("event", [*EVENTS, *TOOLS])
def test_actions_between_two_steps_are_handled(event):
    """The second step must use the written values."""
    outcome = check(EVENTFUL.changed(events=(event,)))
    assert not outcome.failure, outcome.message
    assert outcome.judged


@pytest.mark.long
def test_a_step_that_ignores_a_write_is_found():
    program = EVENTFUL.changed(events=("scale_weights",))
    with patch.object(Program, "act", lambda self, model, i: None):
        steps = checks._ours(program, "cpu").steps
    assert checks._reference(program, "cpu").judge(steps).complaints


def exit_process(settings: Settings, index: int) -> None:
    os._exit(index)


@pytest.mark.long
def test_a_process_that_dies_is_a_failure_of_its_program():
    (found,) = results(Settings(), 3, 1, None, 1, exit_process)
    assert found.index == 3
    assert found.outcome.failure == "crash"
    assert "exit code 3" in found.outcome.message


# --- the criterion ------------------------------------------------------------------------------


def reference(recipe: str) -> Reference:
    torch.manual_seed(0)
    model, x = MLP((64, 128, 64)), torch.randn(32, 64, requires_grad=True)
    formats = Formats.of(Config.recipe(recipe))
    return Reference(model, lambda: [(x.detach().clone().requires_grad_(),)], formats)


def change_gradient(wanted: TrainingStep, change) -> TrainingStep:
    steps = copy.deepcopy(wanted)
    steps.gradients["up.weight"] = change(steps.gradients["up.weight"])
    return steps


WRONG = {
    "zero": torch.zeros_like,
    "half": lambda g: g / 2,
    "negative": lambda g: -g,
    "none": lambda g: None,
    "NaN": lambda g: g.masked_fill(g == g.max(), torch.nan),
    "transposed": lambda g: g.t().reshape(g.shape),
    "half of the rows": lambda g: torch.cat([g[:64], 0 * g[64:]]),
    "cosine 0.3": lambda g: g + 3 * g.norm() / g.numel() ** 0.5 * torch.randn(g.shape),
}


@pytest.mark.parametrize("recipe", ["exact", "coat", "agoq"])
def test_wrong_gradients_are_found(recipe):
    known = reference(recipe)
    for name, change in WRONG.items():
        verdict = known.judge([change_gradient(known.plain[0], change)])
        assert verdict.complaints, name
        assert not verdict.unjudged
    assert not known.judge(known.plain).complaints


@pytest.mark.parametrize("recipe", ["coat", "agoq", "linear"])
def test_errors_of_rounding_are_accepted(recipe):
    known = reference(recipe)
    x = known.batches()[0][0]
    program = torch.compile(known.model, backend="fp8pass", options={"compiler": "eager"})
    verdict = known.judge([step(program, known.model, (x,))])
    assert not verdict.complaints
    assert verdict.worst > 0.1  # the accepted error is not much larger


def test_grids_agree_with_the_formats():
    x = torch.randn(4096) * 2.0 ** torch.randint(-12, 9, (4096,))
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        clamped = x.clamp(-GRIDS[name].largest, GRIDS[name].largest)
        assert torch.equal(GRIDS[name].round(x), clamped.to(dtype).float())
