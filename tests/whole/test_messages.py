"""docs/messages.md lists every sentence that the package may print."""

from __future__ import annotations

import re

import pytest
from messages import LISTED, messages, page

from fp8pass.codegen.kernels.limits import UnsupportedProgram
from fp8pass.codegen.program.verify import MalformedProgram
from fp8pass.graph.spec import MalformedGraph


def test_the_list_is_up_to_date():
    assert LISTED.read_text() == page(), "write it again: python -m tests.messages"


def test_kinds_and_parts_that_are_filled_in():
    found = {(m.kind, m.text) for m in messages()}
    assert ("error", "{…} must be a bool, True or False, got {…}.") in found
    assert ("help", "print JSON instead of tables") in found
    assert ("text", "it is small") in found
    # A value that was refused is not said to be what it should have been.
    assert not [t for kind, t in found if kind == "error" and re.search(r"^\S+ is an? .*, got", t)]
    assert not any(re.search("derivation|one of both", text) for _, text in found)
    assert any(kind == "warning" and "torch.utils.checkpoint" in text for kind, text in found)
    assert not any("tl." in text or "Attributes:" in text for _, text in found)


@pytest.mark.parametrize("error", [MalformedGraph, MalformedProgram, UnsupportedProgram])
def test_errors_that_no_user_can_cause_say_what_to_report(error):
    said = str(error("store of y: takes one value"))
    assert said.startswith("store of y: takes one value. This is a bug of fp8pass: please report")
