"""The README as PyPI shows it; all else is in pyproject.toml.

PyPI has none of the repository's files. Their links lead to the repository, at the tag of the
version, where pyproject.toml has its address, `Source` in [project.urls]; without one they are
plain text.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
# A target in the repository: neither an address nor a heading of the page.
_FILE = r"\((?![a-z]+:|#)([^)]+)\)"


def for_pypi(text: str, source: str | None, tag: str) -> str:
    """`text` with its links to files as absolute ones; without a `source` as plain text."""
    image, link = rf"!\[([^\]]*)\]{_FILE}", rf"\[([^\]]*|!\[[^\]]*\]\([^)]*\))\]{_FILE}"
    if source:
        text = re.sub(image, rf"![\1]({source}/raw/{tag}/\2)", text)
        return re.sub(link, rf"[\1]({source}/blob/{tag}/\2)", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(link, r"\1", re.sub(image, "", text)))


def _found(pattern: str, file: str) -> str | None:
    match = re.search(pattern, (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].rstrip("/") if match else None


if __name__ == "__main__":
    setup(
        long_description=for_pypi(
            (HERE / "README.md").read_text(encoding="utf-8"),
            _found(r'^Source = "(.*)"', "pyproject.toml"),
            f"v{_found(r'^__version__ = .(.*).$', 'fp8pass/__init__.py')}",
        ),
        long_description_content_type="text/markdown",
    )
