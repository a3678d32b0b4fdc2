"""Lightning, with a monitor that writes the health of quantized tensors to a CSV file.

python examples/lightning_module.py
"""

from __future__ import annotations

import lightning
import torch
from common import BATCH, RATE, llama, rows
from torch import Tensor

import fp8pass


class Module(lightning.LightningModule):
    """A model that is compiled in place, so that the keys of checkpoints do not change."""

    def __init__(self, monitor: fp8pass.Monitor) -> None:
        super().__init__()
        self.model = llama()
        self.model.compile(backend=fp8pass.backend(fp8pass.Config(), monitor=monitor))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fp8pass.optim.AdamW(self.parameters(), lr=RATE)


def main() -> list[float]:
    """Train, and return the losses."""
    monitor = fp8pass.Monitor(every=100, csv="health.csv")
    module = Module(monitor)
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH, drop_last=True)
    trainer = lightning.Trainer(
        max_epochs=1, callbacks=[monitor.lightning()], logger=False, enable_checkpointing=False
    )
    trainer.fit(module, loader)
    return module.losses


if __name__ == "__main__":
    print(main())
