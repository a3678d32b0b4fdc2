"""The estimated kernels of a graph, and what limits a step: the CPU that launches them, or the GPU
that runs them."""

from __future__ import annotations

import pytest
import torch
from helpers import capture_joint
from torch import nn
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass.graph.collectives import ALL_GATHER
from fp8pass.graph.launches import find_kernels, seconds_of, why_launch_bound
from fp8pass.hardware import GPUS

H200 = GPUS["H200"]


def mlp(x, w, v):
    return nn.functional.gelu(x @ w) @ v + x


def centered(x, w, v):
    return (x - x.mean(-1, keepdim=True)) @ w


def transposed(x, w, v):
    return (x * 2).t().view(x.shape[1], -1) @ x


def repeated(x, w, v):
    for _ in range(10):
        x = mlp(x, w, v)
    return x


def trace(function, rows=64, hidden=64):
    shapes = (rows, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)
    args = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    return make_fx(function, tracing_mode="fake")(*args).graph


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (mlp, 4),  # a GEMM, GELU, a GEMM, and the sum
        (centered, 3),  # the means, the difference, and a GEMM
        (transposed, 2),  # views launch nothing
        (repeated, 40),
    ],
)
def test_number_of_kernels(function, kernels):
    assert len(find_kernels(trace(function))) == kernels


def test_seconds_follow_the_roofline():
    """A product with 256 columns is limited by memory, and one with 32,768 by tensor cores."""
    for hidden, flops in ((64, False), (8192, True)):
        g = trace(lambda x, w, v: x @ w, rows=8192, hidden=hidden)
        moved = 2 * (8192 * hidden + 4 * hidden**2 + 4 * 8192 * hidden) / H200.bandwidth
        work = 2 * 8192 * 4 * hidden**2 / H200.bf16_flops
        assert seconds_of(find_kernels(g), H200) == pytest.approx(work if flops else moved)


def test_small_kernels_are_limited_by_the_cpu():
    limit = why_launch_bound(trace(repeated), H200)
    assert limit.startswith("the CPU launches the kernels in 2 ms, the GPU runs them in 0.0")
    assert not why_launch_bound(trace(repeated, rows=8192, hidden=4096), H200)


def test_symbolic_sizes_stand_for_many_tokens():
    """The size of the first batch is not in the cache key."""
    for hidden, is_limited in ((256, True), (1024, False)):
        model = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden))
        x = torch.randn(48, hidden).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        g = capture_joint(model.bfloat16(), x).gm.graph
        assert bool(why_launch_bound(g, H200)) == is_limited


def test_cuda_graphs_have_no_launches():
    with inductor_config.patch({"triton.cudagraphs": True}):
        assert not why_launch_bound(trace(repeated), H200)


def test_graphs_with_collectives_have_no_limit():
    """Ranks with different sizes must repeat the same gathers."""
    g = trace(repeated)
    with g.inserting_before(next(iter(g.find_nodes(op="output")))):
        g.call_function(ALL_GATHER, (next(iter(g.nodes)), 2, "0"))
    assert not why_launch_bound(g, H200)
