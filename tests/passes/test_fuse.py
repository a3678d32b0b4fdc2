"""Which matrices the kernels take over, and that gradients stay what they were.

On the CPU the kernels' references run in their place, called by Inductor.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from helpers import MLP, benchmark_models, cosine, gpt2, leaves, llama, step, tokens
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fp8pass
from fp8pass import backend as make_backend
from fp8pass.codegen.kernels.tiles import tiles
from fp8pass.codegen.program.batch import Batch
from fp8pass.config import Config, ConfigError
from fp8pass.dialect import hardware
from fp8pass.graph.order import sort_topologically
from fp8pass.passes import Context
from fp8pass.passes.count_kernels import count_kernels
from fp8pass.passes.fuse_tiles import fuse_tiles

aten, fp8 = torch.ops.aten, torch.ops.fp8pass


def counts(graphs: list[fx.Graph]) -> Counter[str]:
    """How many programs each kernel runs, and matrices are quantized without one."""
    found: Counter[str] = Counter()
    for g in graphs:
        ctx = Context(Config())
        count_kernels(fx.GraphModule(nn.Module(), g), ctx)
        (use,) = ctx.plan.kernels
        found.update(use.programs)
        found["quantize"] += sum(use.generated.values())
    return +found


class Layers(nn.Module):
    """Two decoder layers of the benchmarks, small."""

    def __init__(self) -> None:
        super().__init__()
        models = benchmark_models()
        self.stack = models.Stack(2, 128, 2, 256)
        self.tables = models.rope_tables(16, 64, torch.device("cpu"))

    def forward(self, x):
        return self.stack(x, *self.tables)


def gradients(model, x, config, *, kernels_off, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv(
        "FP8PASS_DISABLE_PASSES", "fuse_rows,fuse_norms,fuse_tiles" if kernels_off else ""
    )
    program = torch.compile(model, backend=make_backend(config))
    return step(program, model, (x.clone().requires_grad_(),))


@pytest.mark.parametrize(
    ("make", "shape", "recipe"),
    [(Layers, (2, 16, 128), "coat"), (Layers, (2, 16, 128), "agoq"), (MLP, (32, 64), "linear")],
    ids=["coat", "agoq", "linear"],
)
def test_gradients_stay(make, shape, recipe, graphs, monkeypatch):
    model, x = make().bfloat16(), torch.randn(shape).bfloat16()
    config = Config.recipe(recipe)
    want = gradients(model, x, config, kernels_off=True, monkeypatch=monkeypatch)
    assert set(counts(graphs)) == {"quantize"}
    graphs.clear()
    got = gradients(model, x, config, kernels_off=False, monkeypatch=monkeypatch)
    assert counts(graphs)["tiles"]
    for a, b in zip(leaves(got.outputs), leaves(want.outputs), strict=True):
        assert cosine(a, b) > 0.9995
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter


def test_what_a_decoder_layer_launches(graphs):
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    forward, backward = (counts([g]) for g in graphs)
    # Seven weights; inputs of q/k/v, of o, of gate/up, of down: of each a scale for the backward.
    assert forward == {"rows": 2 * 11, "scales": 2 * 11}
    # Norms with a residual stream before them: all but the first. Of a layer: seven weights, four
    # gradients and three inputs again, gate's and up's gradient and down's input together. The
    # latter, gradients of rotated queries and keys, and those of values, are measured before that;
    # so is the gradient that the caller hands in.
    assert backward == {"rows": 3, "tiles": 2 * 20 + 1, "scales": 2 * 5}


def test_recipe_exact_uses_none(graphs):
    """Its results are those of stock torch.compile, bit for bit."""
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    program = torch.compile(model, backend=make_backend(Config.recipe("exact")))
    program(x).sum().backward()
    assert not any(counts(graphs).values())


def test_disabled_kernels(graphs, monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_tiles")
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    assert counts(graphs)["rows"]
    assert not counts(graphs)["tiles"]
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_tile")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"'fuse_tile'.*'fuse_tiles'") as raised:
        torch.compile(model, backend="fp8pass")(x)
    assert isinstance(raised.value.inner_exception, ConfigError)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
def test_hugging_face_models_train(make, graphs):
    model = make().bfloat16()
    program = torch.compile(model, backend="fp8pass")
    ids = tokens()
    loss = program(input_ids=ids, labels=ids).loss
    loss.backward()
    assert counts(graphs)["tiles"]
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_varying_lengths(graphs):
    model = Layers().bfloat16()
    program = torch.compile(model.stack, backend="fp8pass", dynamic=True)
    for length in (16, 24, 21):
        tables = benchmark_models().rope_tables(length, 64, torch.device("cpu"))
        x = torch.randn(2, length, 128).bfloat16().requires_grad_()
        program(x, *tables).sum().backward()
        assert x.grad.isfinite().all()
    assert counts(graphs)["rows"]
    assert counts(graphs)["tiles"]


class Gated(nn.Module):
    """A gated unit of any activation."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(
    "activation",
    [
        nn.functional.silu,
        nn.functional.gelu,
        lambda x: nn.functional.gelu(x, approximate="tanh"),
        lambda x: torch.relu(x).square(),
        torch.sigmoid,
        lambda x: x * torch.exp(-x.square()),
    ],
    ids=["swiglu", "geglu", "geglu-tanh", "squared-relu", "sigmoid", "made-up"],
)
def test_any_activation_gets_the_kernels(activation, graphs, monkeypatch):
    """The product and its gradients are in one tile kernel, whatever the activation is."""
    model, x = Gated(activation).bfloat16(), torch.randn(32, 64).bfloat16()
    want = gradients(model, x, Config(), kernels_off=True, monkeypatch=monkeypatch)
    graphs.clear()
    got = gradients(model, x, Config(), kernels_off=False, monkeypatch=monkeypatch)
    assert "quantize" not in counts(graphs)
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter
    # Both gradients by rows, in one matrix, and all three by columns.
    layouts = [
        sorted(layout for store in program.stores for layout in store.layouts)
        for node in graphs[1].nodes
        if node.target is tiles
        for program in Batch.parse(node.args[1]).programs
    ]
    assert ["columns"] * 3 + ["rows"] * 2 in layouts


class Made(nn.Module):
    """A model made of a function and its modules and parameters."""

    def __init__(self, function, **members) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x):
        return self.function(self, x)


def residual_mlp(m, x):
    h = m.e(x)
    h = h + m.b(torch.relu(m.a(h)))
    return m.l(h + m.d(torch.relu(m.c(h))))


def normalized(m, x):
    variance, mean = torch.var_mean(x)
    return m.l((x - mean) * torch.rsqrt(variance + 1e-5))


def masked(m, x):
    positive = x > 0
    return m.l(torch.where(positive, x, x * 0.1)), positive


AWKWARD = {
    # The codes of a gradient, for two layers.
    "a sum of layers": (
        lambda m, x: m.l(torch.tanh(x)) + m.b(torch.tanh(x)),
        {"b": lambda: nn.Linear(64, 96, bias=False)},
        (32, 64),
    ),
    # With as many rows as columns, a value for each row has the shape of one for each column.
    "square, rows": (
        lambda m, x: m.l(torch.relu(x * m.r[:, None])),
        {"r": lambda: nn.Parameter(torch.randn(64))},
        (64, 64),
    ),
    "square, columns": (
        lambda m, x: m.l(torch.relu(x * m.r)),
        {"r": lambda: nn.Parameter(torch.randn(64))},
        (64, 64),
    ),
    "square, norm": (
        lambda m, x: m.l(x * torch.rsqrt(x.square().sum(-1) + 1e-3).unsqueeze(-1)),
        {},
        (64, 64),
    ),
    "no matrix to read": (
        lambda m, x: m.l(m.q.expand(x.shape[0], -1)) + x[:, :1],
        {"q": lambda: nn.Parameter(torch.randn(1, 64))},
        (32, 64),
    ),
    "a mask that is used elsewhere": (masked, {}, (32, 64)),
    "reductions over everything": (normalized, {}, (32, 64)),
    "a sum over one element": (
        lambda m, x: m.l(x * x.square().mean(-1, keepdim=True).sum(-1, keepdim=True)),
        {},
        (32, 64),
    ),
    "infinite constants": (lambda m, x: m.l(torch.where(x == -math.inf, x * 0, x)), {}, (32, 64)),
    "one row": (lambda m, x: m.l(torch.relu(x) * 2), {}, (1, 64)),
    "numbers on the CPU": (lambda m, x: m.l(x * torch.tensor(0.5)), {}, (32, 64)),
    "residual sums without norms": (
        residual_mlp,
        {name: lambda: nn.Linear(64, 64) for name in "abcde"},
        (32, 64),
    ),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_models(case, graphs, monkeypatch):
    function, members, shape = AWKWARD[case]
    made = {name: make() for name, make in members.items()}
    model = Made(function, l=nn.Linear(64, 96), **made).bfloat16()
    x = (torch.randn(shape) * torch.rand(shape[0], 1).clamp_min(0.1)).bfloat16()
    want = gradients(model, x, Config(), kernels_off=True, monkeypatch=monkeypatch)
    got = gradients(model, x, Config(), kernels_off=False, monkeypatch=monkeypatch)
    for a, b in zip(leaves(got.outputs), leaves(want.outputs), strict=True):
        if a.is_floating_point():
            assert cosine(a, b) > 0.999
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter


def test_kernels_do_not_need_each_other():
    """Two kernels, each of which would read what the other one stores."""
    g = fx.Graph()
    a, b = g.placeholder("a"), g.placeholder("b")
    first = g.call_function(torch.neg, (a,))
    second = g.call_function(torch.neg, (b,))
    g.output((first, second))
    first.args, second.args = (second,), (first,)
    with pytest.raises(AssertionError, match="needs what it computes"):
        sort_topologically(g)


@pytest.mark.parametrize("parts", ["ab", "aa", "aba"])
def test_codes_side_by_side(parts, monkeypatch):
    """Stored there by the kernels, or copied where one part is two."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)

    def function(x, y, scale):
        codes = {"a": fp8.quantize(x, scale, "e4m3"), "b": fp8.quantize(y, scale, "e4m3")}
        turned = [fp8.transpose(codes[name]).view(torch.uint8) for name in "ab"]
        return fp8.joined([codes[name] for name in parts]).view(torch.uint8), *turned

    args = torch.randn(32, 64), torch.randn(32, 48), torch.tensor(0.01)
    gm = make_fx(function, tracing_mode="fake")(*args)
    fuse_tiles(gm, Context(Config()))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    joined = fp8.joined.default in {n.target for n in gm.graph.nodes}
    assert joined == (len(set(parts)) < len(parts))
    for got, want in zip(gm(*args), function(*args), strict=True):
        assert torch.equal(got, want)


def heads(x):
    return x.view(2, 16, 4, 16).transpose(1, 2)


AT_HAND = {
    "input": lambda x, w: x,
    "view of an input": lambda x, w: x.view(2, -1, 64).view(64, 32),
    "product": lambda x, w: x @ w,
    "attention": lambda x, w: (
        aten._scaled_dot_product_flash_attention_for_cpu(*[heads(x)] * 3)[0]
        .transpose(1, 2)
        .reshape(32, 64)
    ),
}
COMPUTED = {
    "pointwise": lambda x, w: x @ w + 1,
    "copy": lambda x, w: heads(x).reshape(32, 64),
    "part of an input": lambda x, w: x[:, 1:],
    "one row for all": lambda x, w: w[0].expand(32, 64),
    "gathered": lambda x, w: torch.cat([x, w]),
    # Laid out as Inductor likes, and copied.
    "convolution": lambda x, w: torch.conv1d(x[None], w[:32, :32, None]).view(32, 64),
}


@pytest.mark.parametrize("case", [*AT_HAND, *COMPUTED])
def test_amaxes_of_what_nothing_generated_computes(case, monkeypatch):
    """Elsewhere the generated code that computes a value takes its amax."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    value = (AT_HAND | COMPUTED)[case]

    def function(x, w):
        return fp8.amax(value(x, w))

    args = torch.randn(32, 64), torch.randn(64, 64)
    gm = make_fx(function, tracing_mode="fake")(*args)
    fuse_tiles(gm, Context(Config()))
    assert (tiles in {n.target for n in gm.graph.nodes}) == (case in AT_HAND)
    are_inputs = [n.op == "placeholder" for n in gm.graph.nodes]
    assert are_inputs == sorted(are_inputs, reverse=True)
    for special in (1.0, -1e30, math.nan, -math.inf):
        args[0][3, 17] = special
        assert torch.equal(gm(*args).nan_to_num(-1.0), function(*args).nan_to_num(-1.0))


def test_explain_counts_kernels(graphs):
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    explanation = fp8pass.explain(model, x)
    forward, backward = explanation.graphs[0].plan.kernels
    assert forward.programs == {"rows": 22, "scales": 22}
    assert backward.programs == {"rows": 3, "tiles": 41, "scales": 10}
    assert (forward.launches, backward.launches) == (11, 26)
    assert "Kernels: 25 × rows, 32 × scales, 41 × tiles, in" in str(explanation)


def test_explain_says_why_there_are_no_kernels():
    x = torch.randn(32, 64, requires_grad=True)
    assert "× no Triton kernels on cpu" in str(fp8pass.explain(MLP(), x))
