"""List the code that a pass changes, by module. Repeated layers with equal changes are merged."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from fp8pass.passes.runner import MODULE_COMMENT, PassRecord

# Numbers of nodes and layers, which may differ between equal changes.
_NUMBERS = re.compile(r"_\d+\b|(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
_CONTEXT = 1  # unchanged lines around a change


@dataclass(frozen=True)
class ModuleDiff:
    """The change of a pass in `count` modules. Only numbers differ between these modules."""

    module: str
    count: int
    text: str


def diff_modules(record: PassRecord) -> list[ModuleDiff]:
    """Return the changes of a pass, in the order of the graph."""
    before, after = split_code(record.before), split_code(record.after)
    same: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module in dict.fromkeys((*before, *after)):
        old, new = before.get(module, []), after.get(module, [])
        if old != new:
            _, _, *changes = difflib.unified_diff(old, new, lineterm="", n=_CONTEXT)
            text = "\n".join(changes)
            key = _NUMBERS.sub("", module), _NUMBERS.sub("", text)
            same.setdefault(key, []).append((module, text))
    return [ModuleDiff(found[0][0], len(found), found[0][1]) for found in same.values()]


def split_code(code: str) -> dict[str, list[str]]:
    """Map each module to its lines of code. The key '' has the lines without a module."""
    modules: dict[str, list[str]] = {}
    lines = modules.setdefault("", [])
    for line in code.splitlines():
        comment = line.strip()
        if comment.startswith(MODULE_COMMENT.strip()):
            lines = modules.setdefault(comment.removeprefix(MODULE_COMMENT.strip()).strip(), [])
        elif comment:
            lines.append(comment)
    return modules
