"""Time of a step of decoder layers on two GPUs, sequence parallel and as SimpleFSDP, against BF16.

    python benchmarks/parallel.py          writes benchmarks/results/parallel.json
    python benchmarks/parallel.py --tiny   a small case, on CPUs too, to check that the script works

Per way and variant: milliseconds for forward + backward (median over steps, the slower rank) and
MiB that a rank gives to gathers, as planned. Variants take turns. Layers have the sizes of those
of Llama 7B.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from models import RMSNorm, init_weights, rope_tables, rotate
from report import environment, print_table, write_json
from torch import Tensor, fx, multiprocessing, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.utils import parametrize

import fp8pass
from fp8pass.dynamo import Backend

RANKS = 2


@dataclass(frozen=True)
class Case:
    """A stack of layers and its input."""

    layers: int
    hidden: int
    ffn: int
    seq: int
    batch: int
    head: int = 128


LARGE, TINY = Case(4, 4096, 11008, 4096, 2), Case(1, 128, 384, 64, 2, head=32)


class Attention(nn.Module):
    """Causal attention with RoPE, of the heads that this rank has."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.head = case.head
        sizes = case.hidden, case.hidden
        self.q, self.k, self.v, self.o = (nn.Linear(*sizes, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(case.hidden, case.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(case.ffn, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(case.hidden), RMSNorm(case.hidden)
        self.attention, self.mlp = Attention(case), MLP(case)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """Layers on one rotary table."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class Whole(nn.Module):
    """The whole of a sharded parameter, whose gradient is the mean over ranks."""

    def forward(self, shard: DTensor) -> Tensor:
        whole = shard.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Activations are split along the sequence, weights by heads and hidden units."""
    rows, whole = Shard(1), Replicate()
    split: dict[str, ParallelStyle] = {
        "norm1": SequenceParallel(use_local_output=True),
        "norm2": SequenceParallel(use_local_output=True),
        "attention": PrepareModuleInput(
            input_layouts=(rows, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=rows),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, split)


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Weights are gathered by parametrizations."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            module.register_parameter(name, shard)
            parametrize.register_parametrization(module, name, Whole(), unsafe=True)


WAYS = {"sequence parallel": sequence_parallel, "SimpleFSDP": simple_fsdp}


def with_fp8pass(left_out: str, plans: list[Any]) -> Callable[..., Any]:
    """The backend without a pass; its plans are collected."""

    def compile_graph(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        with patch.dict(os.environ, FP8PASS_DISABLE_PASSES=left_out):
            return Backend(fp8pass.Config(), plans.append)(gm, inputs, **kwargs)

    return compile_graph


def compiled(model: nn.Module, variant: str, plans: list[Any]) -> Any:
    """A variant of a model."""
    if variant == "bf16 compile":
        return torch.compile(model)
    left_out = "gather_codes" if "16 bits" in variant else ""
    return torch.compile(model, backend=with_fp8pass(left_out, plans))


VARIANTS = ("bf16 compile", "fp8pass coat", "fp8pass coat, gathers in 16 bits")


def measure(way: str, case: Case, rounds: int, device: str) -> list[dict[str, Any]]:
    """Times of all variants of one way, on this rank."""
    mesh = init_device_mesh(device, (RANKS,))
    length = case.seq // RANKS if way == "sequence parallel" else case.seq
    x = torch.randn(case.batch, length, case.hidden, device=device, dtype=torch.bfloat16)
    grad, tables = torch.randn_like(x), rope_tables(case.seq, case.head, torch.device(device))
    steps: dict[str, Callable[..., float]] = {}
    plans: dict[str, list[Any]] = {}
    torch._dynamo.reset()  # what it saw of other sizes would make these vary
    for variant in VARIANTS:
        torch.manual_seed(0)
        model = Stack(case).to(device, torch.bfloat16)
        init_weights(model)
        WAYS[way](model, mesh)
        plans[variant] = []
        program, own = compiled(model, variant, plans[variant]), x.clone().requires_grad_()

        def step(program: Any = program, own: Tensor = own, model: nn.Module = model) -> float:
            model.zero_grad(set_to_none=True)
            dist.barrier()
            start = time.perf_counter()
            program(own, *tables).backward(grad)
            if device == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) * 1e3

        for _ in range(3):
            step()
        steps[variant] = step
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, step in steps.items():
            times[variant].append(step())
    sent = {v: [c for g in found for c in g.plan.collectives] for v, found in plans.items()}
    return [
        {
            "way": way,
            "variant": variant,
            "ms": statistics.median(times[variant]),
            "gathered_bytes": sum(c.bytes for c in sent[variant] if c.op.startswith("all_gather")),
        }
        for variant in VARIANTS
    ]


def run(rank: int, store: str, case: Case, rounds: int, device: str, results: Any) -> None:
    """One rank: everything, one way after the other."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for way in WAYS:
        results.put(measure(way, case, rounds, device))
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="one small case, on CPUs too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/parallel.json")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    case = TINY if args.tiny else LARGE
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", case, args.rounds, device, results)
        multiprocessing.spawn(run, args=given, nprocs=RANKS)
    found = [results.get() for _ in range(RANKS * len(WAYS))]
    slower: dict[tuple[str, str], dict[str, Any]] = {}
    for row in (row for rows in found for row in rows):
        key = row["way"], row["variant"]
        slower[key] = max(row, slower.get(key, row), key=lambda r: r["ms"])
    rows = list(slower.values())
    table = [
        {"way": r["way"], "variant": r["variant"], "ms": f"{r['ms']:.2f}"}
        | {"gathers MiB": f"{r['gathered_bytes'] / 2**20:.1f}" if r["gathered_bytes"] else ""}
        for r in rows
    ]
    print_table("decoder layers on two ranks, forward + backward", table)
    if not args.tiny:
        write_json(args.out, {**environment(), "case": asdict(case), "results": rows})


if __name__ == "__main__":
    main()
