"""Check that docstrings, comments and documentation are plain English: `python tests/prose.py`.

The patterns are constructions that technical English rarely needs, and that make readers guess what
a sentence is about. Each path may contain at most two per 1,000 words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = ("fp8pass", "tests", "docs", "benchmarks", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LIMIT = 2.0  # per 1,000 words
RIDDLES = re.compile(
    r"\b(?:of|by|with|from|to|for|in|on|at|than) (?:what|whom|whatever)\b"  # "of what is kept"
    r"|(?:^|(?<=[.;:] ))What(?:ever)?\b(?![^.?!]*\?)"  # "What the GPU does takes a second."
    r"|\b(?:of|from|by|behind|between|within) which\b"
    r"|\b(?:that|those) (?:of|that|which|in|with|without)\b(?<!so that of)"  # "those of the others"
    r"|\b(?:is|are|was|were) none\b|\bhas none\b"
    r"|\b(?:others|another one|anew|beside|therein|whose|elsewhere|nobody|somebody)\b"
    r"|\b(?:says?|said|knows?|tells?|told)\b"  # code does not speak
    r"|\bas (?:it|they) (?:was|were|is|are)\b"
)


def texts(file: Path) -> Iterator[str]:
    """Yield the paragraphs of a page, or the docstrings and comments of a module."""
    source = file.read_text()
    if file.suffix == ".md":
        prose = re.sub(r"(?s)```.*?```|<!-- table.*?<!-- end -->|`[^`\n]*`", "", source)
        yield from re.split(r"\n\s*\n", prose)
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, documented))
    yield from (text for n in nodes if (text := ast.get_docstring(n)))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def files(path: Path) -> list[Path]:
    """Return the modules and pages of a folder, or the file itself."""
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.suffix in (".py", ".md")]


def rate(path: Path) -> tuple[float, list[str]]:
    """Return the number of riddles per 1,000 words, and the riddles in their places."""
    words, found = 0, []
    for file in files(path):
        for text in texts(file):
            words += len(re.findall(r"[A-Za-z']+", text))
            flat = re.sub(r"\s+", " ", text)
            for match in RIDDLES.finditer(flat):
                context = flat[max(match.start() - 40, 0) : match.end() + 40]
                found.append(f"{file.relative_to(ROOT)}: … {context} …")
    return 1000 * len(found) / max(words, 1), found


def main() -> int:
    """Print the riddles of each path with too many of them. Return 1 if there is such a path."""
    rates = {path: rate(ROOT / path) for path in PATHS}
    for path, (number, found) in rates.items():
        if number > LIMIT:
            print(*found, f"{path}: {number:.1f} per 1,000 words, at most {LIMIT}", sep="\n")
    return int(any(number > LIMIT for number, _ in rates.values()))


if __name__ == "__main__":
    sys.exit(main())
