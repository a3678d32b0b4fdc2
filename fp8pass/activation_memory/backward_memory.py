"""Bytes alive during the backward: saved values, recomputed values and gradients.

A recomputed value stays alive until its last use, often in more bytes than when it is saved. Weight
gradients accumulate until the end, so recomputing values of the first block can raise the peak.

Only values that have a buffer are counted: results of GEMMs and attention, quantized data, sums of
the residual stream. Inductor fuses other pointwise operators. A time is a node's position in the
backward.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.costs import can_run_again
from fp8pass.activation_memory.decision import Decision, Decisions, host_bytes, stored_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.flops import EXPENSIVE_KINDS, is_expensive
from fp8pass.graph.patterns import SUM_OPERATORS, is_residual_sum, transposes

fp8 = torch.ops.fp8pass

BUFFERED_KINDS = (*EXPENSIVE_KINDS, Kind.REDUCTION, Kind.QUANTIZE)


class Lifetime(NamedTuple):
    """The first and last time at which a forward value is alive in the backward.

    A saved value is alive from the start of the backward, also before `first`.
    """

    first: float = math.inf
    last: float = -math.inf

    @classmethod
    def union(cls, lifetimes: Iterable[Lifetime]) -> Lifetime:
        found = [cls(), *lifetimes]
        return cls(min(x.first for x in found), max(x.last for x in found))


# Indices into `BackwardMemory.times`, and the bytes that a value takes at these times.
Span = tuple[range, float]


class BackwardMemory:
    """Bytes alive in the backward of one joint graph.

    Attributes:
        backward: the nodes of the backward, in order.
        times: positions in `backward` at which the bytes are added up, in increasing order.
        gradients: bytes of the gradients that are alive at each of `times`. No plan changes them.
        lifetimes: lifetime of each forward value that the backward reads, or from which it may
            recompute other values.
    """

    def __init__(self, values: list[fx.Node], choices: FormatChoices) -> None:
        self.choices, rules = choices, choices.rules
        self.backward = [n for n in rules.graph.nodes if n in rules.backward and n.op != "output"]
        self._position = {n: i for i, n in enumerate(self.backward)}
        self._used = find_uses(self.backward, is_buffered)
        self.lifetimes = self._find_lifetimes(values)
        gradients = self._total(
            (start, self._used[n].last, graph.nbytes(n)) for n, start in self._starts().items()
        )
        recomputed = self._total(
            buffer for value in self.lifetimes for buffer in self._recomputed_buffers(value)
        )
        self.times = self._pick_times([a + b for a, b in zip(gradients, recomputed, strict=True)])
        self.gradients = [gradients[t] for t in self.times]

    def peak(self, decisions: Decisions) -> float:
        alive = list(self.gradients)
        for value, decision in decisions.items():
            if value in self.lifetimes and not self.choices.facts.is_free(value):
                for times, bytes_ in self._alive(value, decision):
                    for time in times:
                        alive[time] += bytes_
        return max(alive, default=0.0)

    def _alive(self, value: fx.Node, decision: Decision) -> list[Span]:
        if decision.recomputed:
            return self.alive_recomputed(value)
        on_host = host_bytes(value, decision)
        return self.alive_saved(value, stored_bytes(value, decision) - on_host, on_host)

    def alive_saved(self, value: fx.Node, on_device: float, on_host: float) -> list[Span]:
        """Return when the bytes of a saved value are in memory of the device.

        A copy from the host begins one index of `times` before the first use.
        """
        used = self._times_between(*self.lifetimes[value])
        return [(range(used.stop), on_device), (range(max(used.start - 1, 0), used.stop), on_host)]

    def alive_recomputed(self, value: fx.Node) -> list[Span]:
        buffers = self._recomputed_buffers(value)
        return [(self._times_between(first, last), bytes_) for first, last, bytes_ in buffers]

    def _times_between(self, first: float, last: float) -> range:
        return range(bisect_left(self.times, first), bisect_right(self.times, last))

    def _recomputed_buffers(self, value: fx.Node) -> list[tuple[float, float, float]]:
        """Return first position, last position and bytes of each buffer of a recomputed value.

        The kernel that quantizes operands of a recomputed GEMM also writes the transposes for the
        backward.
        """
        first, last = self.lifetimes[value]
        buffers = [(first, last, _recomputed_bytes(value))]
        if value.target is fp8.scaled_mm.default:
            for operand in (value.args[0], value.args[2]):
                for transpose in transposes(operand):  # type: ignore[arg-type]
                    if transpose in self.lifetimes:
                        end = self.lifetimes[transpose].first - 1
                        buffers.append((first, end, graph.nbytes(transpose)))
        return [buffer for buffer in buffers if buffer[2]]

    def _starts(self) -> dict[fx.Node, int]:
        """Map each gradient with a buffer to the position at which the buffer is allocated.

        One kernel writes all quantized data of a region, so the buffers are allocated together.
        """
        region_of = {n: i for i, r in enumerate(self.choices.rules.regions) for n in r.nodes}
        starts: dict[fx.Node, int] = {}
        kernels: dict[int, int] = {}
        for node in self.backward:
            if is_buffered(node):
                position = self._position[node]
                region = region_of.get(_unquantized(node))
                starts[node] = position if region is None else kernels.setdefault(region, position)
        return starts

    def _find_lifetimes(self, values: list[fx.Node]) -> dict[fx.Node, Lifetime]:
        """Return the longest lifetime that any plan of `budget.py` can give to each value.

        Such a plan recomputes at most one of two consecutive residual sums. `within` maps each
        value to its first use, also through recomputed values that are not sums.
        """
        lifetimes: dict[fx.Node, Lifetime] = {}
        within: dict[fx.Node, float] = {}
        members = set(values)
        for value in reversed(values):
            direct = Lifetime.union(
                Lifetime(self._position[u], self._position[u]) if is_buffered(u) else self._used[u]
                for u in value.users
                if u in self._position
            )
            users = [u for u in value.users if u in members and can_run_again(u)]
            others = [u for u in users if u.target not in SUM_OPERATORS]
            within[value] = min([direct.first, *(within[u] for u in others)])
            sums = [within[u] for u in users if u.target in SUM_OPERATORS]
            first = min([within[value], *sums, *(lifetimes[u].first for u in others)])
            ends = [within[u] if is_buffered(u) else lifetimes[u].last for u in users]
            last = max([direct.last, *(e for e in ends if math.isfinite(e))])
            lifetimes[value] = Lifetime(first, last)
        return lifetimes

    def _pick_times(self, alive: list[float]) -> list[int]:
        """Return each block's position with the most bytes alive. Blocks end at residual sums."""
        ends = [self._position[n] for n in self.backward if is_residual_sum(n)]
        blocks = pairwise([0, *(e + 1 for e in ends), len(self.backward)])
        return [max(range(a, b), key=alive.__getitem__) for a, b in blocks if a < b]

    def _total(self, buffers: Iterable[tuple[float, float, float]]) -> list[float]:
        """Return the bytes alive at each position, given buffers (first position, last, bytes)."""
        length = len(self.backward)
        change = [0.0] * (length + 1)
        for first, last, bytes_ in buffers:
            if first <= last:
                change[int(min(first, length))] += bytes_
                change[int(min(last + 1, length))] -= bytes_
        return list(accumulate(change[:length]))


def find_uses(
    nodes: Sequence[fx.Node], has_buffer: Callable[[fx.Node], bool]
) -> dict[fx.Node, Lifetime]:
    """Map each node to its first and last use by nodes with a buffer, also through fused users.

    `nodes` are all nodes of a graph, or of its backward, except the output.
    """
    position, uses = {n: i for i, n in enumerate(nodes)}, dict[fx.Node, Lifetime]()

    def use(user: fx.Node) -> Lifetime:
        if user.op != "output" and not has_buffer(user):
            return uses[user]
        at = position.get(user, len(nodes))
        return Lifetime(at, at)

    for node in reversed(nodes):
        uses[node] = Lifetime.union(map(use, node.users))
    return uses


def is_buffered(node: fx.Node) -> bool:
    """Whether a node's value is written to a buffer of its own."""
    if is_residual_sum(node) or node.op == "placeholder":
        return True
    if node.target is fp8.quantize.default:  # not written if only the transpose is read
        return any(u.target is not fp8.transpose.default for u in node.users)
    if kind(node) is Kind.VIEW:  # a view is in the buffer of its base
        return False
    return kind(node) in BUFFERED_KINDS or any(reads_memory(user) for user in node.users)


def reads_memory(user: fx.Node) -> bool:
    """Whether a library call reads `user` or a view of it from a buffer."""
    if kind(user) is Kind.VIEW:
        return any(reads_memory(u) for u in user.users)
    return is_expensive(user)


def _unquantized(node: fx.Node) -> fx.Node:
    while node.target in (fp8.transpose.default, fp8.quantize.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _recomputed_bytes(value: fx.Node) -> float:
    if value.target is fp8.quantize.default and len(value.users) > 1:
        return 0.0  # the backward reads the transpose; only the forward reads `value`
    return graph.nbytes(value) if is_buffered(value) else 0.0
