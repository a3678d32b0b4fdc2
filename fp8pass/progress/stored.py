"""Store the messages about each graph in files, in the folder of Inductor's caches.

When PyTorch takes a graph from its caches, fp8pass's passes do not run, and there is no plan to
report. Therefore the messages of the original compilation are stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx, nn

from fp8pass import compat, hardware
from fp8pass.compilation import describe_config, match_names, source_hash
from fp8pass.config import Config
from fp8pass.passes.runner import disabled_passes


@dataclass(frozen=True)
class StoredMessages:
    """The file with the messages about one graph. Failures to read or write the file are ignored.

    Attributes:
        key: hash of the graph, its inputs, the configuration and the source of fp8pass.
        path: the file, or None if compiled graphs are not cached.
    """

    key: str
    path: Path | None

    @classmethod
    def find(cls, gm: fx.GraphModule, config: Config) -> StoredMessages:
        """Return the file for the Dynamo graph `gm`. The file may not exist yet."""
        values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        text = repr(
            (
                [part.code for part in gm.modules() if isinstance(part, fx.GraphModule)],
                [_describe(x) for x in values],
                torch.is_grad_enabled(),
                [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
                describe_config(config),
                match_names(gm, config),
                disabled_passes(),
                source_hash(),
            )
        )
        key = hashlib.sha256(text.encode()).hexdigest()
        folder = compat.cache_folder()
        return cls(key, Path(folder, "fp8pass", f"{key}.json") if folder else None)

    def read(self) -> dict[str, str]:
        """Return the stored messages, by kind; {} without a file."""
        try:
            return dict(json.loads(self.path.read_text())) if self.path else {}
        except (OSError, ValueError, TypeError):
            return {}

    def write(self, messages: dict[str, str]) -> None:
        """Store messages, if there are any. Other processes never read an incomplete file."""
        if not self.path or not messages:
            return
        part = self.path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(messages))
            os.replace(part, self.path)


def _describe(x: object) -> str:
    """Return the properties of a graph input that messages depend on."""
    if not isinstance(x, torch.Tensor):
        return str(x)
    is_parameter = isinstance(x, nn.Parameter)
    device = f"{x.device} {hardware.name_of(x.device)}"
    return f"{x.dtype} {tuple(x.shape)} {device} {x.requires_grad} {is_parameter}"
