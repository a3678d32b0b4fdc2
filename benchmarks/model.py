"""Training speed and peak memory of a Hugging Face Llama of 1.2B parameters, against the peers.

    python benchmarks/model.py            needs CUDA, transformers and, for the peer, torchao

Every variant trains the same initial weights on one batch with `torch.optim.AdamW(fused=True)`,
weights and states in BF16. The first four steps (compilation, autotuning) are not timed.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from layer import Variant, torchao, with_fp8pass
from report import environment, print_table, write_json

BATCH, SEQ, VOCABULARY = 8, 2048, 50304
WARM_UP, TIMED = 4, 8
VARIANTS: dict[str, Variant] = {
    "bf16 compile": lambda m: torch.compile(m),  # type: ignore[dict-item, return-value]
    "torchao tensorwise": torchao("tensorwise"),
    "fp8pass coat": with_fp8pass(),
}


@dataclass
class Result:
    """One variant; `loss` is that of the last step."""

    variant: str
    first_step_s: float
    tokens_per_second: float
    peak_bytes: int
    loss: float


def measure(name: str, compile_model: Variant) -> Result:
    """Train one variant from scratch."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQ,
    )
    llama: Any = transformers.LlamaForCausalLM(config)
    model = compile_model(llama.to("cuda", torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(VOCABULARY, (BATCH, SEQ), device="cuda")

    def steps(count: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(count):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        final = loss.item()  # waits for the GPU
        return time.perf_counter() - start, final

    first, _ = steps(1)
    steps(WARM_UP - 1)
    torch.cuda.reset_peak_memory_stats()
    seconds, loss = steps(TIMED)
    speed = BATCH * SEQ * TIMED / seconds
    return Result(name, first, speed, torch.cuda.max_memory_allocated(), loss)


def main() -> None:
    """Measure every variant, one after the other."""
    results = []
    for name, compile_model in VARIANTS.items():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        results.append(measure(name, compile_model))
        print(results[-1], file=sys.stderr, flush=True)
    rows = [{k: str(v) for k, v in asdict(r).items()} for r in results]
    print_table("Llama 1.2B, training", rows)
    out = Path(__file__).parent / "results/model.json"
    write_json(out, {**environment(), "results": [asdict(r) for r in results]})


if __name__ == "__main__":
    main()
