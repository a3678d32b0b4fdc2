"""What counts as a linear layer; what comes close is listed with a reason."""

from __future__ import annotations

import pytest
import torch
from helpers import COAT_EAGER, capture_joint, compiled, relative, step, stock_eager
from torch import nn
from torch.nn.utils import parametrizations, prune

from fp8pass.config import Config
from fp8pass.graph.linear_layers import find_layers
from fp8pass.plan import Linear


def pruned(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    return layer


class Gathered(nn.Linear):
    """A weight that is put together from two."""

    def forward(self, x):
        halves = self.weight.chunk(2)
        return x @ torch.cat([halves[1], halves[0]]).t()


class DropConnect(nn.Linear):
    """A weight of which some elements are left out at random."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * (torch.rand_like(self.weight) > 0.1))


class LowRank(nn.Module):
    """A weight that is a product of two."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(64, 4)), nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        return x @ (self.a @ self.b)


COMPUTED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
    "pruned": lambda: pruned(nn.Linear(64, 64)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(64, 64)),
    "dropped": lambda: DropConnect(64, 64, bias=False),
    "low rank": LowRank,
    "gathered": lambda: Gathered(64, 64, bias=False),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_weights_are_layers_with_a_reason(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), COMPUTED[name]())
    program, spy = compiled(model, COAT_EAGER)
    program(torch.randn(32, 64)).sum().backward()
    plain, *parameters, computed = spy.plan.linears
    assert all("none of its operands" in y.reason for y in parameters)
    assert plain.fp8
    assert not plain.reason
    assert not computed.fp8
    assert "its weight is computed by aten." in computed.reason
    assert not computed.chosen
    assert (computed.module, computed.in_features, computed.out_features) == ("2", 64, 64)


def linears(model: nn.Module, *args: torch.Tensor) -> list[Linear]:
    """What the plan says about the linear layers of `model(*args)`, in training."""
    program, spy = compiled(model, COAT_EAGER)
    program(*args).sum().backward()
    return spy.plan.linears


def evaluated(model: nn.Module, *args: torch.Tensor) -> list[Linear]:
    """The same without gradients."""
    program, spy = compiled(model, COAT_EAGER)
    with torch.no_grad():
        program(*args)
    return spy.plan.linears


def test_products_of_activations_are_no_layers():
    """Nor are those with what learned queries become."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(16, 64))
            self.project = nn.Linear(64, 64)

        def forward(self, x):
            queries = self.project(self.queries).expand(len(x), -1, -1)
            scores = queries @ x.transpose(1, 2)
            return scores.softmax(-1) @ x + x[:, :16] @ (x.transpose(1, 2) @ x)

    (project,) = linears(Attention(), torch.randn(2, 32, 64, requires_grad=True))
    assert project.module == "project"
    assert project.reason == "none of its operands is an activation"


class Penalized(nn.Module):
    """A linear layer whose weight is also multiplied with itself, as many rows as it has inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        gram = self.layer.weight @ self.layer.weight.t() - torch.eye(32)
        return self.layer(x) + (gram**2).sum()


def test_a_product_of_parameters_stays_exact_and_its_gradients_are_its_own():
    """The layer and the penalty share a weight, and all their GEMMs have the same sizes."""
    x = torch.randn(32, 32, requires_grad=True)
    joint = capture_joint(Penalized(), x)
    layers = find_layers(joint.gm.graph, joint.ctx.facts)
    penalty, layer = sorted(layers, key=lambda y: not y.flaw)
    assert layer.module.endswith("layer")
    assert not penalty.module.endswith("layer")
    assert (len(layer.dgrad), len(layer.wgrad)) == (1, 1)
    assert len(penalty.dgrad) + len(penalty.wgrad) == 2

    class Penalty(Penalized):
        def forward(self, x):
            return super().forward(x) - self.layer(x)

    model = Penalty()
    want = step(torch.compile(model, backend=stock_eager), model, [x])
    got = step(compiled(model, Config.recipe("linear", compiler="eager"))[0], model, [x])
    assert relative(got.gradients["layer.weight"], want.gradients["layer.weight"]) < 1e-4


def test_weights_that_are_built_by_products_stay_exact():
    """Steps of Newton and Schulz towards an orthogonal weight."""

    class Orthogonal(nn.Linear):
        def forward(self, x):
            weight = self.weight
            for _ in range(2):
                weight = 1.5 * weight - 0.5 * (weight @ weight.t()) @ weight
            return x @ weight.t()

    *steps, layer = linears(Orthogonal(64, 64, bias=False), torch.randn(32, 64))
    assert steps
    assert all(y.reason == "none of its operands is an activation" for y in steps)
    assert "its weight is computed by aten." in layer.reason


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("listed", [linears, evaluated])
def test_a_product_with_a_buffer_or_constant_is_no_layer(registered, listed):
    class Filtered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.register_buffer("registered", torch.randn(64, 64))
            self.attribute = torch.randn(64, 64)

        def forward(self, x):
            x = self.layer(x) @ torch.eye(64)
            return x @ (self.registered if registered else self.attribute).t()

    layer, product = listed(Filtered(), torch.randn(32, 64, requires_grad=True))
    assert layer.fp8
    assert not product.fp8
    assert "its weight is a buffer or constant" in product.reason


@pytest.mark.parametrize("listed", [linears, evaluated])
def test_frozen_parameters_are_weights(listed):
    """As those below an adapter are."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(64, 64).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 16, bias=False), nn.Linear(16, 64, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    found = listed(Adapted(), torch.randn(32, 64))
    assert {y.module.rsplit(".", 1)[-1] for y in found} == {"base", "down", "up"}
    assert all("forward" in y.fp8 for y in found)


def test_a_projection_of_random_numbers_is_a_layer():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, like):
            return self.layer(torch.randn(32, 64)) + like

    (layer,) = linears(Generator(), torch.randn(64))
    assert layer.fp8


def test_gradients_of_a_function_of_several_products_belong_to_its_layers():
    """A custom function is one step of autograd, however many products there are in it."""

    class TwoLayers(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, a, b):
            h = x @ a
            ctx.save_for_backward(x, h, a, b)
            return h @ b

        @staticmethod
        def backward(ctx, dy):
            x, h, a, b = ctx.saved_tensors
            dh = dy @ b.t()
            return dh @ a.t(), x.t() @ dh, h.t() @ dy

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

        def forward(self, x):
            return TwoLayers.apply(x, self.a, self.b)

    found = linears(Model(), torch.randn(32, 64, requires_grad=True))
    assert [y.fp8 for y in found] == [("forward", "dgrad", "wgrad")] * 2
