"""Build the README for PyPI. All other metadata is in pyproject.toml.

PyPI does not host the repository's files. If pyproject.toml has the address of the repository
(`Source` in [project.urls]), links to files lead to the repository, at the tag of the version.
Otherwise they become plain text.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
# The target of a link to a file: not an address and not a heading of the page.
_FILE = r"\((?![a-z]+:|#)([^)]+)\)"


def for_pypi(text: str, source: str | None, tag: str) -> str:
    """Make links to files in `text` absolute, or plain text if `source` is None."""
    image, link = rf"!\[([^\]]*)\]{_FILE}", rf"\[([^\]]*|!\[[^\]]*\]\([^)]*\))\]{_FILE}"
    if source:
        text = re.sub(image, rf"![\1]({source}/raw/{tag}/\2)", text)
        return re.sub(link, rf"[\1]({source}/blob/{tag}/\2)", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(link, r"\1", re.sub(image, "", text)))


def _search(pattern: str, file: str) -> str | None:
    match = re.search(pattern, (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].rstrip("/") if match else None


if __name__ == "__main__":
    setup(
        long_description=for_pypi(
            (HERE / "README.md").read_text(encoding="utf-8"),
            _search(r'^Source = "(.*)"', "pyproject.toml"),
            f"v{_search(r'^__version__ = .(.*).$', 'fp8pass/__init__.py')}",
        ),
        long_description_content_type="text/markdown",
    )
