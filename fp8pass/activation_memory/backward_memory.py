"""Bytes alive over time while the backward runs: kept values, recomputed values, gradients.

A budget for kept bytes says little about the peak. A recomputed value lives until its last use as a
kept one does, often in more bytes, and weight gradients pile up until the end. Recomputing values
of a model's first block, whose backward comes last, can raise the peak that it should lower.

Only values with a buffer count: results of GEMMs and attention, codes, sums of the residual stream.
Pointwise operators are fused with their users. A time is the position of a node of the backward.
Each stretch between two sums of gradients is represented by one time, that with the most bytes
alive if all values are recomputed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.costs import can_run_again
from fp8pass.activation_memory.decision import Decision, host_bytes, stored_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.patterns import ADDITIONS, is_residual_sum

fp8 = torch.ops.fp8pass

LIBRARY_KINDS = (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)
BUFFERED_KINDS = (*LIBRARY_KINDS, Kind.REDUCTION, Kind.QUANTIZE)


@dataclass(frozen=True)
class Lifetime:
    """When a forward value is alive in the backward, as positions of nodes, both ends included.

    A kept value is alive from the start to `last`, a recomputed one from `first` to `last`.
    """

    first: float = math.inf
    last: float = -math.inf


class BackwardMemory:
    """Bytes alive in the backward of one joint graph.

    Attributes:
        backward: the nodes of the backward.
        times: positions of the nodes that represent stretches of the backward.
        gradients: bytes of gradients alive at each of the times, the same for every plan.
        lifetimes: lifetimes of the forward values that the backward needs or recomputes from.
    """

    def __init__(self, g: fx.Graph, values: list[fx.Node], choices: FormatChoices) -> None:
        self.choices = choices
        self.backward = [n for n in g.nodes if n in choices.rules.backward and n.op != "output"]
        self._position = {n: i for i, n in enumerate(self.backward)}
        self._used = self._spans_of_use()
        self.lifetimes = self._lifetimes(values)
        gradients = _running_total(
            ((start, self._used[n].last, graph.nbytes(n)) for n, start in self._starts().items()),
            len(self.backward),
        )
        recomputed = _running_total(
            (span for value in self.lifetimes for span in self._recomputed_spans(value)),
            len(self.backward),
        )
        alive = [a + b for a, b in zip(gradients, recomputed, strict=True)]
        self.times = self._representative_times(alive)
        self.gradients = [gradients[t] for t in self.times]

    def peak(self, decisions: Mapping[fx.Node, Decision]) -> float:
        """The most bytes alive at any time under a plan, gradients included."""
        alive = list(self.gradients)
        for value, decision in decisions.items():
            if value not in self.lifetimes or self.choices.facts.is_free(value):
                continue
            if decision.recomputed:
                spans = self.alive_recomputed(value)
            else:
                away = host_bytes(value, decision)
                spans = [(self.alive_kept(value), stored_bytes(value, decision) - away)]
                if away:
                    spans.append((self.alive_fetched(value), away))
            for indices, bytes_ in spans:
                for index in indices:
                    alive[index] += bytes_
        return max(alive, default=0.0)

    def alive_kept(self, value: fx.Node) -> range:
        """Indices into `times` at which a value is alive if it is kept."""
        return self._times_between(-math.inf, self.lifetimes[value].last)

    def alive_fetched(self, value: fx.Node) -> range:
        """Indices into `times` at which a value is alive if it comes back from the host.

        It is on its way for some time before it is used.
        """
        used = self._times_between(self.lifetimes[value].first, self.lifetimes[value].last)
        return range(max(used.start - 1, 0), used.stop)

    def alive_recomputed(self, value: fx.Node) -> list[tuple[range, float]]:
        """Indices into `times`, and the bytes alive there, of a value if it is recomputed."""
        spans = self._recomputed_spans(value)
        return [(self._times_between(first, last), bytes_) for first, last, bytes_ in spans]

    def _times_between(self, first: float, last: float) -> range:
        return range(bisect_left(self.times, first), bisect_right(self.times, last))

    def _recomputed_spans(self, value: fx.Node) -> list[tuple[float, float, float]]:
        """First position, last position and bytes of the buffers of a recomputed value.

        The kernel that quantizes the operands of a recomputed GEMM also writes their transposes,
        which the GEMMs of the backward read.
        """
        first, last = self.lifetimes[value].first, self.lifetimes[value].last
        spans = [(first, last, recomputed_bytes(value))]
        if value.target is fp8.scaled_mm.default:
            for codes in (value.args[0], value.args[2]):
                for user in codes.users:  # type: ignore[union-attr]
                    if user.target is fp8.transpose.default and user in self.lifetimes:
                        spans.append((first, self.lifetimes[user].first - 1, graph.nbytes(user)))
        return [span for span in spans if span[2]]

    def _spans_of_use(self) -> dict[fx.Node, Lifetime]:
        """First and last position at which a buffer is computed from each node of the backward."""
        found: dict[fx.Node, Lifetime] = {}
        for node in reversed(self.backward):
            found[node] = _span(self._use(user, found) for user in node.users)
        return found

    def _use(self, user: fx.Node, uses: Mapping[fx.Node, Lifetime]) -> Lifetime:
        if user.op == "output":
            return Lifetime(len(self.backward), len(self.backward))
        position = self._position[user]
        return Lifetime(position, position) if is_buffered(user) else uses[user]

    def _starts(self) -> dict[fx.Node, int]:
        """Positions at which buffers of gradients are allocated.

        Codes of one region come from one kernel, hence at the same position.
        """
        region_of = {n: i for i, r in enumerate(self.choices.rules.regions) for n in r.nodes}
        starts: dict[fx.Node, int] = {}
        kernels: dict[int, int] = {}
        for node in self.backward:
            if is_buffered(node):
                position = self._position[node]
                region = region_of.get(_quantized(node))
                starts[node] = position if region is None else kernels.setdefault(region, position)
        return starts

    def _lifetimes(self, values: list[fx.Node]) -> dict[fx.Node, Lifetime]:
        """Lifetimes of values if everything may be recomputed.

        Of two consecutive sums of the residual stream one is kept (`budget.py`), so that at most
        one sum lies between a value and the uses that it is recomputed for. `within` is the first
        use before that sum.
        """
        lifetimes: dict[fx.Node, Lifetime] = {}
        within: dict[fx.Node, float] = {}
        members = set(values)
        for value in reversed(values):
            direct = _span(self._use(u, self._used) for u in value.users if u in self._position)
            users = [u for u in value.users if u in members and can_run_again(u)]
            others = [u for u in users if u.target not in ADDITIONS]
            within[value] = min([direct.first, *(within[u] for u in others)])
            sums = [within[u] for u in users if u.target in ADDITIONS]
            first = min([within[value], *sums, *(lifetimes[u].first for u in others)])
            ends = [within[u] if is_buffered(u) else lifetimes[u].last for u in users]
            last = max([direct.last, *(e for e in ends if math.isfinite(e))])
            lifetimes[value] = Lifetime(first, last)
        return lifetimes

    def _representative_times(self, alive: list[float]) -> list[int]:
        """The position with the most bytes alive of each stretch between two sums of gradients."""
        ends = [self._position[n] for n in self.backward if is_residual_sum(n)]
        stretches = pairwise([0, *(e + 1 for e in ends), len(self.backward)])
        return [max(range(a, b), key=alive.__getitem__) for a, b in stretches if a < b]


def is_buffered(node: fx.Node) -> bool:
    """Whether a node's result is held in memory of its own."""
    if is_residual_sum(node) or node.op == "placeholder":
        return True
    if node.target is fp8.quantize.default:  # its transpose is computed in the same kernel
        return any(u.target is not fp8.transpose.default for u in node.users)
    if kind(node) is Kind.VIEW:  # its base counts
        return False
    return kind(node) in BUFFERED_KINDS or any(reads_memory(user) for user in node.users)


def reads_memory(user: fx.Node) -> bool:
    """Whether an operator is a library call, so that its operands have to be in memory."""
    if kind(user) is Kind.VIEW:
        return any(reads_memory(u) for u in user.users)
    return kind(user) in LIBRARY_KINDS and not graph.is_getitem(user)


def _quantized(node: fx.Node) -> fx.Node:
    """The value that codes are made from; for other nodes the node itself."""
    while node.target in (fp8.transpose.default, fp8.quantize.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def recomputed_bytes(value: fx.Node) -> float:
    """Bytes of a recomputed value's buffer."""
    if value.target is fp8.quantize.default and len(value.users) > 1:
        return 0.0  # only the transpose is kept: the forward's GEMM reads the codes
    return graph.nbytes(value) if is_buffered(value) else 0.0


def _span(lifetimes: Iterable[Lifetime]) -> Lifetime:
    first, last = math.inf, -math.inf
    for lifetime in lifetimes:
        first, last = min(first, lifetime.first), max(last, lifetime.last)
    return Lifetime(first, last)


def _running_total(spans: Iterable[tuple[float, float, float]], length: int) -> list[float]:
    """Bytes alive at each position, from spans (first, last, bytes)."""
    change = [0.0] * (length + 1)
    for first, last, bytes_ in spans:
        if first <= last:
            change[int(min(first, length))] += bytes_
            change[int(min(last + 1, length))] -= bytes_
    return list(accumulate(change[:length]))
