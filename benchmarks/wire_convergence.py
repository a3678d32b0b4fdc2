"""Does it train as well with 8 bits on the wire? The model of `convergence.py` on two ranks.

    python benchmarks/wire_convergence.py                      all runs that are not in the results
    python benchmarks/wire_convergence.py --tiny --out x.json  a small model, on CPUs with gloo too

FSDP2 of the whole model (there is nothing to overlap on a model so small, and the hooks of blocks
would take longer than their layers), weights in FP32, gathers and gradients in BF16; recipe `coat`,
replayed as CUDA graphs: half a batch is too little work to wait for the CPU's launches. Every rank
has half of each batch. For one seed all variants start from the same weights and see the
same batches; they differ in `fp8pass.distributed.compress` alone. Measured per run as there; wire
ratios are bytes over those of BF16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from convergence import MODEL, TINY, Result, corpus, rate, summary
from report import merge, print_rows, resume, write_json
from tables_runs import wire_convergence_table
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8pass
from fp8pass.demo.data import Data
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size
from fp8pass.demo.train import Meter

RANKS = 2
# Arguments of `compress`.
VARIANTS = {
    "bf16 wire": ("none", "none"),
    "8 bits": ("groups", "row"),
    "gradients alone": ("groups", "none"),
    "gradients, FP8-LM": ("scaled", "none"),
}
FIRST_STEPS = 5


def sharded(size: Size, seed: int, device: torch.device) -> nn.Module:
    """The model, compiled and in parts on all ranks."""
    torch.manual_seed(seed)
    model = Decoder(size).to(device)
    mesh = init_device_mesh(device.type, (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model.compile(backend="fp8pass", options={"recipe": "coat", "triton.cudagraphs": True})
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def run(variant: str, seed: int, size: Size, data: Data) -> dict[str, Any]:
    """Train one variant on this rank and the others, and validate it."""
    device, rank = data.train.device, dist.get_rank()
    model = sharded(size, seed, device)
    done = fp8pass.distributed.compress(model, *VARIANTS[variant])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.peak_lr, betas=(0.9, 0.95), weight_decay=0.1,
        fused=device.type == "cuda",
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, steps=size.steps))

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        # Validation has no backward, behind which graphs would know that a step begins.
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device.type, torch.bfloat16):
            return model(*(x.chunk(RANKS)[rank] for x in batch))

    losses = []
    for step, batch in enumerate(data.train_batches(size, seed)):
        if step == FIRST_STEPS:
            meter = Meter(device)
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())  # what graphs return is overwritten
    seconds, peak_bytes = meter.read()
    count = (len(data.held_out) - 1) // size.tokens
    held_out = [loss_of(batch).detach().clone() for batch in data.held_out_batches(size, count)]
    found = torch.stack(losses), torch.stack(held_out).mean()
    for part in found:  # gloo has no mean
        dist.all_reduce(part)
        part /= RANKS
    speed = (size.steps - FIRST_STEPS) * size.tokens / seconds
    result: Result = summary(variant, seed, *found, speed, 0.0, peak_bytes)
    sent = {"gradients_sent": done.gradients.ratio, "weights_sent": done.weights.ratio}
    return {**asdict(result), **sent}


def serve(
    rank: int, folder: str, runs: list[tuple[str, int]], size: Size, out: Path, record: Any
) -> None:
    """One rank of all runs; the first one adds each result to the record and writes it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store",
        rank=rank, world_size=RANKS,
    )  # fmt: skip
    data = corpus(device)
    for variant, seed in runs:
        torch._dynamo.reset()
        found = run(variant, seed, size, data)
        if rank == 0:
            merge(record, found, ("variant", "seed"))
            write_json(out, record)
            print({**found, "losses": "..."}, file=sys.stderr, flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"instead of {MODEL.steps}")
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="a small model, on CPUs too")
    default = Path(__file__).parent / "results/wire_convergence.json"
    parser.add_argument("--out", type=Path, default=default, help="results to add to")
    args = parser.parse_args()
    if torch.cuda.device_count() < RANKS and not args.tiny:
        sys.exit(f"This takes {RANKS} NVIDIA GPUs; --tiny runs on CPUs.")
    size = TINY if args.tiny else MODEL
    size = replace(size, steps=args.steps or size.steps)
    if size.steps <= FIRST_STEPS:
        parser.error(f"--steps must be more than {FIRST_STEPS}, which are not timed.")
    record = resume(args.out, {**asdict(size), "ranks": RANKS}, again=args.again)
    done = {(r["variant"], r["seed"]) for r in record["results"]}
    runs = [(v, s) for s in args.seeds for v in args.variants if (v, s) not in done]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(serve, (folder, runs, size, args.out, record), nprocs=RANKS)
    print_rows("training on two ranks", wire_convergence_table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
