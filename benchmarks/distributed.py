"""Measure training on several GPUs: speed, memory and sent bytes, over each kind of link.

    python benchmarks/distributed.py                    every variant over both links (two GPUs)
    python benchmarks/distributed.py --links host --models 7B --variants "fp8pass coat, compressed"
    python benchmarks/distributed.py --models 1B --out benchmarks/results/distributed_graphs.json \\
        --variants "fp8pass coat" "fp8pass coat, CUDA graphs"
    python benchmarks/distributed.py --ranks 1 --links nvlink --models 1B --tokens 65536 \\
        --out benchmarks/results/long_sequences.json \\
        --variants "bf16 compile, context" "… recomputed" "fp8pass coat, context" "… agoq"
    python benchmarks/distributed.py --tiny             small models, on CPUs with gloo too

`fsdp` trains the 1B Llama of `model.py`, or the first eight layers of the 7B Llama, which run
longer than the CPU takes to launch them. Weights are in FP32. FSDP2 shards each decoder layer, with
gathers and gradients in BF16. In all models, layers are compiled in place. `sequence` is a stack of
16 decoder layers (models.Stack) in the sizes of the 1B Llama, with tensor parallelism and
sequence-parallel norms. `context` is the same stack with PyTorch's context parallelism: one long
sequence is divided among the GPUs. With `--tokens`, the stack has four layers, and each GPU has
this number of tokens. `experts` is a stack of four decoder layers. The experts of
Qwen3-MoE (`moe.py`) are divided among the GPUs.

Links: `nvlink` uses the links that NCCL finds; `host` sends through host memory
(NCCL_P2P_DISABLE=1), as GPUs without peer access do. Each GPU has one process for all variants of a
link. Variants alternate, because the CPU's speed, which may limit a step, changes from minute to
minute. Tokens per second are summed over ranks, for the median step and for the fastest step. All
other numbers are measured on rank 0: the milliseconds in which the CPU launches a step; the memory
peak above the memory of the other variants; and the bytes of sent gradients and quantized weights,
as a share of their bytes in BF16.

`kernels` compares the kernels that quantize and add with the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from layer import with_own_code
from model import LEARNING_RATE, MODELS, TINY, WARM_UP, Size, new_llama, step_seconds
from models import ExpertLayer, Stack, init_weights, rope_tables
from moe import CASES as EXPERTS
from moe import TINY as SMALL_EXPERTS
from moe import Case
from report import environment, merge, print_rows, use_expandable_segments, write_json
from tables_models import distributed_table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.demo.train import Meter, free_memory

HERE = Path(__file__).parent
LINKS = {"nvlink": {}, "host": {"NCCL_P2P_DISABLE": "1"}}
# Sequences for each GPU. A sequence-parallel model has this batch for all GPUs together.
BATCH = 4
SIZES = {"1B": MODELS["1B"], "7B": replace(MODELS["7B"], layers=8)}
EXPERT_LAYERS = 4
LONG_LAYERS = 4
EXPERT_CASES = {case.hidden: case for case in EXPERTS[1:]}  # Qwen3-MoE's sizes
# Number of turns of each variant, and of steps in each turn. The first step of a turn is not timed,
# because the CPU's caches hold code of other variants. In the second step only the launches of the
# CPU are timed.
TURNS, STEPS = 6, 8


@dataclass(frozen=True)
class Variant:
    """How a variant compiles, distributes and optimizes its model.

    Attributes:
        way: `fsdp`, `sequence`, `context` or `experts`.
        compiler: `bf16`, `torchao` or `fp8pass`.
        gather: whether torchao gathers weights in FP8.
        compress: arguments of `fp8pass.distributed.compress`; None does not call it.
        optimizer: `fused` for PyTorch's AdamW, or `fp8pass` for fp8pass's AdamW.
        without: a pass to disable.
        scatters: fp8pass's option `scatter_format`.
        recipe: fp8pass's recipe.
        recomputes: whether the backward recomputes each layer.
        keeps: whether gathered weights stay in memory from the forward to the backward.
        graphs: whether layers are replayed as CUDA graphs.
    """

    way: str = "fsdp"
    compiler: str = "bf16"
    gather: bool = False
    compress: tuple[str, str] | None = None
    optimizer: str = "fused"
    without: str = ""
    scatters: str = "exact"
    recipe: str = "coat"
    recomputes: bool = False
    keeps: bool = False
    graphs: bool = False


BASELINE = "torchao, FP8 gather"
VARIANTS = {
    "bf16 compile": Variant(),
    "torchao": Variant(compiler="torchao"),
    BASELINE: Variant(compiler="torchao", gather=True),
    "fp8pass coat": Variant(compiler="fp8pass"),
    "fp8pass coat, compressed": Variant(compiler="fp8pass", compress=("groups", "row")),
    "… gradients alone": Variant(compiler="fp8pass", compress=("groups", "none")),
    "… weights alone": Variant(compiler="fp8pass", compress=("none", "row")),
    "… with its AdamW": Variant(
        compiler="fp8pass", compress=("groups", "row"), optimizer="fp8pass"
    ),
    "fp8pass coat, weights kept": Variant(compiler="fp8pass", keeps=True),
    "… compressed, weights kept": Variant(
        compiler="fp8pass", compress=("groups", "row"), keeps=True
    ),
    "… with its AdamW, weights kept": Variant(
        compiler="fp8pass", compress=("groups", "row"), optimizer="fp8pass", keeps=True
    ),
    "bf16 compile, CUDA graphs": Variant(graphs=True),
    "fp8pass coat, CUDA graphs": Variant(compiler="fp8pass", graphs=True),
    "fp8pass coat, compressed, CUDA graphs": Variant(
        compiler="fp8pass", compress=("groups", "row"), graphs=True
    ),
    "… gradients alone, CUDA graphs": Variant(
        compiler="fp8pass", compress=("groups", "none"), graphs=True
    ),
    "bf16 compile, sequence": Variant("sequence"),
    "fp8pass coat, sequence": Variant("sequence", "fp8pass"),
    "… sequence, gathers in BF16": Variant("sequence", "fp8pass", without="gather_quantized"),
    "… sequence, scatters in FP8": Variant("sequence", "fp8pass", scatters="e4m3"),
    "bf16 compile, sequence, CUDA graphs": Variant("sequence", graphs=True),
    "fp8pass coat, sequence, CUDA graphs": Variant("sequence", "fp8pass", graphs=True),
    "… scatters in FP8, CUDA graphs": Variant("sequence", "fp8pass", scatters="e4m3", graphs=True),
    "bf16 compile, context": Variant("context"),
    "… recomputed": Variant("context", recomputes=True),
    "fp8pass coat, context": Variant("context", "fp8pass"),
    "… agoq": Variant("context", "fp8pass", recipe="agoq"),
    "bf16 compile, experts": Variant("experts"),
    "fp8pass coat, experts": Variant("experts", "fp8pass"),
    "… experts, exchanges in BF16": Variant("experts", "fp8pass", without="exchange_quantized"),
}


# --- models ---------------------------------------------------------------------------------------


def sharded_llama(size: Size, variant: Variant, device: torch.device) -> tuple[Any, Any]:
    """Return a Llama, sharded and compiled, and the counters of the bytes that `compress` sends."""
    with torch.device(device):
        llama = new_llama(size, device).float()
    if variant.compiler == "torchao":
        convert_to_torchao(llama, gather=variant.gather)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    compile_in_place(llama.model.layers, variant)
    for layer in llama.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=not variant.keeps)
    fully_shard(llama, mp_policy=policy)
    llama.loss_function = torch.compile(llama.loss_function)
    done = variant.compress and fp8pass.distributed.compress(llama, *variant.compress)
    return llama, done


def convert_to_torchao(llama: nn.Module, *, gather: bool) -> None:
    """Let all linear layers but the output head run in torchao's FP8, also their gathers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        llama,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=gather),
        module_filter_fn=lambda module, path: "lm_head" not in path,
    )


def compile_in_place(layers: nn.ModuleList, variant: Variant) -> None:
    """Compile each layer in place. All layers share the class and its compiled code."""
    options: dict[str, Any] = {"triton.cudagraphs": True} if variant.graphs else {}
    if variant.scatters != "exact":
        options["scatter_format"] = variant.scatters
    if variant.recipe != "coat":
        options["recipe"] = variant.recipe
    backend = "fp8pass" if variant.compiler == "fp8pass" else "inductor"
    kind = type(with_own_code(layers[0], "_call_impl"))
    for layer in layers:
        layer.__class__ = kind
        layer.compile(backend=backend, options=options or None)


def sequence_parallel_stack(size: Size, variant: Variant, device: torch.device) -> Any:
    """Return decoder layers with tensor parallelism and sequence-parallel norms."""
    stack: Any = Stack(size.layers, size.hidden, size.heads, size.ffn)
    with torch.no_grad():
        init_weights(stack.to(device, torch.bfloat16))
    ranks = dist.get_world_size()
    mesh, tokens = init_device_mesh(device.type, (ranks,)), Shard(1)
    plan = {
        "norm1": SequenceParallel(use_local_output=False),
        "norm2": SequenceParallel(use_local_output=False),
        **{name: ColwiseParallel(input_layouts=tokens) for name in ("q", "k", "v", "gate", "up")},
        **{name: RowwiseParallel(output_layouts=tokens) for name in ("o", "down")},
    }
    for layer in stack.layers:
        layer.heads //= ranks
        parallelize_module(layer, mesh, plan)
    compile_in_place(stack.layers, variant)
    return stack


def expert_parallel_stack(case: Case, variant: Variant, device: torch.device) -> Any:
    """Return compiled decoder layers. Each rank has a part of the experts of each layer."""
    heads = case.hidden // 128 or 2
    sizes = case.hidden, heads, case.ffn, case.experts, case.top
    stack: Any = Stack(0, *sizes[:3])
    stack.layers.extend(ExpertLayer(*sizes) for _ in range(EXPERT_LAYERS))
    stack.to(device, torch.bfloat16)
    with torch.no_grad():
        init_weights(stack)
    torch._dynamo.config.capture_scalar_outputs = True  # sizes of the exchanges are tensor values
    compile_in_place(stack.layers, variant)
    return stack


# --- measurements ---------------------------------------------------------------------------------


class Run:
    """One compiled and warmed-up variant on this rank; see the module's docstring."""

    def __init__(self, name: str, size: Size, device: torch.device) -> None:
        self.variant, self.device = VARIANTS[name], device
        self.losses: list[Tensor] = []
        self.seconds: list[float] = []
        self.launch_seconds: list[float] = []
        torch.manual_seed(0)
        os.environ["FP8PASS_DISABLE_PASSES"] = self.variant.without
        cuda = device.type == "cuda"
        others = torch.cuda.memory_allocated(device) if cuda else 0
        build = BUILDERS[self.variant.way]
        self.step, self.done, self.tokens = build(size, self.variant, device, self.losses)
        (self.first_step_s,) = step_seconds(self.step, 1, device)
        step_seconds(self.step, WARM_UP - 2, device)
        meter = Meter(device)
        step_seconds(self.step, 1, device)
        _, peak = meter.read()
        # PyTorch does not count the memory that a replayed CUDA graph uses inside.
        self.peak_bytes = None if peak is None or self.variant.graphs else peak - others

    def take_turn(self) -> None:
        """Run the steps of one turn of this variant."""
        step_seconds(self.step, 1, self.device)
        begin = time.perf_counter()
        self.step()
        self.launch_seconds.append(time.perf_counter() - begin)
        self.seconds += step_seconds(self.step, STEPS - 2, self.device)

    def result(self) -> dict[str, Any]:
        """Return the measurements of all turns."""
        sent = {
            f"{kind}_wire": traffic.ratio if traffic and traffic.bytes else None
            for kind in ("gradients", "weights")
            for traffic in (getattr(self.done, kind, None),)
        }
        return {
            "first_step_s": self.first_step_s,
            "tokens_per_second": self.tokens / statistics.median(self.seconds),
            "fastest": self.tokens / min(self.seconds),
            "launch_s": statistics.median(self.launch_seconds),
            "peak_bytes": self.peak_bytes,
            "loss": self.losses[-1].item() if self.losses else None,
            **sent,
        }


def measure(names: list[str], size: Size, device: torch.device) -> dict[str, dict[str, Any]]:
    """Measure variants in alternating turns. Return the result or the error of each variant."""
    torch._dynamo.reset()
    results: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name in names:
        try:
            runs[name] = Run(name, size, device)
        except Exception as error:  # a missing package or out of memory, on all ranks alike
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            free_memory()
    # The garbage collector would scan the objects of all variants; real programs have only one.
    gc.collect()
    gc.freeze()
    for _ in range(TURNS):
        for run in runs.values():
            run.take_turn()
    gc.unfreeze()
    for name, run in runs.items():
        results[name] = {"error": None, **run.result()}
    return results


def _fsdp_step(
    size: Size, variant: Variant, device: torch.device, losses: list[Tensor]
) -> tuple[Callable[[], None], Any, int]:
    llama, done = sharded_llama(size, variant, device)
    optimizer = (
        fp8pass.optim.AdamW(llama.parameters(), lr=LEARNING_RATE)
        if variant.optimizer == "fp8pass"
        else torch.optim.AdamW(llama.parameters(), LEARNING_RATE, fused=device.type == "cuda")
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(size.vocabulary, (size.batch, size.seq), generator=generator).to(device)

    def step() -> None:
        loss = llama(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if variant.gather:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(llama)

    return step, done, ids.numel() * dist.get_world_size()


def _sequence_step(
    size: Size, variant: Variant, device: torch.device, losses: list[Tensor]
) -> tuple[Callable[[], None], Any, int]:
    stack = sequence_parallel_stack(size, variant, device)
    shape = size.batch, size.seq // dist.get_world_size(), size.hidden
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    tables = rope_tables(size.seq, size.hidden // size.heads, device)

    def step() -> None:
        y = stack(x, *tables)
        y.backward(torch.ones_like(y))
        stack.zero_grad()
        x.grad = None

    return step, None, size.batch * size.seq


def _context_step(
    size: Size, variant: Variant, device: torch.device, losses: list[Tensor]
) -> tuple[Callable[[], None], Any, int]:
    stack: Any = Stack(size.layers, size.hidden, size.heads, size.ffn)
    with torch.no_grad():
        init_weights(stack.to(device, torch.bfloat16))
    compile_in_place(stack.layers, variant)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tokens = size.batch * size.seq * mesh.size()
    whole = torch.randn(1, tokens, size.hidden, device=device, dtype=torch.bfloat16)
    tables = rope_tables(tokens, size.hidden // size.heads, device)
    recompute = partial(checkpoint, use_reentrant=False)
    run: Callable[..., Any] = recompute if variant.recomputes else lambda layer, *args: layer(*args)

    def step() -> None:
        # `context_parallel` replaces these tensors by the part of this rank.
        x, cos, sin = parts = [tensor.clone() for tensor in (whole, *tables)]
        divided = context_parallel(
            mesh, buffers=parts, buffer_seq_dims=[1, 0, 0], no_restore_buffers=set(parts)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), divided if mesh.size() > 1 else nullcontext():
            y = x
            for layer in stack.layers:
                y = run(layer, y, cos, sin)
            y.backward(torch.ones_like(y))
        stack.zero_grad()

    return step, None, tokens


def _expert_step(
    size: Size, variant: Variant, device: torch.device, losses: list[Tensor]
) -> tuple[Callable[[], None], Any, int]:
    case = EXPERT_CASES.get(size.hidden, SMALL_EXPERTS)
    stack = expert_parallel_stack(case, variant, device)
    torch.manual_seed(1 + dist.get_rank())
    shape = size.batch, size.seq, case.hidden
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    tables = rope_tables(size.seq, case.hidden // stack.layers[0].heads, device)

    def step() -> None:
        y = stack(x, *tables)
        y.backward(torch.ones_like(y))
        stack.zero_grad()
        x.grad = None

    return step, None, size.batch * size.seq * dist.get_world_size()


BUILDERS = {
    "fsdp": _fsdp_step,
    "sequence": _sequence_step,
    "context": _context_step,
    "experts": _expert_step,
}


def kernels(device: torch.device, elements: int = 1 << 28) -> dict[str, Any]:
    """Measure the share of a copy's bandwidth that the kernels of `compress` reach."""
    from fp8pass.distributed import weight_gather, wire
    from fp8pass.weights.quantized_parameter import quantize_rows

    def seconds(function: Callable[[], Any]) -> float:
        step_seconds(function, 5, device)
        return statistics.median(step_seconds(function, 30, device))

    def share(function: Callable[[], Any], moved: int) -> float:
        return moved / seconds(function) / copy

    source = torch.empty(4 * elements, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / seconds(lambda: target.copy_(source))
    found: dict[str, Any] = {"copy_bytes_per_second": copy, "elements": elements}
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.randn(2, elements // 2, device=device, dtype=dtype)
        sent = wire.pack(rows)
        into = torch.empty(1, elements // 2, device=device, dtype=dtype)
        coded, summed = sent.numel(), sent.numel() + into.numel() * dtype.itemsize
        matrix = rows.view(-1, 2048)
        weights_moved = matrix.numel() * (1 + dtype.itemsize)
        timed: dict[str, tuple[Callable[[], Any], int]] = {
            "pack": (partial(wire.pack, rows), rows.numel() * dtype.itemsize + coded),
            "add up": (partial(wire.add_up, sent.unsqueeze(1), into, 0.5), summed),
            "code rows": (partial(quantize_rows, matrix, torch.bfloat16), weights_moved),
        }
        for name, (function, moved) in timed.items():
            found[f"{name} {dtype}"] = share(function, moved)
    whole = weight_gather.PackedWeights([torch.Size((elements // 2048, 2048))] * 3, device)
    shards = torch.empty(2, whole.memory.numel() // 2, dtype=torch.uint8, device=device)
    found["take apart"] = share(partial(weight_gather.unpack, shards, whole), 2 * shards.numel())
    return found


# --- processes ------------------------------------------------------------------------------------


def child(args: argparse.Namespace) -> None:
    """Run one rank over one link. Rank 0 prints a line for each variant."""
    use_expandable_segments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", args.rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = dist.FileStore(args.store, args.ranks)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=args.rank, world_size=args.ranks,
        device_id=device if cuda else None,
    )  # fmt: skip
    # Layers of all variants share code objects, so Dynamo counts their compilations together.
    torch._dynamo.config.recompile_limit = len(VARIANTS) * 8
    ways = [(model, "fsdp") for model in args.models]
    # PyTorch has no context parallelism on CPUs.
    context = ["context"] if cuda or args.ranks == 1 else []
    ways += [("1B", way) for way in ("sequence", *context, "experts")]
    if args.tokens:
        ways = [("1B", "context")]
    for model, way in ways:
        names = [name for name in args.variants if VARIANTS[name].way == way]
        size, label = _size(model, tiny=args.tiny), model
        if args.tokens:
            size = replace(size, layers=LONG_LAYERS, batch=1, seq=args.tokens)
            label = f"{args.ranks * args.tokens:,} tokens"
        found = measure(names, size, device)
        free_memory()
        for name in names if args.rank == 0 else ():
            about = {"model": label, "link": args.child, "variant": name}
            print(json.dumps({**about, **found[name]}), flush=True)
    if args.rank == 0 and cuda and args.child == "nvlink" and not args.tokens:
        print(json.dumps({"kernels": kernels(device)}), flush=True)
    os._exit(0)  # without a shutdown, because threads of process groups may still run


def _size(model: str, *, tiny: bool) -> Size:
    size = (TINY if tiny else SIZES)[model]
    return replace(size, batch=min(size.batch, BATCH) if tiny else BATCH)


def run_link(link: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all variants over one link, with one process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        common = [sys.executable, __file__, "--child", link, "--ranks", str(args.ranks)]
        common += ["--store", f"{folder}/store", *(["--tiny"] if args.tiny else [])]
        common += ["--models", *args.models, "--variants", *args.variants]
        common += ["--tokens", str(args.tokens)]
        started = [
            subprocess.Popen(
                [*common, "--rank", str(rank)],
                env=os.environ | LINKS[link],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(args.ranks)
        ]
        found = []
        assert started[0].stdout is not None
        for line in started[0].stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                print(line.rstrip(), file=sys.stderr, flush=True)
        for process in started:
            process.wait(timeout=60)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a GPU in `context`")
    parser.add_argument("--tiny", action="store_true", help="small models, on CPUs too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results/distributed.json")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    if torch.cuda.device_count() < args.ranks and not args.tiny:
        sys.exit(f"This takes {args.ranks} NVIDIA GPUs; --tiny runs on CPUs.")
    sizes = {model: asdict(_size(model, tiny=args.tiny)) for model in SIZES}
    settings = {"ranks": args.ranks, "sizes": sizes, "tokens": args.tokens}
    record: dict[str, Any] = {**environment(), "settings": settings, "results": []}
    for link in args.links:
        for found in run_link(link, args):
            if "kernels" in found:
                record["kernels"] = found["kernels"]
            else:
                merge(record, found, ("model", "link", "variant"))
        write_json(args.out, record)
    print_rows("training on several GPUs", distributed_table(record))


if __name__ == "__main__":
    main()
