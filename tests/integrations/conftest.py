"""Fixtures that run compiled graphs op by op and reset the state of accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from fp8pass import compat
from fp8pass.compile_log import CompileLog
from fp8pass.hooks import CompiledGraph
from fp8pass.plan import Plan


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Run graphs op by op instead of compiling them with Inductor. Return their plans."""
    found: list[Plan] = []

    def note(self: CompileLog, compiled: CompiledGraph) -> None:
        if not compiled.plan.inference:
            found.append(compiled.plan)

    monkeypatch.setattr(CompileLog, "after_passes", note)
    monkeypatch.setattr(compat, "compile_fx_inner", lambda gm, inputs, **kw: compat.interpret(gm))
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    _forget()
    yield found
    _forget()


@pytest.fixture
def forget_accelerate() -> Callable[[], None]:
    """A function that resets the state of accelerate."""
    return _forget


def _forget() -> None:
    """Reset the state of accelerate, which otherwise the first `Accelerator` of a process sets."""
    if find_spec("accelerate"):
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
