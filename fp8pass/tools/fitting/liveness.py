"""Bytes alive while one half of a graph runs, after each of its operators.

`activation_memory/backward_memory.py` says what has a buffer of its own and until when it is used:
results of GEMMs and attention, codes, sums of the residual stream; pointwise operators run inside
of those that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx

from fp8pass import graph
from fp8pass.activation_memory.backward_memory import is_buffered, reads_memory
from fp8pass.graph.chunks import Chunks, in_chunks
from fp8pass.graph.classify import Kind, kind

fp8 = torch.ops.fp8pass

# Generated code decodes where it reads.
DECODERS = {fp8.dequantize.default}
# CUDA kernels of attention's backward add up the gradient of queries in FP32.
BYTES_PER_QUERY = 4


@dataclass(frozen=True)
class HalfMemory:
    """Bytes alive after each operator of a half.

    Attributes:
        saved: of what crosses into the backward.
        gradients: of parameters' gradients.
        workspace: of all else that the half allocates.
        modules: paths of the modules that the operators come from.
    """

    modules: list[str]
    saved: list[float]
    gradients: list[float]
    workspace: list[float]

    @property
    def totals(self) -> list[float]:
        """Bytes of all kinds."""
        return [sum(x) for x in zip(self.saved, self.gradients, self.workspace, strict=True)]


def forward_memory(g: fx.Graph, saved: set[fx.Node]) -> HalfMemory:
    """The memory of a forward, whose results stay until its end; `saved` cross."""
    spans = _Spans(g)
    return spans.memory(dict.fromkeys(saved, "saved"))


def backward_memory(g: fx.Graph, saved: set[fx.Node], gradients: set[fx.Node]) -> HalfMemory:
    """The memory of a backward: inputs among `saved` are freed as they were used for the last time.

    `gradients` of parameters are among its results.
    """
    spans = _Spans(g, saved)
    return spans.memory({**dict.fromkeys(saved, "saved"), **dict.fromkeys(gradients, "gradients")})


class _Spans:
    """When buffers of a graph are alive, as positions of nodes."""

    def __init__(self, g: fx.Graph, inputs: Iterable[fx.Node] = ()) -> None:
        self.inputs = set(inputs)
        self.nodes = [n for n in g.nodes if n.op != "output"]
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.last = self._last_uses()

    def _begin(self, node: fx.Node) -> int:
        """Where a buffer is allocated: that of transposed codes by the kernel that quantizes."""
        source = node.args[0] if graph.is_call(node, fp8.transpose.default) else node
        return self.position.get(source, self.position[node])

    def _last_uses(self) -> dict[fx.Node, int]:
        """The last position at which a buffer is computed from each node."""
        found: dict[fx.Node, int] = {}
        for node in reversed(self.nodes):
            ends = (self._end(user, found) for user in node.users)
            found[node] = max([self.position[node], *ends])
        return found

    def _end(self, user: fx.Node, found: Mapping[fx.Node, int]) -> int:
        if user.op == "output":
            return len(self.nodes)
        return self.position[user] if has_buffer(user) else found[user]

    def memory(self, kinds: Mapping[fx.Node, str]) -> HalfMemory:
        """Bytes by kind; of nodes that are in no kind as workspace."""
        length = len(self.nodes)
        changes = {name: [0.0] * (length + 1) for name in ("saved", "gradients", "workspace")}
        for node in self.nodes:
            at, end = self._begin(node), min(self.last[node], length - 1)
            change = changes[kinds.get(node, "workspace")]
            if node in self.inputs:
                change[0] += graph.nbytes(node)
                change[end + 1] -= graph.nbytes(node)
            elif node.op == "call_function" and has_buffer(node):
                change[at] += graph.nbytes(node)
                change[end + 1] -= graph.nbytes(node)
            extra = _meanwhile(node)
            changes["workspace"][at] += extra
            changes["workspace"][at + 1] -= extra
        alive = {name: list(accumulate(x[:length])) for name, x in changes.items()}
        return HalfMemory([graph.module_path(n) for n in self.nodes], **alive)


def has_buffer(node: fx.Node) -> bool:
    """Whether a node's result is in memory of its own."""
    if node.target in DECODERS:
        return any(reads_memory(user) for user in node.users)
    if graph.is_getitem(node) and graph.is_call(node.args[0], in_chunks):  # type: ignore[arg-type]
        return True
    return is_buffered(node)


def _meanwhile(node: fx.Node) -> float:
    """Bytes that an operator allocates while it runs, besides its results."""
    if graph.is_call(node, in_chunks):
        return max(forward_memory(Chunks(node).body.graph, set()).totals, default=0.0)
    is_attention = kind(node) is Kind.ATTENTION and not graph.is_getitem(node)
    if is_attention and "backward" in str(node.target):
        return BYTES_PER_QUERY * graph.numel(graph.tensor(node.args[1]))  # type: ignore[arg-type]
    return 0.0
