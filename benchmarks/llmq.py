"""Train Qwen2.5 as in LLMQ's contest: sequences of 1,024 tokens, 524,288 tokens a step.

    python benchmarks/llmq.py                            all that is not in the results yet
    python benchmarks/llmq.py --models 7B --variants "fp8pass coat"
    python benchmarks/llmq.py --tiny --out x.json        small models, on the CPU too

Weights, gradients and optimizer states are in BF16 (FP8 states with fp8pass's AdamW), and weights
are random. As in torchtitan, layers are compiled one by one and share their code; head and loss are
one module that returns only the loss. Measured: median seconds of a micro-batch (forward, backward,
and the sum of gradients), median seconds of an optimizer step, and the memory peak. A step is
524,288 tokens in micro-batches and one optimizer step; tokens per second refer to a step.

LLMQ's figures are its own, on one H100: https://github.com/IST-DASLab/llmq, `benchmarks/H100x1.md`.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from layer import torchao, with_fp8pass
from model import OPTIMIZERS, Compile, LossOnly, new_llama, step_seconds
from report import add_result, print_rows, record_parser, resume, use_expandable_segments
from tables_models import llmq_table
from torch import Tensor

from fp8pass.demo.train import Meter, free_memory

SEQ, TOKENS_PER_STEP = 1024, 524_288
WARM_UP, TIMED, UPDATES = 3, 8, 3
VOCABULARY = 151_936
# Without this argument, transformers waits for the GPU in each forward, to find packed sequences.
NO_MASK = {"full_attention": None}


@dataclass(frozen=True)
class Size:
    """A Qwen2.5, its micro-batch, and LLMQ's tokens per second on one H100."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    batch: int
    llmq: int
    seq: int = SEQ
    vocabulary: int = VOCABULARY


MODELS = {
    "0.5B": Size(896, 4864, 24, 14, 2, True, batch=32, llmq=164_000),
    "1.5B": Size(1536, 8960, 28, 12, 2, True, batch=16, llmq=73_000),
    "3B": Size(2048, 11008, 36, 16, 2, True, batch=16, llmq=40_400),
    "7B": Size(3584, 18944, 28, 28, 4, False, batch=16, llmq=19_194),
}
TINY = {
    name: replace(size, hidden=64, ffn=128, layers=2, heads=4, batch=2, seq=32, vocabulary=256)
    for name, size in MODELS.items()
}
VARIANTS: dict[str, tuple[Compile, str]] = {
    "bf16 compile": (torch.compile, "AdamW"),  # type: ignore[dict-item]
    "torchao tensorwise": (torchao("tensorwise"), "AdamW"),
    "fp8pass coat": (with_fp8pass(), "fp8pass AdamW"),
}


@dataclass
class Result:
    """One variant of one model; see the module's docstring."""

    model: str
    variant: str
    micro_batch_s: float | None = None
    update_s: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    error: str | None = None


def measure(size: Size, variant: str, device: torch.device) -> dict[str, Any]:
    """Train one variant from scratch. Return the fields of a `Result`."""
    torch.manual_seed(0)
    compile_layer, optimizer = VARIANTS[variant]
    # torchao converts layers only: its head stays in BF16, as fp8pass's head does.
    compile_head: Compile = torch.compile if "torchao" in variant else compile_layer  # type: ignore[assignment]
    qwen = new_llama(size, device, transformers.Qwen2Config, tie_word_embeddings=size.tied)
    model = LossOnly(qwen, compile_layer, compile_head)
    batches = torch.randint(size.vocabulary, (2, size.batch, size.seq), device=device)
    with OPTIMIZERS[optimizer](model) as update:
        return train(model, update, batches)


def train(model: Any, optimizer: torch.optim.Optimizer, batches: Tensor) -> dict[str, Any]:
    """Time micro-batches and optimizer steps. Return speed, memory peak and the last loss."""
    device, losses = batches.device, [torch.zeros(())]

    def micro_batch() -> None:
        ids = batches[len(losses) % len(batches)]
        loss = model(input_ids=ids, labels=ids, use_cache=False, attention_mask=NO_MASK).loss
        loss.backward()
        losses.append(loss.detach().clone())

    step_seconds(micro_batch, 1, device)
    optimizer.step()  # compiles, and allocates states
    step_seconds(micro_batch, WARM_UP, device)
    meter = Meter(device)
    micro = statistics.median(step_seconds(micro_batch, TIMED, device))
    update = statistics.median(step_seconds(optimizer.step, UPDATES, device))
    tokens = batches[0].numel()
    return {
        "micro_batch_s": micro,
        "update_s": update,
        "tokens_per_second": TOKENS_PER_STEP / (micro * TOKENS_PER_STEP / tokens + update),
        "peak_bytes": meter.read()[1],
        "loss": losses[-1].item(),
    }


def attempt(name: str, size: Size, variant: str, device: torch.device) -> Result:
    """Measure one variant and free the memory. If it fails, the result has the error."""
    try:
        return Result(name, variant, **measure(size, variant, device))
    except Exception as error:  # out of memory or a missing package: the next variants still run
        return Result(name, variant, error=f"{type(error).__name__}: {error}")
    finally:
        free_memory()


def main() -> None:
    """Run the command line."""
    parser = record_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    args = parser.parse_args()
    path = args.out or Path(__file__).parent / "results/llmq.json"
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not args.tiny:
        sys.exit("These models need an NVIDIA GPU; --tiny runs on the CPU.")
    sizes = TINY if args.tiny else MODELS
    settings = {
        "models": {name: asdict(size) for name, size in sizes.items()},
        "warm_up": WARM_UP,
        "timed": TIMED,
    }
    record = resume(path, settings, again=args.again)
    done = {(r["model"], r["variant"]) for r in record["results"] if not r["error"]}
    for name, variant in [(n, v) for n in args.models for v in args.variants]:
        if (name, variant) not in done:
            result = attempt(name, sizes[name], variant, device)
            add_result(path, record, asdict(result), ("model", "variant"))
    print_rows("Qwen2.5, LLMQ's contest", llmq_table(record))


if __name__ == "__main__":
    main()
