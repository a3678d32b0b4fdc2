"""Transformers' Trainer, with the backend selected by name.

python examples/trainer.py
torchrun --nproc_per_node 8 examples/trainer.py     # DDP
"""

from __future__ import annotations

from common import BATCH, CUDA, RATE, STEPS, llama, rows
from transformers import Trainer, TrainingArguments

import fp8pass.integrations.accelerate  # noqa: F401, makes accelerate accept "fp8pass"


def main() -> list[float]:
    """Train, and return the losses."""
    arguments = TrainingArguments(
        "trainer-output",
        torch_compile=True,
        torch_compile_backend="fp8pass",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        bf16=CUDA,
        use_cpu=not CUDA,
        logging_steps=max(1, STEPS // 20),
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(llama(), arguments, train_dataset=rows())
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
