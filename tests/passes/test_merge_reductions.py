"""Terms that ranks reduce separately are added first, and reduced once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from helpers import COAT_EAGER, JointGraph, capture_joint
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fp8pass import compat
from fp8pass.compilation import CompiledGraph
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.graph import spec
from fp8pass.graph.collectives import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from fp8pass.graph.nodes import aten
from fp8pass.passes import JOINT_PASSES
from fp8pass.passes.runner import run_passes

fp8 = torch.ops.fp8pass
ADD = aten.add.Tensor
WIDTH = 128


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """Process groups in which only this rank exists."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


class Projections(nn.Module):
    """Three layers that read the same tokens, each parallelized on its own."""

    def __init__(self, mesh: DeviceMesh, layout: Shard | Replicate) -> None:
        super().__init__()
        for name in "qkv":
            layer = nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
            self.add_module(
                name, parallelize_module(layer, mesh, ColwiseParallel(input_layouts=layout))
            )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.q(x) * self.k(x) * self.v(x)


class Sum(nn.Module):
    """A sum of tensors that are each reduced over ranks."""

    def __init__(self, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        return self.total(x)


def reduce(x: Tensor, mesh: DeviceMesh, operation: str = "sum") -> Tensor:
    part = DTensor.from_local(x, mesh, [Partial(operation)], run_check=False)
    return part.redistribute(placements=[Shard(0)]).to_local()


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=dtype).requires_grad_()


def planned(model: nn.Module, x: Tensor, config: Config = COAT_EAGER) -> JointGraph:
    joint = capture_joint(model, x, config=config)
    guards = compat.guard_count(joint.gm.graph)
    run_passes(JOINT_PASSES, joint.gm, joint.ctx)
    spec.verify(joint.gm.graph)
    spec.verify_guards(joint.gm.graph, guards)
    return joint


def reductions(joint: JointGraph) -> int:
    return len(joint.calls(ALL_REDUCE)) + len(joint.calls(REDUCE_SCATTER))


# --- it fires -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Shard(0), Shard(1), Replicate()], ids=str)
def test_gradients_of_shared_inputs_are_reduced_once(mesh, layout):
    joint = planned(Projections(mesh["a"], layout), tokens(4, 16))
    assert reductions(joint) == 1
    assert joint.ctx.plan.merged == [("v", "k", "q")]


def test_scatters_in_8_bits_are_merged_too(mesh):
    config = Config.recipe("coat", compiler="eager", scatter_format="e4m3")
    joint = planned(Projections(mesh["a"], Shard(1)), tokens(4, 16), config)
    assert len(joint.calls(ALL_TO_ALL)) == 1
    assert not reductions(joint)


def test_terms_of_other_operators_stay_in_the_sum(mesh):
    a = mesh["a"]
    joint = planned(Sum(lambda x: reduce(x.sin(), a) + x[:4] + reduce(x.cos(), a)), tokens(8))
    assert reductions(joint) == 1


def test_sums_inside_sums_are_merged(mesh):
    """The sum of two reductions is an operand of another reduction, over other ranks."""
    a, b = mesh["a"], mesh["b"]
    joint = planned(
        Sum(
            lambda x: (
                reduce(reduce(x.sin(), a) + reduce(x.cos(), a), b) + reduce(reduce(x.exp(), a), b)
            )
        ),
        tokens(8),
    )
    assert reductions(joint) == 2


@pytest.mark.parametrize(("inside", "left"), [(2, 1), (1, 2)])
def test_terms_of_one_checkpointed_block_are_merged(mesh, inside, left):
    a = mesh["a"]

    def block(x: Tensor) -> Tensor:
        y = reduce(x.sin(), a)
        return y + reduce(x.cos(), a) if inside == 2 else y

    def total(x: Tensor) -> Tensor:
        y = checkpoint(block, x, use_reentrant=False)
        return y if inside == 2 else y + reduce(x.cos(), a)

    assert reductions(planned(Sum(total), tokens(4))) == left


def test_terms_are_added_when_they_are_known(mesh):
    """Otherwise the terms of all layers would wait in memory for the last one."""
    a = mesh["a"]

    def total(x: Tensor) -> Tensor:
        y = reduce(x, a)
        for _ in range(3):
            x = x.sin()
            y = y + reduce(x, a)
        return y

    joint = planned(Sum(total), tokens(4))
    assert reductions(joint) == 1
    order = [n.target for n in joint.gm.graph.nodes if n.target in (aten.sin.default, ADD)]
    assert order == [aten.sin.default, ADD] * 3 + order[6:]


def test_terms_are_merged_in_inference_graphs(mesh):
    plans: list[CompiledGraph] = []
    backend = Backend(COAT_EAGER, plans.append)
    a = mesh["a"]
    torch.compile(lambda x: reduce(x.sin(), a) + reduce(x.cos(), a), backend=backend)(
        tokens(8).detach()
    )
    (compiled,) = plans
    assert [c.op for c in compiled.plan.collectives] == ["reduce_scatter_tensor"]


# --- it does not --------------------------------------------------------------------------------


def sum_and_mean(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce(x.sin(), mesh["a"]) + reduce(x.cos(), mesh["a"], "avg")


def other_groups(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce(x.sin(), mesh["a"]) + reduce(x.cos(), mesh["b"])


def term_with_another_reader(x: Tensor, mesh: DeviceMesh) -> Tensor:
    first = reduce(x.sin(), mesh["a"])
    return (first + reduce(x.cos(), mesh["a"])) * first


def other_sizes(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce(x.sin(), mesh["a"]) + reduce(x[:2].cos(), mesh["a"])


def means(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce(x.sin(), mesh["a"], "avg") + reduce(x.cos(), mesh["a"], "avg")


def sums_in_fp16(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce(x.sin().half(), mesh["a"]) + reduce(x.cos().half(), mesh["a"])


def padded_parts(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A rank slices the result only if its part is padded."""
    x = x[:3]
    return reduce(x.sin(), mesh["a"]) + reduce(x.cos(), mesh["a"])


class KeepsTheSum(torch.autograd.Function):
    """Adds a term that the forward reduced to a term of the backward."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        ctx.save_for_backward(reduce(x.sin(), mesh["a"]), x)
        return x.cos()

    @staticmethod
    def backward(ctx, gradient):
        kept, x = ctx.saved_tensors
        total = kept + reduce(gradient * x, ctx.mesh["a"])
        return torch.cat([total, total]), None


def terms_of_both_halves(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return KeepsTheSum.apply(x, mesh)


def weighted_sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return torch.add(reduce(x.sin(), mesh["a"]), reduce(x.cos(), mesh["a"]), alpha=2)


def other_dtypes(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return reduce(x.sin(), mesh["a"]) + reduce(x.cos().float(), mesh["a"])


@pytest.mark.parametrize(
    "total",
    [
        *(sum_and_mean, other_groups, term_with_another_reader, other_sizes, weighted_sum),
        *(other_dtypes, means, sums_in_fp16, padded_parts, terms_of_both_halves),
    ],
    ids=lambda total: total.__name__,
)
def test_other_sums_are_left_alone(mesh, total):
    model = Sum(lambda x: total(x, mesh))
    with mock.patch.dict(os.environ, FP8PASS_DISABLE_PASSES="merge_reductions"):
        want = planned(model, tokens(4))
    assert reductions(planned(model, tokens(4))) == reductions(want) >= 2


def test_recipe_exact_keeps_the_order_of_sums(mesh):
    config = Config.recipe("exact", compiler="eager")
    assert reductions(planned(Projections(mesh["a"], Shard(1)), tokens(4, 16), config)) == 3
