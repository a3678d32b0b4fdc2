"""Fixture for groups of ranks that train many pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ranks import Ranks, ranks


class Groups:
    """One group of ranks at a time, which is replaced when it is broken or has another size."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders, self._running, self._world = folders, ExitStack(), 0
        self._group: Ranks | None = None

    def of(self, world: int) -> Ranks:
        """Return a running group."""
        if self._group is None or self._group.broken or self._world != world:
            self.close()
            folder: Path = self._folders.mktemp("ranks")
            self._group = self._running.enter_context(ranks(folder, "cpu", world))
            self._world = world
        return self._group

    def close(self) -> None:
        """End the group."""
        self._running.close()
        self._group = None


@pytest.fixture(scope="session")
def groups(tmp_path_factory) -> Iterator[Groups]:
    """Groups of ranks for all tests of a process."""
    started = Groups(tmp_path_factory)
    yield started
    started.close()
