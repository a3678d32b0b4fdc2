"""Estimate how long a step waits for copies of saved values to host memory and back.

In each direction one copy runs at a time, at the bandwidth of the link to the host. Times are
roofline estimates. The waits are:

    forward     max over t of (seconds to copy all values computed in the last t seconds, minus t)
    backward    max over t of (seconds to copy all values used in the first t seconds, minus t)

So the copies of values that the forward computes late and the backward uses early are not hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.activation_memory.decision import Decisions, host_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.config import Config
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.traffic import base
from fp8pass.runtime.copies import bandwidth

# A copy of fewer bytes takes no longer than its launch.
SMALLEST_COPY = 1 << 20

# Copies slow down other work: GEMMs take 4% longer while copies run in both directions.
SLOWDOWN = 0.04

# Maximum number of points in time at which the mixed-integer program limits the copies, for each
# direction.
INSTANTS = 32


def running_times(g: fx.Graph, nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[float, float]]:
    """Return when each node begins and ends, in seconds, if `nodes` run in order."""
    chunks = {c.node: c for c in chunks_of(g)}
    found, now = {}, 0.0
    for node in nodes:
        begin = now
        if node in chunks:
            body = chunks[node].body.graph.nodes
            now += chunks[node].count * sum(map(recompute_seconds, body))
        else:
            now += recompute_seconds(node)
        found[node] = begin, now
    return found


class HostTransfer:
    """Estimates the times of copies between the device of a joint graph and host memory.

    Attributes:
        device: the device that runs the graph.
        bandwidth: bytes per second that each direction of the link copies.
        to_send: seconds from the computation of each forward value to the end of the forward.
        to_fetch: seconds from the start of the backward to its first use of each value.
    """

    def __init__(self, memory: BackwardMemory, choices: FormatChoices) -> None:
        self.facts, self._constants = choices.facts, choices.rules.constants
        g, backward = choices.rules.graph, choices.rules.backward
        forward = [n for n in g.nodes if n not in backward and n.op != "output"]
        computed = _times_of_forward(g, forward, memory.backward)
        end = max(computed.values(), default=0.0)
        self.to_send = {value: end - time for value, time in computed.items()}
        begins = [begin for begin, _ in running_times(g, memory.backward).values()]
        self.to_fetch = {
            value: begins[int(life.first)]
            for value, life in memory.lifetimes.items()
            if life.first < len(begins)
        }
        self._results = {base(n) for n in graph.outputs(g) if isinstance(n, fx.Node)}
        devices = (val.device for n in forward if (val := graph.value(n)) is not None)
        self.device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
        self.bandwidth = find_bandwidth(choices.config, self.device)

    def may_send(self, value: fx.Node, bytes_: float) -> bool:
        """Whether `bytes_` bytes of a value may be in host memory.

        Parameters, leaves, data and results of the graph are alive anyway. The backward can
        recompute values that depend only on parameters and data.
        """
        if bytes_ < SMALLEST_COPY or value not in self.to_fetch or self.facts.is_free(value):
            return False
        is_data = value.op == "placeholder" and value not in self.facts.activations
        if value in self._constants or is_data or base(value) in self._results:
            return False
        val = graph.value(value)
        return val is not None and val.device == self.device and _is_dense(val)

    def seconds(self, bytes_: float) -> float:
        return bytes_ / self.bandwidth

    def slowdown(self, bytes_: float) -> float:
        return SLOWDOWN * 2 * self.seconds(bytes_)

    def wait(self, decisions: Decisions) -> float:
        sent = {n: self.seconds(host_bytes(n, d)) for n, d in decisions.items() if d.on_host}
        return sum(
            exposed_seconds((left[n], seconds) for n, seconds in sent.items())
            for left in (self.to_send, self.to_fetch)
        )


def _times_of_forward(
    g: fx.Graph, forward: list[fx.Node], backward: list[fx.Node]
) -> dict[fx.Node, float]:
    """Return the seconds until each forward value is computed.

    A forward node after the first backward node counts as computed together with its last operand.
    """
    begin = next((n for n in backward if n.op == "call_function"), graph.output_node(g))
    early = [n for n in forward if n < begin]
    computed = {n: end for n, (_, end) in running_times(g, early).items()}
    for node in forward[len(early) :]:
        computed[node] = max((computed[n] for n in node.all_input_nodes), default=0.0)
    return computed


def limit_copies(
    left: Mapping[fx.Node, float], values: Collection[fx.Node]
) -> Iterator[tuple[set[fx.Node], float]]:
    """Yield pairs (values, seconds): the time in which the values can be copied without a wait."""
    times = sorted({left[v] for v in values})
    last = len(times) - 1
    if last >= INSTANTS:
        times = [times[round(i * last / (INSTANTS - 1))] for i in range(INSTANTS)]
    for seconds in times:
        yield {v for v in values if left[v] <= seconds}, seconds


def exposed_seconds(copies: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that computation waits for `copies`: pairs (seconds left, duration)."""
    total = late = 0.0
    for left, seconds in sorted(copies):
        total += seconds
        late = max(late, total - left)
    return late


def find_bandwidth(config: Config, device: torch.device) -> float:
    """Return the bytes per second of the link to the host, per direction; measured if not set."""
    return config.host_bandwidth or bandwidth(device)


def _is_dense(val: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in any order."""
    if compat.has_unbacked(val):
        return False
    sizes = [compat.size_hint(size) for size in val.shape]
    strides = [compat.size_hint(stride) for stride in val.stride()]
    extent = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return extent == graph.numel(val)
