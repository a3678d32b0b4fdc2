"""Forward and all gradients of many architectures, through Inductor, against eager PyTorch in fp64.

What is accepted is measured (closeness.py): a relative error e of a gradient, which is an SQNR of
-20 log10(e), bounds its cosine (at least √(1 - e²)) and its norm (within 1 ± e). All gradients
together are held against noise as one vector, too, so that none can hide where single ones are
chaotic.

A hash of the sources draws a few architectures, and `FP8PASS_SEED=...` the same again. All are
tried under `make test-long`, and on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import Spy, step
from torch import nn

from fp8pass import compat
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.testing.closeness import Reference, Verdict
from fp8pass.testing.noise import Formats

from . import huggingface, modules
from .stock import FAILS, FAILS_ON_A_GPU, WRONG_ON_A_GPU

RECIPES = ("coat", "agoq", "exact")
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
NAMES = (*huggingface.ARCHITECTURES, *modules.ARCHITECTURES)
ALL = [(name, recipe) for name in NAMES for recipe in RECIPES]


def sample(count: int) -> list[tuple[str, str]]:
    """Architectures that this run draws, each with a recipe."""
    rng = random.Random(int(os.environ["FP8PASS_SEED"]))
    return [(name, rng.choice(RECIPES)) for name in rng.sample(NAMES, count)]


class Called(nn.Module):
    """A model whose arguments are given in the order of their names."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Any) -> Any:
        return self.model(**dict(zip(self.names, args, strict=True)))


def make(name: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, list[Any]]:
    """An architecture and its inputs."""
    torch.manual_seed(0)
    if name in modules.ARCHITECTURES:
        model, inputs = (function() for function in modules.ARCHITECTURES[name])
    else:
        model, inputs = huggingface.ARCHITECTURES[name].make()
    return Called(model, tuple(inputs)).to(device, dtype), placed(inputs, device, dtype)


def placed(inputs: Mapping[str, Any], device: str, dtype: torch.dtype) -> list[Any]:
    """Inputs on a device; floating point ones in that dtype."""
    return [x.to(device, dtype if x.is_floating_point() else None) for x in inputs.values()]


def compiled_step(name: str, backend: Any, device: str, dtype: torch.dtype) -> Any:
    torch._dynamo.reset()
    model, inputs = make(name, device, dtype)
    return step(torch.compile(model, backend=backend), model, inputs)


def halves_as(compiler: str) -> Any:
    """`lowered`: halves are run op by op after all passes on them."""
    if compiler == "lowered":
        interpreted = lambda gm, inputs, **kwargs: compat.interpret(gm)  # noqa: E731
        return patch.object(compat, "compile_fx_inner", interpreted)
    return contextlib.nullcontext()


def check(
    name: str, recipe: str, compiler: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Verdict, Spy]:
    """One step, held against noise."""
    config, spy = Config.recipe(recipe), Spy()
    try:
        with halves_as(compiler):
            got = compiled_step(name, Backend(config, spy), device, dtype)
    except Exception as error:
        raise AssertionError(
            f"{error}\nstock Inductor {stock_error(name, device, dtype)}"
        ) from error
    reference = reference_of(name, config, device, dtype)
    verdict = reference.judge([got])
    known = device == "cuda" and name in WRONG_ON_A_GPU
    if verdict.complaints or known:
        stock = reference.judge([compiled_step(name, "inductor", device, dtype)])
        assert stock.complaints or not known, f"stock.py lists {name}, which is right now"
        said = f"stock Inductor: {stock.complaints or 'is fine'}"
        verdict.complaints = [] if known else [*verdict.complaints, said]
    return verdict, spy


def stock_error(name: str, device: str, dtype: torch.dtype) -> str:
    """What to list in stock.py, if it fails."""
    try:
        compiled_step(name, "inductor", device, dtype)
    except Exception as error:
        return f"fails, too: {error}"
    return "compiles it"


def reference_of(name: str, config: Config, device: str, dtype: torch.dtype) -> Reference:
    """The eager model in fp64, or in fp32 where it mixes dtypes of its own."""
    model, inputs = make(name, device, dtype)
    for wide in (torch.float64, torch.float32):
        try:
            return Reference(model, lambda: [inputs], Formats.of(config, dtype), wide=wide)
        except (RuntimeError, ValueError) as error:
            reason = error
    raise AssertionError(f"eager PyTorch runs {name} in no dtype: {reason}")


def passes(
    name: str, recipe: str, device: str, dtype: torch.dtype, compiler: str = "inductor"
) -> None:
    compiler = "lowered" if name in FAILS else compiler
    verdict, spy = check(name, recipe, compiler, device, dtype)
    assert not verdict.complaints, "\n".join(verdict.complaints)
    assert verdict.judged > 0
    assert spy.plans


@pytest.mark.long
@pytest.mark.parametrize(("name", "recipe"), ALL if LONG else sample(1))
def test_architecture(name, recipe):
    passes(name, recipe, "cpu", torch.float32)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("name", "recipe"), [] if LONG else sample(4)[1:])
def test_architecture_up_to_code_generation(name, recipe):
    """Compiling C++ takes twenty seconds, all that comes before it two."""
    passes(name, recipe, "cpu", torch.float32, "lowered")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "recipe"), ALL if torch.cuda.is_available() else sample(1))
def test_architecture_on_a_gpu(name, recipe):
    if name in FAILS_ON_A_GPU:
        with pytest.raises(Exception, match=FAILS_ON_A_GPU[name]):
            compiled_step(name, "inductor", "cuda", torch.bfloat16)
        return
    passes(name, recipe, "cuda", torch.bfloat16)


@pytest.mark.parametrize("name", list(FAILS) if LONG else list(FAILS)[:1])
def test_stock_pytorch_fails(name):
    with pytest.raises(Exception, match=FAILS[name]):
        compiled_step(name, "inductor", "cpu", torch.float32)


def test_what_a_run_of_the_zoo_records(monkeypatch):
    """For docs/supported.md."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root)
    monkeypatch.syspath_prepend(root / "benchmarks")  # whose scripts import each other by name
    from tables import zoo_operators_table, zoo_table

    from .__main__ import FAMILIES, row

    assert sorted(NAMES) == sorted(name for family in FAMILIES.values() for name in family)
    found = row("torch.nn", "nn attention")
    assert found["fp8"] == found["layers"] - found["asked_for"] > 0
    assert 0 < found["kept_bytes"] < found["stock_bytes"]
    assert "mm" in found["operators"]["gemm"].split()
    _, (_, total, *_), (title, *_), (name, fp8, _, share, right, why) = zoo_table(
        {"results": [found]}
    )
    assert (title, name, right, why) == ("**torch.nn**, 1", "nn attention", "yes", "")
    assert fp8 == total == f"{found['fp8']} of {found['fp8']}"
    assert 0 < float(share) < 1
    assert ["`mm`", "1", "", ""] in zoo_operators_table({"results": [found]})


def test_there_are_enough_architectures():
    assert len(NAMES) >= 60
    assert {*FAILS, *FAILS_ON_A_GPU, *WRONG_ON_A_GPU} <= set(NAMES)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("name", sorted(NAMES) if LONG else [n for n, _ in sample(8)])
def test_architectures_run_in_eager_pytorch(name: str) -> None:
    model, inputs = make(name, "cpu", torch.float32)
    got = step(model, model, inputs)
    assert any(g is not None and g.any() for g in got.gradients.values())
