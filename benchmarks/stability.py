"""Find the learning rates at which training diverges, for formats and seeds of a small Llama.

    python benchmarks/stability.py                      all runs that are not in the results yet
    python benchmarks/stability.py --variants bf16 e8m3 --rates 1e-2 --seeds 0
    python benchmarks/stability.py --tiny --out x.json  a minute on a CPU

The protocol follows the paper "To FP8 and Back Again", at a small size. Linear layers compute in a
simulated format, forward and backward. Weights and AdamW's states are fp32, under BF16 autocast,
with clipped gradients. The learning rate warms up and then stays constant. The text is the source
of Python's standard library; every tenth file is held out. For one seed every run starts from the
same weights and sees the same batches. `bf16` is stock torch.compile, which computes in E8M7.

A run's final loss is the mean of its last 20 steps. The run *holds* if this loss is at most a tenth
of a nat above the lowest bf16 loss with the same seed. The run *diverges* if a mean loss of 20
steps is half a nat above the lowest earlier mean, or not finite. Sharpness (`fp8pass.sharpness`) is
measured ten times in a run on held-out sequences: in the corner of the box of changed logits, and
for the first seed also with the search. Each GPU has one process, which compiles the model once for
each format; each run only sets the weights. Each run is written to the results as soon as it ends.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from quality import corpus, standard_library
from report import RISE, add_result, finite, first_divergence, print_rows, record_parser, resume
from tables_runs import stability_ranks, stability_table
from torch import Tensor, nn
from torch.nn import functional as F
from workers import run_jobs

import fp8pass
from fp8pass.config import Simulation
from fp8pass.demo.data import Data
from fp8pass.demo.model import Decoder
from fp8pass.demo.sizes import Size

# Options of fp8pass; None is stock torch.compile.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "e8m5": {"simulate": "e8m5"},
    "e8m4": {"simulate": "e8m4"},
    "e8m3": {"simulate": "e8m3"},
    "e8m2": {"simulate": "e8m2"},
    "e8m1": {"simulate": "e8m1"},
    "e8m1, first blocks exact": {"simulate": "e8m1", "skip": ("layers.0", "layers.1")},
    "e8m1, head exact": {"simulate": "e8m1", "skip": ("lm_head",)},
    "e7m7": {"simulate": "e7m7"},
    "e6m7": {"simulate": "e6m7"},
    "e5m7": {"simulate": "e5m7"},
    "e5m7, inner clamp alone": {"simulate": Simulation("e5m7", outer_clamp=False)},
    "e5m7, outer clamp alone": {"simulate": Simulation("e5m7", inner_clamp=False)},
}
RATES = (1e-3, 2e-3, 3e-3, 4e-3, 8e-3)
MODEL = Size(256, 4, 4, 4, 768, seq=256, batch=16, steps=400, peak_lr=RATES[0])
TINY = Size(64, 3, 2, 2, 128, seq=32, batch=4, steps=40, peak_lr=RATES[0])
WARM_UP = 0.1  # share of the steps
WINDOW = 20
HOLDS = 0.1  # nats: a run holds if its loss is at most this much above the lowest bf16 loss
MEASURED = 10  # number of measurements of sharpness in a run
SEQUENCES = 8  # number of held-out sequences for sharpness


class Model(Decoder):
    """The demo's model, with a method that returns the logits."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, sequence, vocabulary]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.logits(tokens).float().flatten(0, 1), targets.flatten())


@dataclass
class Result:
    """One run; see the module's docstring. None stands for a value that is not finite.

    Attributes:
        losses: mean losses of `WINDOW` steps each, up to the first mean that is not finite.
        diverged_at: the last step of the first window that has diverged; None without divergence.
        sharpness: for each measurement the step, the value in the corner, and the value of the
            search, which only the first seed has.
    """

    variant: str
    rate: float
    seed: int
    losses: list[float | None]
    diverged_at: int | None
    sharpness: list[tuple[int, float | None, float | None]]
    ms_per_step: float


@dataclass
class Compiled:
    """A model, and its compiled versions for training and for logits."""

    model: Model
    train: Any
    logits: Any


def compiled(variant: str, size: Size, device: torch.device) -> Compiled:
    """Return the compiled model of a variant."""
    # Variants share code objects, so Dynamo counts their compilations together.
    torch._dynamo.config.recompile_limit = 4 * len(VARIANTS)
    model, options = Model(size).to(device), VARIANTS[variant]
    if options is None:
        return Compiled(model, torch.compile(model), model.logits)
    # Logits are computed only a few times in a run, so their graph runs op by op, with the same
    # simulated format.
    measured = torch.compile(
        model.logits, backend="fp8pass", options={**options, "compiler": "eager"}
    )
    return Compiled(model, torch.compile(model, backend="fp8pass", options=options), measured)


def run(of: Compiled, variant: str, rate: float, seed: int, size: Size, data: Data) -> Result:
    """Train from scratch. Stop early if the loss is not finite."""
    device = data.train.device
    torch.manual_seed(seed)
    of.model.load_state_dict(Model(size).state_dict())
    optimizer = torch.optim.AdamW(
        of.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    warm_up = max(1, int(WARM_UP * size.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / warm_up))
    losses: list[Tensor] = []
    measured: list[tuple[int, float | None, float | None]] = []
    start, seconds = time.perf_counter(), 0.0
    for step, batch in enumerate(data.train_batches(size, seed), start=1):
        with torch.autocast(device.type, torch.bfloat16):
            loss = of.train(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(of.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % (size.steps // MEASURED) == 0:
            is_finite = finite(loss) is not None  # waits for the device
            seconds += time.perf_counter() - start
            measured.append((step, *sharpness(of, data, size, searched=seed == 0)))
            start = time.perf_counter()
            if not is_finite:
                break
    means = [finite(x.mean().item()) for x in torch.stack(losses).split(WINDOW)]
    first, ms = first_divergence(means), 1e3 * seconds / len(losses)
    diverged_at = None if first is None else (first + 1) * WINDOW
    return Result(variant, rate, seed, means, diverged_at, measured, ms)


def sharpness(
    of: Compiled, data: Data, size: Size, *, searched: bool
) -> tuple[float | None, float | None]:
    """Measure sharpness on held-out sequences: in the corner, and optionally with the search."""
    tokens, targets = next(data.held_out_batches(replace(size, batch=SEQUENCES), 1))

    def last_loss(model: Any, _: object) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            last = model(tokens)[:, -1]
        return F.cross_entropy(last, targets[:, -1])

    measure = partial(fp8pass.sharpness, of.logits, last_loss, None)
    corner = finite(measure(search=False))
    return corner, finite(measure()) if searched else None


@dataclass(frozen=True)
class Job:
    """Runs of one variant at one learning rate.

    Attributes:
        until: wall-clock time after which no new run begins.
    """

    variant: str
    rate: float
    seeds: tuple[int, ...]
    size: Size
    until: float


models = cache(compiled)


def work(job: Job, device: torch.device) -> Iterator[Result]:
    """Run a job. Each process compiles a variant once."""
    for seed in job.seeds:
        if time.time() > job.until:
            return
        model, data = models(job.variant, job.size, device), corpus(standard_library, device)
        yield run(model, job.variant, job.rate, seed, job.size, data)


def main() -> None:
    """Run the command line."""
    parser = record_parser(__doc__)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"instead of {MODEL.steps}")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no new runs after this")
    args = parser.parse_args()
    path = args.out or Path(__file__).parent / "results/stability.json"
    until = time.time() + args.seconds
    size = TINY if args.tiny else MODEL
    size = replace(size, steps=args.steps or size.steps)
    settings = {**asdict(size), "window": WINDOW, "rise": RISE, "holds": HOLDS}
    record = resume(path, settings, again=args.again)
    keys = "variant", "rate", "seed"
    done = {tuple(r[key] for key in keys) for r in record["results"]}
    jobs = [
        Job(variant, rate, seeds, size, until)
        for variant, rate in itertools.product(args.variants, args.rates)
        if (seeds := tuple(s for s in args.seeds if (variant, rate, s) not in done))
    ]
    for found in run_jobs(work, jobs):
        add_result(path, record, asdict(found), keys)
    print_rows("where training falls over", stability_table(record))
    print_rows("sharpness in the corner, beside that of the search", stability_ranks(record))


if __name__ == "__main__":
    main()
