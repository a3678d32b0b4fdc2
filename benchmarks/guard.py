"""Does the guard warn in time, name the layer, and bring a run back? And is it quiet otherwise?

    python benchmarks/guard.py                      all runs that are not in the results yet
    python benchmarks/guard.py --runs lr --seed 100 --out x.json
    python benchmarks/guard.py --tiny --out x.json  a minute, to check that the script works

A small byte-level Llama in recipe `coat` with a Monitor, fp32 weights, AdamW, gradients clipped;
the learning rate warms up, stays, and falls to zero in the last third. Each case has a seed, of its
weights and batches, and three runs: *quiet*, with nothing wrong, whose alarms are false; *watched*,
in which something goes wrong at a step and the guard only warns; *acting*, the same with all
actions allowed. What goes wrong:

- `lr`: from then on the learning rate grows, by a factor a step, up to a thousand times.
- `format`: from then on linear layers compute in a coarse simulated format.
- `poison`: more and more sequences of a batch have random targets, for some steps.
- `weights`: the weights of one layer are multiplied by 100.

The loss *has doubled* when the median of ten steps is twice that before; such a run diverges, where
models recover by themselves from some of the scaled layers. A run has *recovered* if
its loss on held-out text, computed without fp8pass, is within 2% of the quiet run's. Thresholds of
the guard were set with seeds from 100; from 0 are those that are reported. The overhead is the time
that the calls of `guard.step` take, beside that of a plain training step of the same model.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from convergence import corpus
from report import merge, print_rows, resume, write_json
from tables_runs import guard_cases_table, guard_table
from torch import Tensor, nn

import fp8pass
from fp8pass.demo.data import Data
from fp8pass.demo.model import VOCABULARY, Decoder
from fp8pass.demo.sizes import Size

MODEL = Size(32, 2, 2, 2, 64, seq=32, batch=8, steps=2000, peak_lr=3e-3)
TINY = replace(MODEL, steps=240)
WARM_UP = 50
PLANTED = 400  # the first case's step; each one's is later than that of the case before
AFTER = 400  # steps that a run is watched for
MOST = 1000.0  # times the learning rate
HELD_OUT = 64
WINDOW = 10
MODES = ("quiet", "watched", "acting")
ROUNDS = 400  # of the overhead


@dataclass(frozen=True)
class Case:
    """What goes wrong.

    Attributes:
        kind: see the module's docstring.
        detail: growth of the learning rate, format, highest share and steps of poison, or module.
    """

    kind: str
    detail: str


CASES = (
    *(Case("lr", growth) for growth in ("1.02", "1.03", "1.05")),
    *(Case("format", name) for name in ("e4m2", "e3m2", "e5m1")),
    *(Case("poison", how) for how in ("1.0 100", "0.5 150")),
    *(
        Case("weights", name)
        for name in (
            "lm_head",
            "layers.0.attention.v_proj",
            "layers.1.attention.o_proj",
            "layers.0.mlp.gate_proj",
        )
    ),
    # In the place of the scaled layers that models with norms recover from.
    Case("lr", "1.10"),
    Case("format", "e2m3"),
    Case("poison", "1.0 200"),
)


@dataclass
class Result:
    """One run; see the module's docstring. What is not finite is None.

    Attributes:
        planted: the step from which something is wrong; None in a quiet run.
        warned: the step of the first alarm since then.
        doubled: the step at which the loss had doubled.
        alarms, false_alarms: how many there were; in quiet runs all are false.
        suspects: of the first alarm since then, the most likely first.
        loss: on held-out text, at the end of the run.
    """

    kind: str
    detail: str
    seed: int
    mode: str
    planted: int | None
    warned: int | None
    doubled: int | None
    alarms: int
    false_alarms: int
    suspects: list[str]
    events: list[str]
    loss: float | None
    ms_per_step: float


class Trained:
    """A model, and versions of it: recipe `coat`, and one for each coarse format."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        self.model = Decoder(size).to(device)
        self.monitor = fp8pass.Monitor(every=100, model=self.model, fallback=("*",))
        self._versions: dict[str | None, Any] = {}

    def version(self, format: str | None) -> Any:
        """The compiled model that computes in a format."""
        if format not in self._versions:
            config = (
                fp8pass.Config.recipe("exact", simulate=format, compiler="eager")
                if format
                else fp8pass.Config()
            )
            backend = fp8pass.backend(config, monitor=self.monitor)
            self._versions[format] = torch.compile(self.model, backend=backend)
        return self._versions[format]


class Trouble:
    """Makes a case come about in a training."""

    def __init__(self, case: Case, planted: int, seed: int) -> None:
        self.case, self.planted = case, planted
        self._random = torch.Generator().manual_seed(seed)

    def before(self, step: int, model: nn.Module) -> None:
        """Change weights, if this is the step."""
        if self.case.kind == "weights" and step == self.planted:
            with torch.no_grad():
                model.get_parameter(f"{self.case.detail}.weight").mul_(100)

    def rate(self, step: int) -> float:
        """The factor of the learning rate."""
        if self.case.kind != "lr" or step < self.planted:
            return 1.0
        return min(MOST, float(self.case.detail) ** (step - self.planted))

    def format(self, step: int) -> str | None:
        """The format that linear layers compute in."""
        return self.case.detail if self.case.kind == "format" and step >= self.planted else None

    def targets(self, step: int, targets: Tensor) -> Tensor:
        """The targets of a batch, [batch, sequence]."""
        if self.case.kind != "poison":
            return targets
        highest, length = map(float, self.case.detail.split())
        since = step - self.planted
        if not 0 <= since < length:
            return targets
        share = min(highest, 2 * highest * since / length)
        chosen = torch.rand(len(targets), 1, generator=self._random) < share
        noise = torch.randint(VOCABULARY, targets.shape, generator=self._random)
        return torch.where(chosen.to(targets.device), noise.to(targets.device), targets)


def run(of: Trained, case: Case, number: int, seed: int, mode: str, data: Data) -> Result:
    """One training."""
    size = of.size
    planted = size.steps if mode == "quiet" else _planted(size, number)
    trouble = Trouble(case, planted, seed)
    last = min(size.steps, planted + AFTER) if mode == "watched" else size.steps
    torch.manual_seed(seed)
    of.model.load_state_dict(Decoder(size).state_dict())
    of.monitor.resume(0)
    optimizer = torch.optim.AdamW(
        of.model.parameters(), lr=size.peak_lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    act = ("high precision", "lower lr", "roll back") if mode == "acting" else ()
    guard = fp8pass.Guard(of.monitor, optimizer, act=act)
    losses: list[Tensor] = []
    start = time.perf_counter()
    for step, (tokens, targets) in enumerate(data.train_batches(size, seed)):
        if step == last:
            break
        trouble.before(step, of.model)
        for group in optimizer.param_groups:
            group["lr"] = size.peak_lr * scheduled(step, size) * trouble.rate(step)
        loss = of.version(trouble.format(step))(tokens, trouble.targets(step, targets))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(of.model.parameters(), 1.0)
        optimizer.step()
        of.monitor.step()
        guard.step(loss, gradient_norm=norm)
        optimizer.zero_grad()
        losses.append(loss.detach())
    ms = 1e3 * (time.perf_counter() - start) / len(losses)
    guard.close()
    alarms = [e for e in guard.events if e.kind == "alarm"]
    since = [e for e in alarms if mode != "quiet" and e.step > planted]
    false = len(alarms) - len(since) + guard.counts.get("false alarm", 0) * (mode != "quiet")
    return Result(
        *(case.kind, case.detail, seed, mode),
        planted=None if mode == "quiet" else planted,
        warned=since[0].step if since else None,
        doubled=None if mode == "quiet" else doubled_at(torch.stack(losses).tolist(), planted),
        alarms=len(alarms),
        false_alarms=false,
        suspects=[f"{s.module} {s.tensor}" for s in since[0].suspects] if since else [],
        events=[str(e) for e in guard.events],
        loss=held_out_loss(of.model, size, data),
        ms_per_step=ms,
    )


def _planted(size: Size, number: int) -> int:
    return min(PLANTED + 10 * number, size.steps // 2)


def scheduled(step: int, size: Size) -> float:
    """The share of the peak learning rate."""
    return min(1.0, (step + 1) / WARM_UP, 3 * (size.steps - step) / size.steps)


def doubled_at(losses: list[float], planted: int) -> int | None:
    """The first step at which the median of `WINDOW` losses is twice that before `planted`."""
    before = statistics.median(losses[planted - 3 * WINDOW : planted])
    known = [x if math.isfinite(x) else math.inf for x in losses]
    for step in range(planted + 1, len(known) + 1):
        if statistics.median(known[step - WINDOW : step]) >= 2 * before:
            return step
    return None


@torch.no_grad()
def held_out_loss(model: nn.Module, size: Size, data: Data) -> float | None:
    """Mean loss on held-out text; None if it is not finite."""
    batches = data.held_out_batches(size, HELD_OUT)
    loss = torch.stack([model(*batch) for batch in batches]).mean().item()
    return loss if math.isfinite(loss) else None


def overhead(size: Size, device: torch.device) -> dict[str, float]:
    """Median milliseconds of a plain step, and of the guard's part: between readings, with one."""
    model = Decoder(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (size.batch, size.seq), device=device)
    guards = {
        name: fp8pass.Guard(None, optimizer, model=model, every=every)
        for name, every in (("between", 1 << 30), ("reading", 1))
    }
    times: dict[str, list[float]] = {name: [] for name in ("step", *guards)}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        loss = model(tokens, tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        times["step"].append(time.perf_counter() - start)
        for name, guard in guards.items():
            start = time.perf_counter()
            guard.step(loss, gradient_norm=norm)
            times[name].append(time.perf_counter() - start)
        optimizer.zero_grad()
    return {name: 1e3 * statistics.median(taken[20:]) for name, taken in times.items()}


def planned(args: argparse.Namespace) -> Iterator[tuple[int, Case, str]]:
    """The chosen cases, each with its runs."""
    for number, case in enumerate(CASES):
        if case.kind in args.runs:
            yield from ((number, case, mode) for mode in args.modes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = list(dict.fromkeys(case.kind for case in CASES))
    parser.add_argument("--runs", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no run after that")
    parser.add_argument("--again", action="store_true", help="start the results anew")
    parser.add_argument("--tiny", action="store_true", help="short runs")
    default = Path(__file__).parent / "results/guard.json"
    parser.add_argument("--out", type=Path, default=default, help="results to add to")
    args = parser.parse_args()
    logging.getLogger("fp8pass").setLevel(logging.ERROR)  # warnings are in the results
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = TINY if args.tiny else MODEL
    torch._dynamo.config.recompile_limit = 4 * len(CASES)
    data = corpus(device)
    record = resume(args.out, asdict(size), again=args.again)
    done = {(r["kind"], r["detail"], r["seed"], r["mode"]) for r in record["results"]}
    trained = Trained(size, device)
    for number, case, mode in planned(args):
        seed = args.seed + number
        if (case.kind, case.detail, seed, mode) in done:
            continue
        if time.perf_counter() - start > args.seconds:
            print("out of time: run again for the rest", file=sys.stderr)
            break
        result = asdict(run(trained, case, number, seed, mode, data))
        merge(record, result, ("kind", "detail", "seed", "mode"))
        write_json(args.out, record)
        print({k: v for k, v in result.items() if k != "events"}, file=sys.stderr, flush=True)
    if "overhead" not in record:
        record["overhead"] = overhead(size, device)
        write_json(args.out, record)
    print_rows("the guard, run by run", guard_cases_table(record))
    print_rows("the guard", guard_table(record))


if __name__ == "__main__":
    main()
