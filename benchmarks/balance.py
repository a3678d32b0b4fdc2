"""How evenly optimizer states are shared out: whole tensors (FP8-LM 2.3) against FSDP2's rows.

    python benchmarks/balance.py

FP8-LM's Algorithm 1 gives whole tensors to ranks, since a part of a tensor would need the scale of
the whole: the largest first, each to the rank that has least. `ZeroRedundancyOptimizer` of PyTorch
does the same. fp8pass has scales within rows, so that FSDP2's shards need no other ranks'. A rank's
share is that of the elements of all parameters; 1 is perfect balance.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from report import environment, print_rows, write_json
from tables_models import balance_table

RANKS = (8, 64, 256, 1024)
LLAMAS: dict[str, dict[str, Any]] = {
    "Llama 1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 50304,
    },
    "Llama-2-7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "Llama-2-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000,
    },
}  # fmt: skip


def shapes(config: dict[str, Any]) -> list[torch.Size]:
    """Of all parameters of a Llama."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    return [p.shape for p in model.parameters()]


def whole_tensors(sizes: Sequence[int], ranks: int) -> list[int]:
    """Elements of each rank by FP8-LM's Algorithm 1."""
    loads = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + size, rank))
    return [load for load, _ in sorted(loads, key=lambda each: each[1])]


def rows(shapes: Sequence[Sequence[int]], ranks: int) -> int:
    """Elements of the rank that has most where the rows of each parameter are shared out."""
    return sum(-(-first // ranks) * torch.Size(rest).numel() for first, *rest in shapes)


def measure() -> list[dict[str, Any]]:
    """The share of the rank that has most, times the number of ranks."""
    results = []
    for name, config in LLAMAS.items():
        found = shapes(config)
        total = sum(x.numel() for x in found)
        for ranks in RANKS:
            largest = max(whole_tensors([x.numel() for x in found], ranks))
            results.append(
                {
                    "model": name,
                    "ranks": ranks,
                    "whole tensors": largest * ranks / total,
                    "rows": rows(found, ranks) * ranks / total,
                }
            )
    return results


def main() -> None:
    """Command line."""
    record = {**environment(), "results": measure()}
    write_json(Path(__file__).parent / "results/balance.json", record)
    print_rows("optimizer states of the rank that has most", balance_table(record))


if __name__ == "__main__":
    main()
