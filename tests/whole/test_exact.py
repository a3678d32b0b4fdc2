"""Invariant 1: recipe `exact` returns the same bits as stock PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import (
    EXACT_EAGER,
    MLP,
    aot_exact,
    assert_same_step,
    benchmark_models,
    gpt2,
    llama,
    step,
    stock_eager,
    tokens,
    vit,
)
from hypothesis import given
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8pass.config import Config
from fp8pass.dynamo import Backend
from fp8pass.testing.strategies import programs

# Name -> (rewritten, reference). "aot": the joint graph of aot_eager, without decompositions.
# "inductor": the joint graph of Inductor, run op by op.
PATHS: dict[str, tuple[Any, Any]] = {
    "aot": (aot_exact, "aot_eager"),
    "inductor": (Backend(EXACT_EAGER), stock_eager),
}


def check(
    model: nn.Module,
    *batches: tuple[Any, ...],
    path: str,
    run: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda compiled: compiled,
    **options: Any,
) -> None:
    """Check that steps of the rewritten and the reference program agree bit for bit."""
    results = []
    for backend in PATHS[path]:
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        program = run(torch.compile(twin, backend=backend, **options))
        results.append([step(program, twin, batch) for batch in batches])
    for got, want in zip(*results, strict=True):
        assert_same_step(got, want)


@pytest.fixture(params=list(PATHS))
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def randn(*shape: int, grad: bool = True, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_(grad)


# --- models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_mlp(path, dropout):
    check(MLP(dropout=dropout).train(), (randn(32, 64),), path=path)


@pytest.mark.long
@pytest.mark.drawn(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama(path, attention):
    ids = tokens()
    check(llama(attention), (ids, None, None, None, None, ids), path=path)


@pytest.mark.long
def test_llama_tied(path):
    check(llama(tie_word_embeddings=True), (tokens(),), path=path)


@pytest.mark.long
def test_gpt2_with_dropout(path):
    check(gpt2().train(), (tokens(),), path=path)


@pytest.mark.long
def test_vit(path):
    check(vit().train(), (randn(2, 3, 32, 32, grad=False),), path=path)


@pytest.mark.long
def test_decoder_layer_bf16(path):
    models = benchmark_models()
    cos, sin = models.rope_tables(32, 16, torch.device("cpu"))
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    check(models.Stack(2, 64, 4, 176).bfloat16(), (x, cos, sin), path=path)


class Broken(nn.Module):
    """Two graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP((64, 128, 64), 0.1), MLP((64, 96, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        x = x + self.second(x)
        torch._dynamo.graph_break()
        return x.sum(-1)


@pytest.mark.long
def test_graph_breaks(path):
    check(Broken(), (randn(32, 64),), path=path)


class Attention(nn.Module):
    """The views and size arithmetic of a transformer in few operators."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.qkv, self.out = nn.Linear(64, 3 * 64), nn.Linear(64, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 96)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.norm(x + self.out(y.transpose(1, 2).flatten(-2))))


@pytest.mark.long
def test_dynamic_sizes(path):
    batches = [(tokens(b, s),) for b, s in ((2, 16), (3, 17), (5, 8))]
    check(Attention(), *batches, path=path, dynamic=True)


@pytest.mark.long
def test_marked_dynamic_rows(path):
    batches = []
    for rows in (32, 17, 48, 5):
        x = randn(rows, 64, seed=rows)
        torch._dynamo.mark_dynamic(x, 0)
        batches.append((x,))
    check(MLP(), *batches, path=path)


@pytest.mark.long
@pytest.mark.parametrize("make", [MLP, llama], ids=["mlp", "llama"])
def test_autocast(path, make):
    batch = (randn(32, 64),) if make is MLP else (tokens(),)

    def under_autocast(program):
        def run(*args):
            with torch.autocast("cpu", torch.bfloat16):
                return program(*args)

        return run

    check(make(), batch, path=path, run=under_autocast)


class Checkpointed(nn.Module):
    """Checkpointed blocks with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLP((64, 128, 64), dropout) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, self.norm(x), use_reentrant=False)
        return x


@pytest.mark.long
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpoint(path, dropout):
    check(Checkpointed(dropout), (randn(32, 64),), path=path)


class InPlace(nn.Module):
    """Views, in-place operators and writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.seen.add_(x.detach().sum(0))
        h = self.linear(x)
        left, right = h.chunk(2, dim=-1)
        left = left.mul(2).add_(right).relu_()
        h = h.clone()
        h[:, 16:32].add_(left[:, :16])
        return h.view(-1, 2, 32).transpose(1, 2), left.t()


def test_in_place_and_views(path):
    check(InPlace(), (randn(32, 64),), path=path)


def test_batch_norm(path):
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    check(model.train(), (randn(32, 64),), (randn(32, 64, seed=2),), path=path)


def test_convolution(path):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Flatten(1),
        nn.Linear(16 * 64, 32),
    )  # fmt: skip
    check(model, (randn(4, 3, 8, 8),), path=path)


def test_frozen_and_shared_weights(path):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    check(model, (randn(32, 64),), path=path)
    model[0].weight.requires_grad_(False)
    check(model, (randn(32, 64),), path=path)


def test_no_grad(path):
    def without_gradients(program):
        def run(*args):
            with torch.no_grad():
                return program(*args)

        return run

    check(MLP(), (randn(32, 64, grad=False),), path=path, run=without_gradients)


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_any_number_of_rows(path, rows):
    check(MLP(), (randn(rows, 64),), path=path)


# --- options that make everything exact ---------------------------------------------------------

ALL_EXACT = {"skip": ("*",), "keep_exact": ("*",), "compiler": "eager"}


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"error_tolerance": math.inf}, {"memory_budget": 0.6}],
    ids=["without rules", "budget"],
)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_options_can_make_everything_exact(monkeypatch, make, options):
    config = Config.recipe("agoq", **ALL_EXACT, **options)
    monkeypatch.setitem(PATHS, "all exact", (Backend(config), stock_eager))
    check(make().train(), (tokens(),), path="all exact")


@pytest.mark.long
def test_options_can_make_checkpointed_regions_exact(monkeypatch):
    config = Config.recipe("agoq", **ALL_EXACT)
    monkeypatch.setitem(PATHS, "all exact", (Backend(config), stock_eager))
    check(Checkpointed(0.2), (randn(32, 64),), path="all exact")


# --- random programs ----------------------------------------------------------------------------


@pytest.mark.long
@given(programs())
def test_random_program_aot(case):
    program, inputs = case
    check(program, tuple(inputs), path="aot")


@pytest.mark.long
@given(programs())
def test_random_program_inductor(case):
    program, inputs = case
    check(program, tuple(inputs), path="inductor")


@pytest.mark.long
@given(programs())
def test_options_can_make_a_random_program_exact(case):
    program, inputs = case
    exact = Backend(Config(save_format="e2m1", error_tolerance=math.inf, **ALL_EXACT))
    with patch.dict(PATHS, {"all exact": (exact, stock_eager)}):
        check(program, tuple(inputs), path="all exact")


class ReturnsHidden(nn.Module):
    """Returns the result of a layer. The backward also reads it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gain = nn.Linear(32, 64, bias=False), nn.Parameter(torch.rand(64))

    def forward(self, x):
        hidden = self.layer(x)
        gated = torch.where(hidden > 0, hidden, hidden * self.gain)
        return torch.cat([gated, hidden.gather(-1, (hidden.detach() > 0).long())], -1), hidden


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["exact", "linear"])
def test_a_backward_does_not_overwrite_outputs(recipe):
    """Inductor reuses the memory of saved tensors that are no part of an output."""
    model = ReturnsHidden()
    compiled = torch.compile(model, backend="fp8pass", options={"recipe": recipe})
    outputs = compiled(torch.randn(48, 2, 4, 32, requires_grad=True))
    before = [y.clone() for y in outputs]
    gradients = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(outputs, before, strict=True))
