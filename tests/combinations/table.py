"""Write the table of docs/combinations.md from the table of features.

python tests/combinations/table.py
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from features import FEATURES, REFUSED, Feature, pairs, ranks_of

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
RAISES = {
    "fp8pass": "fp8pass raises an error",
    "PyTorch": "impossible in PyTorch, too",
}


def filled(text: str) -> str:
    """Return the page with its table and numbers made again."""
    for name, body in (("pairs", numbers()), ("combinations", table())):
        block = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text = re.sub(block, lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
    return text


def numbers() -> str:
    """Return how many pairs are trained, and how many are refused."""
    names = {(a.name, b.name): ranks_of((a, b)) for a, b in pairs()}
    worlds = Counter(world for pair, world in names.items() if pair not in REFUSED)
    refused = Counter(refused.by for refused in REFUSED.values())
    rows = [
        ("pairs", len(names)),
        ("trained in one process", worlds[1]),
        *((f"trained on {world} ranks", worlds[world]) for world in sorted(worlds)[1:]),
        *((f"cannot be combined: {RAISES[by]}", count) for by, count in sorted(refused.items())),
    ]
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {count} |" for name, count in rows)


def table() -> str:
    """Return a row for each feature."""
    rows = ["| feature | trained with | cannot be combined with |", "| --- | --- | --- |"]
    return "\n".join([*rows, *(_row(feature) for feature in FEATURES)])


def _row(feature: Feature) -> str:
    found = [(a.name, b.name) for a, b in pairs() if feature in (a, b)]
    refused = [
        f"**{b if a == feature.name else a}**: {REFUSED[a, b].why} ({RAISES[REFUSED[a, b].by]})"
        for a, b in found
        if (a, b) in REFUSED
    ]
    return f"| {feature.name} | {len(found) - len(refused)} | {'<br>'.join(refused)} |"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
