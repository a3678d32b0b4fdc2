"""Supervised fine-tuning of LoRA matrices with TRL and PEFT: `python examples/sft_lora.py`.

The frozen weights run in FP8, too, and so do LoRA matrices if their rank is a multiple of 16.
"""

from __future__ import annotations

from common import BATCH, CUDA, LENGTH, RATE, STEPS, llama, rows
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fp8pass.integrations.accelerate  # noqa: F401, makes accelerate accept "fp8pass"


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes. It is not used, because `rows` returns token ids."""
    words = {f"<{byte}>": byte for byte in range(256)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")),
        pad_token="<0>",
        eos_token="<10>",
    )


def main() -> list[float]:
    """Train, and return the losses."""
    arguments = SFTConfig(
        "sft-output",
        torch_compile=True,
        torch_compile_backend="fp8pass",
        gradient_checkpointing=False,  # on by default; no saved tensor would be left to quantize
        max_steps=STEPS,
        max_length=LENGTH,
        per_device_train_batch_size=BATCH,
        learning_rate=10 * RATE,
        bf16=CUDA,
        use_cpu=not CUDA,
        logging_steps=max(1, STEPS // 20),
        save_strategy="no",
        report_to=[],
    )
    trainer = SFTTrainer(
        llama(),
        arguments,
        train_dataset=Dataset.from_list([{"input_ids": r["input_ids"].tolist()} for r in rows()]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
