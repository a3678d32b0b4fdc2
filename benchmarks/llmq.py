"""Train Qwen2.5 and Llama 3 at the sizes of published measurements on one H100.

    python benchmarks/llmq.py                            all runs that are not in the results yet
    python benchmarks/llmq.py --models Qwen2.5-7B --variants "fp8pass coat"
    python benchmarks/llmq.py --tiny --out x.json        small models, on the CPU too

Weights, gradients and optimizer states are in BF16 (FP8 states with fp8pass's AdamW), and weights
are random. As in torchtitan, layers are compiled one by one and share their code; head and loss are
one module that returns only the loss. Measured: median seconds of a micro-batch (forward, backward,
and the sum of gradients), median seconds of an optimizer step, and the memory peak. A step consists
of micro-batches and one optimizer step; tokens per second refer to a step.

Qwen2.5 has sequences of 1,024 tokens and 524,288 tokens a step, as in LLMQ's measurements
(https://github.com/IST-DASLab/llmq, `benchmarks/H100x1.md`). Llama 3 has sequences of 8,192 tokens
and 16 micro-batches, as in the measurement of Megatron-Bridge 25.11.
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

WARM_UP, TIMED, UPDATES = 3, 8, 3
# Without this mask, transformers waits for the GPU in each forward, to find packed sequences. The
# Llama of transformers does not accept such a mask.
NO_MASK = {"full_attention": None}


@dataclass(frozen=True)
class Size:
    """A model, its micro-batch, and the published tokens per second on one H100."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    batch: int
    published: int
    seq: int = 1024
    vocabulary: int = 151_936
    tokens_per_step: int = 524_288


MODELS = {
    "Qwen2.5-0.5B": Size(896, 4864, 24, 14, 2, True, batch=32, published=164_000),
    "Qwen2.5-1.5B": Size(1536, 8960, 28, 12, 2, True, batch=16, published=73_000),
    "Qwen2.5-3B": Size(2048, 11008, 36, 16, 2, True, batch=16, published=40_400),
    "Qwen2.5-7B": Size(3584, 18944, 28, 28, 4, False, batch=16, published=19_194),
    "Llama-3-8B": Size(4096, 14336, 32, 32, 8, False, 1, 14_451, 8192, 128_256, 16 * 8192),
}
SMALL: dict[str, Any] = {"hidden": 64, "ffn": 128, "layers": 2, "heads": 4, "kv_heads": 2}
TINY = {
    name: replace(size, **SMALL, batch=2, seq=32, vocabulary=256) for name, size in MODELS.items()
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


def measure(name: str, size: Size, variant: str, device: torch.device) -> dict[str, Any]:
    """Train one variant from scratch. Return the fields of a `Result`."""
    torch.manual_seed(0)
    compile_layer, optimizer = VARIANTS[variant]
    # torchao converts layers only: its head stays in BF16, as fp8pass's head does.
    compile_head: Compile = torch.compile if "torchao" in variant else compile_layer  # type: ignore[assignment]
    is_qwen = name.startswith("Qwen")
    family = transformers.Qwen2Config if is_qwen else transformers.LlamaConfig
    llama = new_llama(size, device, family, tie_word_embeddings=size.tied)
    model = LossOnly(llama, compile_layer, compile_head)
    batches = torch.randint(size.vocabulary, (2, size.batch, size.seq), device=device)
    with OPTIMIZERS[optimizer](model) as update:
        mask = NO_MASK if is_qwen else None
        return train(model, update, batches, size.tokens_per_step, mask)


def train(
    model: Any, optimizer: torch.optim.Optimizer, batches: Tensor, tokens_per_step: int, mask: Any
) -> dict[str, Any]:
    """Time micro-batches and optimizer steps. Return speed, memory peak and the last loss."""
    device, losses = batches.device, [torch.zeros(())]

    def micro_batch() -> None:
        ids = batches[len(losses) % len(batches)]
        loss = model(input_ids=ids, labels=ids, use_cache=False, attention_mask=mask).loss
        loss.backward()
        losses.append(loss.detach().clone())

    step_seconds(micro_batch, 1, device)
    optimizer.step()  # compiles, and allocates states
    step_seconds(micro_batch, WARM_UP, device)
    meter = Meter(device)
    micro = statistics.median(step_seconds(micro_batch, TIMED, device))
    update = statistics.median(step_seconds(optimizer.step, UPDATES, device))
    micro_batches = tokens_per_step / batches[0].numel()
    return {
        "micro_batch_s": micro,
        "update_s": update,
        "tokens_per_second": tokens_per_step / (micro * micro_batches + update),
        "peak_bytes": meter.read()[1],
        "loss": losses[-1].item(),
    }


def attempt(name: str, size: Size, variant: str, device: torch.device) -> Result:
    """Measure one variant and free the memory. If it fails, the result has the error."""
    try:
        return Result(name, variant, **measure(name, size, variant, device))
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
    print_rows("training at published sizes", llmq_table(record))


if __name__ == "__main__":
    main()
