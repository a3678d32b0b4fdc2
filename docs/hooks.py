"""What mkdocs does besides: pages of the repository's top become pages of the site.

Links in Markdown say where files are in the repository, so that they work on GitHub. Here those to
pages of the top, and from there to docs/, lead to the pages of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

TOP = Path(__file__).parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the top."""
    for page in PAGES:
        files.append(File.generated(config, page, abs_src_path=str(TOP / page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as they are on the site."""
    if page.file.src_uri in PAGES:
        return markdown.replace("](docs/", "](")
    return re.sub(rf"\]\(\.\./({'|'.join(PAGES)})", r"](\1", markdown)
