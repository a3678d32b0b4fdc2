"""Adapters of layers with the same input share GEMMs, and only small matrices are scaled."""

from __future__ import annotations

import operator

import pytest
import torch
from helpers import relative
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8pass
from fp8pass.graph.merge_adapters import merge_adapters

WIDTH, ROWS = 128, 96


class LoRA(nn.Module):
    def __init__(self, width: int, rank: int, factor: float | None) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, width, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.factor = factor

    def forward(self, x):
        y = self.b(self.a(x))
        return self.base(x) + (y if self.factor is None else y * self.factor)


class Layers(nn.Module):
    """Layers with the same input, and a layer that reads their sum."""

    def __init__(self, ranks=(16, 16, 16), factor: float | None = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.ModuleList(LoRA(WIDTH, rank, factor) for rank in ranks)
        self.last = LoRA(WIDTH, ranks[0], factor)

    def forward(self, x):
        return self.last(sum(torch.sin(layer(x)) for layer in self.shared))


class Gemms(TorchDispatchMode):
    """Records the sizes of GEMMs, and the sizes of products with a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int]] = []
        self.scaled: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.found.append((*a.shape, b.shape[1]))
        assert func is not torch.ops.aten.bmm.default
        if func is torch.ops.aten.mul.Tensor and not getattr(args[1], "shape", ()):
            self.scaled.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def inputs(seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, ROWS // 2, WIDTH, requires_grad=True)


def train(model, x, *, rewrite: bool) -> tuple[list[Tensor], Gemms]:
    """Return the output and all gradients, and the GEMMs that computed them."""

    def backend(gm: fx.GraphModule, _):
        if rewrite:
            merge_adapters(gm)
        gm.graph.lint()

        def run(*args):
            with gemms:  # Dynamo does not compile in a dispatch mode
                return gm(*args)

        return run

    torch._dynamo.reset()
    x, gemms = x.detach().requires_grad_(), Gemms()
    model.zero_grad()
    loss = (y := torch.compile(model, backend=backend)(x)).float().square().sum()
    with gemms:
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [y, x.grad, *gradients], gemms


def check(model, x, gemms: int | None = None, limit: float = 2e-5) -> Gemms:
    """Compare a model with its rewritten graph; `gemms` is the number of GEMMs."""
    wanted, _ = train(model, x, rewrite=False)
    found, counted = train(model, x, rewrite=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None and b is None) or relative(a, b) < limit
    if gemms is not None:
        assert len(counted.found) == gemms
    return counted


# The last layer has nine GEMMs: y, dx and six of its adapter, without the gradient of the weight.
LAST = 8


def test_layers_with_one_input_share_gemms():
    """One GEMM for h, dA and dx of all layers. y, dB and dh of each layer stay."""
    x = inputs()
    _, before = train(Layers(), x, rewrite=False)
    assert len(before.found) == 4 * LAST
    gemms = check(Layers(), x, gemms=LAST + 3 * (2 + 3) + 3)
    assert (ROWS, WIDTH, 48) in gemms.found
    assert (ROWS, 48, WIDTH) in gemms.found


@pytest.mark.parametrize("factor", [2.0, 0.3, 1, None])
def test_only_small_matrices_are_scaled(factor):
    gemms = check(Layers(factor=factor), inputs())
    assert all(numel <= ROWS * 16 for numel in gemms.scaled)
    assert len(gemms.scaled) == (0 if factor is None else 8)


@given(
    ranks=st.lists(st.sampled_from([1, 4, 8, 16, 32, 40]), min_size=1, max_size=4),
    factor=st.one_of(st.none(), st.floats(-4, 4), st.integers(-2, 2)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 3),
)
def test_any_ranks_and_factors(ranks, factor, dtype, seed):
    x = inputs(seed).detach().to(dtype)
    limit = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 0.02}[dtype]
    check(Layers(tuple(ranks), factor).to(dtype), x.requires_grad_(), limit=limit)


def test_a_merged_rank_is_limited():
    check(Layers((32, 32)), inputs(), gemms=LAST + 2 * (2 + 3) + 3)
    gemms = check(Layers((32, 32, 32)), inputs(), gemms=4 * LAST)
    assert all(max(sizes) <= WIDTH for sizes in gemms.found)


def test_other_inputs_stay_apart():
    class Dropped(LoRA):
        def forward(self, x):
            return self.base(x) + self.b(self.a(functional.dropout(x, 0.0))) * 2.0

    model = Layers()
    for layer in model.shared:
        layer.__class__ = Dropped
    check(model, inputs(), gemms=4 * LAST)


def test_casts_of_one_tensor_are_the_same_input():
    """PEFT's adapters are in FP32, and cast their input."""

    class Cast(LoRA):
        def forward(self, x):
            return self.base(x) + (self.b(self.a(x.to(torch.float64))) * 2.0).to(x.dtype)

    model = Layers()
    for layer in model.shared:
        layer.__class__ = Cast
        layer.a.double()
        layer.b.double()
    check(model, inputs(), gemms=LAST + 3 * (2 + 3) + 3)


def test_wide_layers_and_layers_with_a_bias_stay():
    check(Layers((64, 64)), inputs(), gemms=3 * LAST)
    model = Layers()
    for layer in model.shared:
        layer.a.bias = nn.Parameter(torch.ones(16))
    check(model, inputs(), gemms=4 * LAST)


def test_a_frozen_adapter_stays_apart():
    """The merged GEMM would compute a gradient that is not needed."""
    model = Layers()
    model.shared[0].requires_grad_(False)
    x = inputs().detach()

    class Detached(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                first = model.shared[0](x)
            return first + model.shared[1](x) + model.shared[2](x)

    wanted = Detached()(x)
    assert relative(run_forward(Detached(), x), wanted) < 2e-5


def run_forward(model, x) -> Tensor:
    torch._dynamo.reset()

    def backend(gm, _):
        merge_adapters(gm)
        return gm

    return torch.compile(model, backend=backend)(x)


def test_weights_that_are_changed_in_place_stay():
    layers = Layers((16, 16))
    first, second = layers.shared

    class Changed(nn.Module):
        def forward(self, x):
            y = first(x)
            with torch.no_grad():
                second.a.weight.mul_(2.0)
            return y + second(x)

    x = inputs().detach()
    wanted = first(x)
    found = run_forward(Changed(), x)  # the weight has changed now
    assert relative(found, wanted + second(x)) < 2e-5


@pytest.mark.parametrize("cast", [False, True])
def test_inputs_that_are_changed_in_place_stay(cast):
    """Also if a view of the input is changed."""
    layers = Layers((16, 16))
    if cast:
        layers.double()
    first, second = layers.shared
    dtype = torch.float64 if cast else torch.float32

    class Changed(nn.Module):
        def forward(self, x):
            x = x * 1.0
            y = first(x.to(dtype))
            x.view(-1).mul_(2.0)
            return y + second(x.to(dtype))

    x = inputs().detach()
    with torch.no_grad():
        wanted = first(x.to(dtype)) + second(2 * x.to(dtype))
        assert relative(run_forward(Changed(), x), wanted) < 2e-5


def test_routers_stay():
    """Two narrow layers that are no adapters, such as the router and a gate of shared experts."""

    class Gates(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gate, self.shared_gate = (nn.Linear(WIDTH, n, bias=False) for n in (8, 1))

        def forward(self, x):
            return torch.sigmoid(self.shared_gate(x)) * self.gate(x).softmax(-1)

    gemms = check(Gates(), inputs())
    assert (ROWS, WIDTH, 9) not in gemms.found


def test_checkpointed_layers_are_merged():
    model = Layers()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    gemms = check(Checkpointed(), inputs())
    assert (ROWS, WIDTH, 48) in gemms.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    model = Layers()

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.model(x.to(dtype))

    gemms = check(Mixed(), inputs(), limit=0.02)
    assert (ROWS, WIDTH, 48) in gemms.found


def test_a_region_in_other_precision_stays_apart():
    model = Layers((16, 16))

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                first = self.model.shared[0](x)
            return first.float() + self.model.shared[1](x)

    gemms = check(Mixed(), inputs(), limit=0.01)
    assert (ROWS, WIDTH, 32) not in gemms.found


def test_several_adapters_of_one_layer():
    """Two adapters that read the same input are merged as well."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = LoRA(WIDTH, 16, 2.0), LoRA(WIDTH, 8, 0.5)

        def forward(self, x):
            second = self.second
            return self.first(x) + second.b(second.a(x)) * second.factor

    gemms = check(Two(), inputs())
    assert (ROWS, WIDTH, 24) in gemms.found


def test_inference_has_no_batched_gemms():
    model = Layers(factor=None).requires_grad_(False)
    with torch.no_grad():
        wanted = model(inputs())
        torch._dynamo.reset()

        def backend(gm, _):
            merge_adapters(gm)

            def run(*args):
                with gemms:
                    return gm(*args)

            return run

        gemms = Gemms()
        assert relative(torch.compile(model, backend=backend)(inputs()), wanted) < 2e-5
    assert (ROWS, WIDTH, 48) in gemms.found


def test_nodes_keep_their_modules():
    captured = []

    def backend(gm, _):
        merge_adapters(gm)
        captured.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(Layers(), backend=backend)(inputs())
    (gm,) = captured
    for node in gm.graph.nodes:
        if node.target in (torch.cat, functional.linear, operator.getitem, "split"):
            assert node.meta["nn_module_stack"], node


@pytest.mark.parametrize("recipe", ["coat", "linear", "agoq", "exact"])
def test_recipes(recipe):
    model, x = Layers(), inputs()
    wanted, _ = train(model, x, rewrite=False)
    torch._dynamo.reset()
    model.zero_grad()
    y = x.detach().requires_grad_()
    options = {"recipe": recipe, "compiler": "eager", "fp8_gemms": "all"}
    out = torch.compile(model, backend="fp8pass", options=options)(y)
    out.square().sum().backward()
    found = [out, y.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < (1e-6 if recipe == "exact" else 0.2)
    if recipe == "exact":
        assert torch.equal(out, wanted[0])


def test_explain_lists_merged_adapters_once():
    plans = fp8pass.explain(Layers(), inputs()).graphs
    adapters = [
        y for p in plans for y in p.plan.linears if y.module in ("shared.0.a", "shared.1.a")
    ]
    assert [(y.module, y.out_features) for y in adapters] == [("shared.0.a", 48)]
