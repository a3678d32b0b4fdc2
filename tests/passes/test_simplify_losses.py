"""The values of each row of a loss's gradient are computed once, and the results do not change."""

from __future__ import annotations

import math

import pytest
import torch
from head_helpers import HIDDEN, VOCABULARY, padded_labels, plain, summed
from kernel_helpers import both_devices, interpret_halves
from torch import nn
from torch.nn import functional as F

from fp8pass import compilation
from fp8pass.codegen.buffers import buffer
from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.graph.nodes import aten
from fp8pass.passes import LOWERING_PASSES
from fp8pass.passes.lowering.simplify_losses import simplify_losses

BEFORE = tuple(p for p in LOWERING_PASSES if p is not simplify_losses)


class Head(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        self.loss, self.linear = loss, nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x, targets):
        return self.loss(self.linear(x), targets)


def smoothed(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def by_class(logits, targets):
    weights = torch.linspace(0.5, 2.0, VOCABULARY, device=logits.device)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), weight=weights)


def train(loss, device="cpu", passes=LOWERING_PASSES, dynamic=None, weight=1.0, **options):
    """Return the loss, the gradients and the simplified sums of a head in recipe `exact`."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    found = []

    def count(gm, ctx):
        buffers = gm.graph.find_nodes(op="call_function", target=buffer)
        found.extend(n for n in buffers if n.meta["val"].shape[1:] == (1,))

    head = Head(loss).to(device, torch.bfloat16)
    x = torch.randn(4, 16, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(VOCABULARY, (4, 16), device=device)
    targets[0, :3] = -100
    with pytest.MonkeyPatch.context() as patch:
        interpret_halves(patch)
        patch.setattr(compilation, "LOWERING_PASSES", (*passes, count))
        config = Config.recipe("exact", **options)
        value = torch.compile(head, backend=Backend(config), dynamic=dynamic)(x, targets)
        value.backward(torch.tensor(weight, device=device))
    return [value, x.grad, *(p.grad for p in head.parameters())], found


LOSSES = {"plain": plain, "padded labels": padded_labels, "sum": summed}


@both_devices
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_losses_are_equal(device, dynamic, chunks, loss):
    how = {"dynamic": dynamic, "head_chunks": chunks}
    want, none = train(LOSSES[loss], device, BEFORE, **how)
    got, buffers = train(LOSSES[loss], device, **how)
    assert not none
    assert len(buffers) == 2  # labels and weights, also of all chunks together
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("weight", [0.0, math.nan, math.inf])
def test_invalid_gradients_reach_the_parameters(weight):
    want, _ = train(plain, passes=BEFORE, weight=weight)
    got, buffers = train(plain, weight=weight)
    assert len(buffers) == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("loss", [smoothed, by_class, lambda x, y: x.float().square().mean()])
def test_other_losses_do_not_change(loss):
    (want, none), (got, found) = train(loss, passes=BEFORE), train(loss)
    assert len(none) == len(found) == 0
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_one_hot_rows_of_users_do_not_change():
    """Their labels may be out of range, so that a row has no element."""

    def function(x, labels, weights):
        one_hot = torch.where(labels[:, None] == torch.arange(8), 1.0, 0.0) * weights
        return x.sin() * one_hot.sum(1, keepdim=True)

    labels = torch.tensor([3, -1, 7, 11])
    x, weights = torch.randn(4, 8), torch.rand(4, 1) + 1
    program = torch.compile(function, backend=Backend(Config(compiler="eager")))
    torch.testing.assert_close(program(x, labels, weights), function(x, labels, weights))


def test_one_hot_rows_are_not_summed():
    """The pass would leave the sum if a later PyTorch decomposed the loss differently."""
    sums = []

    def count(gm, ctx):
        sums.extend(
            n
            for n in gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
            if n.meta["val"].shape == (64, 1) and n.args[0].target is aten.mul.Tensor
        )

    train(padded_labels, passes=(*BEFORE, count))
    assert len(sums) == 1
    sums.clear()
    train(padded_labels, passes=(*LOWERING_PASSES, count))
    assert not sums


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 4])
def test_generated_code_computes_the_gradients_of_stock_code(chunks):
    torch.manual_seed(0)
    head = Head(plain).cuda().bfloat16()
    x = torch.randn(4, 256, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(VOCABULARY, (4, 256), device="cuda")
    options = {"recipe": "exact", "head_chunks": chunks}
    ours = torch.compile(head, backend="fp8pass", options=options)
    results = []
    for compiled in (torch.compile(head), ours):
        torch._dynamo.reset()
        value = compiled(x, targets)
        results.append([value, *torch.autograd.grad(value, [x, *head.parameters()])])
    for stock, got in zip(*results, strict=True):
        assert (got - stock).norm() <= 0.01 * stock.norm()
