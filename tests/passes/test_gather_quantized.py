"""A tensor that is only quantized is gathered in FP8, and no gathered tensor is saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from helpers import COAT_EAGER, JointGraph, capture_joint
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch._inductor.fx_passes import micro_pipeline_tp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8pass import compat, explain
from fp8pass.codegen.buffers import is_buffer
from fp8pass.codegen.lowering import lower
from fp8pass.config import Config
from fp8pass.graph import spec
from fp8pass.graph.collectives import ALL_GATHER, ALL_TO_ALL, WAIT_TENSOR
from fp8pass.graph.nodes import aten, emit, tensor
from fp8pass.graph.tags import ROLE, WHY_NOT_QUANTIZED
from fp8pass.hardware import GPUS, planning_for
from fp8pass.partition import cut
from fp8pass.passes import JOINT_PASSES
from fp8pass.passes.joint.gather_quantized import gather_quantized
from fp8pass.passes.joint.quantize_linears import quantize_linears

fp8 = torch.ops.fp8pass
WIDTH, ROWS = 1024, 16
BYTES, ROW_AMAXES = torch.uint8, torch.float32


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """A process group of two ranks in which only this rank exists."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Gathered(nn.Module):
    """A linear layer with an input that is sharded over ranks."""

    def __init__(self, mesh: DeviceMesh, dim: int, read: Callable[..., Tensor] | None = None):
        super().__init__()
        self.mesh, self.dim = mesh, dim
        self.read = read or (lambda layer, x: layer(x))
        self.layer = nn.Linear(WIDTH, 80, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        part = DTensor.from_local(torch.tanh(x), self.mesh, [Shard(self.dim)], run_check=False)
        whole = part.redistribute(placements=[Replicate()])
        return self.read(self.layer, whole.to_local(grad_placements=[Partial()]))


class WholeParameter(nn.Module):
    def forward(self, shard: DTensor) -> Tensor:
        whole = shard.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def sharded_layer(mesh: DeviceMesh, dim: int = 0) -> nn.Module:
    """A linear layer with a sharded weight that is gathered for each use, as in SimpleFSDP."""
    layer = nn.Linear(WIDTH, 80, bias=False).bfloat16()
    shard = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
    layer.register_parameter("weight", shard)
    parametrize.register_parametrization(layer, "weight", WholeParameter(), unsafe=True)
    return nn.Sequential(nn.Tanh(), layer)


def activation(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, WIDTH, dtype=dtype).requires_grad_()


def planned(
    model: nn.Module, x: Tensor, config: Config = COAT_EAGER, *, dynamic: bool = False
) -> JointGraph:
    """The joint graph after all passes; checks that each pass is valid and adds no guards."""
    joint = capture_joint(model, x, config=config, dynamic=dynamic)
    for pass_ in JOINT_PASSES:
        guards = compat.guard_count(joint.gm.graph)
        pass_(joint.gm, joint.ctx)
        spec.verify(joint.gm.graph)
        spec.verify_guards(joint.gm.graph, guards)
    return joint


def sent(joint: JointGraph) -> list[torch.dtype]:
    """The dtypes of gathered tensors, in order."""
    return [tensor(n).dtype for n in joint.calls(ALL_GATHER)]


def sent_by_half(joint: JointGraph) -> list[int]:
    """The number of gathers in the forward, and in the backward."""
    halves = cut(joint.gm, joint.ctx)
    return [len(g.graph.find_nodes(op="call_function", target=ALL_GATHER)) for g in halves]


def reasons(joint: JointGraph) -> list[str]:
    return [c.reason for c in joint.ctx.plan.collectives if c.op.startswith("all_gather")]


def put_side_by_side(joint: JointGraph) -> list[torch.dtype]:
    """The dtypes of gathers along another dimension than the first, without BF16 gradients."""
    dtypes = [tensor(n).dtype for n in joint.calls(aten.cat.default)]
    return [dtype for dtype in dtypes if dtype is not torch.bfloat16]


def gathered_bytes(joint: JointGraph) -> int:
    return sum(c.bytes for c in joint.ctx.plan.collectives if c.op.startswith("all_gather"))


# --- it fires -----------------------------------------------------------------------------------


def test_an_activation(mesh):
    """By row in the forward. For wgrad the shard is saved with one scale, and gathered."""
    joint = planned(Gathered(mesh, 1), activation(2, ROWS))
    assert sent(joint) == [ROW_AMAXES, BYTES, BYTES]
    assert put_side_by_side(joint) == sent(joint)
    assert reasons(joint) == [""] * 3
    kept = [t for s in joint.ctx.plan.saved if s.bytes for t in s.tensors]
    codes = 2 * ROWS * WIDTH
    assert max(t.bytes for t in kept) <= codes * (1 + 2 / 128)  # no tensor of both ranks
    assert any((t.dtype, t.bytes) == ("uint8", codes) for t in kept)
    assert gathered_bytes(joint) <= 0.51 * 2 * (2 * codes)  # two gathers in 16 bits
    assert sent_by_half(joint) == [2, 1]


@pytest.mark.parametrize(("sizes", "dim"), [((1, ROWS), 1), ((ROWS,), 0), ((2, ROWS), 0)])
def test_ranks_whose_rows_lie_one_below_the_other(mesh, sizes, dim):
    """A gather along the first dimension needs no concatenation."""
    joint = planned(Gathered(mesh, dim), activation(*sizes))
    assert sent(joint) == [ROW_AMAXES, BYTES, BYTES]
    assert not put_side_by_side(joint)
    assert all(tensor(n).ndim == 2 for n in joint.calls(ALL_GATHER))


def test_a_weight(mesh):
    """Only scales are saved. The scale of the backward needs no amax of its own."""
    joint = planned(sharded_layer(mesh), activation(ROWS))
    assert sent(joint) == [ROW_AMAXES, BYTES, BYTES]
    (layer,) = joint.ctx.plan.linears
    assert layer.fp8 == ("forward", "dgrad", "wgrad")
    assert gathered_bytes(joint) <= 0.502 * 2 * (2 * 40 * WIDTH)
    of_weight = [s for s in joint.ctx.plan.saved if "parametrizations" in s.module]
    assert all(s.is_scalar for s in of_weight)
    weight = 80 * WIDTH
    assert all(t.bytes < weight for s in joint.ctx.plan.saved for t in s.tensors)
    assert sent_by_half(joint) == [2, 1]


def test_gathered_tensors_stay_in_fp8_whatever_fp8_gains(mesh):
    """Ranks with other sizes must run the same collectives."""
    with planning_for(GPUS["H200"]):  # where these small GEMMs gain nothing
        weight = planned(sharded_layer(mesh), activation(ROWS))
        assert sent(weight).count(torch.uint8) > 0
        assert weight.ctx.plan.linears[0].fp8[:2] == ("forward", "dgrad")
        joint = planned(Gathered(mesh, 1), activation(2, ROWS))
        assert sent(joint).count(torch.uint8) > 0


def test_one_scale(mesh):
    """The amax is the largest amax of the ranks. Forward and wgrad use the same FP8 data."""
    joint = planned(Gathered(mesh, 1), activation(2, ROWS), Config.recipe("linear"))
    assert sent(joint) == [torch.float32, BYTES, BYTES]
    assert tensor(joint.calls(ALL_GATHER)[0]).shape == (2,)


def test_one_scale_for_parts_of_rows(mesh):
    """After a gather along rows no row is on one rank, so the tensor has one scale."""
    joint = planned(sharded_layer(mesh, dim=1), activation(ROWS), Config.recipe("linear"))
    assert sent(joint) == [torch.float32, BYTES, BYTES]


def test_casts_and_permutations_on_the_way(mesh):
    def sequence_first(layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x.bfloat16().transpose(0, 1))

    joint = planned(Gathered(mesh, 1, sequence_first), activation(2, ROWS, dtype=torch.float32))
    assert sent(joint) == [ROW_AMAXES, BYTES, BYTES]


def test_the_gradient_of_a_scattered_sum(mesh):
    """Its backward gathers. Dgrad and wgrad share the FP8 data."""

    def scattered(layer: nn.Linear, x: Tensor) -> Tensor:
        terms = DTensor.from_local(layer(x), mesh, [Partial()], run_check=False)
        return terms.redistribute(placements=[Shard(1)]).to_local()

    joint = planned(Gathered(mesh, 1, scattered), activation(2, ROWS))
    assert sent(joint) == [ROW_AMAXES, BYTES, torch.float32, BYTES, BYTES]


@pytest.mark.parametrize("role", ["forward", "wgrad"])
def test_gathered_data_keeps_its_scale(mesh, role):
    joint = planned(Gathered(mesh, 1), activation(2, ROWS))
    gemm = next(n for n in joint.calls(fp8.scaled_mm.default) if n.meta[ROLE] == role)
    a, a_scale, b, b_scale, *rest = gemm.args
    gemm.args = (a, b_scale, b, a_scale, *rest)
    with pytest.raises(spec.MalformedGraph, match="quantized with another scale"):
        spec.verify(joint.gm.graph)


# --- it leaves alone ----------------------------------------------------------------------------


def sum_of(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x) + x.sum()


@pytest.mark.parametrize(
    ("read", "dim", "recipe", "reason"),
    [
        (sum_of, 1, "coat", "aten.sum reads it in high precision"),
        (None, 2, "coat", "its rows are split over ranks"),
        (lambda layer, x: x.sin(), 1, "coat", "no linear layer in FP8 reads this tensor"),
        (None, 1, "exact", "formats are exact, so nothing is rounded"),
    ],
)
def test_not_rewritten(mesh, read, dim, recipe, reason):
    sizes = (2, ROWS, WIDTH // 2) if dim == 2 else (2, ROWS, WIDTH)
    x = torch.randn(*sizes, dtype=torch.bfloat16).requires_grad_()
    joint = capture_joint(Gathered(mesh, dim, read), x, config=Config.recipe(recipe))
    quantize_linears(joint.gm, joint.ctx)
    before = str(joint.gm.graph)
    gather_quantized(joint.gm, joint.ctx)
    assert str(joint.gm.graph) == before
    (gather,) = joint.calls(ALL_GATHER)
    assert gather.meta[WHY_NOT_QUANTIZED] == reason


def test_explain_says_why(mesh):
    explanation = explain(Gathered(mesh, 1, sum_of), activation(2, ROWS))
    gather, scatter = explanation.graphs[0].plan.collectives
    assert (gather.half, gather.dtype, gather.shape) == ("forward", "bfloat16", f"2×{ROWS}×{WIDTH}")
    assert gather.bytes == 2 * 2 * ROWS * WIDTH
    assert (scatter.op, scatter.half) == ("reduce_scatter_tensor", "backward")
    text = " ".join(str(explanation).split())  # the text is wrapped
    assert "aten.sum reads it in high precision" in text
    assert "sums are not rounded" in text
    assert json.loads(explanation.to_json())["graphs"][0]["collectives"][0]["bytes"] == gather.bytes


def test_gathered_weights_in_16_bits_are_not_saved(mesh):
    joint = planned(sharded_layer(mesh), activation(ROWS), Config.recipe("exact"))
    assert sent(joint) == [torch.bfloat16] * 2
    assert not any("parametrizations" in s.module for s in joint.ctx.plan.saved if not s.is_scalar)


def test_inductor_finds_the_gemm_that_reads_a_gather():
    """`_micro_pipeline_tp` overlaps both if the gather is along the first dimension."""
    g = fx.Graph()

    def operand(name: str, *sizes: int, dtype: torch.dtype) -> fx.Node:
        node = g.placeholder(name)
        node.meta["val"] = torch.empty(sizes, dtype=dtype, device="cuda")
        return node

    with FakeTensorMode():
        x = operand("x", ROWS, WIDTH, dtype=torch.bfloat16)
        weight = operand("weight", 64, WIDTH, dtype=torch.float8_e4m3fn)
        scale, weight_scale = (operand(n, dtype=torch.float32) for n in ("scale", "of_weight"))
        add = partial(emit, g, like=x)
        codes = add(fp8.as_bytes.default, add(fp8.quantize.default, x, scale, "e4m3 tensor"))
        whole = add(fp8.as_codes.default, add(WAIT_TENSOR, add(ALL_GATHER, codes, 2, "0")), "e4m3")
        operands = (whole, scale, weight, weight_scale)
        how = "e4m3 tensor", "e4m3 tensor"
        g.output(add(fp8.scaled_mm.default, *operands, None, torch.bfloat16, False, *how))
        lower(fx.GraphModule({}, g))
    (gather,) = micro_pipeline_tp.find_all_gather_patterns(g)
    assert gather.shard_node.meta["val"].dtype is torch.float8_e4m3fn
    assert len(micro_pipeline_tp._find_consumer_matmuls(gather.res_node)) == 1
    assert len(g.find_nodes(op="call_function", target=ALL_GATHER)) == 1


def test_exchanged_bytes_are_not_gathered_on_gpus():
    g = fx.Graph()
    with FakeTensorMode():
        x = g.placeholder("x")
        x.meta["val"] = torch.empty(ROWS, WIDTH, dtype=torch.float8_e4m3fn, device="cuda")
        add = partial(emit, g, like=x)
        sent = add(ALL_TO_ALL, add(aten.view.dtype, x, torch.uint8), [ROWS], [ROWS], "0")
        g.output(add(fp8.as_codes.default, add(WAIT_TENSOR, sent), "e4m3"))
        lower(fx.GraphModule({}, g))
    (exchange,) = g.find_nodes(op="call_function", target=ALL_TO_ALL)
    assert exchange.args[1:] == ([ROWS], [ROWS], "0")
    assert not g.find_nodes(op="call_function", target=ALL_GATHER)


def test_gathers_along_rows_are_joined_once_on_gpus():
    """Inductor would inline the concatenation into a kernel for each of its readers."""
    g = fx.Graph()
    with FakeTensorMode():
        x = g.placeholder("x")
        x.meta["val"] = torch.empty(4, ROWS, WIDTH, dtype=torch.uint8, device="cuda")
        add = partial(emit, g, like=x)
        joined = add(aten.cat.default, add(aten.split.Tensor, x, 2), 1)
        matrix = add(aten.view.default, joined, [-1, WIDTH])
        g.output(tuple(add(fp8.as_codes.default, y, "e4m3") for y in (matrix, x)))
        lower(fx.GraphModule({}, g))
    stored, other = g.find_nodes(op="output")[0].args[0]
    assert is_buffer(stored, [0, 1])
    assert stored.args[0].target is aten.view.dtype
    assert other.target is aten.view.dtype


@pytest.mark.long
def test_dynamic_shapes(mesh):
    """Only if views of FP8 data would need them as arguments."""
    for dim, sizes, wanted in ((0, (ROWS,), [""] * 3), (1, (2, ROWS), ["its sizes are dynamic"])):
        joint = planned(Gathered(mesh, dim), activation(*sizes), dynamic=True)
        assert reasons(joint) == wanted


def test_deterministic(mesh):
    texts = {str(planned(Gathered(mesh, 1), activation(2, ROWS)).gm.graph) for _ in range(2)}
    assert len(texts) == 1
