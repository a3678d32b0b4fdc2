"""FlexAttention with functions that modify scores and masks, as in torchtitan and transformers."""

from __future__ import annotations

import pytest
import torch
from helpers import capture_joint, compiled, relative, stock_eager
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from fp8pass import graph
from fp8pass.config import Config
from fp8pass.graph.flops import flops
from fp8pass.testing.steps import assert_same_step, step

LENGTH, HIDDEN, HEADS = 128, 64, 2


class Block(nn.Module):
    """Attention within documents, with a bias that decays with distance."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.slope = nn.Parameter(torch.tensor([0.1, 0.02]))

    def forward(self, x: Tensor, mask: flex.BlockMask) -> Tensor:
        shape = *x.shape[:2], HEADS, -1
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        decays = lambda score, b, h, i, j: score - self.slope[h] * (i - j)  # noqa: E731
        y = flex.flex_attention(q, k, v, score_mod=decays, block_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, mask: flex.BlockMask) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def documents(device: str = "cpu") -> flex.BlockMask:
    """Return a causal mask within documents of 50 tokens."""
    document = torch.arange(LENGTH, device=device) // 50
    seen = lambda b, h, i, j: (i >= j) & (document[i] == document[j])  # noqa: E731
    return flex.create_block_mask(seen, None, None, LENGTH, LENGTH, device=device)


def case(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Blocks, list[object]]:
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    return Blocks().to(device, dtype), [x, documents(device)]


@pytest.fixture
def backward_on_cpu(monkeypatch):
    """Disable the check that rejects the backward of FlexAttention on CPUs. It works there."""
    monkeypatch.setattr(flex, "_validate_device", lambda *operands: None)


@pytest.mark.long
@pytest.mark.parametrize("budget", [None, 0.6], ids=["", "within a budget"])
def test_the_exact_recipe_changes_no_bit(backward_on_cpu, budget):
    model, batch = case()
    config = Config.recipe("exact", compiler="eager", memory_budget=budget)
    program, spy = compiled(model, config)
    got = step(program, model, batch)
    torch._dynamo.reset()
    assert_same_step(got, step(torch.compile(model, backend=stock_eager), model, batch))
    outputs = [s for s in spy.plan.saved if "flex_attention" in s.op and s.dtype == "bfloat16"]
    assert len(outputs) == (2 if budget is None else 1)  # the second output is recomputed


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "agoq", "linear"])
def test_gradients_are_close(backward_on_cpu, recipe):
    model, batch = case()
    want = step(model, model, batch)
    program, spy = compiled(model, Config.recipe(recipe, compiler="eager"))
    got = step(program, model, batch)
    assert all(layer.fp8 for layer in spy.plan.linears)
    for name, gradient in want.gradients.items():
        assert relative(got.gradients[name], gradient) < 0.2, name


@pytest.mark.long
def test_saved_outputs_stay_exact_with_a_reason(backward_on_cpu):
    model, batch = case()
    program, spy = compiled(model, Config.recipe("agoq", compiler="eager"))
    step(program, model, batch)
    outputs = [s for s in spy.plan.saved if "flex_attention" in s.op]
    assert len(outputs) == 4  # output and log-sums of two blocks
    assert {s.saved_as for s in outputs} == {"exact"}
    assert all("FlexAttention, whose score_mod may be any" in s.reason for s in outputs)


@pytest.mark.long
def test_flops_are_counted_like_attention(backward_on_cpu):
    model, batch = case()
    joint = capture_joint(model, *batch)
    attention = [n for n in joint.gm.graph.nodes if "flex_attention" in str(n.target)]
    forward = [n for n in attention if "backward" not in str(n.target)]
    products = 2 * 2 * HEADS * LENGTH**2 * HIDDEN // HEADS  # one product, in a batch of two
    assert [flops(n) / products for n in forward] == [2, 2]
    assert [flops(n) / products for n in attention if n not in forward] == [5, 5]
    assert not any(graph.is_getitem(n) for n in attention)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["exact", "coat", "agoq"])
def test_gradients_of_generated_code_are_close_on_a_gpu(recipe):
    model, batch = case("cuda")
    want = step(torch.compile(model), model, batch)
    torch._dynamo.reset()
    got = step(torch.compile(model, backend="fp8pass", options={"recipe": recipe}), model, batch)
    for name, gradient in want.gradients.items():
        # The gradient of a slope is a sum over all scores, and most terms cancel.
        lossy = 0.3 if name.endswith("slope") else 0.2
        bound = 0.02 if recipe == "exact" else lossy
        assert relative(got.gradients[name], gradient) < bound, name
