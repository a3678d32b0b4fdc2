"""Send what is to be kept on the host there, and fetch it before the backward uses it.

    before   q = quantize(x, s)       y = dequantize([q], s)      q crosses
    after    q = quantize(x, s)       c = from_host(h', device, g)       some GEMMs earlier
             h = to_host(q)                  ...
             ...                             q' = settled(c, h')
             h' = settled(h, q)              y = dequantize([q'], s)     h' crosses

A copy begins as soon as there is the value. By a roofline of all operators it is settled where it
should be done, so that nobody waits for it, and fetched as late as it can be. In between it takes
memory of the GPU beside that of what is computed with: of copies on their way there are no more
than the link carries in `IN_FLIGHT_SECONDS`, or two. A fetch begins behind a GEMM (`g`), which no
compiler can put it ahead of.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.host_transfer import (
    backward_wait,
    find_bandwidth,
    forward_wait,
    running_times,
)
from fp8pass.config import ConfigError
from fp8pass.graph.flops import is_expensive
from fp8pass.graph.tags import CARRIES, TO_HOST
from fp8pass.passes.context import Context
from fp8pass.plan import CrossingTensor, HostCopy, Offload
from fp8pass.runtime.arena import available
from fp8pass.runtime.copies import from_host, settled, to_host

log = logging.getLogger("fp8pass")

IN_FLIGHT_SECONDS = 5e-3
# Fetches begin so much earlier than a roofline says: nothing runs at that.
MARGIN = 1.5
# Waits of a smaller share of a step are no news.
WORTH_SAYING = 0.01


def offload_saved(gm: fx.GraphModule, ctx: Context) -> None:
    """Put copies to the host and back around what `materialize_plan` marked.

    Raises:
        ConfigError: the host has less memory.
    """
    sent = [n for n in ctx.saved if n.meta.get(TO_HOST)]
    if not sent:
        return
    schedule = _Schedule(gm, ctx, sent)
    _check_room(schedule.bytes)
    schedule.send()
    schedule.fetch()
    crossing = {copy.node: copy.there for copy in schedule.copies if copy.there is not None}
    ctx.saved = [crossing.get(n, n) for n in ctx.saved]
    names = {n.name: there.name for n, there in crossing.items()}
    ctx.plan.saved = [
        replace(s, bytes=s.bytes - _bytes_of(s.tensors, names), tensors=_moved(s.tensors, names))
        for s in ctx.plan.saved
    ]
    ctx.plan.offload = schedule.offload()
    _say_what_is_waited_for(ctx.plan.offload)


def _check_room(needed: int) -> None:
    found = available()
    if found is not None and needed > found:
        raise ConfigError(
            f"{needed / 2**30:.3g} GiB of saved values are to be on the host, which has "
            f"{found / 2**30:.3g} GiB left: raise memory_budget, or leave them out (offload=False)."
        )


def _say_what_is_waited_for(offload: Offload) -> None:
    step = offload.forward_s + offload.backward_s
    if offload.wait_s > WORTH_SAYING * step:
        log.warning(
            "Copies to the host and back take %.3g ms, at %.3g GB/s; nothing hides %.3g ms of them "
            "in a step that computes %.3g ms. Raise memory_budget, or use smaller formats.",
            *(1e3 * offload.copy_s, offload.bandwidth / 1e9, 1e3 * offload.wait_s, 1e3 * step),
        )


def _bytes_of(tensors: Sequence[CrossingTensor], names: dict[str, str]) -> int:
    return sum(t.bytes for t in tensors if t.name in names)


def _moved(tensors: Sequence[CrossingTensor], names: dict[str, str]) -> tuple[CrossingTensor, ...]:
    """Crossing tensors, those of `names` as they cross now."""
    return tuple(
        replace(t, name=names[t.name], on_host=True) if t.name in names else t for t in tensors
    )


@dataclass(eq=False)
class _Copy:
    """A tensor that is to be on the host.

    Attributes:
        node: the tensor.
        bytes, seconds: of one copy.
        first: the first node of the backward that uses it.
        there: its copy on the host, when that has begun; what crosses when it is settled.
        made, sent: when there is the tensor, and its copy, in seconds of the forward.
        fetched, used: when it is fetched and used, in seconds of the backward.
    """

    node: fx.Node
    bytes: int
    seconds: float
    first: fx.Node
    there: fx.Node | None = None
    made: float = 0.0
    sent: float = 0.0
    fetched: float = 0.0
    used: float = 0.0


class _Schedule:
    """Where in a joint graph copies begin, and where they are settled."""

    def __init__(self, gm: fx.GraphModule, ctx: Context, sent: Sequence[fx.Node]) -> None:
        self.graph = gm.graph
        self.bandwidth = rate = find_bandwidth(ctx.config, graph.tensor(sent[0]).device)
        results = graph.outputs(gm.graph)[: ctx.facts.num_fwd_outputs]
        before = graph.ancestors([*(n for n in results if isinstance(n, fx.Node)), *ctx.saved])
        self.backward = [n for n in gm.graph.nodes if n not in before and n.op != "output"]
        calls = (n for n in self.backward if n.op == "call_function")
        self.begin_of_backward = next(calls)
        self._end_forward_first()
        self.forward = [n for n in gm.graph.nodes if n in before]
        self.order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.copies = [
            _Copy(n, graph.nbytes(n), graph.nbytes(n) / rate, self._first_use(n))
            for n in sorted(sent, key=self.order.__getitem__)
        ]
        largest = sorted(copy.bytes for copy in self.copies)[-2:]
        self.limit = max(IN_FLIGHT_SECONDS * rate, sum(largest))
        self.in_flight = 0

    @property
    def bytes(self) -> int:
        """Bytes that will be on the host."""
        return sum(copy.bytes for copy in self.copies)

    def _end_forward_first(self) -> None:
        """Compute what crosses, but is written down between the backward's nodes, when it can be.

        So codes are transposed where they are made, and not held to the end of the forward.
        """
        begun = False
        for node in list(self.graph.nodes):
            begun = begun or node is self.begin_of_backward
            if begun and node not in self._in_backward and node.op != "output":
                operands = node.all_input_nodes
                place = graph.behind(max(operands)) if operands else self.begin_of_backward
                if place is not node:
                    place.prepend(node)

    def _first_use(self, node: fx.Node) -> fx.Node:
        users = [u for u in node.users if u in self._in_backward]
        return min(users, key=self.order.__getitem__)

    @cached_property
    def _in_backward(self) -> set[fx.Node]:
        return set(self.backward)

    def send(self) -> None:
        """Begin copies to the host, and settle each when it should be done.

        Of those on their way there are no more than the limit.
        """
        times = running_times(self.graph, self.forward)
        copies = {copy.node: copy for copy in self.copies}
        pending: deque[_Copy] = deque()
        free = 0.0
        for node in self.forward:
            begin, end = times[node]
            while pending and pending[0].sent <= begin:
                self._settle(pending.popleft(), node)
            if (copy := copies.get(node)) is None:
                continue
            place = graph.behind(node)
            while pending and self._bytes(pending) + copy.bytes > self.limit:
                self._settle(pending.popleft(), place)
            copy.made, copy.sent = end, max(end, free) + copy.seconds
            free = copy.sent
            with self.graph.inserting_before(place):
                copy.there = graph.emit(self.graph, to_host, node, like=node)
            pending.append(copy)
            self.in_flight = max(self.in_flight, self._bytes(pending))
        for copy in pending:
            self._settle(copy, self.begin_of_backward)

    def _settle(self, copy: _Copy, place: fx.Node) -> None:
        assert copy.there is not None
        with self.graph.inserting_before(place):
            copy.there = graph.emit(self.graph, settled, copy.there, copy.node, like=copy.node)

    def fetch(self) -> None:
        """Begin copies back as late as they can, and settle each right before its first use."""
        times = running_times(self.graph, self.backward)
        copies = sorted(self.copies, key=lambda copy: self.order[copy.first])
        anchors = [n for n in self.backward if is_expensive(n) and graph.value(n) is not None]
        latest = math.inf
        for copy in reversed(copies):
            copy.used = times[copy.first][0]
            latest = copy.fetched = min(copy.used, latest) - MARGIN * copy.seconds
        places: dict[fx.Node, fx.Node] = {}  # in front of which fetches behind a node begin
        for i, copy in enumerate(copies):
            on_way = self._on_way(copies[:i], copy)
            room = self.order[copies[i - len(on_way)].first] if len(on_way) <= i else -1
            self.in_flight = max(self.in_flight, self._bytes(on_way))
            behind = [n for n in anchors if room <= self.order[n] < self.order[copy.first]]
            early = [n for n in behind if times[n][1] <= copy.fetched]
            anchor = early[-1] if early else behind[0] if behind else None
            self._fetch(copy, anchor, places)

    def _on_way(self, before: Sequence[_Copy], copy: _Copy) -> list[_Copy]:
        """The copies that are on their way together, the last ones with `copy`."""
        found = [copy]
        for earlier in reversed(before):
            if self._bytes(found) + earlier.bytes > self.limit:
                break
            found.append(earlier)
        return found

    def _fetch(self, copy: _Copy, anchor: fx.Node | None, places: dict[fx.Node, fx.Node]) -> None:
        """Fetch a copy behind a node of the backward, or where it is used."""
        node, there = copy.node, copy.there
        place = copy.first if anchor is None else places.setdefault(anchor, graph.behind(anchor))
        device = graph.tensor(node).device
        with self.graph.inserting_before(place):
            back = graph.emit(self.graph, from_host, there, device, anchor, like=node)
        with self.graph.inserting_before(copy.first):
            here = graph.emit(self.graph, settled, back, there, like=node)
        for new in (back, here):
            new.meta["partitioner_tag"] = "is_backward"
        here.meta[CARRIES] = node.name
        for user in [u for u in node.users if u in self._in_backward]:
            user.replace_input_with(node, here)

    def _bytes(self, copies: Iterable[_Copy]) -> int:
        return sum(copy.bytes for copy in copies)

    def offload(self) -> Offload:
        """What was decided, for the plan."""
        ends = [running_times(self.graph, half) for half in (self.forward, self.backward)]
        forward, backward = (max((end for _, end in each.values()), default=0.0) for each in ends)
        return Offload(
            bandwidth=self.bandwidth,
            forward_s=forward,
            backward_s=backward,
            copies=[self._described(copy) for copy in self.copies],
            wait_s=forward_wait(((c.made, c.seconds) for c in self.copies), forward)
            + backward_wait((c.used, c.seconds) for c in self.copies),
            in_flight_bytes=self.in_flight,
        )

    def _described(self, copy: _Copy) -> HostCopy:
        val = graph.tensor(copy.node)
        return HostCopy(
            module=graph.module_path(copy.node),
            shape=graph.shape_text(val),
            dtype=graph.dtype_text(val.dtype),
            bytes=copy.bytes,
            computed_s=copy.made,
            used_s=copy.used,
        )
