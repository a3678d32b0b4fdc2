"""A custom training loop with Hugging Face accelerate and fp8pass's optimizer.

python examples/accelerate_loop.py
accelerate launch examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import BATCH, RATE, llama, rows

import fp8pass
import fp8pass.integrations.accelerate  # makes accelerate accept "fp8pass"


def main() -> list[float]:
    """Train, and return the losses."""
    accelerator = Accelerator(dynamo_backend="fp8pass")
    model = llama()
    optimizer = fp8pass.optim.AdamW(model.parameters(), lr=RATE)
    loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
