"""The verifier rejects malformed graphs and names the node."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from helpers import COAT_EAGER, FFN, JointGraph, Spy, capture_joint, relative
from kernel_helpers import interpret_halves
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import compat, graph
from fp8pass.codegen.buffers import buffer
from fp8pass.config import Config
from fp8pass.dialect.ops import OPERATORS
from fp8pass.dynamo import Backend
from fp8pass.graph import spec
from fp8pass.graph.nodes import aten, emit
from fp8pass.graph.spec import MalformedGraph
from fp8pass.graph.tags import ROLE
from fp8pass.passes import CONTRACTS, JOINT_PASSES, LOWERING_PASSES, runner
from fp8pass.runtime.copies import from_host, settled, to_host

fp8 = torch.ops.fp8pass
JOINED = fp8.joined.default


@pytest.fixture
def joint() -> JointGraph:
    """A well-formed rewritten graph."""
    x = torch.randn(32, 64, requires_grad=True) * 1
    joint = capture_joint(nn.Sequential(nn.LayerNorm(64), FFN(64, 128)), x)
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
    spec.verify(joint.gm.graph)
    return joint


def rejected(joint: JointGraph, node: torch.fx.Node, problem: str) -> None:
    with pytest.raises(MalformedGraph, match=problem) as error:
        spec.verify(joint.gm.graph)
    assert f"%{node.name} " in str(error.value)


@pytest.mark.parametrize("operand", [1, 3])
def test_wrong_scale(joint, operand):
    gemm = next(n for n in joint.calls(fp8.scaled_mm.default) if n.meta[ROLE] == "wgrad")
    scales = [n for n in joint.calls(fp8.scale.default) if not n.meta["val"].ndim]
    other = next(n for n in scales if n not in gemm.args)
    gemm.update_arg(operand, other)
    rejected(joint, gemm, "quantized with another scale")


def test_data_that_was_in_host_memory_before_its_transpose(joint):
    transpose = joint.calls(fp8.transpose.default)[0]
    g, data, cpu = joint.gm.graph, transpose.args[0], torch.device("cpu")
    with g.inserting_before(transpose):
        sent = emit(g, settled, emit(g, to_host, data, like=data), data, like=data)
        back = emit(g, settled, emit(g, from_host, sent, cpu, like=data), sent, like=data)
    transpose.update_arg(0, back)
    spec.verify(g)


def test_swapped_scales(joint):
    gemm = joint.calls(fp8.scaled_mm.default)[0]
    a, a_scale, b, b_scale, *rest = gemm.args
    gemm.args = (a, b_scale, b, a_scale, *rest)
    rejected(joint, gemm, "quantized with another scale")


def test_joined_operands_that_are_not_quantized(joint):
    (gemm,) = (n for n in joint.calls(fp8.scaled_mm.default) if n.args[0].target is JOINED)
    first, second = gemm.args[0].args[0]
    with joint.gm.graph.inserting_before(gemm.args[0]):
        view = graph.emit(joint.gm.graph, torch.ops.aten.alias.default, second, like=second)
    gemm.args[0].args = ([first, view],)
    rejected(joint, gemm, "is not quantized")
    gemm.args[0].args = ([first, second],)
    spec.verify(joint.gm.graph)
    gemm.update_arg(2, gemm.args[2].args[0][0])
    rejected(joint, gemm, "one operand is joined")


def test_fp8_outside_the_dialect(joint):
    data = joint.calls(fp8.quantize.default)[0]
    with joint.gm.graph.inserting_after(data):
        node = joint.gm.graph.call_function(aten.add.Tensor, (data, 1))
    node.meta["val"] = data.meta["val"]
    rejected(joint, node, f"computes on FP8 tensor {data.name}")


def test_views_of_fp8_are_fine(joint):
    data = joint.calls(fp8.quantize.default)[0]
    with joint.gm.graph.inserting_after(data):
        emit(joint.gm.graph, aten.permute.default, data, [1, 0], like=data)
    spec.verify(joint.gm.graph)


def test_contraction_mismatch(joint):
    gemm = next(
        n
        for n in joint.calls(fp8.scaled_mm.default)
        if n.args[2].target is fp8.transpose.default
        and n.args[2].meta["val"].shape[0] != n.args[2].meta["val"].shape[1]
    )
    gemm.update_arg(2, gemm.args[2].args[0])  # drop a transpose
    rejected(joint, gemm, "contracts")


def test_operand_that_is_not_quantized(joint):
    gemm = joint.calls(fp8.scaled_mm.default)[0]
    gemm.update_arg(0, gemm.args[0].args[0])
    with pytest.raises(MalformedGraph, match=gemm.name):
        spec.verify(joint.gm.graph)


def test_contracts_of_stages(joint):
    """A joint graph has no kernels, a lowered graph has no operators of the dialect."""
    g = joint.gm.graph
    CONTRACTS[JOINT_PASSES](g)
    with pytest.raises(MalformedGraph, match="was not lowered"):
        CONTRACTS[LOWERING_PASSES](g)
    first = next(n for n in joint.calls(fp8.transpose.default)).args[0]
    with g.inserting_after(first):
        emit(g, buffer, first, (0, 1), like=first)
    with pytest.raises(MalformedGraph, match="not lowered yet"):
        CONTRACTS[JOINT_PASSES](g)


def test_a_stage_that_breaks_its_contract_raises(joint):
    with (
        patch.object(runner, "_select_enabled", lambda passes, added: []),
        pytest.raises(MalformedGraph, match="was not lowered"),
    ):
        runner.run_passes(LOWERING_PASSES, joint.gm, joint.ctx, of="forward")


def test_scales_of_other_groups(joint):
    first, second = joint.calls(fp8.dequantize.default)[:2]
    node = first if first.args[1].meta["val"].shape != second.args[1].meta["val"].shape else None
    if node is None:
        first.update_arg(1, second.args[1])
        rejected(joint, first, "other scales")
    else:
        node.update_arg(1, second.args[1])
        rejected(joint, node, "has scales")


@pytest.mark.parametrize(
    ("x", "row_scales", "problem"),
    [
        (torch.ones(20, 32, dtype=torch.int64), None, "must be floating point"),
        (torch.ones(20, 32), torch.ones(20, 1), "is not FP8 data"),
        (torch.ones(20, 32).to(torch.float8_e4m3fn), None, "must be floating point"),
        (torch.ones(20, 32).to(torch.float8_e4m3fn), torch.ones(1, 1), "not one for each row"),
    ],
    ids=["integers", "scales of floats", "no scales", "one scale"],
)
def test_tokens_of_experts(x, row_scales, problem):
    g = torch.fx.Graph()
    operands = [x, torch.ones(2, 1), torch.tensor([8, 20], dtype=torch.int32), row_scales]
    nodes: list[torch.fx.Node | None] = []
    for name, operand in zip(("x", "scales", "offsets", "row_scales"), operands, strict=True):
        nodes.append(None if operand is None else g.placeholder(name))
        if nodes[-1] is not None:
            nodes[-1].meta["val"] = operand
    *leading, last = nodes
    node = g.call_function(
        fp8.transpose_segments.default, (*leading, "e4m3", None, *([] if last is None else [last]))
    )
    node.meta["val"] = torch.empty(32, 64, dtype=torch.float8_e4m3fn)
    g.output(node)
    with pytest.raises(MalformedGraph, match=problem):
        spec.verify(g)


@pytest.fixture
def unpacking() -> tuple[JointGraph, torch.fx.Node]:
    """A joint graph with saved values of two planes, and a dequantize node that reads them."""
    config = Config(save_format="e2m3", compiler="eager")
    joint = capture_joint(FFN(64, 128), torch.randn(32, 64), config=config)
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
    spec.verify(joint.gm.graph)
    return joint, joint.calls(fp8.dequantize.default)[0]


def test_every_operator_has_constraints():
    assert spec.OPERANDS.keys() == OPERATORS.keys()


def test_missing_plane(unpacking):
    joint, node = unpacking
    node.update_arg(0, node.args[0][:1])
    rejected(joint, node, "e2m3 has 2 planes")


def test_swapped_planes(unpacking):
    joint, node = unpacking
    node.update_arg(0, [node.args[0][0]] * 2)
    rejected(joint, node, "has scales")


def test_planes_of_another_tensor(unpacking):
    joint, node = unpacking
    other = joint.calls(fp8.dequantize.default)[1]
    node.update_arg(0, [node.args[0][0], other.args[0][1]])
    rejected(joint, node, "quantized with other scales")


def test_unknown_format(joint):
    node = joint.calls(fp8.dequantize.default)[0]
    node.update_arg(2, "e9m9")
    rejected(joint, node, "'e9m9' is not a quantization")


def test_missing_value(joint):
    node = joint.calls(fp8.scaled_mm.default)[0]
    del node.meta["val"]
    rejected(joint, node, "has no fake value")


def test_use_before_definition(joint):
    data = joint.calls(fp8.quantize.default)[0]
    next(iter(data.users)).append(data)
    with pytest.raises(RuntimeError, match=data.name):
        spec.verify(joint.gm.graph)


def test_passes_are_checked(monkeypatch):
    """FP8PASS_CHECK=1 runs the verifier after every pass; 0 does not."""
    from fp8pass.passes import runner

    seen = []
    monkeypatch.setattr(runner.spec, "verify", seen.append)
    joint = capture_joint(FFN(64, 128), torch.randn(32, 64))
    runner.run_passes(JOINT_PASSES, joint.gm, joint.ctx)
    assert len(seen) == len(JOINT_PASSES)
    monkeypatch.setenv("FP8PASS_CHECK", "0")
    joint = capture_joint(FFN(64, 128), torch.randn(32, 64))
    runner.run_passes(JOINT_PASSES, joint.gm, joint.ctx)
    assert len(seen) == len(JOINT_PASSES)


def test_a_pass_must_not_add_guards():
    """Comparing two sizes adds a guard. `compat.statically_known_true` does not."""

    def compares(gm, ctx):
        values = [x for n in gm.graph.nodes if isinstance(x := graph.value(n), Tensor)]
        assert any(48 in x.shape for x in values) is False

    backend = Backend(Config.recipe("coat", compiler="eager"))
    program = torch.compile(FFN(32, 64), backend=backend, dynamic=True)
    with (
        patch("fp8pass.partition.JOINT_PASSES", (compares, *JOINT_PASSES)),
        pytest.raises(Exception, match=r"a pass added guards on dynamic shapes: Ne\(s\d+, 48\) at"),
    ):
        program(torch.randn(24, 32))


def test_frozen_layers_add_no_guards():
    """Its GEMMs are compared by size with the GEMMs of attention, without guards."""
    layer = nn.Linear(32, 32).requires_grad_(False)

    def model(x):
        v = layer(x)
        return (x @ x.transpose(-1, -2)).softmax(-1) @ v

    spy = Spy()
    program = torch.compile(model, backend=Backend(COAT_EAGER, spy), dynamic=True)
    for rows in (40, 24, 33):
        program(torch.randn(rows, 32, requires_grad=True)).sum().backward()
    assert spy.plan


def test_a_pass_must_not_make_two_symbolic_sizes_equal():
    def compares(gm, ctx):
        values = [n.meta.get("val") for n in gm.graph.nodes]
        a, b, *_ = (x for x in values if isinstance(x, torch.SymInt))
        if a == b:
            raise AssertionError

    backend = Backend(COAT_EAGER)
    layer = nn.Linear(32, 32)
    program = torch.compile(
        lambda a, b: layer(a).sum() + layer(b).sum(), backend=backend, dynamic=True
    )
    with (
        patch("fp8pass.partition.JOINT_PASSES", (compares, *JOINT_PASSES)),
        pytest.raises(Exception, match="a pass added guards on dynamic shapes: Ne"),
    ):
        program(torch.randn(24, 32), torch.randn(40, 32))


def test_guards_on_strides_are_allowed(monkeypatch):
    """Pointwise operators add the guard that rows of 16 are at least 16 apart."""
    interpret_halves(monkeypatch)
    layer = nn.Linear(16, 16)
    layer.weight.requires_grad_(False)
    program = torch.compile(layer, backend=Backend(Config.recipe("coat")), dynamic=True)
    for rows, columns in ((4, 48), (6, 80)):
        x = torch.randn(rows, columns)[::2, :16]
        assert relative(program(x).detach(), layer(x).detach()) < 0.1


def test_guards_that_are_undefined_for_some_sizes():
    """With 40 elements this guard divides by zero."""

    def function(x):
        size = x.shape[0]
        return x + 1 if size % (size - 40) == 5000 else x * size

    gm = make_fx(function, tracing_mode="symbolic")(torch.randn(37))
    assert compat.guard_count(gm.graph) == 1
    assert compat.restrictions(gm.graph, 0) == []
