"""`find_layers` finds linear layers, and lists flawed ones with a reason."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import COAT_EAGER, capture_joint, compiled, cosine, relative, step, stock_eager
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from fp8pass.config import Config
from fp8pass.graph.linear_layers import find_layers
from fp8pass.plan import Linear


def pruned(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    return layer


class Symmetric(nn.Module):
    """A user-defined parametrization."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def symmetric(layer: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Computed(nn.Module):
    """A layer with a weight, [out, in], that a function computes from parameters and a buffer."""

    def __init__(self, weight, *shapes, buffer=None):
        super().__init__()
        self.computed = weight
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape) / 8) for shape in shapes)
        self.register_buffer("buffer", buffer)

    def forward(self, x):
        parts = [self.parts[i] for i in range(len(self.parts))]  # Dynamo 2.11 unpacks no such list
        return x @ self.computed(*parts, self.buffer).t()


SQUARE = (64, 64)

# Weights that are computed from as many parameters as they have elements.
WEIGHTS = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(64, 64)),
    "old weight norm": lambda: utils.weight_norm(nn.Linear(64, 64)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(64, 64)),
    "old spectral norm": lambda: utils.spectral_norm(nn.Linear(64, 64)),
    "pruned": lambda: pruned(nn.Linear(64, 64)),
    "parametrized": lambda: symmetric(nn.Linear(64, 64)),
    "scaled": lambda: Computed(lambda w, _: w * 64**-0.5, SQUARE),
    "dropped": lambda: Computed(lambda w, _: w * (torch.rand_like(w) > 0.1), SQUARE),
    "binarized": lambda: Computed(lambda w, _: w + (w.sign() - w).detach(), SQUARE),
    "permuted": lambda: Computed(lambda w, rows: w[rows], SQUARE, buffer=torch.randperm(64)),
    "shards": lambda: Computed(lambda a, b, _: torch.cat([a, b]), (16, 64), (48, 64)),
    "one of a stack": lambda: Computed(lambda w, _: w[1], (3, 64, 64)),
    "of three dimensions": lambda: Computed(lambda w, _: w.view(64, 64), (4, 16, 64)),
    "merged adapter": lambda: Computed(lambda w, a, b, _: w + a @ b, SQUARE, (64, 4), (4, 64)),
}

# Weights that are not, each with the expected reason.
PRODUCT = "its weight is a product of parameters"
FEWER = "aten.mul.Tensor computes its weight from parameters that have fewer elements"
NO_WEIGHTS = {
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(64, 64)), PRODUCT),
    "low rank": (lambda: Computed(lambda a, b, _: a @ b, (64, 4), (4, 64)), PRODUCT),
    "outer product": (lambda: Computed(lambda a, b, _: a * b, (64, 1), (1, 64)), FEWER),
    "scaled buffer": (
        lambda: Computed(lambda s, matrix: s * matrix, (64, 1), buffer=torch.randn(64, 64)),
        FEWER,
    ),
}


class Parallel(nn.Module):
    """All layers above, applied to one input."""

    def __init__(self):
        super().__init__()
        makers = WEIGHTS | {name: make for name, (make, _) in NO_WEIGHTS.items()}
        self.layers = nn.ModuleDict({name: make() for name, make in makers.items()})

    def forward(self, x):
        return [layer(x) for layer in self.layers.values()]


@cache
def parallel() -> tuple[dict[str, Linear], dict[str, float]]:
    """Return the plan's entry of each layer, and the cosine of each gradient to stock PyTorch's."""
    torch.manual_seed(0)
    model, x = Parallel(), torch.randn(32, 64, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    want = step(torch.compile(model, backend=stock_eager), model, [x]).gradients
    model.load_state_dict(state)  # spectral norms iterate
    program, spy = compiled(model)
    got = step(program, model, [x]).gradients
    found = {y.module.split(".")[1]: y for y in spy.plan.linears if "no" not in y.reason.split()}
    return found, {name: cosine(got[name], x) for name, x in want.items() if x is not None}


@pytest.mark.long
@pytest.mark.parametrize("name", [*WEIGHTS, *NO_WEIGHTS])
def test_computed_weights(name):
    """They run in FP8 if they are computed from enough parameters, and are listed otherwise."""
    linears, cosines = parallel()
    layer = linears[name]
    assert (layer.in_features, layer.out_features) == SQUARE
    assert not layer.chosen
    if name in WEIGHTS:
        assert layer.fp8 == ("forward", "dgrad", "wgrad")
        assert not layer.reason
    else:
        assert not layer.fp8
        assert layer.reason == NO_WEIGHTS[name][1]
    of_layer = [x for path, x in cosines.items() if path.startswith(f"layers.{name}.")]
    assert of_layer
    assert min(of_layer) > 0.99


def linears(model: nn.Module, *args: torch.Tensor) -> list[Linear]:
    """Return the plan's linear layers of `model(*args)`, in training."""
    program, spy = compiled(model, COAT_EAGER)
    program(*args).sum().backward()
    return spy.plan.linears


def evaluated(model: nn.Module, *args: torch.Tensor) -> list[Linear]:
    """Return the plan's linear layers of `model(*args)`, without gradients."""
    program, spy = compiled(model, COAT_EAGER)
    with torch.no_grad():
        program(*args)
    return spy.plan.linears


def test_products_of_activations_are_not_layers():
    """Learned queries become activations when they meet the data."""

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
    """A linear layer with an orthogonality penalty, with GEMMs of equal sizes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        gram = self.layer.weight @ self.layer.weight.t() - torch.eye(32)
        return self.layer(x) + (gram**2).sum()


@pytest.mark.long
def test_gradients_of_a_penalty_do_not_count_to_the_layer():
    """The layer and the penalty share a weight. The penalty stays in high precision."""
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


def test_newton_schulz_steps_stay_in_high_precision():
    """The steps multiply parameters only. The layer that uses the result runs in FP8."""

    class Orthogonal(nn.Linear):
        def forward(self, x):
            weight = self.weight
            for _ in range(2):
                weight = 1.5 * weight - 0.5 * (weight @ weight.t()) @ weight
            return x @ weight.t()

    *steps, layer = linears(Orthogonal(64, 64, bias=False), torch.randn(32, 64))
    assert steps
    assert all(y.reason == "none of its operands is an activation" for y in steps)
    assert layer.fp8


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("listed", [linears, evaluated])
def test_products_with_a_buffer_or_constant_are_not_layers(registered, listed):
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
    """The base weight below an adapter is frozen."""

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


def test_tokens_in_columns():
    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 32))

        def forward(self, x):
            return self.weight @ x

    (layer,) = linears(Columns(), torch.randn(32, 48))
    assert (layer.rows, layer.in_features, layer.out_features) == ("48", 32, 64)


def test_projections_of_random_numbers_are_layers():
    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, like):
            return self.layer(torch.randn(32, 64)) + like

    (layer,) = linears(Generator(), torch.randn(64))
    assert layer.fp8


def test_gradients_of_a_custom_function_belong_to_its_layers():
    """A custom function is one step of autograd, even with several GEMMs."""

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
