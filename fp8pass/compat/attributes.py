"""Set attributes of PyTorch's objects for a limited time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Attribute = tuple[Any, str, Any]  # (owner, name, value)


@contextmanager
def set_attributes(changes: Sequence[Attribute]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
