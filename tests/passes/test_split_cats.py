"""Concatenations of computed parts are stored part by part; other concatenations do not change."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from kernel_helpers import both_devices, interpret_halves
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fp8pass import compilation, hardware
from fp8pass.codegen.buffers import buffer, side_by_side
from fp8pass.config import Config
from fp8pass.passes import LOWERING_PASSES, Context
from fp8pass.passes.lowering.split_cats import split_cats


def stored(function, *args, recipe="coat", least_bytes=0) -> list[torch.fx.Node]:
    gm = make_fx(function, tracing_mode="fake")(*args)
    want = gm(*args)
    with mock.patch(f"{split_cats.__module__}.LEAST_BYTES", least_bytes):
        split_cats(gm, Context(Config.recipe(recipe)))
    gm.graph.lint()
    gm.recompile()
    assert torch.equal(gm(*args), want)
    return [n for n in gm.graph.nodes if n.target is side_by_side]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(32, 16)


def test_computed_parts_are_stored_for_themselves(x):
    (node,) = stored(lambda x: torch.cat([x.sin(), x.cos()], -1) @ torch.ones(32, 4), x)
    assert node.meta["val"].shape == (32, 32)
    assert stored(lambda x: torch.cat([x.sin().t(), x.cos().t()]), x)


def test_a_small_concatenation_stays(x):
    product = lambda x: torch.cat([x.sin(), x.cos()], -1) @ torch.ones(32, 4)  # noqa: E731
    assert stored(product, x, least_bytes=32 * 32 * 4)
    assert not stored(product, x, least_bytes=32 * 32 * 4 + 1)


def test_parts_are_not_stored_twice(x):
    """FP8 data is in buffers, which only the concatenation reads, as bytes."""

    def product(x):
        parts = [buffer(x.sin(), [0, 1]), buffer(x.cos(), [0, 1])]
        whole = torch.cat([part.view(torch.int32) for part in parts], -1)
        return whole.view(torch.float32) @ torch.ones(32, 4)

    (node,) = stored(product, x)
    assert not node.graph.find_nodes(op="call_function", target=buffer)


def test_parts_that_are_buffers(x):
    def product(x):
        parts = [buffer(x.sin(), [0, 1]), buffer(x.cos(), [0, 1])]
        return torch.cat(parts, -1) @ torch.ones(32, 4)

    (node,) = stored(product, x)
    assert not node.graph.find_nodes(op="call_function", target=buffer)


def test_a_buffer_with_other_readers_stays(x):
    def product(x):
        first = buffer(x.sin(), [0, 1])
        return torch.cat([first, x.cos(), x.tan()], -1) @ torch.ones(48, 4) + first.sum()

    (node,) = stored(product, x)
    assert node.graph.find_nodes(op="call_function", target=buffer)


FUSED = {
    "pointwise": lambda x: torch.cat([x.sin(), x.cos()], -1).exp(),
    "sum": lambda x: torch.cat([x.sin(), x.cos()], -1).sum(-1),
    "pointwise behind views": lambda x: torch.stack([x.sin(), x.cos()], -1).flatten(-2).exp(),
    "half of it": lambda x: torch.cat([x.sin(), x.cos()], -1).chunk(2, -1)[0].exp(),
}
AT_HAND = {
    "one computed": lambda x: torch.cat([x, x.cos()], -1) @ torch.ones(32, 4),
    "inputs": lambda x: torch.cat([x, x], -1) @ torch.ones(32, 4),
    "shift": lambda x: (lambda y: torch.cat([y[:, 4:], y[:, :4]], -1))(x.sin()) @ torch.ones(16, 4),
    "several dtypes": lambda x: (
        torch.cat([x.sin(), x.cos().double()], -1) @ torch.ones(32, 4).double()
    ),
}


@pytest.mark.parametrize("case", [*FUSED, *AT_HAND])
def test_concatenations_that_inductor_inlines_do_not_change(case, x):
    assert not stored((FUSED | AT_HAND)[case], x)


def test_recipe_exact_rounds_where_stock_code_does(x):
    product = lambda x: torch.cat([x.sin(), x.cos()], -1) @ torch.ones(32, 4)  # noqa: E731
    assert stored(product, x)
    assert not stored(product, x, recipe="exact")


class FusedMLP(nn.Module):
    """A SwiGLU with one GEMM for gate and up, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(128, 512, bias=False)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@both_devices
def test_the_gradient_of_a_fused_swiglu_is_stored_by_halves(device, monkeypatch):
    """Kernels read it from memory. If generated code quantizes it, nothing is stored."""
    torch._dynamo.reset()
    seen = []

    def recorded(gm, ctx):
        split_cats(gm, ctx)
        seen.extend(n for n in gm.graph.nodes if n.target is side_by_side)

    changed = tuple(recorded if p is split_cats else p for p in LOWERING_PASSES)
    monkeypatch.setattr(compilation, "LOWERING_PASSES", changed)
    monkeypatch.setattr(f"{split_cats.__module__}.LEAST_BYTES", 0)
    if device == "cpu":
        monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
        interpret_halves(monkeypatch)
    torch.manual_seed(0)
    model = FusedMLP().bfloat16().to(device)
    x = torch.randn(64, 128, device=device).bfloat16().requires_grad_()
    model(x).square().sum().backward()
    want, x.grad = x.grad, None
    torch.compile(model, backend="fp8pass")(x).square().sum().backward()
    assert F.cosine_similarity(x.grad.float().flatten(), want.float().flatten(), 0) > 0.99
    assert len(seen) == 1
