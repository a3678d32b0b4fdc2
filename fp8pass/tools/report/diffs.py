"""The changes of a pass, module by module; equal changes of repeated layers are shown once."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from fp8pass.passes.runner import MODULE_COMMENT, PassRecord

# Numbers of layers in paths, and numbers that FX appends to names.
_NUMBERS = re.compile(r"_\d+\b|(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_CONTEXT = 1  # unchanged lines around a change


@dataclass(frozen=True)
class ModuleDiff:
    """The change of one module's code, equal up to numbers in `count` modules."""

    module: str
    count: int
    text: str


def module_diffs(record: PassRecord) -> list[ModuleDiff]:
    """The changes of one pass, in the order of the graph."""
    before, after = code_by_module(record.before), code_by_module(record.after)
    same: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module in dict.fromkeys((*before, *after)):
        old, new = before.get(module, []), after.get(module, [])
        if old != new:
            text = "\n".join(_unified(old, new))
            same.setdefault((_NUMBERS.sub("", module), _NUMBERS.sub("", text)), []).append(
                (module, text)
            )
    return [ModuleDiff(found[0][0], len(found), found[0][1]) for found in same.values()]


def code_by_module(code: str) -> dict[str, list[str]]:
    """The lines of a graph's code by the module that they come from, '' for none."""
    modules: dict[str, list[str]] = {}
    lines = modules.setdefault("", [])
    for line in code.splitlines():
        comment = line.strip()
        if comment.startswith(MODULE_COMMENT.strip()):
            lines = modules.setdefault(comment.removeprefix(MODULE_COMMENT.strip()).strip(), [])
        elif comment:
            lines.append(comment)
    return modules


def _unified(old: list[str], new: list[str]) -> list[str]:
    _, _, *lines = difflib.unified_diff(old, new, lineterm="", n=_CONTEXT)
    return lines
