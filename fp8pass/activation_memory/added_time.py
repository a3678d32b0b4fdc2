"""Estimate the time for saving a forward value, or for restoring it in the backward.

Saving the exact value costs a read, and a write unless the forward stores the value anyway. Formats
of few bits move fewer bytes. But a value that no generated code computes, such as the result of a
GEMM, is quantized by a kernel of its own. And if a GEMM reads the value in the backward, the
dequantized or recomputed value must be written to memory in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass

from torch import fx

from fp8pass import graph, hardware
from fp8pass.activation_memory.costs import UNITS_PER_BYTE, WITHOUT_KERNEL
from fp8pass.activation_memory.decision import Decision, Decisions, stored_bytes
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.traffic import FUSABLE, count_bytes, count_elements, is_computed
from fp8pass.hardware import Gpu

# Assumed number of pointwise operators that a kernel computes before it quantizes their result.
LONGEST_FUSED = 8


@dataclass(frozen=True)
class AddedTime:
    """Estimates the seconds that decisions add to a step on a GPU, and the price of the seconds.

    Attributes:
        gpu: the GPU.
        backward: the nodes that depend on a gradient.
        price_of_time: number of saved bytes that are worth as much as the time in which the GPU's
            memory moves one byte.
    """

    gpu: Gpu
    backward: Set[fx.Node]
    price_of_time: float = 0.0

    def price(self, node: fx.Node, decision: Decision) -> float:
        """Return the price of the seconds that a decision adds, in units of `costs.py`.

        The seconds are computed with assumed values of dynamic sizes. Other prices use the hints of
        these sizes, so this price is scaled to the hints.
        """
        sizes = ((x, _bytes(x)) for x in (node, *node.all_input_nodes))
        ratios = (graph.nbytes(x) / size for x, size in sizes if size)
        scale = next((ratio for ratio in ratios if ratio != 1), 1.0)
        moved = self.gpu.bandwidth * self.seconds(node, decision)
        # Rounded, so that sums do not depend on the order of their terms.
        return round(self.price_of_time * moved * scale * UNITS_PER_BYTE)

    def total(self, decisions: Decisions) -> float:
        return math.fsum(self.seconds(node, decision) for node, decision in decisions.items())

    def seconds(self, node: fx.Node, decision: Decision) -> float:
        if decision.recomputed:
            return self.recomputed(node)
        return self.low_bit(node, decision) if decision.low_bit else self.exact(node)

    def exact(self, node: fx.Node) -> float:
        """Return the seconds of saving a value exactly."""
        readers = self._readers(node, backward=False)
        is_stored = not is_computed(node) or any(kind(user) not in FUSABLE for user in readers)
        return (1 if is_stored else 2) * _bytes(node) / self.gpu.bandwidth

    def low_bit(self, node: fx.Node, decision: Decision) -> float:
        """Return the seconds of quantizing a value, and reading it in the backward."""
        size = _bytes(node)
        quantized = size * stored_bytes(node, decision) / graph.nbytes(node)
        moved, launches = 2 * quantized, 0
        if self._has_own_kernel(node):
            moved, launches = moved + size, 1
        return moved / self.gpu.bandwidth + launches * hardware.LAUNCH + self._restoring(node)

    def recomputed(self, node: fx.Node) -> float:
        """Return the seconds of recomputing a value in the backward.

        Generated code fuses the recomputation with the operators that read the value, unless a GEMM
        reads the value. A reduction reads its operands once more.
        """
        if node.op != "call_function" or kind(node) in WITHOUT_KERNEL:
            return 0.0
        read = sum(map(_bytes, node.all_input_nodes)) if kind(node) is Kind.REDUCTION else 0
        return read / self.gpu.bandwidth + self._restoring(node)

    def _restoring(self, node: fx.Node) -> float:
        if all(kind(user) in FUSABLE for user in self._readers(node, backward=True)):
            return 0.0
        return 2 * _bytes(node) / self.gpu.bandwidth + hardware.LAUNCH

    def _has_own_kernel(self, node: fx.Node) -> bool:
        """Whether the value needs a separate kernel that quantizes it."""
        readers = list(self._readers(node, backward=False))
        if readers and all(_is_broadcast(node, user) for user in readers):
            return True  # the kernels that read the value run over more elements
        return not (is_computed(node) or self._is_quantized_by_users(node))

    def _is_quantized_by_users(self, node: fx.Node) -> bool:
        """Whether a kernel reads the value to compute and quantize an operand of an FP8 GEMM."""
        found = {node}
        for _ in range(LONGEST_FUSED):
            users = {user for n in found for user in self._readers(n, backward=False)}
            if any(kind(user) is Kind.QUANTIZE for user in users):
                return True
            found = {user for user in users if kind(user) is Kind.POINTWISE}
        return False

    def _readers(self, node: fx.Node, *, backward: bool) -> Iterator[fx.Node]:
        """Yield the users of a value and of its views, in the forward or in the backward."""
        pending = [node]
        while pending:
            for user in pending.pop().users:
                if kind(user) is Kind.VIEW:
                    pending.append(user)
                    continue
                # The output is in `backward`, because it also returns gradients.
                is_backward = user in self.backward and user.op != "output"
                if kind(user) is not Kind.SYMBOL and is_backward == backward:
                    yield user


def _is_broadcast(node: fx.Node, user: fx.Node) -> bool:
    return kind(user) is Kind.POINTWISE and count_elements(user) > count_elements(node)


def _bytes(node: fx.Node) -> int:
    return 0 if graph.value(node) is None else count_bytes(node)
