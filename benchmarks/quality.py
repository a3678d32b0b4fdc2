"""Compare losses with BF16 by seed, for models trained on Python source code, on all GPUs.

    python benchmarks/quality.py                       every recipe, results/quality.json
    python benchmarks/quality.py accumulation          fast and precise accumulation by role
    python benchmarks/quality.py lengths               fast accumulation over 8,192 tokens
    python benchmarks/quality.py rates                 recipes at rising learning rates
    python benchmarks/quality.py mantissa              simulated formats at high learning rates
    python benchmarks/quality.py muon                  Muon with momentum in FP32 and in 8 bits
    python benchmarks/quality.py large                 352M parameters, 300M tokens, on four GPUs
    python benchmarks/quality.py convergence           a Llama of 51M, on the standard library
    python benchmarks/quality.py experts               a mixture of experts of 97M, on the same
    python benchmarks/quality.py --variants coat --seeds 0 1 2 3
    python benchmarks/quality.py --tiny --out x.json   a minute on a CPU

The model is nanoGPT's GPT-2 124M with a vocabulary of 256 bytes: FP32 weights under BF16 autocast,
16 × 1024 tokens a step, AdamW, gradients clipped at 1.0, a linear warm-up and a cosine to a tenth
of the learning rate. The text is the Python source of the standard library and of all installed
packages; every tenth file is held out. For one seed all variants start from the same weights and
see the same batches, so losses can be compared in pairs. Each GPU trains a different variant, and
replays the steps as CUDA graphs. Variants with several ranks use FSDP2 on that many GPUs, with the
same global batch and without CUDA graphs.

In `recipes`, `accumulation` and `lengths`, each seed trains the first 1,200 steps in BF16 at a
fixed rate. All variants continue from these weights with a new optimizer. The reason: from random
weights, the loss stays on a plateau for about 600 steps. Two runs that differ only in rounding
leave the plateau at different times, so their final losses differ by 1%.

`convergence` and `experts` train the demo's model, without CUDA graphs, which would hide the memory
peak. A layer of experts has eight experts and uses two of them for each token. Its training adds
the balancing loss of Switch Transformers, which no reported loss includes.

The loss of a run is the mean of its last 50 steps; the loss on held-out text is computed with the
trained forward. Tables give the mean difference to BF16 over seeds with its standard error. A run
diverges if a mean loss of 50 steps is half a nat above the lowest earlier mean, or not finite.
Other programs may use the GPU at the same time, so do not compare the speed of runs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from models import GPT, MoEDecoder
from report import add_result, finite, first_divergence, print_rows, record_parser, resume
from tables_runs import convergence_table, quality_rates_table, quality_table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from workers import run_jobs

import fp8pass
from fp8pass.config import GEMMS
from fp8pass.demo.data import Data, source_files
from fp8pass.demo.model import VOCABULARY, Decoder
from fp8pass.demo.sizes import Size
from fp8pass.demo.train import Meter, free_memory
from fp8pass.optim import split_parameters


@dataclass(frozen=True)
class Variant:
    """How a variant trains its model.

    Attributes:
        options: options of fp8pass; None does not use fp8pass.
        torchao: float8 recipe of torchao; '' does not use torchao.
        optimizer: options of fp8pass's optimizers; None uses PyTorch's, with FP32 states.
        muon: Muon trains the matrices of hidden layers: `torch.optim.Muon` if this is `torch`, else
            fp8pass's with this format and rounding of the momentum. If it is empty, AdamW trains
            them.
        ranks: number of GPUs that share a batch under FSDP2. fp8pass sends 8 bits (`compress`).
    """

    options: dict[str, Any] | None = None
    torchao: str = ""
    optimizer: dict[str, Any] | None = None
    ranks: int = 1
    muon: str = ""


BASELINE = "BF16"
FP8_STATES: dict[str, Any] = {}
VARIANTS = {
    BASELINE: Variant(),
    "exact": Variant({"recipe": "exact"}),
    "linear": Variant({"recipe": "linear"}),
    "coat": Variant({"recipe": "coat"}),
    "agoq": Variant({"recipe": "agoq"}),
    "block": Variant({"recipe": "block", "fp8_gemms": "all"}),
    "mxfp8": Variant({"recipe": "mxfp8"}),
    "agoq, 6 bits": Variant({"save_format": "e2m3"}),
    "agoq, 4 bits": Variant({"save_format": "e2m1"}),
    "agoq, 4 bits, groups of 32": Variant({"save_format": "e2m1", "group_size": 32}),
    "torchao tensorwise": Variant(torchao="tensorwise"),
    "torchao rowwise": Variant(torchao="rowwise"),
    "coat, E5M2 gradients": Variant({"gradient_format": "e5m2"}),
    "coat, groups of 16": Variant({"group_size": 16}),
    "coat, FP8 AdamW": Variant({"recipe": "coat"}, optimizer=FP8_STATES),
    "coat, FP8 AdamW, 8-bit wire, 2 ranks": Variant({"recipe": "coat"}, "", FP8_STATES, 2),
    "coat, FP8 AdamW, 8-bit wire, 4 ranks": Variant({"recipe": "coat"}, "", FP8_STATES, 4),
    "agoq, FP8 AdamW, 8-bit wire, 2 ranks": Variant({"recipe": "agoq"}, "", FP8_STATES, 2),
    "agoq, FP8 AdamW, 8-bit wire, 4 ranks": Variant({"recipe": "agoq"}, "", FP8_STATES, 4),
}
RECIPES = tuple(VARIANTS)
# Variants for every choice of GEMMs with fast accumulation, for contractions of any length.
ANY_LENGTH = 2**30
ACCUMULATION = {
    f"coat, fast: {' '.join(fast) or 'none'}": Variant(
        {"fast_accumulation": fast, "longest_fast": ANY_LENGTH}
    )
    for count in range(len(GEMMS) + 1)
    for fast in itertools.combinations(GEMMS, count)
}
FAST_UP_TO_8192 = "coat, fast up to 8192"
SIMULATED = {name.upper(): Variant({"simulate": name}) for name in ("e8m5", "e8m4", "e8m3")}
FOUR_RANKS = "BF16, 4 ranks"
# The first variant is the baseline.
MUON = {
    "BF16, torch Muon": Variant(muon="torch"),
    **{
        f"BF16, Muon, {how.removesuffix(' stochastic')}": Variant(optimizer=FP8_STATES, muon=how)
        for how in (
            *("e4m3+expand stochastic", "e4m3+expand nearest", "de8 stochastic"),
            *("int8 stochastic", "int8 nearest"),
        )
    },
    "coat, Muon, int8": Variant({"recipe": "coat"}, optimizer=FP8_STATES, muon="int8 stochastic"),
}
VARIANTS |= MUON | ACCUMULATION | SIMULATED | {FOUR_RANKS: Variant(ranks=4)}
VARIANTS[FAST_UP_TO_8192] = Variant({"longest_fast": 8192})
# 4 bits wherever possible, without the error rules.
VARIANTS["uniform4"] = Variant({"save_format": "e2m1", "error_tolerance": math.inf})

MODEL = Size(768, 12, 12, 12, 3072, seq=1024, batch=16, steps=2000, peak_lr=6e-4)
CONTINUED = replace(MODEL, steps=800)
LARGE = Size(1024, 28, 16, 16, 4096, seq=1024, batch=64, steps=4600, peak_lr=3e-4)
LLAMA = Size(640, 10, 10, 10, 1792, seq=1024, batch=12, steps=2000, peak_lr=1e-3)
EXPERTS = Size(512, 8, 8, 8, 896, seq=1024, batch=12, steps=1500, peak_lr=1e-3)
TINY = Size(64, 2, 2, 2, 256, seq=32, batch=4, steps=30, peak_lr=2e-3)
HELD_OUT_EVERY = 10
MOST_TEXT = 256 << 20


@cache
def corpus(files: Callable[[], list[Path]], device: torch.device) -> Data:
    """Return files as bytes, split by file into training and held-out text."""
    texts = [bytearray(), bytearray()]
    for i, file in enumerate(files()):
        texts[i % HELD_OUT_EVERY == 0] += file.read_bytes()
    train, held_out = (torch.frombuffer(t[:MOST_TEXT], dtype=torch.uint8) for t in texts)
    return Data(train.to(device), held_out.to(device))


def installed_sources() -> list[Path]:
    """List the files of the standard library and of installed packages other than fp8pass."""
    stdlib, packages = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
    found = [f for f in stdlib.rglob("*.py") if not f.is_relative_to(packages)]
    for package in packages.iterdir():
        found += [] if package.name.startswith("fp8pass") else package.rglob("*.py")
    return sorted(f for f in found if f.is_file())


def standard_library() -> list[Path]:
    """List the files of the standard library without tests, in a random order."""
    return source_files(None)


def gpt(size: Size) -> nn.Module:
    """Return a GPT-2 with a vocabulary of bytes."""
    return GPT(size.layers, size.dim, size.heads, VOCABULARY, size.seq)


@dataclass(frozen=True)
class Experiment:
    """The runs of one record and one table.

    Attributes:
        variants: names of variants, the baseline first.
        size: sizes of the model and its batches.
        seeds: number of seeds.
        rates: peak learning rates; if empty, the rate of `size`.
        start: steps in BF16 before the variants of a seed start.
        model: returns a model. Its forward returns the loss.
        files: lists the files of the text.
        graphs: whether steps are replayed as CUDA graphs, which hide the memory peak.
        table: returns the rows of the table.
    """

    variants: tuple[str, ...]
    size: Size = MODEL
    seeds: int = 6
    rates: tuple[float, ...] = ()
    start: int = 0
    model: Callable[[Size], nn.Module] = gpt
    files: Callable[[], list[Path]] = installed_sources
    graphs: bool = True
    table: Callable[[dict[str, Any]], list[list[str]]] = quality_table


SMALL = Experiment(
    (BASELINE, "linear", "coat", "agoq, 4 bits", "uniform4"), LLAMA, seeds=2,
    model=Decoder, files=standard_library, graphs=False, table=convergence_table,
)  # fmt: skip
EXPERIMENTS = {
    "recipes": Experiment(RECIPES, CONTINUED, start=1200),
    "accumulation": Experiment((BASELINE, *ACCUMULATION), CONTINUED, seeds=4, start=1200),
    # With 8 sequences, wgrad sums over 8,192 tokens.
    "lengths": Experiment(
        (BASELINE, "coat", FAST_UP_TO_8192, "coat, fast: none"),
        replace(CONTINUED, batch=8),
        start=1200,
    ),
    "rates": Experiment(
        (BASELINE, "linear", "coat", "agoq", "torchao tensorwise"),
        replace(MODEL, steps=600),
        seeds=2,
        rates=(2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    ),
    "mantissa": Experiment((BASELINE, *SIMULATED), seeds=2, rates=(4e-3, 8e-3)),
    "muon": Experiment(tuple(MUON), CONTINUED, start=1200),
    "large": Experiment((FOUR_RANKS, "coat, FP8 AdamW, 8-bit wire, 4 ranks"), LARGE, seeds=1),
    "convergence": SMALL,
    "experts": replace(SMALL, variants=(BASELINE, "coat"), size=EXPERTS, seeds=3, model=MoEDecoder),
}
# Records that are named differently from their experiments.
RECORDS = {"recipes": "quality", "convergence": "convergence", "experts": "moe_convergence"}
WARM_UP = 0.04  # share of the steps
LEAST_RATE = 0.1  # share of the peak rate
LAST = 50
WINDOW = 50
HELD_OUT_BATCHES = 20
FIRST_STEPS = 5
START_DATA = 1_000_000  # added to the seed, so that batches before the start are different
PROGRESS = 1000  # steps between lines of progress
Batch = tuple[Tensor, Tensor]


@dataclass
class Result:
    """One run; see the module's docstring. A loss that is not finite is None.

    Attributes:
        start: identifies the weights that the run started from; '' is the seed's random weights.
        peak_bytes: memory peak after the first steps; None if unknown.
    """

    variant: str
    rate: float
    seed: int
    start: str
    loss: float | None
    held_out_loss: float | None
    losses: list[float | None]
    diverged: bool
    tokens_per_second: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Job:
    """Runs of one variant of an experiment.

    Attributes:
        until: wall-clock time after which no new run begins.
    """

    variant: str
    rate: float
    seeds: tuple[int, ...]
    of: Experiment
    until: float = math.inf

    def start_file(self, seed: int) -> Path:
        """Return the file with the weights that all variants of a seed start from."""
        size = self.of.size
        name = f"{size.dim}-{size.layers}-{size.tokens}-{size.peak_lr}-{self.of.start}-{seed}.pt"
        return Path(tempfile.gettempdir()) / "fp8pass-quality" / name

    def trainer(self, device: torch.device) -> Trainer:
        """Compile the model of the variant."""
        return Trainer(VARIANTS[self.variant], self.of, new_model(self.of, 0, device))


def new_model(of: Experiment, seed: int, device: torch.device) -> nn.Module:
    """Return the model with the weights of a seed."""
    torch.manual_seed(seed)
    with device:
        return of.model(of.size)


class Trainer:
    """A model of one variant, compiled in place and trained once for each seed."""

    def __init__(self, variant: Variant, of: Experiment, model: nn.Module) -> None:
        free_memory()
        self.variant, self.of, self.model = variant, of, model
        self.device = next(model.parameters()).device
        self.data = corpus(of.files, self.device)
        # FSDP2 gathers weights to new addresses, and CUDA graphs would be captured again for each.
        self.replayed = of.graphs and self.device.type == "cuda" and variant.ranks == 1
        graphs = {"triton.cudagraphs": True} if self.replayed else {}
        if variant.torchao:
            convert(self.model, variant.torchao)
        backend = "inductor" if variant.options is None else "fp8pass"
        self.model.compile(backend=backend, options={**(variant.options or {}), **graphs})
        if variant.ranks > 1:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
            mesh = init_device_mesh(self.device.type, (variant.ranks,))
            fully_shard(self.model, mesh=mesh, mp_policy=policy)
            if variant.options is not None:
                fp8pass.distributed.compress(self.model)

    def optimizers(self, rate: float) -> list[Any]:
        """Return new optimizers with weight decay for matrices, as in nanoGPT."""
        hidden, others = split_parameters(self.model, skip=() if self.variant.muon else "*")
        trained = [p for p in others if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        options = self.variant.optimizer or {}
        module: Any = torch.optim if self.variant.optimizer is None else fp8pass.optim
        fused = {"fused": True} if module is torch.optim and self.device.type == "cuda" else {}
        found = [module.AdamW(groups, rate, (0.9, 0.95), **fused, **options)]
        if hidden:  # with this option, learning rates of AdamW fit
            if self.variant.muon != "torch":
                format, rounding = self.variant.muon.split()
                options = {**options, "momentum_format": format, "state_rounding": rounding}
            found.append(module.Muon(hidden, rate, adjust_lr_fn="match_rms_adamw", **options))
        return found

    def reset(self, seed: int, file: Path | None = None) -> str:
        """Set the weights of a seed, or the weights in `file`, and return their identifier."""
        model, start = new_model(self.of, seed, self.device), ""
        if file:
            saved = torch.load(file, map_location=self.device)
            model.load_state_dict(saved["weights"])
            start = saved["id"]
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # a forward without a backward leaves the weights gathered
        with torch.no_grad():
            for own, value in zip(self.model.parameters(), model.parameters(), strict=True):
                if isinstance(own, DTensor):
                    own.copy_(distribute_tensor(value.detach(), own.device_mesh, own.placements))
                else:
                    own.copy_(value)
        return start

    def loss(self, batch: Batch) -> Tensor:
        """Compute the loss of this rank's part of a batch."""
        if self.variant.ranks > 1:
            batch = tuple(x.chunk(self.variant.ranks)[dist.get_rank()] for x in batch)  # type: ignore[assignment]
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(*batch)

    def mean(self, losses: list[Tensor]) -> Tensor:
        """Return the losses of steps as means over ranks."""
        stacked = torch.stack(losses)
        if self.variant.ranks > 1:
            dist.all_reduce(stacked)
            stacked /= self.variant.ranks
        return stacked

    def run(self, variant: str, rate: float, seed: int, start: str = "") -> Result:
        """Train from the present weights with the batches of a seed, and compute the losses."""
        size = self.of.size
        batches = self.data.train_batches(size, seed)
        losses, seconds, peak = self.train(batches, rate, share)
        held_out_batches = self.data.held_out_batches(size, HELD_OUT_BATCHES)
        held_out = self.mean([self.loss(batch).detach().clone() for batch in held_out_batches])
        trained = self.mean(losses)
        windows = [finite(window.mean()) for window in trained.split(WINDOW)]
        return Result(
            variant,
            rate,
            seed,
            start,
            finite(trained[-LAST:].mean()),
            finite(held_out.mean()),
            windows,
            first_divergence(windows) is not None,
            (size.steps - FIRST_STEPS) * size.tokens / seconds,
            None if self.replayed else peak,
        )

    def make_start(self, seed: int, file: Path) -> None:
        """Train and save the weights that all variants of a seed start from."""
        self.reset(seed)
        size = replace(self.of.size, steps=self.of.start)
        self.train(self.data.train_batches(size, START_DATA + seed), size.peak_lr, warm_up)
        file.parent.mkdir(exist_ok=True)
        torch.save({"id": uuid.uuid4().hex[:8], "weights": self.model.state_dict()}, file)

    def train(
        self, batches: Iterator[Batch], rate: float, share: Callable[[int, int], float]
    ) -> tuple[list[Tensor], float, int | None]:
        """Run all steps. Return losses, and the seconds and memory peak after the first steps."""
        optimizers = self.optimizers(rate)
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: share(step, self.of.size.steps))
            for each in optimizers
        ]
        losses: list[Tensor] = []
        for step, batch in enumerate(batches):
            if step == FIRST_STEPS:
                meter = Meter(self.device)
            loss = self.loss(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for each in (*optimizers, *schedules):
                each.step()
            self.model.zero_grad()
            losses.append(loss.detach().clone())  # a CUDA graph overwrites its previous results
            if not (step + 1) % PROGRESS:
                print(f"step {step + 1}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
        return losses, *meter.read()


def convert(model: nn.Module, recipe: str) -> None:
    """Replace a model's linear layers, except the output head, by torchao's FP8 layers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name
    )


def share(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the peak: warm-up, then a cosine."""
    first = warm_up_steps(steps)
    cosine = 0.5 + 0.5 * math.cos(math.pi * max(step - first, 0) / (steps - first))
    return warm_up(step, steps) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def warm_up(step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of the peak: warm-up, then constant."""
    return min((step + 1) / warm_up_steps(steps), 1.0)


def warm_up_steps(steps: int) -> int:
    """Return the number of steps in which the learning rate rises."""
    return max(1, int(WARM_UP * steps))


def train(job: Job, device: torch.device) -> Iterator[Result]:
    """Run a job on this process's device."""
    trainer = None
    for seed in job.seeds:
        late = torch.tensor(float(time.time() > job.until), device=device)
        if VARIANTS[job.variant].ranks > 1:
            dist.all_reduce(late)  # all ranks must decide the same
        if late.item():
            return
        trainer = trainer or job.trainer(device)
        start = trainer.reset(seed, job.start_file(seed) if job.of.start else None)
        yield trainer.run(job.variant, job.rate, seed, start)


def make_starts(job: Job, device: torch.device) -> Iterator[Result]:
    """Train the weights that variants start from."""
    trainer = job.trainer(device)
    for seed in job.seeds:
        trainer.make_start(seed, job.start_file(seed))
    yield from ()


def start_ids(like: Job) -> dict[int, str]:
    """Return an identifier of each seed's starting weights. Train missing weights first."""
    if not like.of.start:
        return dict.fromkeys(like.seeds, "")
    missing = tuple(seed for seed in like.seeds if not like.start_file(seed).exists())
    gpus = max(torch.cuda.device_count(), 1)
    jobs = [replace(like, seeds=missing[gpu::gpus]) for gpu in range(min(gpus, len(missing)))]
    list(run_jobs(make_starts, jobs))
    return {seed: torch.load(like.start_file(seed), mmap=True)["id"] for seed in like.seeds}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, with the experiment's values as defaults."""
    parser = record_parser(__doc__)
    parser.add_argument("experiment", nargs="?", choices=EXPERIMENTS, default="recipes")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--start", type=int, help="steps in BF16 before variants start")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no new runs after this")
    args = parser.parse_args()
    of = EXPERIMENTS[args.experiment]
    size = TINY if args.tiny else of.size
    size = replace(size, steps=args.steps or size.steps)
    if args.start is None:
        args.start = 0 if args.tiny else of.start
    args.of = replace(of, size=size, start=args.start)
    args.variants = args.variants or list(of.variants)
    args.seeds = args.seeds or list(range(of.seeds))
    args.rates = args.rates or list(of.rates) or [size.peak_lr]
    name = RECORDS.get(args.experiment, f"quality_{args.experiment}")
    args.out = args.out or Path(__file__).parent / f"results/{name}.json"
    return args


def main() -> None:
    """Run all jobs that have no result yet."""
    args = parse_arguments()
    until = time.time() + args.seconds
    gpus = torch.cuda.device_count()
    if not gpus and not args.tiny:
        sys.exit("These models need an NVIDIA GPU; --tiny runs on the CPU.")
    of: Experiment = args.of
    text_bytes = sum(file.stat().st_size for file in of.files())
    settings = {**asdict(of.size), "start": of.start, "last": LAST, "text_bytes": text_bytes}
    record = resume(args.out, settings, again=args.again)
    like = Job(BASELINE, of.size.peak_lr, tuple(args.seeds), of, until)
    starts = start_ids(like)
    keys = "variant", "rate", "seed", "start"
    found = (r for r in record["results"] if r["start"] == starts.get(r["seed"]))
    done = {(r["variant"], r["rate"], r["seed"]) for r in found}
    for ranks in sorted({VARIANTS[v].ranks for v in args.variants}):
        some = [v for v in args.variants if VARIANTS[v].ranks == ranks]
        if gpus and ranks > gpus:
            print(f"skipped, because they need {ranks} GPUs: {', '.join(some)}", file=sys.stderr)
            continue
        jobs = [
            replace(like, variant=variant, rate=rate, seeds=missing)
            for variant, rate in itertools.product(some, args.rates)
            if (missing := tuple(s for s in args.seeds if (variant, rate, s) not in done))
        ]
        for result in run_jobs(train, jobs, ranks=ranks) if jobs else ():
            add_result(args.out, record, asdict(result), keys)
    table = quality_rates_table if len(args.rates) > 1 else of.table
    print_rows("loss beside BF16", table(record))


if __name__ == "__main__":
    main()
