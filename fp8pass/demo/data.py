"""The demo's text, as batches of bytes."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fp8pass.demo.sizes import Size
from fp8pass.tools.cli.parsing import UsageError

MAX_TEXT_BYTES = 4 << 20
HELD_OUT_SHARE = 16  # 1/16 of the bytes is held out from training
HELD_OUT_BATCHES = 16
# These folders contain tables, tests or other packages.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "encodings", "lib2to3", "idlelib")
)


def read_text(path: Path | None) -> bytes:
    """Return at most MAX_TEXT_BYTES of text from a file, a folder or the standard library.

    Raises:
        UsageError: the path does not exist.
    """
    if path and not path.exists():
        raise UsageError(f"--data {path}: no such file or folder.")
    text = b""
    for file in source_files(path):
        with file.open("rb") as stream:
            content = stream.read(MAX_TEXT_BYTES - len(text))
        if b"\0" not in content:
            text += content
        if len(text) == MAX_TEXT_BYTES:
            break
    return text


def source_files(path: Path | None) -> list[Path]:
    """List the files to read, in a random order that is the same in every call."""
    if path and path.is_file():
        return [path]
    root = path or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*" if path else "*.py") if p.is_file())
    if not path:
        files = [p for p in files if SKIPPED_FOLDERS.isdisjoint(p.relative_to(root).parts)]
    # Training text and held-out text must come from the same distribution.
    random.Random(0).shuffle(files)
    return files


@dataclass(frozen=True)
class Data:
    """Training and held-out text, each as uint8 [N] on the device that trains the model."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: bytes, size: Size, device: torch.device) -> Data:
        """Split a text. The last part is held out from training.

        Raises:
            UsageError: the text is too short.
        """
        held_out = len(text) // HELD_OUT_SHARE
        if held_out <= size.seq:
            raise UsageError(
                f"Found {len(text):,} bytes of text, too few for sequences of {size.seq} bytes: "
                f"pass at least {HELD_OUT_SHARE * (size.seq + 1):,} bytes with --data PATH."
            )
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        return cls(tokens[:-held_out], tokens[-held_out:])

    def train_batches(self, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return random batches. A seed gives the same batches on all devices."""
        generator = torch.Generator().manual_seed(seed)
        count = len(self.train) - size.seq
        starts = torch.randint(count, (size.steps, size.batch), generator=generator)
        return (_take_windows(self.train, s, size.seq) for s in starts.to(self.train.device))

    def held_out_batches(
        self, size: Size, count: int = HELD_OUT_BATCHES
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return batches of sequences that are spread evenly over the held-out bytes."""
        last = len(self.held_out) - size.seq - 1
        # FP32 cannot represent all integers above 2^24.
        starts = torch.linspace(0, last, count * size.batch, dtype=torch.float64).long()
        batches = starts.to(self.held_out.device).split(size.batch)
        return (_take_windows(self.held_out, s, size.seq) for s in batches)


def _take_windows(tokens: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets that begin at `starts`, each int64 [B, seq]."""
    index = starts[:, None] + torch.arange(seq, device=starts.device)
    return tokens[index].long(), tokens[index + 1].long()
