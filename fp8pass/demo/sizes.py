"""The sizes of the demo's model, its batches and its training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    batch: int
    steps: int
    peak_lr: float

    @property
    def tokens(self) -> int:
        return self.batch * self.seq


SIZES = {
    "tiny": Size(128, 1, 2, 1, 256, 64, 8, steps=40, peak_lr=1e-2),
    "small": Size(256, 2, 4, 2, 768, 128, 8, steps=200, peak_lr=2e-3),
    "large": Size(2048, 8, 16, 8, 5632, 2048, 8, steps=150, peak_lr=3e-4),
}
