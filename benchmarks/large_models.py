"""Train large models with FSDP2 on several GPUs of limited memory.

    python benchmarks/large_models.py --ranks 4                     everything (four GPUs)
    python benchmarks/large_models.py --ranks 2 --setups "14B fp8pass" "14B CPUOffloadPolicy"
    python benchmarks/large_models.py --ranks 2 --setups "32B fp8pass" --limit 32
    python benchmarks/large_models.py --ranks 2 --tiny --out x.json       small models, on the CPU

`14B` and `32B` have the shapes of Qwen2.5 (Llama layers, untied weights), and 24 GiB for each GPU
(LLMQ, table 3). A step takes 65,536 tokens of all ranks. `fp8pass` has the shards of weights,
optimizer states and sums of gradients in host memory, and gathers FP8 data. `CPUOffloadPolicy` is
FSDP2's own offloading in BF16, with each layer recomputed, and the optimizer on the CPU.

`13B` has Llama-2-13B's shape, FP32 weights, and 79 GiB for each GPU. A step is one micro-batch. The
batch of each set-up is doubled until memory ends.

`8B` has Llama-3-8B's shape and FP32 weights. A step has 16 micro-batches of one sequence of 8,192
tokens. Megatron-Bridge publishes 14,451 tokens per second and GPU for this case on 8 H100.

The limit is PyTorch's own (`torch.cuda.set_per_process_memory_fraction`). It does not count CUDA's
context and libraries. Tokens per second are summed over ranks, for the median step after the first
step. MFU is the share of the GPUs' peak rate, as in LLMQ: GEMMs of layers count at the peak of FP8,
the output head and attention at the peak of BF16. The reserved memory and the largest memory of the
process on the host are measured on rank 0.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from distributed import convert_to_torchao
from model import LEARNING_RATE, MODELS, LossOnly, Size, new_llama, step_seconds
from report import add_result, print_rows, record_parser, resume, use_expandable_segments
from tables_models import large_models_table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from workers import run_jobs

import fp8pass
from fp8pass.demo.train import free_memory

STEP_TOKENS = 65_536
TIMED = 2
LARGEST_BATCH = 64
SIZES = {
    "8B": MODELS["8B"],
    "13B": Size(5120, 13824, 40, 40, 40, 32000, batch=1, seq=2048, per_block=True),
    "14B": Size(5120, 13824, 48, 40, 8, 152064, batch=4, seq=2048, per_block=True),
    "32B": Size(5120, 27648, 64, 40, 8, 152064, batch=2, seq=2048, per_block=True),
}
TINY = Size(512, 1024, 2, 4, 2, 512, batch=2, seq=32, per_block=True)


@dataclass(frozen=True)
class Setup:
    """A model and how it is trained.

    Attributes:
        model: a key of `SIZES`.
        how: a key of `WAYS`.
        limit: memory of a GPU in GiB.
        budget: fp8pass's memory budget of a layer.
        micro_batches: number of micro-batches of a step; 0 makes a step of `STEP_TOKENS`.
        grows: whether the batch is doubled until memory ends.
    """

    model: str
    how: str
    limit: float
    budget: float = 1.0
    micro_batches: int = 0
    grows: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.how}"


ON_GPUS = ("bf16 compile", "torchao, FP8 gather", "fp8pass, compressed")
SETUPS = (
    *(Setup("8B", how, 79, micro_batches=16) for how in ON_GPUS),
    *(Setup("13B", how, 79, micro_batches=1, grows=True) for how in ON_GPUS),
    Setup("14B", "fp8pass", 24, budget=0.2),
    Setup("14B", "CPUOffloadPolicy", 24),
    Setup("32B", "fp8pass", 24, budget=0.2),
    Setup("32B", "CPUOffloadPolicy", 24),
)
BY_NAME = {setup.name: setup for setup in SETUPS}

# The loss of a micro-batch, and the function that ends a step.
Training = tuple[Callable[[Tensor], Tensor], Callable[[], object]]


def on_meta(size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama with parameters on the `meta` device."""
    llama = new_llama(size, torch.device("meta")).to(dtype)
    restore_rotary_tables(llama, device)
    return llama


def restore_rotary_tables(llama: Any, device: torch.device) -> None:
    """Compute the rotary frequencies, which are buffers."""
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config).to(device)


@torch.no_grad()
def initialize(model: nn.Module, device: torch.device) -> None:
    """Draw weights on the device, also weights in host memory. The CPU would take minutes."""
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        shard = cast(DTensor, parameter).to_local()
        drawn = torch.empty(shard.shape, dtype=shard.dtype, device=device)
        shard.copy_(drawn.normal_(std=0.02) if shard.ndim == 2 else drawn.fill_(1))


def compile_in_place(module: nn.Module, **options: Any) -> nn.Module:
    if options.pop("backend", "fp8pass") == "inductor":
        module.compile()
    else:
        module.compile(backend="fp8pass", options=options)
    return module


def shard(model: LossOnly, **policy: Any) -> LossOnly:
    """Shard each layer, the head and the embedding."""
    how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), **policy}
    for module in (*model.model.layers, model.head, model):
        fully_shard(module, **how)
    return model


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


def with_offloaded_shards(
    setup: Setup, size: Size, device: torch.device, backwards: int
) -> Training:
    """fp8pass, with everything in host memory except FP8 data of the weights."""
    model = LossOnly(
        on_meta(size, device, torch.bfloat16),
        lambda m: compile_in_place(m, memory_budget=setup.budget),
        lambda m: compile_in_place(m, head_chunks=8),
    )
    shard(model)
    fp8pass.distributed.compress(model)
    fp8pass.optim.offload_weights(model, device)
    initialize(model, device)
    optimizer = fp8pass.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, offload=("states", "gradients")
    )
    fp8pass.optim.step_in_backward(model, optimizer, accumulate=backwards, max_norm=1.0)
    return loss_of(model), lambda: None


def with_cpu_offload_policy(
    setup: Setup, size: Size, device: torch.device, backwards: int
) -> Training:
    """FSDP2's own offloading: parameters, gradients, states and the optimizer on the CPU."""
    llama = on_meta(size, device, torch.bfloat16)
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    llama.train()
    plain = {"backend": "inductor"}
    model = LossOnly(llama, *[lambda m: compile_in_place(m, **plain)] * 2)
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda"))
    model.to_empty(device="cpu")
    restore_rotary_tables(llama, device)
    initialize(model, device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    return loss_of(model), lambda: finish(model, optimizer)


def with_all_on_gpus(setup: Setup, size: Size, device: torch.device, backwards: int) -> Training:
    """BF16, torchao's FP8 with FP8 gathers, or fp8pass with 8 bits on the wire; FP32 weights."""
    llama = on_meta(size, device, torch.float32)
    if is_torchao := setup.how.startswith("torchao"):
        convert_to_torchao(llama, gather=True)
    options = {} if is_ours(setup) else {"backend": "inductor"}
    model = shard(LossOnly(llama, *[lambda m: compile_in_place(m, **options)] * 2))
    if is_ours(setup):
        fp8pass.distributed.compress(model)
    model.to_empty(device=device)
    restore_rotary_tables(llama, device)
    initialize(model, device)
    if is_ours(setup):
        optimizer: Any = fp8pass.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    else:
        fused = device.type == "cuda"
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=fused)

    def end_of_step() -> None:
        finish(model, optimizer)
        if is_torchao:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)

    return loss_of(model), end_of_step


def is_ours(setup: Setup) -> bool:
    return setup.how.startswith("fp8pass")


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


WAYS = {
    **dict.fromkeys(ON_GPUS, with_all_on_gpus),
    "fp8pass": with_offloaded_shards,
    "CPUOffloadPolicy": with_cpu_offload_policy,
}


def measure(setup: Setup, size: Size, device: torch.device) -> dict[str, Any]:
    """Train one set-up on this rank. The results of rank 0 are reported."""
    cuda, ranks = device.type == "cuda", dist.get_world_size()
    if cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(setup.limit * 2**30 / total, device)
    tokens = size.batch * size.seq * ranks
    step_tokens = STEP_TOKENS if cuda else 2 * tokens
    backwards = setup.micro_batches or step_tokens // tokens
    loss_of_batch, end_step = WAYS[setup.how](setup, size, device, backwards)
    torch.manual_seed(dist.get_rank())
    losses: list[Tensor] = []

    def train(batch: int) -> dict[str, Any]:
        ids = torch.randint(size.vocabulary, (backwards, batch, size.seq), device=device)

        def step() -> None:
            for part in ids:
                loss = loss_of_batch(part)
                (loss / backwards).backward()
            end_step()
            losses.append(loss.detach())

        (first,) = step_seconds(step, 1, device)
        seconds = statistics.median(step_seconds(step, TIMED, device))
        rate = backwards * batch * size.seq * ranks / seconds
        return {
            "batch": batch,
            "first_step_s": first,
            "tokens_per_second": rate,
            "mfu": rate / ranks * seconds_per_token(size),
            "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "loss": losses[-1].item(),
        }

    found, batch = train(size.batch), 2 * size.batch
    while setup.grows and batch <= LARGEST_BATCH:
        try:
            found = train(batch)
        except torch.OutOfMemoryError:
            break
        batch *= 2
    return found


def seconds_per_token(size: Size) -> float:
    """Return the time of a token's GEMMs and attention at the peak rates of an H100 or H200."""
    head_dim = size.hidden // size.heads
    layer = size.hidden * (2 * size.hidden + 2 * size.kv_heads * head_dim + 3 * size.ffn)
    attention = 2 * size.seq * size.hidden  # causal: half of QKᵀ and of the product with V
    in_bf16 = 6 * size.hidden * size.vocabulary + 3 * size.layers * attention
    return 6 * size.layers * layer / 1979e12 + in_bf16 / 989e12


def attempt(job: tuple[Setup, Size], device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure a set-up on this rank. If it fails, the result has the error."""
    setup, size = job
    torch._dynamo.reset()
    try:
        found = {"error": None, **measure(setup, size, device)}
    except Exception as error:  # out of memory or a missing package, on all ranks alike
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        free_memory()
    yield {**asdict(setup), "ranks": dist.get_world_size(), **found}


RECORD = "results/large_models.json"


def main() -> None:
    """Run the command line."""
    parser = record_parser(__doc__)
    parser.add_argument("--setups", nargs="+", default=list(BY_NAME), choices=BY_NAME)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=float, help="GiB of each GPU, instead of the set-up's")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks and not args.tiny:
        sys.exit(f"This takes {args.ranks} NVIDIA GPUs; --tiny runs on the CPU.")
    use_expandable_segments()
    sizes = dict.fromkeys(SIZES, TINY) if args.tiny else SIZES
    settings = {
        "models": {name: asdict(size) for name, size in sizes.items()},
        "step_tokens": STEP_TOKENS,
        "timed": TIMED,
    }
    path = args.out or Path(__file__).parent / RECORD
    record = resume(path, settings, again=args.again)
    setups = [replace(x, limit=args.limit or x.limit) for x in map(BY_NAME.get, args.setups) if x]
    jobs = [(setup, sizes[setup.model]) for setup in setups]
    for result in run_jobs(attempt, jobs, ranks=args.ranks):
        add_result(path, record, result, ("model", "how", "limit", "ranks"))
    print_rows("large models on several GPUs", large_models_table(record))


if __name__ == "__main__":
    main()
