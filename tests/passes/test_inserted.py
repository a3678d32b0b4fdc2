"""A pass may be inserted anywhere without changing what diagnose and the Monitor measure."""

from __future__ import annotations

import pytest
import torch
from helpers import MLP
from torch import fx

import fp8pass
from fp8pass import compat, compilation, partition
from fp8pass.graph.nodes import aten, emit
from fp8pass.passes import JOINT_PASSES, LOWERING_PASSES, Context


def add_dead_views(gm: fx.GraphModule, ctx: Context) -> None:
    """Change a graph, but not its values."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is aten.mm.default:
            with gm.graph.inserting_after(node):
                view = emit(gm.graph, aten.alias.default, node, like=node)
            node.replace_all_uses_with(view, delete_user_cb=lambda user, v=view: user is not v)
    gm.recompile()


def loss(model, x):
    return model(x).square().mean()


def diagnosis():
    torch.manual_seed(0)
    found = fp8pass.diagnose(MLP(), loss, torch.randn(32, 64))
    return [(y.module, y.gradient, y.relative) for y in found.layers]


def monitored():
    torch.manual_seed(0)
    monitor = fp8pass.Monitor()
    config = fp8pass.Config(compiler="eager")
    model = torch.compile(MLP(), backend=fp8pass.backend(config, monitor=monitor))
    loss(model, torch.randn(32, 64)).backward()
    monitor.step()
    return [(r.module, r.tensor, r.amax, r.sqnr_db) for r in monitor.latest]


def explained():
    torch.manual_seed(0)
    (graph,) = fp8pass.explain(MLP(), torch.randn(32, 64)).graphs
    return graph


def inserted(passes, index):
    return (*passes[:index], add_dead_views, *passes[index:])


@pytest.fixture(scope="module")
def measured():
    """The result without an inserted pass."""
    with compat.fresh_compilation():
        return diagnosis(), monitored()


@pytest.fixture(scope="module")
def planned():
    """The result without an inserted pass."""
    with compat.fresh_compilation():
        return explained().plan


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(JOINT_PASSES) + 1))
def test_into_the_joint_passes(index, measured, monkeypatch):
    monkeypatch.setattr(partition, "JOINT_PASSES", inserted(JOINT_PASSES, index))
    torch._dynamo.reset()
    assert (diagnosis(), monitored()) == measured
    assert all(measured)


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(LOWERING_PASSES) + 1))
def test_into_the_passes_of_the_halves(index, planned, monkeypatch):
    monkeypatch.setattr(compilation, "LOWERING_PASSES", inserted(LOWERING_PASSES, index))
    torch._dynamo.reset()
    got = explained()
    assert got.plan == planned
    names = [r.name for r in got.passes if r.graph == "backward"]
    assert names.index("add_dead_views") == index
