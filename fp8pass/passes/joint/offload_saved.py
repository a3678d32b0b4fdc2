"""Copy saved tensors to host memory as planned, and back before the backward uses them.

             forward                  backward
    before   q = quantize(x, s)       y = dequantize([q], s)             saves q
    after    q = quantize(x, s)       c = from_host(h', device, g)       (some GEMMs earlier)
             h = to_host(q)           ...
             ...                      q' = settled(c, h')
             h' = settled(h, q)       y = dequantize([q'], s)            saves h'

`settled` waits for a copy, at the place where a roofline expects the copy to be done. A copy back
begins as late as possible. The result of a GEMM `g` is an operand of `from_host`, so that compilers
do not move the copy before the GEMM.

Copies in flight take GPU memory, too. Their bytes are limited to the bytes that the link carries in
`IN_FLIGHT_SECONDS`, or to the bytes of the two largest copies if that is more.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.host_transfer import (
    exposed_seconds,
    find_bandwidth,
    running_times,
)
from fp8pass.graph.flops import is_expensive
from fp8pass.graph.tags import COPIED_VALUE, IS_OFFLOADED
from fp8pass.option_checks import ConfigError
from fp8pass.passes.context import Context
from fp8pass.plan import HostCopy, Offload, SavedTensor
from fp8pass.runtime.arena import available
from fp8pass.runtime.copies import from_host, settled, to_host

log = logging.getLogger("fp8pass")

IN_FLIGHT_SECONDS = 5e-3
# The schedule assumes that a copy back takes this many times its duration at the link's peak rate.
MARGIN = 1.5
# Exposed copies are logged if they take more than this share of a step.
WORTH_LOGGING = 0.01


def offload_saved(gm: fx.GraphModule, ctx: Context) -> None:
    """Emit copies to the host and back for the tensors that `materialize_plan` marked.

    Raises:
        ConfigError: the tensors do not fit in host memory.
    """
    offloaded = [n for n in ctx.saved if n.meta.get(IS_OFFLOADED)]
    if not offloaded:
        return
    schedule = _Schedule(gm, ctx, offloaded)
    _check_host_memory(sum(copy.bytes for copy in schedule.copies))
    schedule.emit_sends()
    schedule.emit_fetches()
    on_host = {copy.node: copy.on_host for copy in schedule.copies if copy.on_host is not None}
    ctx.saved = [on_host.get(n, n) for n in ctx.saved]
    names = {n.name: copy.name for n, copy in on_host.items()}
    ctx.plan.saved = [_move_to_host(saved, names) for saved in ctx.plan.saved]
    ctx.plan.offload = schedule.describe()
    _warn_about_exposed_copies(ctx.plan.offload)


def _check_host_memory(needed: int) -> None:
    free = available()
    if free is not None and needed > free:
        raise ConfigError(
            f"Offloaded tensors need {needed / 2**30:.3g} GiB of host memory, but only "
            f"{free / 2**30:.3g} GiB are free: raise memory_budget, or pass offload=False."
        )


def _warn_about_exposed_copies(offload: Offload) -> None:
    step = offload.forward_s + offload.backward_s
    if offload.wait_s > WORTH_LOGGING * step:
        log.warning(
            "Offload copies take %.3g ms per step, at %.3g GB/s; %.3g ms of them are exposed "
            "(compute: %.3g ms). Raise memory_budget, or use smaller formats.",
            *(1e3 * offload.copy_s, offload.bandwidth / 1e9, 1e3 * offload.wait_s, 1e3 * step),
        )


def _move_to_host(saved: SavedTensor, names: dict[str, str]) -> SavedTensor:
    """Return a plan entry with the tensors `names` (device name -> host name) in host memory."""
    moved = sum(t.bytes for t in saved.tensors if t.name in names)
    tensors = tuple(
        replace(t, name=names[t.name], on_host=True) if t.name in names else t
        for t in saved.tensors
    )
    return replace(saved, bytes=saved.bytes - moved, tensors=tensors)


@dataclass(eq=False)
class _Copy:
    """A tensor that is offloaded."""

    node: fx.Node
    bytes: int
    seconds: float
    first: fx.Node  # the first node of the backward that uses the tensor
    # The node of the copy in host memory: `to_host`, later `settled`; None before `emit_sends`.
    on_host: fx.Node | None = None
    # When the tensor is computed, and when its copy to the host ends: seconds since the forward
    # began.
    made: float = 0.0
    sent: float = 0.0
    # When the copy back begins, and when the tensor is first used: seconds since the backward
    # began.
    fetched: float = 0.0
    used: float = 0.0

    def describe(self) -> HostCopy:
        val = graph.tensor(self.node)
        return HostCopy(
            module=graph.module_path(self.node),
            shape=graph.shape_text(val),
            dtype=graph.dtype_text(val.dtype),
            bytes=self.bytes,
            computed_s=self.made,
            used_s=self.used,
        )


class _Schedule:
    def __init__(self, gm: fx.GraphModule, ctx: Context, offloaded: Sequence[fx.Node]) -> None:
        self.graph = gm.graph
        self.bandwidth = rate = find_bandwidth(ctx.config, graph.tensor(offloaded[0]).device)
        results = graph.outputs(gm.graph)[: ctx.facts.num_fwd_outputs]
        in_forward = graph.ancestors([*(n for n in results if isinstance(n, fx.Node)), *ctx.saved])
        self.backward = [n for n in gm.graph.nodes if n not in in_forward and n.op != "output"]
        self._in_backward = set(self.backward)
        self.backward_begin = next(n for n in self.backward if n.op == "call_function")
        self._move_forward_up()
        self.forward = [n for n in gm.graph.nodes if n in in_forward]
        self.order = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.copies = [
            _Copy(n, graph.nbytes(n), graph.nbytes(n) / rate, min(self._backward_users(n)))
            for n in sorted(offloaded)
        ]
        largest = sorted(copy.bytes for copy in self.copies)[-2:]
        self.limit = max(IN_FLIGHT_SECONDS * rate, sum(largest))
        self.in_flight = 0

    def _move_forward_up(self) -> None:
        """Move forward nodes between backward nodes up to their operands, to free memory early."""
        begun = False
        for node in list(self.graph.nodes):
            begun = begun or node is self.backward_begin
            if begun and node not in self._in_backward and node.op != "output":
                operands = node.all_input_nodes
                place = (
                    graph.insertion_point_after(max(operands)) if operands else self.backward_begin
                )
                if place is not node:
                    place.prepend(node)

    def _backward_users(self, node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u in self._in_backward]

    def emit_sends(self) -> None:
        """Emit copies to the host, and waits for them. Wait earlier if they exceed the limit."""
        times = running_times(self.graph, self.forward)
        copies = {copy.node: copy for copy in self.copies}
        pending: deque[_Copy] = deque()
        link_free = 0.0
        for node in self.forward:
            begin, end = times[node]
            while pending and pending[0].sent <= begin:
                self._settle(pending.popleft(), node)
            if (copy := copies.get(node)) is None:
                continue
            place = graph.insertion_point_after(node)
            while pending and _total_bytes(pending) + copy.bytes > self.limit:
                self._settle(pending.popleft(), place)
            copy.made, copy.sent = end, max(end, link_free) + copy.seconds
            link_free = copy.sent
            with self.graph.inserting_before(place):
                copy.on_host = graph.emit(self.graph, to_host, node, like=node)
            pending.append(copy)
            self.in_flight = max(self.in_flight, _total_bytes(pending))
        for copy in pending:
            self._settle(copy, self.backward_begin)

    def _settle(self, copy: _Copy, place: fx.Node) -> None:
        assert copy.on_host is not None
        with self.graph.inserting_before(place):
            copy.on_host = graph.emit(self.graph, settled, copy.on_host, copy.node, like=copy.node)

    def emit_fetches(self) -> None:
        """Emit each copy from the host after the last GEMM that still leaves time for the copy.

        Copies in flight take at most the allowed memory.
        """
        times = running_times(self.graph, self.backward)
        copies = sorted(self.copies, key=lambda copy: self.order[copy.first])
        gemms = [n for n in self.backward if is_expensive(n) and graph.value(n) is not None]
        latest = math.inf
        for copy in reversed(copies):
            copy.used = times[copy.first][0]
            latest = copy.fetched = min(copy.used, latest) - MARGIN * copy.seconds
        places: dict[fx.Node, fx.Node] = {}  # GEMM -> node that follows the GEMM and its copies
        for i, copy in enumerate(copies):
            in_flight = self._copies_in_flight(copies[:i], copy)
            done = self.order[copies[i - len(in_flight)].first] if len(in_flight) <= i else -1
            self.in_flight = max(self.in_flight, _total_bytes(in_flight))
            possible = [n for n in gemms if done <= self.order[n] < self.order[copy.first]]
            early = [n for n in possible if times[n][1] <= copy.fetched]
            anchor = early[-1] if early else possible[0] if possible else None
            self._fetch(copy, anchor, places)

    def _copies_in_flight(self, before: Sequence[_Copy], copy: _Copy) -> list[_Copy]:
        """Return `copy` and as many of the copies right before it as the limit allows."""
        found = [copy]
        for earlier in reversed(before):
            if _total_bytes(found) + earlier.bytes > self.limit:
                break
            found.append(earlier)
        return found

    def _fetch(self, copy: _Copy, anchor: fx.Node | None, places: dict[fx.Node, fx.Node]) -> None:
        node, on_host = copy.node, copy.on_host
        place = (
            copy.first
            if anchor is None
            else places.setdefault(anchor, graph.insertion_point_after(anchor))
        )
        device = graph.tensor(node).device
        with self.graph.inserting_before(place):
            back = graph.emit(self.graph, from_host, on_host, device, anchor, like=node)
        with self.graph.inserting_before(copy.first):
            fetched = graph.emit(self.graph, settled, back, on_host, like=node)
        for new in (back, fetched):
            new.meta["partitioner_tag"] = "is_backward"
        fetched.meta[COPIED_VALUE] = node.name
        for user in self._backward_users(node):
            user.replace_input_with(node, fetched)

    def describe(self) -> Offload:
        ends = [running_times(self.graph, half) for half in (self.forward, self.backward)]
        forward, backward = (max((end for _, end in each.values()), default=0.0) for each in ends)
        return Offload(
            bandwidth=self.bandwidth,
            forward_s=forward,
            backward_s=backward,
            copies=[copy.describe() for copy in self.copies],
            wait_s=exposed_seconds((forward - c.made, c.seconds) for c in self.copies)
            + exposed_seconds((c.used, c.seconds) for c in self.copies),
            in_flight_bytes=self.in_flight,
        )


def _total_bytes(copies: Iterable[_Copy]) -> int:
    return sum(copy.bytes for copy in copies)
