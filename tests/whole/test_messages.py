"""docs/messages.md lists every sentence that the package may print."""

from __future__ import annotations

from messages import LISTED, messages, page


def test_the_list_is_up_to_date():
    assert LISTED.read_text() == page(), "write it again: python -m tests.messages"


def test_kinds_and_parts_that_are_filled_in():
    found = {(m.kind, m.text) for m in messages()}
    assert ("error", "{…} must be a bool, True or False, got {…}.") in found
    assert ("help", "print JSON instead of tables") in found
    assert ("text", "it is small") in found
    assert any(kind == "warning" and "torch.utils.checkpoint" in text for kind, text in found)
    assert not any("tl." in text or "Attributes:" in text for _, text in found)
