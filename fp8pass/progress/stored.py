"""Messages about a graph, stored beside PyTorch's caches.

PyTorch takes a cached graph without running our passes, so that there is no plan to report.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from fp8pass import compat
from fp8pass.compilation import source_hash
from fp8pass.config import Config


@dataclass(frozen=True)
class StoredMessages:
    """The file with the messages about one graph. Failures to read or write it are ignored.

    Attributes:
        key: hash of the graph, its inputs, the configuration and the source of fp8pass.
        path: the file, or None if compiled graphs are not cached.
    """

    key: str
    path: Path | None

    @classmethod
    def find(cls, gm: fx.GraphModule, config: Config) -> StoredMessages:
        """Return the messages about a graph of Dynamo."""
        values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        inputs = [(str(getattr(x, "dtype", "")), str(getattr(x, "shape", x))) for x in values]
        text = repr((gm.code, inputs, config, source_hash()))
        key = hashlib.sha256(text.encode()).hexdigest()
        folder = compat.cache_folder()
        return cls(key, Path(folder, "fp8pass", f"{key}.json") if folder else None)

    def read(self) -> dict[str, str]:
        """Return the messages, by kind."""
        try:
            return dict(json.loads(self.path.read_text())) if self.path else {}
        except (OSError, ValueError):
            return {}

    def write(self, messages: dict[str, str]) -> None:
        """Store messages. Other processes never see a part of the file."""
        if not self.path:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(messages, file)
            os.replace(file.name, self.path)
