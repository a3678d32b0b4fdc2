"""Adapters that read one tensor share GEMMs, and LoRA's factor multiplies small matrices only."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from helpers import capture_joint, relative
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.config import Config
from fp8pass.graph.nodes import aten
from fp8pass.passes.joint.merge_adapters import merge_adapters

WIDTH, ROWS, RANK = 256, 512, 16


class LoRA(nn.Module):
    def __init__(self, width: int = WIDTH, rank: int = RANK, factor: float | None = 2.0) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, width, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.factor = factor

    def forward(self, x):
        y = self.b(self.a(x))
        return self.base(x) + (y if self.factor is None else y * self.factor)


class Layers(nn.Module):
    """Layers with the same input, and a layer that reads their sum."""

    def __init__(self, ranks=(RANK, RANK, RANK), factor: float | None = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.ModuleList(LoRA(WIDTH, rank, factor) for rank in ranks)
        self.last = LoRA(WIDTH, ranks[0], factor)

    def forward(self, x):
        return self.last(sum(torch.sin(layer(x)) for layer in self.shared))


# The GEMMs of a layer: y, dx, and six of its adapter: h, y, dh, dB, dA, dx.
EACH = 8
# Three layers with one input share h, dA and dx. Each has y, dx, and its adapter's y, dh and dB.
SHARED = 3 + 3 * 5


def inputs(dtype=torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, ROWS // 2, WIDTH, dtype=dtype, requires_grad=True)


def rewritten(
    model: nn.Module, x: Tensor | None = None, limit: float = 1e-12, **options
) -> fx.Graph:
    """Rewrite a joint graph, and check that its results stay the same."""
    x = inputs() if x is None else x
    joint = capture_joint(model.to(x.dtype), x, config=Config(**options))
    torch.manual_seed(2)
    values = [
        torch.randn(n.meta["val"].shape, dtype=n.meta["val"].dtype) / 16
        for n in joint.gm.graph.find_nodes(op="placeholder")
    ]
    torch.manual_seed(3)  # of dropout
    want = copy.deepcopy(joint.gm)(*values)
    merge_adapters(joint.gm, joint.ctx)
    joint.gm.graph.lint()
    joint.gm.recompile()
    torch.manual_seed(3)
    for a, b in zip(joint.gm(*values), want, strict=True):
        assert (a is None and b is None) or relative(a, b) < limit
    return joint.gm.graph


def gemms(g: fx.Graph) -> list[tuple[int, ...]]:
    """The sizes M, K, N of all GEMMs."""
    found = [n for n in g.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    return [(*n.args[-2].meta["val"].shape, n.meta["val"].shape[1]) for n in found]


def scaled(g: fx.Graph) -> list[int]:
    """The sizes of all tensors that are multiplied by a number."""
    products = g.find_nodes(op="call_function", target=aten.mul.Tensor)
    return [n.meta["val"].numel() for n in products if isinstance(n.args[1], (int, float))]


def test_layers_with_one_input_share_gemms():
    sizes = gemms(rewritten(Layers()))
    assert len(sizes) == SHARED + EACH
    assert (ROWS, WIDTH, 3 * RANK) in sizes
    assert (3 * RANK, ROWS, WIDTH) in sizes
    assert (ROWS, 3 * RANK, WIDTH) in sizes


@pytest.mark.parametrize("factor", [2.0, 0.3, 1, None])
def test_only_small_matrices_are_scaled(factor):
    sizes = scaled(rewritten(Layers(factor=factor)))
    assert all(numel <= ROWS * RANK for numel in sizes)
    assert len(sizes) == (0 if factor is None else 2 * 4)


@given(
    ranks=st.lists(st.sampled_from([1, 4, 8, 16, 40]), min_size=1, max_size=4),
    factor=st.one_of(st.none(), st.floats(-4, 4), st.integers(-2, 2)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_any_ranks_and_factors(ranks, factor, dtype):
    limits = {torch.float32: 1e-5, torch.float64: 1e-12}
    rewritten(Layers(tuple(ranks), factor), inputs(dtype), limits.get(dtype, 0.05))


def test_fp16_keeps_its_factors():
    """The factor's product with `h` may overflow."""
    sizes = scaled(rewritten(Layers(), inputs(torch.float16), 0.05))
    assert min(sizes) == ROWS * WIDTH


class Dropped(LoRA):
    def forward(self, x):
        return self.base(x) + self.b(self.a(functional.dropout(x, 0.5))) * 2.0


class Gates(nn.Module):
    """Routers are narrow, too. No GEMM multiplies their results again."""

    def __init__(self, *args) -> None:
        super().__init__()
        self.gate, self.scale = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x):
        return x * torch.sigmoid(self.scale(x)) * self.gate(x).softmax(-1).amax(-1, keepdim=True)


class Sequential(LoRA):
    """The second adapter's matrix depends on the result of the first."""

    def forward(self, x):
        first = self.b(self.a(x))
        return first + self.b(functional.linear(x, self.a.weight * (1 + first.mean())))


@pytest.mark.parametrize("kind", [Dropped, Gates, Sequential])
def test_other_gemms_stay_apart(kind):
    model = Layers()
    model.shared = nn.ModuleList(kind() for _ in range(2))
    torch.manual_seed(3)
    sizes = gemms(rewritten(model))
    assert not any(2 * RANK in size or 8 + 1 in size for size in sizes)


class Returned(Layers):
    """The caller may view `h`, so `h` must be contiguous."""

    def forward(self, x):
        h = [layer.a(x) for layer in self.shared]
        y = sum(layer.b(h_) for layer, h_ in zip(self.shared, h, strict=True))
        return y, h[0], h[1].flatten(0, 1)


def test_results_of_the_graph_stay_contiguous():
    torch._dynamo.reset()
    run = torch.compile(Returned(), backend="fp8pass", options={"compiler": "eager"})
    assert all(y.is_contiguous() for y in run(inputs(torch.float32)))
    assert (ROWS, WIDTH, 3 * RANK) not in gemms(rewritten(Returned()))


class Interleaved(nn.Module):
    """Between the GEMMs of one group, the weight of another group is computed from activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.ParameterList(torch.randn(*size) / 16 for _ in range(4))
            for size in ((RANK, WIDTH), (WIDTH, RANK))
        )

    def forward(self, x):
        a0, a1, a2, a3 = self.a
        z = torch.sin(x)
        first = x @ a0.t()
        second = z @ (a1 * first.mean()).t()
        h = first, second, z @ a2.t(), x @ a3.t()
        return sum(h_ @ b.t() for h_, b in zip(h, self.b, strict=True))


def test_groups_whose_members_are_moved():
    sizes = gemms(rewritten(Interleaved()))
    assert sizes.count((ROWS, WIDTH, 2 * RANK)) >= 2


def test_saved_results_of_a_checkpoint_policy_stay():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        saves = op is aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    model, contexts = Layers(), lambda: create_selective_checkpoint_contexts(policy)
    run = lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    joint = capture_joint(run, inputs(torch.float32), config=Config())
    merge_adapters(joint.gm, joint.ctx)
    assert (ROWS, WIDTH, 3 * RANK) not in gemms(joint.gm.graph)


class Twice(LoRA):
    """Other operators read the product, too."""

    def forward(self, x):
        y = self.b(self.a(x))
        return self.base(x) + 2.0 * y + torch.sin(y)


class ScaledGradient(LoRA):
    """Other operators read the scaled gradient, too."""

    def forward(self, x):
        return (self.base(x) + self.b(self.a(x)) + torch.sin(x)) * 2.0


@pytest.mark.parametrize("kind", [Twice, ScaledGradient])
def test_values_that_others_read_stay(kind):
    model = Layers()
    model.shared = nn.ModuleList(kind() for _ in range(2))
    assert max(scaled(rewritten(model))) == ROWS * WIDTH


def test_a_bias_stays_in_its_gemm():
    """Only gradients are merged then."""
    model = Layers()
    for layer in model.shared:
        layer.a.bias = nn.Parameter(torch.ones(RANK))
    sizes = gemms(rewritten(model))
    assert (ROWS, WIDTH, 3 * RANK) not in sizes
    assert (3 * RANK, ROWS, WIDTH) in sizes


def test_several_adapters_of_one_layer():
    """They read the same input and the same gradient, and their products are terms of one sum."""

    class Two(LoRA):
        def __init__(self) -> None:
            super().__init__(rank=8)
            self.second = LoRA(rank=8, factor=0.5)

        def forward(self, x):
            second = self.second
            return super().forward(x) + second.b(second.a(x)) * second.factor

    sizes = gemms(rewritten(Two()))
    assert len(sizes) == 2 + 7  # y and dx; h, y, dh, two dB, dA and dx
    assert sizes.count((ROWS, 16, WIDTH)) == 2


def test_a_frozen_adapter_has_no_gradient():
    model = Layers()
    model.shared[0].requires_grad_(False)
    sizes = gemms(rewritten(model))
    assert (ROWS, WIDTH, 3 * RANK) in sizes
    assert (2 * RANK, ROWS, WIDTH) in sizes


@pytest.mark.parametrize("config", [Config.recipe("exact"), Config(simulate="e4m3")], ids=str)
def test_exact_and_simulated_gemms_do_not_change(config):
    joint = capture_joint(Layers(), inputs(torch.float32), config=config)
    before = str(joint.gm.graph)
    merge_adapters(joint.gm, joint.ctx)
    assert str(joint.gm.graph) == before


# --- the whole pipeline -------------------------------------------------------------------------


def train(run: Callable, model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


def compare(model: nn.Module, x: Tensor, limit: float, run=None, **options) -> None:
    torch._dynamo.reset()
    want = train(run or model, model, x)
    options = {"compiler": "eager", "fp8_gemms": "all", **options}
    compiled = torch.compile(run or model, backend="fp8pass", options=options)
    for a, b in zip(train(compiled, model, x), want, strict=True):
        assert (a is None and b is None) or relative(a, b) < limit


@pytest.mark.parametrize("recipe", ["coat", "linear", "agoq", "exact"])
def test_recipes(recipe):
    limit = 1e-6 if recipe == "exact" else 0.2
    compare(Layers(), inputs(torch.float32), limit, recipe=recipe)


def test_checkpointed_layers():
    model = Layers()
    run = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    compare(model, inputs(torch.float32), 0.1, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    """Adapters of PEFT are in FP32."""
    model = Layers()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x.to(dtype))

    compare(model, inputs(torch.float32), 0.1, run)


def test_a_budget_and_quantized_weights():
    model = Layers()
    x = inputs(torch.float32)
    want = train(model, model, x)
    fp8pass.quantize_frozen(model)
    torch._dynamo.reset()
    options = {"compiler": "eager", "fp8_gemms": "all", "memory_budget": 0.9}
    found = train(torch.compile(model, backend="fp8pass", options=options), model, x)
    for a, b in zip(found, want, strict=True):
        assert relative(a, b) < 0.1


def test_any_number_of_rows():
    torch._dynamo.reset()
    model = Layers()
    program = torch.compile(
        model, backend="fp8pass", dynamic=True, options={"compiler": "eager", "fp8_gemms": "all"}
    )
    for rows in (32, 64, 80):
        x = torch.randn(2, rows, WIDTH)
        for a, b in zip(train(program, model, x), train(model, model, x), strict=True):
            assert relative(a, b) < 0.1


def test_inference():
    torch._dynamo.reset()
    model = Layers().requires_grad_(False)
    x = inputs(torch.float32).detach()
    want = model(x)
    program = torch.compile(model, backend="fp8pass", options={"compiler": "eager"})
    with torch.no_grad():
        assert relative(program(x), want) < 0.1


def test_explain_counts_merged_adapters():
    text = str(fp8pass.explain(Layers(), inputs(torch.float32)))
    assert "Merged GEMMs of 3 adapters into one GEMM." in " ".join(text.split())
