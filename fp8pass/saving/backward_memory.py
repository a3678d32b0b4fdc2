"""What is alive while the backward runs, moment by moment: kept, recomputed, gradients.

A budget for what is kept says little about the most that is allocated at once: a recomputed value
lives until its last use as a kept one does, often in more bytes, and weight gradients pile up until
the end. Recomputing in the first block of a model, whose backward comes last, can so raise the peak
that it was to lower.

Only what gets a buffer counts: results of GEMMs and attention, codes, sums of the residual stream.
Pointwise operators are computed where they are used. A moment is a node of the backward; one stands
for each stretch between two sums of gradients, that with the most alive if all is recomputed.
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
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.patterns import SUMS, is_residual_sum
from fp8pass.saving.costs import can_run_again
from fp8pass.saving.decision import Decision, stored_bytes
from fp8pass.saving.storage import Storage

fp8 = torch.ops.fp8pass

LIBRARY_KINDS = (Kind.GEMM, Kind.ATTENTION, Kind.CONVOLUTION)
BUFFERED_KINDS = (*LIBRARY_KINDS, Kind.REDUCTION, Kind.QUANTIZE)


@dataclass(frozen=True)
class Life:
    """When a forward value is alive in the backward, as positions of nodes, both ends included.

    Kept, it is alive from the start to `last`; recomputed, from `first` to `last`.
    """

    first: float = math.inf
    last: float = -math.inf


class BackwardMemory:
    """Bytes alive in the backward of one joint graph.

    Attributes:
        moments: positions of nodes that stand for stretches of the backward.
        gradients: bytes of gradients alive at each of them, whatever the plan.
        lives: of the forward values that the backward needs or recomputes from.
    """

    def __init__(self, g: fx.Graph, values: list[fx.Node], storage: Storage) -> None:
        self.storage = storage
        self._backward = [n for n in g.nodes if n in storage.rules.backward and n.op != "output"]
        self._position = {n: i for i, n in enumerate(self._backward)}
        self._used = self._uses()
        self.lives = self._lives(values)
        gradients = _running_total(
            ((born, self._used[n].last, graph.nbytes(n)) for n, born in self._births().items()),
            len(self._backward),
        )
        again = _running_total(
            (span for value in self.lives for span in self._spans_again(value)), len(self._backward)
        )
        self.moments = self._choose([a + b for a, b in zip(gradients, again, strict=True)])
        self.gradients = [gradients[m] for m in self.moments]

    def peak(self, decisions: Mapping[fx.Node, Decision]) -> float:
        """The most bytes alive at a moment under a plan, gradients included."""
        alive = list(self.gradients)
        for value, decision in decisions.items():
            if value not in self.lives or self.storage.facts.is_free(value):
                continue
            if decision.recomputed:
                spans = self.alive_again(value)
            else:
                spans = [(self.alive_kept(value), stored_bytes(value, decision))]
            for moments, bytes_ in spans:
                for index in moments:
                    alive[index] += bytes_
        return max(alive, default=0.0)

    def alive_kept(self, value: fx.Node) -> range:
        """Indices of the moments at which a value is alive if it is kept."""
        return self._moments_in(-math.inf, self.lives[value].last)

    def alive_again(self, value: fx.Node) -> list[tuple[range, float]]:
        """Indices of moments and the bytes that a value takes there if it is recomputed."""
        spans = self._spans_again(value)
        return [(self._moments_in(first, last), bytes_) for first, last, bytes_ in spans]

    def _moments_in(self, first: float, last: float) -> range:
        return range(bisect_left(self.moments, first), bisect_right(self.moments, last))

    def _spans_again(self, value: fx.Node) -> list[tuple[float, float, float]]:
        """When a recomputed value takes which bytes.

        The kernel that codes the operands of a recomputed GEMM also transposes them for the GEMMs
        of the backward.
        """
        life = self.lives[value]
        spans = [(life.first, life.last, bytes_again(value))]
        if value.target is fp8.scaled_mm.default:
            for codes in (value.args[0], value.args[2]):
                for user in codes.users:  # type: ignore[union-attr]
                    if user.target is fp8.transpose.default and user in self.lives:
                        spans.append((life.first, self.lives[user].first - 1, graph.nbytes(user)))
        return [span for span in spans if span[2]]

    def _uses(self) -> dict[fx.Node, Life]:
        """First and last position at which a buffer is computed from each node of the backward."""
        found: dict[fx.Node, Life] = {}
        for node in reversed(self._backward):
            found[node] = _span(self._use(user, found) for user in node.users)
        return found

    def _use(self, user: fx.Node, uses: Mapping[fx.Node, Life]) -> Life:
        if user.op == "output":
            return Life(len(self._backward), len(self._backward))
        position = self._position[user]
        return Life(position, position) if is_buffered(user) else uses[user]

    def _births(self) -> dict[fx.Node, int]:
        """Positions at which buffers of gradients come up: codes of one region in one kernel."""
        region_of = {n: i for i, r in enumerate(self.storage.rules.regions) for n in r.nodes}
        births: dict[fx.Node, int] = {}
        kernels: dict[int, int] = {}
        for node in self._backward:
            if is_buffered(node):
                position = self._position[node]
                region = region_of.get(_quantized(node))
                births[node] = position if region is None else kernels.setdefault(region, position)
        return births

    def _lives(self, values: list[fx.Node]) -> dict[fx.Node, Life]:
        """Lives of values where everything may be recomputed.

        Of two sums of the residual stream in a row one is kept (`budget.py`), so what a value is
        recomputed for lies behind one sum at most; `within` is its first use before that.
        """
        lives: dict[fx.Node, Life] = {}
        within: dict[fx.Node, float] = {}
        members = set(values)
        for value in reversed(values):
            direct = _span(self._use(u, self._used) for u in value.users if u in self._position)
            users = [u for u in value.users if u in members and can_run_again(u)]
            others = [u for u in users if u.target not in SUMS]
            within[value] = min([direct.first, *(within[u] for u in others)])
            sums = [within[u] for u in users if u.target in SUMS]
            first = min([within[value], *sums, *(lives[u].first for u in others)])
            ends = [within[u] if is_buffered(u) else lives[u].last for u in users]
            last = max([direct.last, *(e for e in ends if math.isfinite(e))])
            lives[value] = Life(first, last)
        return lives

    def _choose(self, alive: list[float]) -> list[int]:
        """The fullest moment of each stretch between two sums of gradients."""
        ends = [self._position[n] for n in self._backward if is_residual_sum(n)]
        stretches = pairwise([0, *(e + 1 for e in ends), len(self._backward)])
        return [max(range(a, b), key=alive.__getitem__) for a, b in stretches if a < b]


def is_buffered(node: fx.Node) -> bool:
    """Whether a node's result is held in memory of its own."""
    if is_residual_sum(node) or node.op == "placeholder":
        return True
    if node.target is fp8.quantize.default:  # its transpose is computed in the same kernel
        return any(u.target is not fp8.transpose.default for u in node.users)
    if kind(node) is Kind.VIEW:  # its base is
        return False
    return kind(node) in BUFFERED_KINDS or any(_reads_memory(user) for user in node.users)


def _reads_memory(user: fx.Node) -> bool:
    """Whether an operator is no generated kernel, so that its operands have to be in memory."""
    if kind(user) is Kind.VIEW:
        return any(_reads_memory(u) for u in user.users)
    return kind(user) in LIBRARY_KINDS and not graph.is_getitem(user)


def _quantized(node: fx.Node) -> fx.Node:
    """What codes are of; other nodes themselves."""
    while node.target in (fp8.transpose.default, fp8.quantize.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def bytes_again(value: fx.Node) -> float:
    """Bytes that a recomputed value takes while it is alive."""
    if value.target is fp8.quantize.default and len(value.users) > 1:
        return 0.0  # the forward's GEMM uses the codes, the backward's their transpose
    return graph.nbytes(value) if is_buffered(value) else 0.0


def _span(lives: Iterable[Life]) -> Life:
    first, last = math.inf, -math.inf
    for life in lives:
        first, last = min(first, life.first), max(last, life.last)
    return Life(first, last)


def _running_total(spans: Iterable[tuple[float, float, float]], length: int) -> list[float]:
    """Bytes alive at each position, of spans (first, last, bytes)."""
    change = [0.0] * (length + 1)
    for first, last, bytes_ in spans:
        if first <= last:
            change[int(min(first, length))] += bytes_
            change[int(min(last + 1, length))] -= bytes_
    return list(accumulate(change[:length]))
