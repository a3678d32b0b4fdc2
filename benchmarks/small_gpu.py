"""Llamas trained with PyTorch's allocator capped at a few GiB, against no limit and the peers.

    python benchmarks/small_gpu.py                          all that is not in the results yet
    python benchmarks/small_gpu.py --setups "7B fp8pass 16 GiB"
    python benchmarks/small_gpu.py --tiny --out x.json      small models, on the CPU too

A step takes 65,536 tokens, in micro-batches of a set-up's size. The limit is PyTorch's own
(`torch.cuda.set_per_process_memory_fraction`) and holds from the first tensor on. It does not count
the CUDA context and libraries, so that a GPU with as much memory as the limit would be too small.
Weights are drawn on the GPU one by one and kept on the host.

fp8pass without a limit is the fastest way of `model.py`: layers compiled one by one, head and loss
as one module, `fp8pass.optim.AdamW` after the last micro-batch. With a limit weights, states and
sums of gradients are on the host (`offload_weights`, `AdamW(offload=...)`, `attach`).

The peers are PyTorch's own means, in BF16: FSDP2 on one rank with `CPUOffloadPolicy`, which steps
on the CPU, and torchao's `CPUOffloadOptimizer`; both with each layer checkpointed.

Every set-up is a process of its own. Measured: tokens a second by the median of the three steps
after the first, of peers by one, which takes them up to a minute; the most memory reserved and
allocated on the GPU in these; the process's on the host.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from layer import with_fp8pass
from model import MODELS, TINY, LossOnly, Size, new_llama, step_seconds
from report import merge, print_rows, resume, use_expandable_segments, write_json
from tables_models import small_gpu_table
from torch import Tensor

from fp8pass.optim import AdamW, attach, offload_weights

STEP_TOKENS = 65_536
TIMED = 3
LEARNING_RATE = 1e-4
SIZES = {
    "1B": replace(MODELS["1B"], batch=2, per_block=True),
    "7B": replace(MODELS["7B"], batch=4),
    "14B": Size(5120, 13824, 40, 40, 40, 32000, batch=2, seq=2048, per_block=True),
}
EVERYTHING = ("weights", "states", "gradients")


@dataclass(frozen=True)
class Setup:
    """A model, a limit, and how it is trained.

    Attributes:
        model: of `SIZES`.
        how: of `WAYS`.
        limit: GiB of the GPU; None is all there is.
        batch: sequences of a micro-batch.
        offload: what is on the host.
        options: of fp8pass, for layers.
    """

    model: str
    how: str
    limit: float | None
    batch: int
    offload: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return f"{self.model} {self.how} {f'{self.limit:g} GiB' if self.limit else 'no limit'}"


# With a limit micro-batches are as large as what is computed again leaves room for: the update
# behind the last one, which moves 9 bytes a weight, takes as long as the backward of 25,000 tokens.
SETUPS = (
    Setup("7B", "fp8pass", None, batch=4),
    Setup("7B", "fp8pass", 16, batch=8, offload=EVERYTHING, options={"memory_budget": 0.2}),
    Setup("7B", "fp8pass", 24, batch=16, offload=EVERYTHING, options={"memory_budget": 0.18}),
    Setup("7B", "FSDP2", 16, batch=4),
    Setup("7B", "FSDP2", 24, batch=8),
    Setup("7B", "CPUOffloadOptimizer", 24, batch=1),
    Setup("14B", "fp8pass", 24, batch=4, offload=EVERYTHING, options={"memory_budget": 0.3}),
    Setup("1B", "fp8pass", None, batch=4),
    Setup("1B", "fp8pass", 4, batch=4, offload=EVERYTHING, options={"memory_budget": 0.35}),
    Setup("1B", "FSDP2", 4, batch=2),
)


@dataclass
class Result:
    """One set-up; see the module's docstring."""

    setup: str
    model: str
    how: str
    limit: float | None
    batch: int
    first_step_s: float | None = None
    tokens_per_second: float | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None
    host_bytes: int | None = None
    loss: float | None = None
    error: str | None = None


def drawn_llama(size: Size, device: torch.device) -> Any:
    """A Llama in BF16 on the host, whose weights `device` has drawn."""
    llama = new_llama(size, torch.device("meta"))
    llama.to_empty(device="cpu")
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config)
    torch.manual_seed(0)
    for parameter in llama.parameters():
        drawn = torch.empty_like(parameter, device=device)
        parameter.data.copy_(drawn.normal_(std=0.02) if drawn.ndim == 2 else drawn.fill_(1))
    return llama


Forward = Callable[[Tensor], Tensor]
Step = Callable[[], object]


def with_fp8(
    setup: Setup, llama: Any, device: torch.device, backwards: int
) -> tuple[Forward, Step]:
    """fp8pass: the loss of a micro-batch, and what comes after the last one of a step."""
    if "weights" in setup.offload:
        offload_weights(llama, device)
    else:
        llama.to(device)
    model = LossOnly(llama, with_fp8pass(**setup.options), with_fp8pass(head_chunks=8))
    moved = tuple(x for x in setup.offload if x != "weights")
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, offload=moved)
    if setup.offload:
        attach(model, optimizer, accumulate=backwards)

    def forward(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return forward, lambda: _finish(optimizer)


def with_fsdp(
    setup: Setup, llama: Any, device: torch.device, backwards: int
) -> tuple[Forward, Step]:
    """PyTorch's own: parameters, gradients, states and the optimizer's step on the CPU."""
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = distributed.HashStore()
    distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store)
    policy = CPUOffloadPolicy(pin_memory=True)
    _checkpoint_and_compile(llama)
    for layer in llama.model.layers:
        fully_shard(layer, offload_policy=policy)
    fully_shard(llama, offload_policy=policy)
    for name, buffer in llama.named_buffers():
        owner, _, last = name.rpartition(".")
        llama.get_submodule(owner)._buffers[last] = buffer.to(device)
    optimizer = torch.optim.AdamW(llama.parameters(), LEARNING_RATE, fused=True)
    return _loss_of(llama), lambda: _finish(optimizer)


def with_torchao(
    setup: Setup, llama: Any, device: torch.device, backwards: int
) -> tuple[Forward, Step]:
    """torchao's optimizer, whose states are on the host and which steps on the CPU."""
    from torchao.optim import CPUOffloadOptimizer

    llama.to(device)
    _checkpoint_and_compile(llama)
    optimizer = CPUOffloadOptimizer(
        llama.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return _loss_of(llama), lambda: _finish(optimizer)


WAYS = {"fp8pass": with_fp8, "FSDP2": with_fsdp, "CPUOffloadOptimizer": with_torchao}


def _checkpoint_and_compile(llama: Any) -> None:
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    llama.train()
    for layer in llama.model.layers:
        layer.compile()
    llama.loss_function = torch.compile(llama.loss_function)


def _loss_of(llama: Any) -> Forward:
    return lambda ids: llama(input_ids=ids, labels=ids, use_cache=False).loss


def _finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def measure(setup: Setup, size: Size, step_tokens: int, device: torch.device) -> dict[str, Any]:
    """Train one set-up in this process; what a `Result` says of it."""
    on_gpu = device.type == "cuda"
    if on_gpu and setup.limit is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(setup.limit * 2**30 / total)
    backwards = step_tokens // (setup.batch * size.seq)
    forward, finish = WAYS[setup.how](setup, drawn_llama(size, device), device, backwards)
    ids = torch.randint(size.vocabulary, (backwards, setup.batch, size.seq), device=device)
    losses: list[Tensor] = []

    def step() -> None:
        for part in ids:
            loss = forward(part)
            (loss / backwards).backward()
        finish()
        losses.append(loss.detach())

    (first,) = step_seconds(step, 1, device)
    print(f"{setup.name}: the first step took {first:.1f} s", file=sys.stderr, flush=True)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    timed = TIMED if setup.how == "fp8pass" else 1
    seconds = statistics.median(step_seconds(step, timed, device))
    return {
        "first_step_s": first,
        "tokens_per_second": ids.numel() / seconds,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "loss": losses[-1].item(),
    }


def child(setup: Setup, size: Size, step_tokens: int) -> Result:
    """A result, or the error in its place."""
    use_expandable_segments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = Result(setup.name, setup.model, setup.how, setup.limit, setup.batch)
    try:
        return replace(result, **measure(setup, size, step_tokens, device))
    except Exception as error:  # out of memory, a missing peer: the others go on
        return replace(result, error=f"{type(error).__name__}: {error}".splitlines()[0])


def attempt(setup: Setup, *, tiny: bool, seconds: float) -> Result:
    """The result of a process of its own."""
    command = [sys.executable, __file__, "--child", setup.name, *(["--tiny"] if tiny else [])]
    result = Result(setup.name, setup.model, setup.how, setup.limit, setup.batch)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return replace(result, error=f"took longer than {seconds:.0f} s")
    if done.returncode:
        return replace(result, error=f"ended with code {done.returncode}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Command line."""
    by_name = {setup.name: setup for setup in SETUPS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--setups", nargs="+", default=list(by_name), choices=by_name)
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="small models, on the CPU too")
    parser.add_argument("--seconds", type=float, default=600.0, help="of one set-up at most")
    parser.add_argument("--child", choices=by_name, help=argparse.SUPPRESS)
    default = Path(__file__).parent / "results/small_gpu.json"
    parser.add_argument("--out", type=Path, default=default, help="results to add to")
    args = parser.parse_args()
    sizes = {
        **SIZES,
        **{name: replace(TINY["7B"], hidden=256, vocabulary=512) for name in SIZES if args.tiny},
    }
    step_tokens = 512 if args.tiny else STEP_TOKENS
    if args.child:
        setup = by_name[args.child]
        if args.tiny:  # a budget for large layers is too small for what these cannot do without
            setup = replace(setup, options={})
        print(json.dumps(asdict(child(setup, sizes[setup.model], step_tokens))))
        return
    if not torch.cuda.is_available() and not args.tiny:
        sys.exit("These models need an NVIDIA GPU; --tiny runs on the CPU.")
    settings = {
        "models": {name: asdict(size) for name, size in sizes.items()},
        "step_tokens": step_tokens,
        "timed": TIMED,
    }
    record = resume(args.out, settings, again=args.again)
    done = {r["setup"] for r in record["results"] if not r["error"]}
    for name in args.setups:
        if name in done:
            continue
        result = attempt(by_name[name], tiny=args.tiny, seconds=args.seconds)
        print(result, file=sys.stderr, flush=True)
        merge(record, asdict(result), ("setup",))
        write_json(args.out, record)
    print_rows("with a limit of a few GiB", small_gpu_table(record))


if __name__ == "__main__":
    main()
