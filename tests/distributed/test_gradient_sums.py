"""Groups of gradients do not cross parameters, so replicas of a parameter stay equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fp8pass
from fp8pass.distributed.gradient_sums import GradientSums, ParameterLayout, Traffic, make_layout
from fp8pass.distributed.wire import add_up, pack


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6).map(tuple),
    rows=st.integers(1, 3),
    unit=st.sampled_from([1, 4, 8]),
)
def test_groups_begin_with_parameters(sizes, rows, unit):
    layout = ParameterLayout(sizes, unit)
    x = 1.0 + torch.arange(rows * sum(sizes)).view(rows, -1)
    padded = layout.pad(x)
    back = torch.empty_like(x)
    layout.unpad(padded, back)
    assert torch.equal(back, x)
    groups = nn.functional.pad(padded, (0, -padded.shape[-1] % unit)).unflatten(-1, (-1, unit))
    counts = [-(-size // unit) for size in sizes]
    assert groups.shape[1] == sum(counts)
    for i, (parameter, part) in enumerate(
        zip(x.split(sizes, -1), groups.split(counts, 1), strict=True)
    ):
        its_groups = part.flatten(1)
        assert torch.equal(its_groups[:, : sizes[i]], parameter)
        assert not its_groups[:, sizes[i] :].any()


def test_rows_of_whole_groups_are_not_copied():
    rows = torch.ones(2, 3 * 128 + 5)
    assert make_layout((128, 256, 0, 5)).pad(rows) is rows
    assert make_layout((128, 5, 256)).pad(rows) is not rows


@given(first=st.integers(1, 200), others=st.integers(1, 200), scale=st.sampled_from([1e-6, 1e6]))
def test_sent_gradients_of_a_parameter_do_not_depend_on_others(first, others, scale):
    generator = torch.Generator().manual_seed(first)
    mine = torch.randn(2, 150, generator=generator)
    found = []
    for before, after in ((first, others), (others, first), (1, 1)):
        neighbours = [scale * torch.randn(2, n, generator=generator) for n in (before, after)]
        rows = torch.cat((neighbours[0], mine, neighbours[1]), -1)
        layout = make_layout((before, 150, after))
        padded = layout.pad(rows)
        layout.unpad(add_up(pack(padded).unsqueeze(0), torch.empty_like(padded)), rows)
        found.append(rows[:, before : before + 150])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- functions of ranks -------------------------------------------------------------------------


def sums_do_not_depend_on_other_parameters(device: str, reduces: str) -> None:
    """The parameter before it has different sizes and magnitudes, and sums that overflow."""
    world, found = dist.get_world_size(), []
    for before, scale in ((256, 1.0), (256, 1e4), (1000, 1e-4), (5000, 1e4)):
        generator = torch.Generator().manual_seed(dist.get_rank())
        sums, outputs = GradientSums(Traffic()), []
        noise = torch.Generator().manual_seed(before)
        for _ in range(8):
            mine = torch.randn(world, 150, generator=generator)
            # Equal on all ranks, so that sums reach the largest FP8 value.
            other = scale * torch.randn(world, before, generator=noise)
            rows = torch.cat((other, mine), -1).to(device)
            if reduces == "reduce_scatter":
                output = rows.new_empty(rows.shape[-1])
                sums.reduce_scatter(output, rows.flatten(), (before, 150), dist.group.WORLD, 0.5)
            else:
                output = rows[0].clone()
                sums.all_reduce(output, (before, 150), dist.group.WORLD, 0.5)
            outputs.append(output[before:])
        found.append(torch.stack(outputs))
    for each in found[1:]:
        assert torch.equal(each, found[0])


class Part(nn.Module):
    """A rank of tensor parallelism: copies of `norm`, `matrix` and `bias`, a shard of `weight`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.randn(40, device=device))
        self.weight = nn.Parameter(torch.randn(20, 30, device=device))
        self.norm = nn.Parameter(torch.randn(150, device=device))
        self.matrix = nn.Parameter(torch.randn(6, 10, device=device))
        self.bias = nn.Parameter(torch.randn(70, device=device))

    def forward(self, scale: float) -> Tensor:
        generator = torch.Generator().manual_seed(dist.get_rank())
        loss = torch.zeros((), device=self.norm.device)
        for name in ("norm", "matrix", "bias", "weight"):
            parameter = getattr(self, name)
            slope = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            loss = loss + (parameter * slope * (scale if name == "weight" else 1)).sum()
        return loss


def copies_get_equal_gradients(device: str, way: str) -> None:
    """Shards have gradients of different magnitude, and a parameter has no gradient."""
    found = []
    for scale in (1.0, 1e5):
        model: nn.Module = Part(device)
        if way == "ddp":
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        else:

            def place(parameter: nn.Parameter) -> Shard | None:
                return Shard(1) if parameter.ndim == 2 else None

            fully_shard(model, shard_placement_fn=place if way == "columns" else None)
        fp8pass.distributed.compress(model, weights="none")
        for _ in range(3):
            model(scale).backward()
        part = model.module if way == "ddp" else model
        found.append([part.norm.grad, part.matrix.grad, part.bias.grad])
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        assert torch.equal(one, other) if way == "ddp" else one.to_local().equal(other.to_local())


@pytest.mark.parametrize("reduces", ["reduce_scatter", "all_reduce"])
def test_sums_do_not_depend_on_other_parameters(two, reduces):
    two(sums_do_not_depend_on_other_parameters, reduces)


@pytest.mark.parametrize("way", ["ddp", "rows", "columns"])
def test_copies_of_a_parameter_get_equal_gradients(two, way):
    two(copies_get_equal_gradients, way)
