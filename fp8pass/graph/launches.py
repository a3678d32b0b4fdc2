"""Estimate the kernels of a graph: the time to launch them, and the time to run them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Set

import torch
from torch import fx

from fp8pass import compat, graph, hardware
from fp8pass.graph.classify import Kind, kind
from fp8pass.graph.collectives import starts_communication
from fp8pass.graph.flops import EXPENSIVE_KINDS, flops
from fp8pass.graph.traffic import FUSABLE, assumed_size, count_bytes, count_elements
from fp8pass.hardware import Gpu

# Kinds of nodes that launch no kernel.
_WITHOUT_KERNEL = (Kind.VIEW, Kind.SYMBOL, Kind.CREATION, Kind.INPUT)

# FP8 adds casts, so the CPU takes 1.3 to 1.8 times as long to launch the kernels of GPT-2, DiT,
# nanochat d12 and ViT. But `find_kernels` counts up to 25% too many kernels. The factor separates
# BERT base and ViT-B/16 from GPT-2 and DiT. In the first two, FP8 is slower on hosts with slow CPUs
# (ViT takes 0.98 to 1.11 times as long). In the last two, FP8 was faster on all hosts of the last
# measurements.
MORE_LAUNCHES = 1.25
# How much slower GEMMs are in FP32 than in BF16, by the datasheet of an H100.
FP32_GEMM = 989 / 67


def why_launch_bound(g: fx.Graph, gpu: Gpu) -> str:
    """Return why FP8 would not make a step faster, or '' if it would.

    The CPU limits a step if it launches the kernels more slowly than the GPU runs them. CUDA graphs
    launch all kernels at once. The answer depends on sizes, which may differ between ranks, but all
    ranks must run the same collectives. So for a graph with collectives the function always returns
    ''.
    """
    if hardware.launches_at_once() or compat.uses_cuda_graphs({}):
        return ""
    if any(map(starts_communication, g.nodes)):
        return ""
    kernels = find_kernels(g)
    launching = MORE_LAUNCHES * len(kernels) * hardware.CPU_LAUNCH
    running = seconds_of(kernels, gpu)
    if launching <= running:
        return ""
    return (
        f"the CPU launches the kernels in {1e3 * launching:.2g} ms, the GPU runs them in "
        f"{1e3 * running:.2g} ms: try mode='reduce-overhead' or fp8pass.optim.capture_step"
    )


def find_kernels(g: fx.Graph) -> set[fx.Node]:
    """Return one node for each kernel that the graph launches.

    For a kernel of Inductor, this is the last of the fused operators; for a kernel of a library, it
    is the operator that calls the library. The number of nodes is within 25% of the number of
    launches in twelve models of `never_slower.py`.
    """
    return {node for node in g.nodes if _ends_kernel(node)}


def seconds_of(kernels: Set[fx.Node], gpu: Gpu) -> float:
    """Estimate the total time of kernels in seconds, by the roofline.

    A kernel reads its operands once. Inductor fuses kernels that read the same large tensors.
    """
    seconds, fused = [], defaultdict[frozenset[fx.Node], set[fx.Node]](set)
    for node in kernels:
        found = graph.ancestors(node.all_input_nodes, lambda n: not _is_stored(n, kernels))
        reads = {n for n in found if _is_stored(n, kernels)}
        results = {user for user in node.users if graph.is_getitem(user)} or {node}
        if kind(node) in FUSABLE:
            largest = max(map(_bytes, reads), default=0)
            fused[frozenset(n for n in reads if 4 * _bytes(n) >= largest)] |= reads | results
        else:
            moved = sum(map(_bytes, reads | results))
            seconds.append(max(moved / gpu.bandwidth, _compute_seconds(node, gpu)))
    seconds.append(sum(_bytes(n) for moved in fused.values() for n in moved) / gpu.bandwidth)
    # Unlike `sum`, `fsum` does not depend on the order of the set, so all ranks get the same time.
    return math.fsum(seconds)


def _ends_kernel(node: fx.Node) -> bool:
    if node.op != "call_function" or graph.is_getitem(node) or kind(node) in _WITHOUT_KERNEL:
        return False
    if kind(node) not in FUSABLE or kind(node) is Kind.REDUCTION:
        return True
    return any(kind(user) not in FUSABLE for user in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a value and of its views."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if kind(user) is Kind.VIEW or graph.is_getitem(user):
                pending.append(user)
            else:
                yield user


def _is_stored(node: fx.Node, kernels: Set[fx.Node]) -> bool:
    return node.op == "placeholder" or node in kernels


def _bytes(node: fx.Node) -> int:
    return 0 if graph.value(node) is None else count_bytes(node)


def _compute_seconds(node: fx.Node, gpu: Gpu) -> float:
    """Return the computing time of a GEMM, convolution or attention; 0 for other kernels.

    With symbolic sizes, only the time of a GEMM can be estimated. For a convolution or attention
    with symbolic sizes, the function returns 0.
    """
    if kind(node) not in EXPENSIVE_KINDS:
        return 0.0
    rate = gpu.attention_flops if kind(node) is Kind.ATTENTION else gpu.bf16_flops
    if kind(node) is Kind.GEMM and graph.tensor(node).dtype is torch.float32:
        rate /= FP32_GEMM
    if all(isinstance(size, int) for n in (node, *node.all_input_nodes) for size in _shape(n)):
        return flops(node) / rate
    if kind(node) is not Kind.GEMM:
        return 0.0
    length = assumed_size(_shape(node.all_input_nodes[-1])[-2], node.graph)
    return 2 * count_elements(node) * length / rate


def _shape(node: fx.Node) -> tuple[int, ...]:
    return () if graph.value(node) is None else tuple(graph.tensor(node).shape)
