"""Ways to train, each with its memory and its time; the fastest that fits.

The lattice is small and fixed: configurations of the backend, times what is where. Those that
change no number but by rounding come first; 4-bit saved values only where nothing else fits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from fp8pass.activation_memory.planner import BudgetTooSmall
from fp8pass.config import Config, ConfigError, bytes_text
from fp8pass.hardware import Gpu
from fp8pass.tools.fitting.parameters import Parameters
from fp8pass.tools.fitting.replay import KINDS, Fate, Moment
from fp8pass.tools.fitting.setup import Setup
from fp8pass.tools.fitting.timing import Seconds, step_seconds
from fp8pass.tools.fitting.traced import Traced

MIB = 1 << 20
# What CUDA, its libraries and the kernels take of a GPU besides tensors.
CONTEXT_BYTES = 600 * MIB
# PyTorch's allocator reserves more than is allocated: with expandable segments by some 2%.
UNUSED_SHARE = 0.02
# Python, PyTorch and the driver take of the host besides what is offloaded.
PROCESS_BYTES = 4 << 30
# Pages are locked in powers of two, the last of which is partly used.
HOST_SHARE = 0.05

# Shares of what the plan would keep, for graphs that keep too much.
BUDGETS = (0.8, 0.6, 0.45, 0.3, 0.2)
HEAD_CHUNKS = 8
# Whether the optimizer steps in the backward, and what is on the host.
PLACES: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (False, ()),
    (True, ()),
    (False, ("states",)),
    (True, ("states",)),
    (True, ("states", "gradients")),
    (True, ("states", "gradients", "weights")),
)
# Of two ways whose times differ by less the one that comes first is taken.
SAME_TIME = 1.01


@dataclass(frozen=True)
class Candidate:
    """A way to train, and what it takes.

    Attributes:
        setup: the options.
        gpu: bytes there at the peak, by kind: `weights`, `states`, `sums`, `staging`, `saved`,
            `activations`, `gradients`, `workspace`.
        host: bytes there, by kind.
        peak: where the peak is: a module of the `forward` or `backward`, or the `update`.
        seconds: of an optimizer step.
    """

    setup: Setup
    gpu: dict[str, float]
    host: dict[str, float]
    peak: str
    seconds: Seconds

    @property
    def allocated(self) -> float:
        """Bytes of tensors on the GPU at the peak, as `torch.cuda.max_memory_allocated` counts."""
        return sum(self.gpu.values())

    @property
    def gpu_bytes(self) -> float:
        """Bytes of the GPU in all."""
        return self.allocated * (1 + UNUSED_SHARE) + CONTEXT_BYTES

    @property
    def host_bytes(self) -> float:
        """Bytes of the host in all."""
        return sum(self.host.values()) * (1 + HOST_SHARE) + PROCESS_BYTES

    def why_not(self, gpu: float, host: float) -> str:
        """Why it does not fit; '' if it does."""
        over = self.gpu_bytes - gpu, self.host_bytes - host
        reasons = []
        if over[0] > 0:
            largest = sorted(self.gpu, key=self.gpu.__getitem__, reverse=True)[:2]
            named = ", ".join(f"{name} {bytes_text(self.gpu[name])}" for name in largest)
            reasons.append(f"{bytes_text(over[0])} too much for the GPU ({named})")
        if over[1] > 0:
            reasons.append(f"{bytes_text(over[1])} too much for the host")
        return "; ".join(reasons)


class Candidates:
    """The ways to train one model.

    Args:
        traced: its step.
        parameters: its parameters.
        config: of the backend, where the lattice begins.
        accumulate: micro-batches of a step.
        gpu: rates of the GPU.

    Attributes:
        impossible: configurations that cannot be planned so far, each with why.
    """

    def __init__(
        self,
        traced: Traced,
        parameters: Parameters,
        config: Config,
        accumulate: int,
        gpu: Gpu,
    ) -> None:
        self.traced, self.parameters, self.config = traced, parameters, config
        self.accumulate, self.gpu = accumulate, gpu
        self.impossible: dict[Config, str] = {}
        self._too_small: set[Config] = set()
        self._largest = cache(self._largest_moment)

    def all(self) -> Iterator[Candidate]:
        """All ways to train; those of fewer bits, which round more, after all others."""
        yield from self.evaluated(self._configs(self.config))
        if self.config == replace(Config(), head_chunks=self.config.head_chunks):
            yield from self.evaluated(self._configs(replace(self.config, save_format="e2m1")))

    def _configs(self, base: Config) -> list[Config]:
        """Configurations, each of which takes more time than those before it."""
        found = [base]
        heads = [head for plan in self.traced.plans(base) for head in plan.heads]
        if base.head_chunks is None and any(head.chunks == 1 and head.can_chunk for head in heads):
            found.append(replace(base, head_chunks=HEAD_CHUNKS))
        if base.memory_budget is None:
            found += [replace(c, memory_budget=share) for share in BUDGETS for c in list(found[:2])]
        return found

    def _places(self) -> Iterator[tuple[bool, tuple[str, ...]]]:
        for attach, offload in PLACES:
            if "weights" in offload and not self.parameters.coded:
                continue
            if self.accumulate == 1:  # there are no sums
                offload = tuple(name for name in offload if name != "gradients")
            yield attach, offload

    def evaluated(self, configs: Iterable[Config]) -> Iterator[Candidate]:
        """Ways to train from the fastest on; those that cannot be planned are left out.

        A configuration is planned when its turn comes, which takes time.
        """
        waiting = deque(configs)
        timed: list[tuple[int, Setup, Seconds]] = []
        begun = -math.inf  # no configuration that waits has a faster way
        while waiting or timed:
            while waiting and not (timed and timed[0][0] <= begun):
                new = self._timed(waiting.popleft())
                begun = max(begun, min((t for t, *_ in new), default=begun))
                timed = sorted((*timed, *new), key=lambda each: each[0])
            if timed:
                _, setup, seconds = timed.pop(0)
                yield self.candidate(setup, seconds)

    def _timed(self, config: Config) -> list[tuple[int, Setup, Seconds]]:
        """The ways to train with a configuration, with what they are sorted by."""
        if not self._may_help(config):
            return []
        try:
            self.traced.work(config)
        except ConfigError as error:
            self.impossible[config] = str(error)
            if isinstance(error, BudgetTooSmall):
                self._too_small.add(replace(config, memory_budget=None))
            return []
        setups = [Setup(config, *place) for place in dict.fromkeys(self._places())]
        timed = [(setup, self.seconds(setup)) for setup in setups]
        return [(round(math.log(t.total, SAME_TIME)), setup, t) for setup, t in timed]

    def _may_help(self, config: Config) -> bool:
        """Whether a configuration may differ from those before it, and be possible."""
        unlimited = replace(config, memory_budget=None)
        if unlimited in self._too_small:
            return False
        if config.head_chunks == self.config.head_chunks:
            return True
        return any(head.chunks > 1 for plan in self.traced.plans(unlimited) for head in plan.heads)

    def seconds(self, setup: Setup) -> Seconds:
        """The time of a step."""
        work = self.traced.work(setup.config)
        return step_seconds(work, self.parameters, setup, self.accumulate, self.gpu)

    def candidate(self, setup: Setup, seconds: Seconds | None = None) -> Candidate:
        """A way to train, with its memory."""
        here, host = self.parameters.place(setup, self.accumulate)
        fate = self.parameters.fate_of_gradients(setup, self.accumulate)
        moment = self._largest(setup.config, fate)
        alive = {kind: getattr(moment, kind) for kind in KINDS}
        half = "backward" if moment.backward else "forward"
        peak = f"{half} of {moment.module}" if moment.module else half
        gradients = self.parameters.gradient_bytes
        if not setup.attach and self.accumulate == 1 and gradients > sum(alive.values()):
            alive, peak = {**dict.fromkeys(KINDS, 0.0), "gradients": gradients}, "update"
        return Candidate(
            setup,
            {**vars(here), **alive},
            {name: x for name, x in vars(host).items() if x},
            peak,
            seconds or self.seconds(setup),
        )

    def _largest_moment(self, config: Config, fate: Fate) -> Moment:
        return max(self.traced.moments(config, fate), key=lambda moment: moment.total)
