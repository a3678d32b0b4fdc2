"""Batched GEMMs that are not rewritten, and the reason for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expert_helpers import (
    ALL,
    SPELLINGS,
    Batched,
    E,
    Experts,
    K,
    N,
    T,
    only_layer,
    rewritten,
    tokens,
)
from helpers import (
    EXACT_EAGER,
    assert_same_step,
    capture_joint,
    compiled,
    step,
    stock_eager,
)
from torch import Tensor, nn

from fp8pass.config import Config
from fp8pass.graph.linear_layers import REPEATED
from fp8pass.graph.nodes import aten
from fp8pass.passes.joint.quantize_experts import quantize_experts
from fp8pass.passes.joint.quantize_linears import quantize_linears


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["bmm", "matmul", "tokens first"])
def test_recipe_exact(name):
    spelling = SPELLINGS[name]
    model, x = Batched(spelling), tokens(*spelling.tokens)
    joint = capture_joint(model, x, config=EXACT_EAGER)
    before = joint.code
    quantize_linears(joint.gm, joint.ctx)
    quantize_experts(joint.gm, joint.ctx)
    assert joint.code == before
    assert joint.ctx.plan.linears[0].reason == "formats are exact, so the layer is not rewritten"
    torch._dynamo.reset()
    want = step(torch.compile(model, backend=stock_eager), model, (x,))
    torch._dynamo.reset()
    assert_same_step(step(compiled(model, EXACT_EAGER)[0], model, (x,)), want)


def test_a_batch_of_one_in_recipe_exact():
    x = tokens(T, K)
    function = lambda w, x: torch.einsum("tk,ekn->ten", x, w)  # noqa: E731
    layer = only_layer(function, (E, K, N), x, config=EXACT_EAGER)
    assert layer.reason == "formats are exact, so the layer is not rewritten"


class Transposed(nn.Module):
    """A frozen layer that reads transposed rows, as after a convolution of patches."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.trained = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return self.trained(self.frozen(x.contiguous() if self.copies else x))


@pytest.mark.parametrize("copies", [False, True])
def test_a_frozen_layer_needs_a_contiguous_input(copies):
    joint = rewritten(Transposed(copies=copies).bfloat16(), torch.randn(4, 64, 32).bfloat16())
    found = {layer.module: layer.reason for layer in joint.ctx.plan.linears}
    assert found == {"frozen": "" if copies else REPEATED, "trained": ""}


def test_attention_does_not_change():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(E, K, K).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            scores = torch.bmm(torch.bmm(x, self.weight), x.mT)
            return torch.bmm(scores.softmax(-1), x)

    joint = rewritten(Attention(), tokens(E, T, K))
    (layer,) = joint.ctx.plan.linears
    assert layer.fp8 == ALL
    assert len(joint.calls(aten.bmm.default)) == 6


REASONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], str]] = {
    "one matrix for all": (
        lambda w, x: torch.bmm(x, w.expand(E, -1, -1)),
        (K, N),
        REPEATED,
    ),
    "a batch of batches": (
        lambda w, x: x.expand(2, -1, -1, -1) @ w,
        (E, K, N),
        "aten.expand computes its weight from parameters that have fewer elements",
    ),
    "odd sizes": (
        torch.Tensor.__rmatmul__,
        (E, K, 40),
        "weights 4×32×40: both sizes of each matrix must be multiples of 16",
    ),
    "factors": (
        lambda w, x: torch.baddbmm(x, x, w, alpha=0.5),
        (E, K, K),
        "aten.baddbmm.default with alpha or beta: only plain sums and products run in FP8",
    ),
    "a head": (
        lambda w, x: torch.bmm(x, w).log_softmax(-1),
        (E, K, N),
        "an output head, which stays exact unless quantize_lm_head=True",
    ),
    "a router": (
        lambda w, x: torch.bmm(x, w).topk(2, -1).values,
        (E, K, N),
        "router: a small error may send a token to another expert",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    function, shape, reason = REASONS[name]
    assert only_layer(function, shape, tokens(E, T, K)).reason == reason


def test_more_experts_than_pytorch_takes():
    layer = only_layer(lambda w, x: torch.bmm(x, w), (1024, 16, 16), tokens(1024, 1, 16))
    assert layer.reason == "1024 experts: PyTorch's FP8 GEMMs take at most 1023"


def test_other_formats():
    config = Config(gradient_format="e5m2")
    layer = only_layer(SPELLINGS["bmm"].function, (E, K, N), tokens(E, T, K), config=config)
    assert layer.reason == "PyTorch's FP8 GEMMs of experts take only e4m3"


def test_skipped():
    model = nn.Sequential(Experts(), Experts())
    joint = rewritten(model, tokens(E, T, K), config=Config(skip=("0",)))
    reasons = [y.reason for y in joint.ctx.plan.linears]
    assert reasons == ["matches skip pattern '0'"] * 3 + [""] * 3
    assert len(joint.calls(aten.bmm.default)) == 9


def test_double_precision():
    layer = only_layer(
        SPELLINGS["bmm"].function,
        (E, K, N),
        tokens(E, T, K, dtype=torch.float64),
        dtype=torch.float64,
    )
    assert layer.reason == "float64 operands"


def test_buffers():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(E, K, N).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.table)

    joint = rewritten(Mixed(), tokens(E, T, K))
    assert [y.reason for y in joint.ctx.plan.linears] == [
        "its weight is a buffer or constant: only parameters run in FP8"
    ]
