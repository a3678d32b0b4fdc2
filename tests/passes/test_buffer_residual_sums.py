"""Only residual sums get buffers."""

from __future__ import annotations

import pytest
import torch
from helpers import capture_joint, compiled, relative
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import graph
from fp8pass.codegen.buffers import buffer
from fp8pass.config import Config
from fp8pass.graph.patterns import is_residual_sum
from fp8pass.passes import Context
from fp8pass.passes.lowering.buffer_residual_sums import buffer_residual_sums


def buffered(function, *args) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]]:
    """Run the pass; return the graph and the values that got buffers."""
    gm = make_fx(function, tracing_mode="fake")(*args)
    buffer_residual_sums(gm, Context(Config()))
    gm.graph.lint()
    return gm, [n.args[0] for n in gm.graph.nodes if n.target is buffer]


def residual(x):
    first = x + x.sin()
    second = first + first.cos()
    return second + second.exp()


def test_every_sum_of_a_residual_stream_but_the_last():
    _, sums = buffered(residual, torch.randn(4, 8))
    assert [n.target for n in sums] == [torch.ops.aten.add.Tensor] * 2


def test_users_read_the_buffer():
    _, sums = buffered(residual, torch.randn(4, 8))
    for node in sums:
        (user,) = node.users
        assert user.target is buffer


def test_sums_of_several_terms_are_no_residual_streams():
    _, sums = buffered(lambda x: (x.sin() + x.cos()) + x.exp(), torch.randn(4, 8))
    assert not sums


def test_softmax_is_no_residual_stream():
    """Its difference from the maximum has two users. One of them is a difference, too."""

    def log_softmax(x):
        shifted = x - x.amax(-1, keepdim=True)
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    _, sums = buffered(log_softmax, torch.randn(4, 8))
    assert not sums


def test_buffers_have_the_layout_of_the_sums():
    def function(x):
        return residual(x.permute(0, 2, 1))

    x = torch.randn(2, 4, 8)
    gm, sums = buffered(function, x)
    assert [n.meta["val"].stride() for n in sums] == [(32, 1, 8)] * 2
    held = [n.meta["val"] for n in gm.graph.nodes if n.target is buffer]
    assert [v.stride() for v in held] == [(32, 1, 8)] * 2
    assert torch.equal(gm(x), function(x))


@pytest.mark.long
@pytest.mark.parametrize("permutation", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_generated_code_gives_the_same(permutation):
    def function(x):
        return residual(x.permute(permutation) * 1)

    x = torch.randn(4, 16, 8, requires_grad=True)
    program, _ = compiled(function, Config())
    torch.testing.assert_close(program(x), function(x))
    (got,) = torch.autograd.grad(program(x).sum(), x)
    (want,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(got, want)


class Residual(nn.Module):
    """Residual branches."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(branches))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.nn.functional.layer_norm(x, x.shape[-1:]))
        return x


def test_gradients_of_a_residual_stream_are_sums_of_one():
    joint = capture_joint(Residual(3), torch.randn(32, 64).requires_grad_() * 1)
    sums = [n for n in joint.gm.graph.nodes if is_residual_sum(n)]
    backward = [n for n in sums if any("tangents" in m.name for m in graph.ancestors([n]))]
    assert len(sums) - len(backward) == 2
    assert len(backward) == 2


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "linear"])
def test_saved_tensors_have_memory_of_their_size(recipe):
    """Symbolic strides must not reach the tensors that autograd saves.

    Recipe linear saves the sums.
    """
    model = Residual(2)
    program, spy = compiled(model, Config.recipe(recipe), dynamic=True)
    eager, _ = compiled(model, Config.recipe(recipe, compiler="eager"), dynamic=True)
    for rows in (32, 48):
        x = torch.randn(rows, 64, requires_grad=True)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x) or x, lambda x: x
        ):
            y = program(x * 1)
        assert len(saved) > 3
        assert all(x.untyped_storage().nbytes() >= x.nbytes for x in saved)
        (got,) = torch.autograd.grad(y.square().sum(), x)
        (want,) = torch.autograd.grad(eager(x * 1).square().sum(), x)
        assert relative(got, want) < 0.05
    assert len(spy.plans) == 1


@pytest.mark.long
def test_saved_transposes_with_symbolic_sizes():
    """The quantized input is saved transposed, with rows last."""
    model = nn.Linear(64, 128)
    program, spy = compiled(model, Config(), dynamic=True)
    for rows in (48, 80):
        x = torch.randn(rows, 64).requires_grad_() * 1
        program(x).sum().backward()
    assert any(s.op == "fp8pass.transpose" for s in spy.plan.saved)
