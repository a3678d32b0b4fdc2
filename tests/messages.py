"""Every sentence that fp8pass may print, from its source; `python -m tests.messages` lists them.

docs/messages.md has the texts of errors, warnings, logs and help, and all that reads like
words: reasons, tables and conclusions. Parts that are filled in are shown as {…}.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LISTED = ROOT / "docs" / "messages.md"

KINDS = {
    "error": "Errors",
    "warning": "Warnings",
    "log": "Logs",
    "help": "Help of the command line",
    "text": "Reasons, tables and conclusions",
}
INTRODUCTION = """\
# What fp8pass prints

Every sentence, by file; {…} is filled in. Written by `python -m tests.messages` from the source, so
that all of them can be read in one place. A new one says in plain English what happened and, where
something can be done, what to do.
"""

# Modules whose strings are the text of programs: Triton's and C++'s.
_CODE = re.compile(
    r"codegen/(kernels/\w+_source|kernels/prelude|kernels/nibbles|coding|masking)\.py"
)
# At least three words in a row, as in a sentence or a reason.
_WORDS = re.compile(r"[A-Za-z'’-]+[,:;]? [A-Za-z'’`{…-]+[,:;]? [A-Za-z'’`{…}-]+")
# Programs and schemas of operators within other modules.
_PROGRAM = re.compile(r"\btl\.|\.reg |@triton|-> |SymInt|^\s*#")
_LOGS = {"debug": "log", "info": "log", "warning": "warning", "error": "warning"}


@dataclass(frozen=True)
class Message:
    """A text of the source."""

    kind: str
    file: str
    text: str


def messages() -> list[Message]:
    """All messages of the package, in the order of the source."""
    found: dict[Message, None] = {}
    for path in sorted((ROOT / "fp8pass").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if not _CODE.search(file):
            tree = ast.parse(path.read_text())
            found.update(dict.fromkeys(Message(k, file, t) for k, t in _of(tree, "text")))
    return list(found)


def _of(node: ast.AST, kind: str) -> Iterator[tuple[str, str]]:
    """Kind and text of the messages below a node."""
    if (text := _text(node)) is not None:
        words = " " in text if kind in ("error", "help") else _WORDS.search(text)
        if words and not _PROGRAM.search(text):
            yield kind, text
        # What is filled in may be words, too.
        for inner in _filled_in(node):
            yield from _of(inner, "text")
        return
    for child in _children(node):
        yield from _of(child, _kind(child, kind))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without docstrings, annotations and `assert`."""
    if isinstance(node, ast.Assert):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_docstring = isinstance(child, ast.Expr) and _text(child.value) is not None
            if isinstance(child, ast.AST) and not is_docstring:
                yield child


def _kind(node: ast.AST, of_parent: str) -> str:
    """The kind of message that a node's strings are."""
    if isinstance(node, ast.Raise):
        return "error"
    if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
        return "help"
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if owner == "log" and name in _LOGS:
            return _LOGS[name]
        if (owner, name) == ("warnings", "warn"):
            return "warning"
        called = ast.unparse(node.func)
        if re.search(r"(Error|Failure|Exception)$", called):
            return "error"
    if isinstance(node, ast.Lambda | ast.FunctionDef | ast.ClassDef):
        return "text"
    return of_parent


def _text(node: ast.AST | None) -> str | None:
    """The text of a string expression, filled-in parts as {…}; None if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(p.value) if isinstance(p, ast.Constant) else "{…}"  # type: ignore[attr-defined]
            for p in node.values
        )
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        if left is None and right is None:
            return None
        return ("{…}" if left is None else left) + ("{…}" if right is None else right)
    return None


def _filled_in(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions that are filled into a text."""
    if isinstance(node, ast.JoinedStr):
        yield from (v.value for v in node.values if isinstance(v, ast.FormattedValue))
    elif isinstance(node, ast.BinOp):
        for side in (node.left, node.right):
            if _text(side) is None:
                yield side
            else:
                yield from _filled_in(side)


def page() -> str:
    """The text of docs/messages.md."""
    found = messages()
    lines = [INTRODUCTION]
    for kind, title in KINDS.items():
        lines.append(f"## {title}\n")
        for file in dict.fromkeys(m.file for m in found if m.kind == kind):
            lines.append(f"`{file}`\n")
            texts = (m.text for m in found if (m.kind, m.file) == (kind, file))
            lines += [f"- {_as_markdown(text)}" for text in texts]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _as_markdown(text: str) -> str:
    """A text on one line, as it is printed."""
    line = " ".join(text.split())
    return re.sub(r"([\\*_<>|#])", r"\\\1", line)


if __name__ == "__main__":
    LISTED.write_text(page())
    print(f"{len(messages())} messages in {LISTED.relative_to(ROOT)}")
