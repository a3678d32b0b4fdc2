"""Choose the GEMMs that run in FP8: FP8 must save more time than the casts of the operands take.

Each GEMM has a gain, its time in BF16 minus its time in FP8. Each cast of an operand has a cost,
and GEMMs share casts. The best choice is a minimum cut (project selection), which
`activation_memory/cuts.py` computes:

    source --gain--> GEMM --∞--> cast --cost--> sink

Cutting the first arc leaves a GEMM in BF16, and cutting the last arc casts a tensor. If costs and
gains are equal, the GEMM stays in BF16, because FP8 would round its operands without saving time.

GEMMs of the forward are chosen first, and the choice ignores the backward. So evaluation gives the
same results as the forward of training. Then dgrad and wgrad are chosen. Casts that the forward
needs cost nothing in this second choice.

All gains are 0 if the CPU takes longer to launch the kernels of the graph than the GPU takes to run
them (`launches.py`).

The estimates are rooflines (`hardware.py`). Fused casts cost only the bytes that they add. A test
compares the sums with measured steps (`tests/passes/test_gemm_choice.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import networkx as nx
import torch
from torch import fx

from fp8pass import graph, hardware
from fp8pass.activation_memory.cuts import CutValue, solve_cut
from fp8pass.config import GEMMS, Config
from fp8pass.dialect.quantization import parse
from fp8pass.graph.classify import GROUPED_GEMMS
from fp8pass.graph.collectives import find_exchanges, find_gathers, receives_tokens
from fp8pass.graph.launches import why_launch_bound
from fp8pass.graph.linear_layers import Layer, gemm_operands
from fp8pass.graph.nodes import tensor
from fp8pass.graph.tags import ROLE
from fp8pass.graph.traffic import assumed_size, count_elements
from fp8pass.hardware import Gpu

fp8 = torch.ops.fp8pass

# The overhead of an FP8 GEMM for each tile, as the length of a contraction that takes the same
# time. The first number is for cuBLASLt, the second one for PyTorch's grouped GEMM.
OVERHEAD, GROUPED_OVERHEAD = 128, 700
PICOSECONDS = 1e12
# The GEMMs of the forward are chosen first.
STAGES: tuple[tuple[str, ...], ...] = (GEMMS[:1], GEMMS[1:])


class Cast(NamedTuple):
    """The work that one cast adds to a step: bytes of memory traffic, and kernel launches."""

    bytes: float
    launches: float = 0

    def seconds(self, gpu: Gpu) -> float:
        """Estimate the time of the cast."""
        return self.bytes / gpu.bandwidth + self.launches * hardware.LAUNCH


Casts = Mapping[Hashable, Cast]


@dataclass
class Choice:
    """The GEMMs that run in FP8, and the estimates that led to the choice, in seconds.

    Attributes:
        in_fp8: the chosen GEMMs.
        gains: the time that FP8 saves in a GEMM; infinite if the GEMM must run in FP8.
        casts: for each GEMM, the time of each cast that it needs. For a GEMM in BF16, casts that a
            chosen GEMM needs anyway are left out.
        done: the casts that chosen GEMMs need.
        limit: why faster GEMMs would not make a step faster, or ''.
    """

    in_fp8: set[fx.Node] = field(default_factory=set)
    gains: dict[fx.Node, float] = field(default_factory=dict)
    casts: dict[fx.Node, dict[Hashable, float]] = field(default_factory=dict)
    done: set[Hashable] = field(default_factory=set)
    limit: str = ""

    @property
    def saved_seconds(self) -> float:
        """The time that FP8 saves in a step; infinite if GEMMs were not chosen by their times."""
        if not self.in_fp8 <= self.gains.keys():
            return math.inf
        casts = {key: s for gemm in self.in_fp8 for key, s in self.casts[gemm].items()}
        gains = (self.gains[gemm] for gemm in self.in_fp8)
        return math.fsum((*gains, *(-s for s in casts.values())))

    def explain(self, layer: Layer) -> str:
        """Return why GEMMs of a layer stay in BF16, e.g. `casts take 31 µs, ...`; '' if none do."""
        rest = [(role, gemm) for role, gemm in layer.gemms() if gemm not in self.in_fp8]
        if not rest:
            return ""
        if self.limit:
            return self.limit
        # The GEMMs of the forward were chosen separately, so a cast that is missing in forward and
        # backward counts twice.
        missing = {
            (role in STAGES[0], key): seconds
            for role, gemm in rest
            for key, seconds in self.casts[gemm].items()
        }
        casts, saved = sum(missing.values()), sum(self.gains[gemm] for _, gemm in rest)
        return f"casts take {1e6 * casts:.3g} µs, FP8 GEMMs save {1e6 * saved:.3g} µs"


def choose_gemms(
    g: fx.Graph,
    layers: Iterable[Layer],
    casts_of: Callable[[fx.Node, Layer], Casts],
    config: Config,
) -> Choice:
    """Choose the GEMMs of `layers` that run in FP8.

    All GEMMs run in FP8 with `fp8_gemms="all"`, on a CPU, and on GPUs with unknown rates. The
    choice ignores hints of symbolic sizes. The cache key does not contain the hints, and the batch
    that determines a hint may be unusually small.

    Args:
        g: the graph of the layers, whose GEMMs are tagged with their roles.
        layers: layers that can run in FP8.
        casts_of: returns the casts that a GEMM needs, by key. Casts with equal keys are the same
            cast.
        config: the options of the user.
    """
    gemms = [(gemm, layer) for layer in layers for _, gemm in layer.gemms()]
    everything = config.fp8_gemms == "all" or not config.quantizes_linears
    choice, gathered = Choice(), {gather.whole for gather in find_gathers(g)}
    received = {exchange.wait for exchange in find_exchanges(g)}
    for gemm, layer in gemms:
        gpu = None if everything else hardware.rates_of(tensor(gemm).device)
        if gpu is None:
            choice.in_fp8.add(gemm)
            continue
        casts = casts_of(gemm, layer)
        choice.casts[gemm] = {key: cast.seconds(gpu) for key, cast in casts.items()}
        is_needed = _must_be_fp8(gemm, gathered, received)
        choice.gains[gemm] = math.inf if is_needed else _gain(gemm, layer, gpu, config)
    if choice.gains and all(map(math.isfinite, choice.gains.values())):
        _limit_gains(g, choice)
    for roles in STAGES:
        stage = [gemm for gemm in choice.gains if gemm.meta[ROLE] in roles]
        for group in _independent(stage, choice):
            _choose(group, choice)
        choice.done |= {key for n in stage if n in choice.in_fp8 for key in choice.casts[n]}
        for gemm in (n for n in stage if n not in choice.in_fp8):
            needed = choice.casts[gemm].items()
            choice.casts[gemm] = {key: s for key, s in needed if key not in choice.done}
    return choice


def why_emulated(device: torch.device, config: Config) -> str:
    """Return why GEMMs of linear layers would multiply dequantized operands on `device`, or ''."""
    scales = parse(config.quantizations["forward", "input"]).scales
    return hardware.why_emulated(device, scales) or ""


def _limit_gains(g: fx.Graph, choice: Choice) -> None:
    """Set all gains to 0 if faster GEMMs would not make a step faster."""
    gpu = hardware.rates_of(tensor(next(iter(choice.gains))).device)
    assert gpu
    choice.limit = why_launch_bound(g, gpu)
    if choice.limit:
        choice.gains = dict.fromkeys(choice.gains, 0.0)


def _must_be_fp8(gemm: fx.Node, gathered: set[fx.Node], received: set[fx.Node]) -> bool:
    """Whether a GEMM runs in FP8 regardless of its gain.

    This is true if an operand is stored in FP8, and so is already rounded, like a frozen weight or
    a weight that FSDP2 gathers in FP8. It is also true if a collective gathers an operand, or
    exchanges its rows: all ranks must send the same dtype, even if the sizes differ between ranks.
    """
    operands = gemm_operands(gemm)
    sources = {graph.skip_views_and_casts(x) for x in operands}
    at_rest = any(graph.is_call(x, fp8.dequantize.default) for x in sources)
    matrices = (graph.skip_transposes(x)[0] for x in operands)
    exchanged = any(receives_tokens(x, received) for x in matrices)
    return at_rest or bool(sources & gathered) or exchanged


def _gain(gemm: fx.Node, layer: Layer, gpu: Gpu, config: Config) -> float:
    """Return the seconds that FP8 saves in a GEMM, not counting casts; infinite for FP32 GEMMs.

    In FP32, the alternative to FP8 is not BF16, but a much slower format.
    """
    if not layer.experts and why_emulated(tensor(gemm).device, config):
        return 0.0
    if tensor(gemm).dtype is torch.float32:
        return math.inf
    operands = gemm_operands(gemm)
    elements = sum(map(count_elements, operands))
    result = count_elements(gemm) * tensor(gemm).element_size()
    length = assumed_size(tensor(operands[0]).shape[-1], gemm.graph)
    if gemm.meta[ROLE] == "wgrad" and gemm.target in GROUPED_GEMMS:
        length = max(length // layer.experts, 1)  # contracts over the tokens of each expert
    work = 2 * count_elements(gemm) * length
    slower = 1 + (GROUPED_OVERHEAD if layer.experts else OVERHEAD) / length
    in_bf16 = max(work / gpu.bf16_flops, (2 * elements + result) / gpu.bandwidth)
    in_fp8 = max(slower * work / gpu.fp8_flops, (elements + result) / gpu.bandwidth)
    # Before each FP8 GEMM, cuBLASLt launches a kernel that clears a buffer.
    return max(in_bf16 - in_fp8 - hardware.LAUNCH, 0)


def _independent(gemms: list[fx.Node], choice: Choice) -> list[list[fx.Node]]:
    """Split GEMMs into groups that share no casts. Equal layers then have equal groups."""
    connected = nx.utils.UnionFind()
    for gemm in gemms:
        connected.union(gemm, *choice.casts[gemm])
    groups: dict[Hashable, list[fx.Node]] = {}
    for gemm in gemms:
        groups.setdefault(connected[gemm], []).append(gemm)
    return list(groups.values())


def _choose(gemms: list[fx.Node], choice: Choice) -> None:
    """Add to `choice` the GEMMs of a group that run in FP8."""
    readers: dict[Hashable, list[int]] = {}
    costs: dict[Hashable, float] = {}
    for i, gemm in enumerate(gemms):
        for key, seconds in choice.casts[gemm].items():
            readers.setdefault(key, []).append(i)
            costs[key] = 0 if key in choice.done else seconds
    values = [CutValue(math.inf, PICOSECONDS * choice.gains[gemm], False, ()) for gemm in gemms]
    values += [CutValue(PICOSECONDS * costs[k], 0, True, tuple(readers[k])) for k in readers]
    _, in_bf16, _ = solve_cut(tuple(values), early=True)
    choice.in_fp8.update(gemm for i, gemm in enumerate(gemms) if i not in in_bf16)
