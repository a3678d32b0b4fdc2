"""Train a pipeline on several GPUs, with and without a memory budget for each stage.

    python benchmarks/pipelines.py --ranks 4            all schedules and variants (four GPUs)
    python benchmarks/pipelines.py --ranks 2 --schedules 1F1B --variants "bf16 compile" "fp8pass"
    python benchmarks/pipelines.py --ranks 2 --tiny --out x.json        a small model, on the CPU

Each rank has four decoder layers in the sizes of Llama-2-7B: one stage in `1F1B`, two stages in
`Interleaved1F1B`. Each stage is compiled as a whole. A step has four micro-batches for each rank,
of two sequences of 2,048 tokens. All variants start from the same weights and train on the same
tokens with PyTorch's AdamW. The variants memorize these tokens, so the recorded losses show only
that they train.

`fp8pass` saves activations in 8 bits on all ranks, `4 bits` in 4 bits. `budgets` sets the memory
budgets of `pipeline_configs` (AGoQ, section 4.2): 4 bits on the rank with the most micro-batches,
more bits on other ranks. Measured: tokens per second, by the median step after the first steps; the
memory peak of each rank; seconds of the first step, which compiles the stages; the mean loss of the
last step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from model import LEARNING_RATE, MODELS, TINY, Size, step_seconds
from models import DecoderLayer, RMSNorm, init_weights, rope_tables
from report import add_result, print_rows, record_parser, resume, use_expandable_segments
from tables_models import pipelines_table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from workers import run_jobs

import fp8pass
from fp8pass.demo.train import Meter, free_memory

WARM_UP, TIMED = 3, 6
MICROBATCHES = 4  # for each rank
STAGES = {"1F1B": 1, "Interleaved1F1B": 2}  # of each rank
VARIANTS = ("bf16 compile", "fp8pass", "fp8pass, 4 bits", "fp8pass, budgets")


SIZE = replace(MODELS["7B"], layers=4)  # layers of each rank


class Stage(nn.Module):
    """Consecutive decoder layers. The first stage has the embedding, the last the output head."""

    def __init__(self, size: Size, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.before = nn.Embedding(size.vocabulary, size.hidden) if first else nn.Identity()
        self.layers = nn.ModuleList(
            DecoderLayer(size.hidden, size.heads, size.ffn) for _ in range(layers)
        )
        head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.after = nn.Sequential(RMSNorm(size.hidden), head) if last else nn.Identity()
        self.cos: Tensor
        self.sin: Tensor
        tables = rope_tables(size.seq, size.hidden // size.heads, torch.device("cpu"))
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.after(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def new_stages(size: Size, count: int, device: torch.device) -> list[PipelineStage]:
    """Return this rank's stages. Their weights depend on the index of the stage only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = []
    for index in range(rank, count, ranks):
        torch.manual_seed(index)
        layers = size.layers * ranks // count
        module = Stage(size, layers, first=index == 0, last=index == count - 1)
        with torch.no_grad():
            init_weights(module.to(device, torch.bfloat16))
        stages.append(PipelineStage(module, index, count, device))
    return stages


def compile_stages(variant: str, stages: list[PipelineStage], schedule: Any) -> None:
    budgets = fp8pass.distributed.pipeline_configs(schedule) if "budgets" in variant else None
    for stage in stages:
        if variant == "bf16 compile":
            stage.submod.compile()
            continue
        config = fp8pass.Config(save_format="e2m1" if "4 bits" in variant else "e4m3")
        if budgets:
            config = budgets[stage.stage_index]
        stage.submod.compile(backend=fp8pass.backend(config))


def measure(name: str, variant: str, size: Size, device: torch.device) -> dict[str, Any]:
    """Train one variant on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = new_stages(size, ranks * STAGES[name], device)
    kind, microbatches = get_schedule_class(name), MICROBATCHES * ranks
    is_multi = issubclass(kind, PipelineScheduleMulti)
    arguments: Any = stages if is_multi else stages[0]
    schedule: Any = kind(arguments, n_microbatches=microbatches, loss_fn=loss_of)
    compile_stages(variant, stages, schedule)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, fused=device.type == "cuda")
    torch.manual_seed(0)
    shape = microbatches * size.batch, size.seq
    ids = torch.randint(size.vocabulary, shape, device=device)
    losses: list[Tensor] = []

    def step() -> None:
        found: list[Tensor] = []
        inputs = (ids,) if rank == 0 else ()
        outputs = {"target": ids.roll(-1, 1), "losses": found} if rank == ranks - 1 else {}
        schedule.step(*inputs, **outputs)
        optimizer.step()
        optimizer.zero_grad()
        if found:
            losses.append(torch.stack(found).mean().detach())

    (first,) = step_seconds(step, 1, device)
    step_seconds(step, WARM_UP - 1, device)
    meter = Meter(device)
    seconds = statistics.median(step_seconds(step, TIMED, device))
    _, peak = meter.read()
    found = [None] * ranks
    last = losses[-1].item() if losses else None
    dist.all_gather_object(found, (peak, first, last))
    peaks, firsts, lasts = zip(*found, strict=True)
    return {
        "first_step_s": max(firsts),
        "tokens_per_second": ids.numel() / seconds,
        "peak_bytes": peaks,
        "loss": lasts[-1],
    }


def attempt(job: tuple[str, str, Size], device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure a variant on this rank. If it fails, the result has the error."""
    schedule, variant, size = job
    torch._dynamo.reset()
    try:
        found = {"error": None, **measure(schedule, variant, size, device)}
    except Exception as error:  # out of memory, on all ranks alike
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        free_memory()
    yield {"schedule": schedule, "variant": variant, "ranks": dist.get_world_size(), **found}


def main() -> None:
    """Run the command line."""
    parser = record_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks and not args.tiny:
        sys.exit(f"This takes {args.ranks} NVIDIA GPUs; --tiny runs on the CPU.")
    use_expandable_segments()
    size = TINY["7B"] if args.tiny else SIZE
    path = args.out or Path(__file__).parent / "results/pipelines.json"
    settings = {"size": asdict(size), "microbatches_per_rank": MICROBATCHES, "timed": TIMED}
    record = resume(path, settings, again=args.again)
    jobs = [(schedule, variant, size) for schedule in args.schedules for variant in args.variants]
    for result in run_jobs(attempt, jobs, ranks=args.ranks):
        add_result(path, record, result, ("schedule", "variant", "ranks"))
    print_rows("pipelines", pipelines_table(record))


if __name__ == "__main__":
    main()
