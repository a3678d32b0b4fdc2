"""Compare training speed and peak memory of whole Hugging Face Llamas.

    python benchmarks/model.py                          all runs that are not in the results yet
    python benchmarks/model.py --models 7B --variants "fp8pass coat + AdamW"
    python benchmarks/model.py --tiny --out x.json      small models, on the CPU too

A variant combines a way to compile with an optimizer. All variants start from the same weights and
train on one batch. Weights are in BF16, and so are the states of `torch.optim.AdamW(fused=True)`.
The first steps (compilation, autotuning) are not timed. Measured: seconds of the first step, which
may find code of earlier variants in Inductor's cache; tokens per second, by the median step; the
memory peak of the timed steps; the last loss. Each result is written when its variant ends. A
failure is written with its error, and the next run of the script tries the variant again.

`1B` is compiled as a whole. torchao converts its output head, fp8pass leaves the head in BF16.

`7B` has Llama-2-7B's shape. As in torchtitan, each decoder layer and the loss are compiled
separately, and layers share compiled code. All other modules stay in BF16 in every variant: fp8pass
does not compile them, so torchao does not convert them. torchtitan's FP8 settings also leave out
the output head.

`8B` has Llama-3-8B's shape and is compiled in the same way. In the variants "head and loss",
fp8pass compiles both as one module that returns only the loss: with all logits at once, or in four
chunks of tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from layer import Variant as Compile
from layer import torchao, with_fp8pass
from report import add_result, print_rows, record_parser, resume, use_expandable_segments
from tables_models import model_table
from torch import Tensor, nn

from fp8pass.demo.train import Meter, free_memory
from fp8pass.optim import AdamW, step_in_backward

WARM_UP, TIMED = 4, 8
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Size:
    """A Llama, its batch, and whether its layers are compiled one by one."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    seq: int
    per_block: bool


MODELS = {
    "1B": Size(2048, 8192, 16, 32, 8, 50304, batch=8, seq=2048, per_block=False),
    "7B": Size(4096, 11008, 32, 32, 32, 32000, batch=2, seq=2048, per_block=True),
    "8B": Size(4096, 14336, 32, 32, 8, 128256, batch=1, seq=8192, per_block=True),
}
TINY = {
    name: Size(128, 256, 2, 2, 2, 256, batch=2, seq=32, per_block=size.per_block)
    for name, size in MODELS.items()
}

COMPILED: dict[str, Compile] = {
    "bf16 compile": lambda m: torch.compile(m),  # type: ignore[dict-item, return-value]
    "torchao tensorwise": torchao("tensorwise"),
    "fp8pass coat": with_fp8pass(),
    "fp8pass coat, head and loss whole": with_fp8pass(head_chunks=1),
    "fp8pass coat, head and loss in chunks": with_fp8pass(head_chunks=4),
}


def torchao_adamw8bit(model: nn.Module) -> torch.optim.Optimizer:
    """Return torchao's AdamW with 8-bit states; weights are rounded stochastically."""
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=LEARNING_RATE, bf16_stochastic_round=True)


OPTIMIZERS: dict[str, Callable[[nn.Module], AbstractContextManager[torch.optim.Optimizer]]] = {
    "AdamW": lambda m: nullcontext(torch.optim.AdamW(m.parameters(), LEARNING_RATE, fused=True)),
    "torchao AdamW8bit": lambda m: nullcontext(torchao_adamw8bit(m)),
    "fp8pass AdamW": lambda m: nullcontext(AdamW(m.parameters(), LEARNING_RATE)),
    "fp8pass step_in_backward": lambda m: nullcontext(
        step_in_backward(m, AdamW(m.parameters(), LEARNING_RATE)).optimizers[0]
    ),
}

VARIANTS = {
    f"{compiled} + {optimizer}": (compiled, optimizer)
    for compiled, optimizer in (
        ("bf16 compile", "AdamW"),
        ("torchao tensorwise", "AdamW"),
        ("torchao tensorwise", "torchao AdamW8bit"),
        ("fp8pass coat", "AdamW"),
        ("fp8pass coat", "fp8pass AdamW"),
        ("fp8pass coat", "fp8pass step_in_backward"),
        ("fp8pass coat, head and loss whole", "fp8pass AdamW"),
        ("fp8pass coat, head and loss in chunks", "fp8pass AdamW"),
    )
}


@dataclass
class Result:
    """One variant of one model; see the module's docstring."""

    model: str
    variant: str
    optimizer: str
    first_step_s: float | None = None
    tokens_per_second: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    error: str | None = None


def new_llama(
    size: Any, device: torch.device, family: Any = transformers.LlamaConfig, **options: Any
) -> Any:
    """Return a Llama, or a model of a similar family, in BF16 and initialized on the device."""
    config = family(
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.seq,
        use_cache=False,
        **options,
    )
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def compile_blocks(llama: Any, compile_module: Compile) -> Any:
    """Compile each layer and the loss separately."""
    layers = llama.model.layers
    for i, layer in enumerate(layers):
        layers[i] = compile_module(layer)
    llama.loss_function = torch.compile(llama.loss_function)
    return llama


class HeadAndLoss(nn.Module):
    """The output head and the loss of a Llama as one module, which does not return logits."""

    def __init__(self, llama: Any) -> None:
        super().__init__()
        self.lm_head, self.loss_function = llama.lm_head, llama.loss_function
        self.vocabulary = llama.config.vocab_size

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of all tokens from their features."""
        return self.loss_function(self.lm_head(hidden), labels, self.vocabulary)


class LossOnly(nn.Module):
    """A Llama with head and loss compiled together. It has Hugging Face's interface."""

    def __init__(self, llama: Any, compile_layer: Compile, compile_head: Compile) -> None:
        super().__init__()
        self.head = compile_head(HeadAndLoss(llama))
        layers = llama.model.layers
        for i, layer in enumerate(layers):
            layers[i] = compile_layer(layer)
        self.model = llama.model

    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Any:
        """Return an object with the `loss`."""
        hidden = self.model(input_ids=input_ids, **inputs).last_hidden_state
        return SimpleNamespace(loss=self.head(hidden, labels))


def measure(size: Size, compiled: str, optimizer: str, device: torch.device) -> dict[str, Any]:
    """Train one variant from scratch. Return the fields of a `Result`."""
    torch.manual_seed(0)
    llama, compile_module = new_llama(size, device), COMPILED[compiled]
    model: Any
    if "head and loss" in compiled:
        model = LossOnly(llama, compile_module, compile_module)
    elif size.per_block:
        model = compile_blocks(llama, compile_module)
    else:
        model = compile_module(llama)
    ids = torch.randint(size.vocabulary, (size.batch, size.seq), device=device)
    with OPTIMIZERS[optimizer](model) as update:
        return train(model, update, ids)


def train(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor) -> dict[str, Any]:
    """Train on one batch. Return the speed, the memory peak and the last loss."""
    losses = []

    def step() -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())  # CUDA graphs write the next loss to the same memory

    (first,) = step_seconds(step, 1, ids.device)
    step_seconds(step, WARM_UP - 1, ids.device)
    meter = Meter(ids.device)
    seconds = statistics.median(step_seconds(step, TIMED, ids.device))
    _, peak = meter.read()
    return {
        "first_step_s": first,
        "tokens_per_second": ids.numel() / seconds,
        "peak_bytes": peak,
        "loss": losses[-1].item(),
    }


def step_seconds(step: Callable[[], None], count: int, device: torch.device) -> list[float]:
    """Return the seconds of each step, without synchronization between steps."""
    marks = [_mark(device)]
    for _ in range(count):
        step()
        marks.append(_mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]
    return [end - start for start, end in pairwise(marks)]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def attempt(name: str, size: Size, variant: str, device: torch.device) -> Result:
    """Measure one variant and free the memory. If it fails, the result has the error."""
    pair = VARIANTS[variant]
    try:
        return Result(name, *pair, **measure(size, *pair, device))
    except Exception as error:  # out of memory or a missing package: the next variants still run
        return Result(name, *pair, error=f"{type(error).__name__}: {error}")
    finally:
        free_memory()


def main() -> None:
    """Run the command line."""
    parser = record_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    args = parser.parse_args()
    path = args.out or Path(__file__).parent / "results/model.json"
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
    keys = ("model", "variant", "optimizer")
    done = {tuple(r[k] for k in keys) for r in record["results"] if not r["error"]}
    for name, variant in [(n, v) for n in args.models for v in args.variants]:
        if (name, *VARIANTS[variant]) in done:
            continue
        result = attempt(name, sizes[name], variant, device)
        add_result(path, record, asdict(result), keys)
    print_rows("whole Llamas, training", model_table(record))


if __name__ == "__main__":
    main()
