"""List the training setups, each with its memory and its step time, the fastest first.

Candidates combine backend configurations with choices of which data to keep in host memory.
Candidates with 4-bit saved values come last, because they are less accurate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from fp8pass.activation_memory.planner import BudgetTooSmall
from fp8pass.config import Config
from fp8pass.hardware import Gpu, Work
from fp8pass.option_checks import ConfigError, bytes_text
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.planned import REGION_KINDS
from fp8pass.tools.fitting.setup import Setup
from fp8pass.tools.fitting.traced import TracedLayers, TracedStep

MIB = 1 << 20
# GPU memory of CUDA, its libraries and kernels.
CONTEXT_BYTES = 600 * MIB
# Memory that PyTorch's allocator reserves but does not use, as a share of the allocated memory,
# measured with expandable segments.
UNUSED_SHARE = 0.02
# Host memory of Python, PyTorch and the driver.
PROCESS_BYTES = 4 << 30
# Unused share of pinned memory, which is allocated in blocks of 2^n bytes.
HOST_SHARE = 0.05
# CPU time to launch the update of one parameter during the backward: 12 ms for the 291 parameters
# of Llama-2-7B on an H200 (benchmarks/results/model.json).
ATTACHED_SECONDS = 40e-6

# Memory budgets, as shares of the bytes that are saved without a budget.
BUDGETS = (0.8, 0.6, 0.45, 0.3, 0.2)
HEAD_CHUNKS = 8
# Pairs of `step_in_backward` and `offload`.
STATE_PLACES: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (False, ()),
    (True, ()),
    (False, ("states",)),
    (True, ("states",)),
    (True, ("states", "gradients")),
    (True, ("states", "gradients", "weights")),
)
# Step times with a smaller ratio count as equal. Candidates with equal times stay in the order of
# `STATE_PLACES`.
SAME_TIME = 1.01


@dataclass(frozen=True)
class Seconds:
    """The time of an optimizer step, in seconds."""

    forward: float  # forward of all micro-batches
    backward: float  # backward of all micro-batches
    update: float  # optimizer, and adding up gradients
    waiting: float  # copies to and from the host that do not overlap with computation
    link: float  # how long the link to the host is busy; both directions work at the same time

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update + self.waiting


def estimate_step(
    work: tuple[Work, Work], parameters: Parameters, setup: Setup, accumulate: int, gpu: Gpu
) -> Seconds:
    """Estimate the time of a step of `accumulate` micro-batches from a roofline and the host link.

    `work` is the work of the forward and the backward of one micro-batch.
    """
    forward, backward = map(gpu.seconds, work)
    here, host = parameters.place(setup, accumulate)
    gradients = parameters.gradient_bytes
    # The update reads gradients and weights, and writes weights. It reads and writes states.
    update = (3 * gradients + 2 * (here.states + host.states)) / gpu.bandwidth
    if setup.step_in_backward:
        update += ATTACHED_SECONDS * len(parameters.trained)
    adding = (gradients + 2 * (here.sums + host.sums)) / gpu.bandwidth if accumulate > 1 else 0.0
    one_way, sums_one_way = (host.states + host.weights) / gpu.link, host.sums / gpu.link
    # With `step_in_backward`, copies overlap with the backward and the updates; otherwise only with
    # the updates.
    overlap = backward + adding if setup.step_in_backward else 0.0
    waits = (accumulate - 1) * max(0.0, sums_one_way - overlap)
    waits += max(0.0, one_way + sums_one_way - overlap - update)
    return Seconds(
        accumulate * forward,
        accumulate * backward,
        (accumulate - 1) * adding + update,
        waits,
        one_way + accumulate * sums_one_way,
    )


@dataclass(frozen=True)
class Candidate:
    """A training setup, with its memory and time."""

    setup: Setup
    # Bytes at the peak, by kind: `weights`, `states`, `sums`, `staging`, `saved`, `activations`,
    # `gradients`, `workspace`.
    gpu: dict[str, float]
    host: dict[str, float]  # bytes by kind
    # The part of the step with the peak: `forward of MODULE`, `backward of MODULE` or `update`.
    peak: str
    seconds: Seconds

    @property
    def allocated(self) -> float:
        """Allocated bytes, as in `torch.cuda.max_memory_allocated`."""
        return sum(self.gpu.values())

    @property
    def gpu_bytes(self) -> float:
        """All GPU bytes, including the context of CUDA and the unused memory of the allocator."""
        return self.allocated * (1 + UNUSED_SHARE) + CONTEXT_BYTES

    @property
    def host_bytes(self) -> float:
        """All bytes in host memory, including the process itself."""
        return sum(self.host.values()) * (1 + HOST_SHARE) + PROCESS_BYTES

    def why_not(self, gpu: float, host: float) -> str:
        """Return '' if `gpu` and `host` bytes of memory are enough, else what is too large."""
        reasons = []
        if (over := self.gpu_bytes - gpu) > 0:
            largest = sorted(self.gpu, key=self.gpu.__getitem__, reverse=True)[:2]
            named = ", ".join(f"{name} {bytes_text(self.gpu[name])}" for name in largest)
            reasons.append(f"{bytes_text(over)} too much for the GPU (largest parts: {named})")
        if (over := self.host_bytes - host) > 0:
            reasons.append(f"{bytes_text(over)} too much for the host")
        return "; ".join(reasons)


@dataclass
class Candidates:
    """The training setups for one model."""

    traced: TracedStep | TracedLayers
    parameters: Parameters
    config: Config  # the configuration that the search varies
    accumulate: int  # number of micro-batches of a step
    gpu: Gpu
    impossible: dict[Config, str] = field(default_factory=dict)  # why it cannot be planned
    _too_small: set[Config] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._find_peak = cache(
            lambda config, held: max(self.traced.moments(config, held), key=lambda m: m.total)
        )

    def all(self) -> Iterator[Candidate]:
        """Yield all candidates. Candidates with 4-bit saved values come last."""
        yield from self._evaluate(self._list_configs(self.config))
        if self.config == replace(Config(), head_chunks=self.config.head_chunks):
            in_4_bits = replace(self.config, save_format="e2m1")
            yield from self._evaluate(self._list_configs(in_4_bits))

    def _list_configs(self, base: Config) -> list[Config]:
        """List the configurations to try, in the order of their expected step times."""
        found = [base]
        heads = [head for plan in self.traced.plans(base) for head in plan.heads]
        if base.head_chunks is None and any(head.chunks == 1 and head.can_chunk for head in heads):
            found.append(replace(base, head_chunks=HEAD_CHUNKS))
        if base.memory_budget is None:
            found += [replace(c, memory_budget=share) for share in BUDGETS for c in list(found[:2])]
        return found

    def _evaluate(self, configs: Iterable[Config]) -> Iterator[Candidate]:
        """Yield candidates, the fastest first.

        Planning is slow, so a configuration is planned only if it may be faster than the fastest
        setup that was timed and not yet yielded.
        """
        timed: list[tuple[int, Setup, Seconds]] = []
        begun = -math.inf  # no later configuration is expected to have a smaller sort key
        for config in configs:
            new = self._time(config)
            begun = max(begun, min((key for key, *_ in new), default=begun))
            timed = sorted((*timed, *new), key=lambda each: each[0])
            while timed and timed[0][0] <= begun:
                yield self._measure(*timed.pop(0)[1:])
        for _, setup, seconds in timed:
            yield self._measure(setup, seconds)

    def _time(self, config: Config) -> list[tuple[int, Setup, Seconds]]:
        """Return (sort key, setup, seconds) of each setup with `config`."""
        if not self._may_help(config):
            return []
        try:
            work = self.traced.work(config)
        except ConfigError as error:
            self.impossible[config] = str(error)
            if isinstance(error, BudgetTooSmall):
                self._too_small.add(replace(config, memory_budget=None))
            return []
        setups: dict[Setup, None] = {}
        for step_in_backward, offload in STATE_PLACES:
            if self.accumulate == 1:  # no sums of gradients exist
                offload = tuple(name for name in offload if name != "gradients")
            if "weights" not in offload or (self.parameters.movable and self.gpu.has_fp8):
                setups[Setup(config, step_in_backward, offload)] = None
        times = [estimate_step(work, self.parameters, s, self.accumulate, self.gpu) for s in setups]
        keys = [round(math.log(t.total, SAME_TIME)) for t in times]
        return list(zip(keys, setups, times, strict=True))

    def _may_help(self, config: Config) -> bool:
        """Whether planning `config` may give a plan that no earlier configuration gave."""
        unlimited = replace(config, memory_budget=None)
        if unlimited in self._too_small:
            return False
        if config.head_chunks == self.config.head_chunks:
            return True
        return any(head.chunks > 1 for plan in self.traced.plans(unlimited) for head in plan.heads)

    def _measure(self, setup: Setup, seconds: Seconds) -> Candidate:
        here, host = self.parameters.place(setup, self.accumulate)
        held = self.parameters.held_gradients(setup, self.accumulate)
        moment = self._find_peak(setup.config, held)
        alive = {kind: getattr(moment, kind) for kind in REGION_KINDS}
        half = "backward" if moment.backward else "forward"
        peak = f"{half} of {moment.module}" if moment.module else half
        gradients = self.parameters.gradient_bytes
        if not setup.step_in_backward and self.accumulate == 1 and gradients > sum(alive.values()):
            alive, peak = {**dict.fromkeys(REGION_KINDS, 0.0), "gradients": gradients}, "update"
        on_host = {name: x for name, x in vars(host).items() if x}
        return Candidate(setup, {**vars(here), **alive}, on_host, peak, seconds)
