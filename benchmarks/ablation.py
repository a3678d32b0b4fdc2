"""Measure the speed gained by each optional part of fp8pass: models with and without the part.

    python benchmarks/ablation.py                              all cases
    python benchmarks/ablation.py --cases h2048 gpt2           some of them
    python benchmarks/ablation.py --tiny --out x.json          a small case, on the CPU too

A part stays in fp8pass if some case is at least 1% faster with the part. A time is the median of
forward and backward over rounds. Variants alternate, in a different order each round (`layer.py`).
All variants of a case run in one process and share their parameters.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Caches are off, because they would return code of another variant.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import torch
from layer import CASES as LAYERS
from layer import TINY, Case, median_times, share_parameters, with_own_code
from model import MODELS, new_llama
from models import GPT, Stack, init_weights, rope_tables
from report import environment, merge, print_rows, write_json
from tables_layers import ALL_PARTS, GRAPHED, ablation_table
from torch import Tensor, fx, nn

import fp8pass


@dataclass(frozen=True)
class Variant:
    """fp8pass without some of its parts.

    Attributes:
        env: environment variables during the compilation.
        how: arguments of `torch.compile`.
    """

    env: dict[str, str] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        """Compile one graph."""
        with patch.dict(os.environ, self.env):
            return fp8pass.backend(fp8pass.Config())(gm, inputs, **kwargs)


APART = {"FP8PASS_DISABLE_PASSES": "fuse_launches,fuse_scales"}
REPLAYED = {"mode": "reduce-overhead"}
COMBINED = {"options": {"combo_kernels": True, "benchmark_combo_kernel": False}}

VARIANTS = {
    ALL_PARTS: Variant(),
    "dgrads apart": Variant({"FP8PASS_DISABLE_PASSES": "merge_dgrads"}),
    "launches apart": Variant(APART),
    "launches apart, combo_kernels": Variant(APART, how=COMBINED),
}
GRAPHED_VARIANTS = {
    ALL_PARTS + GRAPHED: Variant(how=REPLAYED),
    "dgrads apart" + GRAPHED: Variant({"FP8PASS_DISABLE_PASSES": "merge_dgrads"}, how=REPLAYED),
    "launches apart" + GRAPHED: Variant(APART, how=REPLAYED),
}


class Subject:
    """One compiled variant of a model, run by `step`."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], step: Callable) -> None:
        self.model, self.inputs, self._step = model, inputs, step

    def step(self) -> None:
        """Run forward and backward."""
        self._step(self.model)

    def clear(self) -> None:
        """Delete the gradients."""
        self.inputs[0].grad = None
        self.model.zero_grad(set_to_none=True)


Made = tuple[nn.Module, tuple[Tensor, ...], Callable[[nn.Module], None]]


def layer_case(case: Case, device: torch.device) -> Made:
    """Return a stack of decoder layers in BF16."""
    model = Stack(case.layers, case.hidden, case.heads, case.ffn).to(device, torch.bfloat16)
    init_weights(model)
    x = torch.randn(case.batch, case.seq, case.hidden, device=device, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    inputs = (x.requires_grad_(), *rope_tables(case.seq, case.hidden // case.heads, device))
    return model, inputs, lambda m: m(*inputs).backward(grad)


def gpt2_case(device: torch.device, batch: int = 16, seq: int = 1024) -> Made:
    """Return GPT-2 124M as nanoGPT trains it: FP32 weights under autocast."""
    model = GPT(layers=12, hidden=768, heads=12, vocabulary=50304, length=seq).to(device)
    ids = torch.randint(50304, (batch, seq + 1), device=device)

    def step(compiled: nn.Module) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(ids[:, :-1], ids[:, 1:])
        loss.backward()

    return model, (ids,), step


def llama_case(name: str, device: torch.device) -> Made:
    """Return a Hugging Face Llama in BF16."""
    size = MODELS[name]
    model = new_llama(size, device)
    ids = torch.randint(size.vocabulary, (size.batch, size.seq), device=device)
    return model, (ids,), lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss.backward()


CASES: dict[str, Callable[[torch.device], Made]] = {
    **{case.name: partial(layer_case, case) for case in LAYERS},
    "gpt2": gpt2_case,
    **{name: partial(llama_case, name) for name in MODELS},
}
# Cases in which the GPU waits for the CPU to launch kernels. They also run with CUDA graphs.
WAITS_FOR_CPU = ("h2048", "gpt2")


def compiled(name: str, model: nn.Module, variant: Variant) -> nn.Module:
    """Return a copy of a model, compiled as a whole or layer by layer."""
    model = share_parameters(model)
    if name in MODELS and MODELS[name].per_block:
        layers: Any = model.model.layers  # type: ignore[union-attr]
        kind = type(with_own_code(layers[0]))  # all layers share the class and its compiled code
        for i, layer in enumerate(layers):
            layer.__class__ = kind
            layers[i] = torch.compile(layer, backend=variant, **variant.how)
        return model
    return torch.compile(with_own_code(model), backend=variant, **variant.how)  # type: ignore[return-value]


def run_case(
    name: str, make: Callable[[torch.device], Made], chosen: dict[str, Variant], rounds: int
) -> list[dict[str, Any]]:
    """Measure the times of all variants of a case."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base, inputs, step = make(device)
    subjects = {}
    for variant, how in chosen.items():
        start = time.perf_counter()
        subject = Subject(compiled(name, base, how), inputs, step)
        for _ in range(3):
            subject.step()
            subject.clear()
        subjects[variant] = subject
        print(f"{name} {variant}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    times = median_times(subjects, rounds)  # type: ignore[arg-type]
    return [
        {"case": name, "variant": variant, "rounds": rounds, **asdict(t)}
        for variant, t in times.items()
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--variants", nargs="+", help="measure only these")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="one small case, on the CPU too")
    default = Path(__file__).parent / "results/ablation.json"
    parser.add_argument("--out", type=Path, default=default)
    args = parser.parse_args()
    cases = {name: CASES[name] for name in args.cases}
    if args.tiny:
        cases = {"tiny": partial(layer_case, TINY)}
    record: dict[str, Any] = {**environment(), "results": []}
    for name, make in cases.items():
        variants = VARIANTS | (GRAPHED_VARIANTS if name in WAITS_FOR_CPU else {})
        chosen = {v: how for v, how in variants.items() if not args.variants or v in args.variants}
        for result in run_case(name, make, chosen, args.rounds):
            merge(record, result, ("case", "variant"))
        gc.collect()
        write_json(args.out, record)
    print_rows("without parts of fp8pass", ablation_table(record))


if __name__ == "__main__":
    main()
