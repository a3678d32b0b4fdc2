"""The line of the user's model that an operator comes from."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in \S+\n\s*(?P<code>[^\n]*)')
_TORCH = str(Path(torch.__file__).parent)


def source_line(node: fx.Node) -> str:
    """The line, as in `model.py:54  q = self.q_proj(x)`; '' if unknown.

    It is the innermost line outside of PyTorch: for `nn.RMSNorm` the line that calls it.
    """
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    outside = [f for f in frames if not f["file"].startswith(_TORCH)]
    if not frames:
        return ""
    frame = (outside or frames)[-1]
    return f"{_short(frame['file'])}:{frame['line']}  {frame['code'].strip()}"


def _short(file: str) -> str:
    """A path relative to the folder of installed packages, or to the working directory."""
    path = Path(file)
    if "site-packages" in path.parts:
        return file.rsplit("site-packages/", 1)[-1]
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
