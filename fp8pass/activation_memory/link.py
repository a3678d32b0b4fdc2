"""What crosses the link to the host beside a step, and how long the step waits for it.

A value may leave from when it is made on, and has to be back when it is first used. One copy
crosses at a time, in the order of that, at the link's bandwidth. By a roofline of all operators:

    the forward waits    max over t of  t + seconds of copies of what is made at t or later
                         minus its own length, for its end to have all copies
    the backward waits   max over t of  seconds of copies of what is used by t, minus t

So a value that is used soon after it was made has nothing to hide its copies behind, and small
tensors, which take longer to launch than to copy, stay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import fx

from fp8pass import compat, graph
from fp8pass.activation_memory.backward_memory import BackwardMemory
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.activation_memory.decision import Decision, host_bytes
from fp8pass.activation_memory.format_choices import FormatChoices
from fp8pass.config import Config
from fp8pass.graph.chunks import chunks_of
from fp8pass.graph.classify import Kind, kind
from fp8pass.runtime.bandwidth import bandwidth

# Of a smaller tensor the copy would take no longer than its launch.
SMALLEST = 1 << 20

# How much longer the GPU takes for other work beside copies, as a share of their time: GEMMs take
# 4% longer beside copies in both directions.
SLOWDOWN = 0.04

# Instants at which the program looks at what is waited for.
INSTANTS = 32


def running_times(g: fx.Graph, nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[float, float]]:
    """When each of `nodes` begins and ends if they run one after the other, in seconds."""
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


class Link:
    """The link between the device of a joint graph and the host.

    Attributes:
        device: where the graph computes.
        bandwidth: bytes a second, each way.
        forward: seconds of the forward.
        made: when each forward value is there, in seconds of the forward.
        used: when the backward first needs it, in seconds of the backward.
    """

    def __init__(self, g: fx.Graph, memory: BackwardMemory, choices: FormatChoices) -> None:
        self.facts, self._constants = choices.facts, choices.rules.constants
        backward = choices.rules.backward
        forward = [n for n in g.nodes if n not in backward and n.op != "output"]
        self.made = self._made(g, forward, memory.backward)
        self.forward = max(self.made.values(), default=0.0)
        begins = [begin for begin, _ in running_times(g, memory.backward).values()]
        self.used = {
            value: begins[int(life.first)]
            for value, life in memory.lifetimes.items()
            if life.first < len(begins)
        }
        self._results = {base(n) for n in graph.outputs(g) if isinstance(n, fx.Node)}
        on_gpu = (graph.tensor(n).device for n in forward if is_on_gpu(n))
        self.device = next(on_gpu, torch.device("cpu"))
        self.bandwidth = bandwidth_of(choices.config, self.device)

    @staticmethod
    def _made(g: fx.Graph, forward: list[fx.Node], backward: list[fx.Node]) -> dict[fx.Node, float]:
        """When forward values are there; those that only the backward uses, with their operands."""
        begin = next((n for n in backward if n.op == "call_function"), graph.output_node(g))
        early = [n for n in forward if n < begin]
        made = {n: end for n, (_, end) in running_times(g, early).items()}
        for node in forward[len(early) :]:
            made[node] = max((made[n] for n in node.all_input_nodes), default=0.0)
        return made

    def may_send(self, value: fx.Node, bytes_: float) -> bool:
        """Whether `bytes_` of a value may be on the host instead of where the graph computes.

        What somebody else holds may not: parameters and leaves, data, the results of the graph. Nor
        what follows from parameters and data alone, and can be made of them again.
        """
        if bytes_ < SMALLEST or value not in self.used or self.facts.is_free(value):
            return False
        if value in self._constants:
            return False
        if value.op == "placeholder" and value not in self.facts.activations:
            return False
        if base(value) in self._results:
            return False
        val = graph.value(value)
        return val is not None and val.device == self.device and is_dense(value)

    def seconds(self, bytes_: float) -> float:
        """Time to copy so many bytes one way."""
        return bytes_ / self.bandwidth

    def slowdown(self, bytes_: float) -> float:
        """By how much copies there and back slow other work down, in seconds."""
        return SLOWDOWN * 2 * self.seconds(bytes_)

    def waits(self, decisions: Mapping[fx.Node, Decision]) -> tuple[float, float]:
        """Seconds that the forward and the backward wait for copies under a plan."""
        sent = {n: self.seconds(host_bytes(n, d)) for n, d in decisions.items() if d.on_host}
        forward = forward_wait(((self.made[n], t) for n, t in sent.items()), self.forward)
        return forward, backward_wait((self.used[n], t) for n, t in sent.items())

    def leaving(self, values: Collection[fx.Node]) -> Iterator[tuple[set[fx.Node], float]]:
        """Values that are made at an instant or later, and the seconds left for their copies."""
        for now in _instants(self.made[v] for v in values):
            yield {v for v in values if self.made[v] >= now}, self.forward - now

    def returning(self, values: Collection[fx.Node]) -> Iterator[tuple[set[fx.Node], float]]:
        """Values that are used by an instant, and the seconds until then for their copies."""
        for now in _instants(self.used[v] for v in values):
            yield {v for v in values if self.used[v] <= now}, now


def forward_wait(copies: Iterable[tuple[float, float]], end: float) -> float:
    """Seconds from the end of a forward until all copies, (made, seconds), have left."""
    free = 0.0
    for made, seconds in sorted(copies):
        free = max(free, made) + seconds
    return max(free - end, 0.0)


def backward_wait(copies: Iterable[tuple[float, float]]) -> float:
    """Seconds that a backward waits in all for copies, (used, seconds), to be back."""
    crossing = late = 0.0
    for used, seconds in sorted(copies):
        crossing += seconds
        late = max(late, crossing - used)
    return late


def bandwidth_of(config: Config, device: torch.device) -> float:
    """Bytes a second each way: those that the user says, or measured."""
    return config.host_bandwidth or bandwidth(device)


def _instants(times: Iterable[float]) -> list[float]:
    """Some of the times, the first and the last among them."""
    ordered = sorted(set(times))
    last = len(ordered) - 1
    if last < INSTANTS:
        return ordered
    return [ordered[round(i * last / (INSTANTS - 1))] for i in range(INSTANTS)]


def base(node: fx.Node) -> fx.Node:
    """The node in whose memory a view lies."""
    while isinstance(node, fx.Node) and node.op == "call_function" and kind(node) is Kind.VIEW:
        node = node.all_input_nodes[0]
    return node


def is_on_gpu(node: fx.Node) -> bool:
    """Whether a value is a tensor on a GPU."""
    val = graph.value(node)
    return val is not None and val.device.type == "cuda"


def is_dense(node: fx.Node) -> bool:
    """Whether a tensor's elements fill its memory, in any order."""
    val = graph.value(node)
    if val is None or compat.has_unbacked(val):
        return False
    sizes = [compat.size_hint(size) for size in val.shape]
    strides = [compat.size_hint(stride) for stride in val.stride()]
    extent = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return extent == graph.numel(val)
