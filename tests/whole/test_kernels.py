"""The kernels replace the right parts of graphs, and gradients do not change.

On the CPU the references of the kernels run, and most tests run lowered graphs op by op.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import MLP, benchmark_models, cosine, gpt2, llama, relative, step, tokens
from kernel_helpers import Layers, counts, interpret_halves
from torch import nn

from fp8pass import backend as make_backend
from fp8pass import compat, graph
from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.kernels.tile_kernel import tiles
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.config import Config
from fp8pass.graph.nodes import tensor
from fp8pass.option_checks import ConfigError
from fp8pass.passes import gemm_choice, quantizer
from fp8pass.passes.lowering import fuse_tiles


def gradients(model, x, config, *, kernels_off, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv(
        "FP8PASS_DISABLE_PASSES", "fuse_rows,fuse_norms,fuse_tiles" if kernels_off else ""
    )
    program = torch.compile(model, backend=make_backend(config))
    return step(program, model, (x.clone().requires_grad_(),))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "shape", "recipe"),
    [(Layers, (2, 16, 128), "coat"), (Layers, (2, 16, 128), "agoq"), (MLP, (32, 64), "linear")],
    ids=["coat", "agoq", "linear"],
)
def test_kernels_do_not_change_gradients(make, shape, recipe, graphs, monkeypatch):
    model, x = make().bfloat16(), torch.randn(shape).bfloat16()
    config = Config.recipe(recipe)
    want = gradients(model, x, config, kernels_off=True, monkeypatch=monkeypatch)
    assert set(counts(graphs)) == {"quantize"}
    graphs.clear()
    got = gradients(model, x, config, kernels_off=False, monkeypatch=monkeypatch)
    assert counts(graphs)["tiles"]
    for a, b in zip(
        compat.tensor_leaves(got.outputs), compat.tensor_leaves(want.outputs), strict=True
    ):
        assert cosine(a, b) > 0.9995
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter


class NormedMLP(nn.Module):
    """Two gated MLPs with norms, so that the second norm follows a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(64) for _ in range(2))
        self.mlps = nn.ModuleList(Gated(nn.functional.silu) for _ in range(2))

    def forward(self, x):
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return x


@pytest.mark.long
def test_kernels_of_norms_compute_amaxes_under_autocast(graphs, monkeypatch):
    """The residual stream is in FP32, and GEMMs read its gradient in BF16."""
    model, x = NormedMLP(), torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        want = gradients(model, x, Config(), kernels_off=True, monkeypatch=monkeypatch)
        graphs.clear()
        got = gradients(model, x, Config(), kernels_off=False, monkeypatch=monkeypatch)
    _, backward = graphs
    operands = [n.args[0] for n in backward.nodes if n.target is torch.ops.fp8pass.amax.default]
    assert [tuple(tensor(x).shape) for x in operands] == [(32, 64), (32, 1)]
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter


@pytest.mark.long
def test_generated_code_agrees_with_interpreted_graphs(kernels_on_cpu, monkeypatch):
    """Inductor compiles them for dynamic shapes."""
    model, x = NormedMLP().bfloat16(), torch.randn(32, 64).bfloat16()
    found = []
    for interprets in (False, True):
        if interprets:
            interpret_halves(monkeypatch)
        torch._dynamo.reset()
        program = torch.compile(model, backend="fp8pass", dynamic=True)
        found.append([step(program, model, (x[:rows].requires_grad_(),)) for rows in (32, 24)])
    forward, backward, *_ = (counts([g]) for g in kernels_on_cpu)
    assert forward.keys() >= {"rows", "scales"}
    assert backward.keys() >= {"rows", "tiles"}
    for got, want in zip(*found, strict=True):
        assert relative(got.outputs[0], want.outputs[0]) < 0.01
        for parameter, gradient in want.gradients.items():
            assert relative(got.gradients[parameter], gradient) < 0.05, parameter


@pytest.mark.long
def test_recipe_exact_uses_no_kernels(graphs):
    model, x = Layers(1).bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    program = torch.compile(model, backend=make_backend(Config.recipe("exact")))
    program(x).sum().backward()
    assert set(counts(graphs)) == {"quantize"}  # in a lossless format


@pytest.mark.long
def test_kernels_can_be_disabled(graphs, monkeypatch):
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_tiles")
    model, x = Layers(1).bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    assert counts(graphs)["rows"]
    assert not counts(graphs)["tiles"]
    monkeypatch.setenv("FP8PASS_DISABLE_PASSES", "fuse_tile")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"'fuse_tile'.*'fuse_tiles'") as raised:
        torch.compile(model, backend="fp8pass")(x)
    assert isinstance(raised.value.inner_exception, ConfigError)  # type: ignore[attr-defined]


@pytest.mark.long
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


@pytest.mark.long
def test_dynamic_lengths_use_kernels(graphs):
    model = Layers(1).bfloat16()
    program = torch.compile(model.stack, backend="fp8pass", dynamic=True)
    for length in (16, 24, 21):
        tables = benchmark_models().rope_tables(length, 64, torch.device("cpu"))
        x = torch.randn(2, length, 128).bfloat16().requires_grad_()
        program(x, *tables).sum().backward()
        assert x.grad.isfinite().all()
    assert counts(graphs)["rows"]
    assert counts(graphs)["tiles"]


class Gated(nn.Module):
    """A gated unit with a given activation."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


@pytest.mark.long
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
def test_gated_units_with_any_activation_use_the_kernels(activation, graphs, monkeypatch):
    """One tile kernel computes the gated product and its gradients."""
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


class Perceptron(nn.Module):
    """Two layers with biases around a GELU, as in ViT, with a linear layer before them."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(64, 48), nn.Linear(48, 256), nn.Linear(256, 64)
        self.activation = nn.GELU(approximate)

    def forward(self, x):
        return self.down(self.activation(self.up(self.first(x))))


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("autocast", [False, True])
def test_norm_kernels_sum_gradients_of_biases(autocast, graphs, monkeypatch):
    """Of the norm, and of the linear layer before the residual sum."""
    model, x = nn.Sequential(*(BiasedBlock() for _ in range(3))), torch.randn(2, 32, 64)
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    found, summed = [], []
    for kernels_off in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            options = {"kernels_off": kernels_off, "monkeypatch": monkeypatch}
            found.append(gradients(model, x, Config(), **options).gradients)
        sums = graphs[-1].find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
        over_rows = [n for n in sums if n.args[1] != [2]]
        summed.append([n for n in over_rows if not graph.is_getitem(n.args[0])])
    # In the first block, only the backward of a norm without a residual gradient is left.
    assert len(summed[0]) == 12
    assert len(summed[1]) <= 3
    plain = step(model, model, (x,)).gradients
    for parameter, want in plain.items():
        without, with_kernels = (relative(each[parameter], want) for each in found)
        assert with_kernels < 1.3 * without + 0.01, parameter


@pytest.mark.parametrize("frozen", [False, True])
def test_norm_kernels_compute_the_gradient_that_a_block_returns(frozen, graphs, monkeypatch):
    """Layers that are compiled one by one return the sums of the residual stream's gradient.

    Weights of norms are frozen if only adapters are trained.
    """
    model, x = BiasedBlock().bfloat16(), torch.randn(2, 32, 64).bfloat16()
    for layer in (model.norm, model.down):
        layer.requires_grad_(not frozen)
    without = gradients(model, x, Config(), kernels_off=True, monkeypatch=monkeypatch)
    got = gradients(model, x, Config(), kernels_off=False, monkeypatch=monkeypatch)
    (returned,) = [n for n in graph.outputs(graphs[-1]) if n and tensor(n).shape == x.shape]
    kernel = graph.operator_of(graph.skip_reshapes(returned))
    assert kernel.target is rows
    stores = Batch.parse(kernel.args[1]).programs[0].stores
    sums = sum("sums" in store.layouts for store in stores)
    assert (sums == 0) if frozen else (sums >= 2)  # of the norm's weight and bias
    plain = step(model, model, (x.clone().requires_grad_(),)).gradients
    for parameter, want in plain.items():
        bound = 1.3 * relative(without.gradients[parameter], want) + 0.01
        assert relative(got.gradients[parameter], want) < bound, parameter


# Recipe, autocast, form of GELU, and the only GEMM in BF16 of each layer.
BIASES = {
    "bf16": ("coat", False, "tanh", ""),
    "autocast": ("coat", True, "none", ""),
    "values saved in BF16": ("linear", False, "none", ""),
    "values saved in BF16 under autocast": ("linear", True, "tanh", ""),
    "wgrad in BF16": ("coat", False, "tanh", "wgrad"),
    "values saved and wgrad in BF16": ("linear", False, "tanh", "wgrad"),
    "values saved and dgrad in BF16": ("linear", False, "tanh", "dgrad"),
}


def leave_out(role, monkeypatch):
    """Run the GEMMs with a role in BF16."""

    def choose(*args):
        choice = gemm_choice.choose_gemms(*args)
        rest = {gemm for gemm in choice.in_fp8 if gemm.meta["fp8pass_role"] == role}
        choice.in_fp8 -= rest
        choice.casts.update((gemm, {}) for gemm in rest)
        choice.gains.update(dict.fromkeys(rest, 0.0))
        return choice

    monkeypatch.setattr(quantizer, "choose_gemms", choose)


def rows_summed(g):
    """Return the number of rows of each sum over rows of 256 columns."""
    sums = g.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    operands = (tensor(node.args[0]) for node in sums)
    return [math.prod(x.shape[:-1]) for x in operands if x.shape[-1] == 256]


@pytest.mark.long
@pytest.mark.parametrize("case", BIASES)
def test_tile_kernels_sum_gradients_of_biases(case, graphs, monkeypatch):
    """Nothing stores the gradient of GELU, unless a GEMM in BF16 reads it."""
    recipe, autocast, approximate, in_bf16 = BIASES[case]
    leave_out(in_bf16, monkeypatch)
    model, x = Perceptron(approximate), torch.randn(4, 40, 64)
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    found, summed = [], []
    for find_sums in (lambda reader, values: {}, fuse_tiles._find_column_sums):
        monkeypatch.setattr(fuse_tiles, "_find_column_sums", find_sums)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            options = {"kernels_off": False, "monkeypatch": monkeypatch}
            found.append(gradients(model, x, Config.recipe(recipe), **options).gradients)
        summed += rows_summed(graphs[-1])
    in_memory = recipe == "linear" and in_bf16
    assert summed == [160, 160 if in_memory else math.ceil(160 / 64)]
    multiplied = [n for n in graphs[-1].nodes if n.target is torch.ops.aten.mul.Tensor]
    assert any(tensor(n).numel() == 160 * 256 for n in multiplied) == bool(in_bf16)
    for parameter, want in found[0].items():
        # Kernels do not round to BF16 what they dequantize from groups.
        tolerance = 0.01 if recipe == "coat" and parameter == "up.bias" else 1e-3
        assert relative(found[1][parameter], want) < tolerance, parameter


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "linear"])
def test_gradients_of_biases_with_dynamic_shapes(recipe, kernels_on_cpu):
    """Inductor compiles the graphs. The last tile may have few rows."""
    model = Perceptron("tanh").bfloat16()
    program = torch.compile(model, backend=make_backend(Config.recipe(recipe)), dynamic=True)
    for count in (160, 37, 128):
        x = torch.randn(count, 64).bfloat16().requires_grad_()
        got, want = step(program, model, (x,)), step(model, model, (x,))
        for name in ("first.bias", "up.bias", "down.bias"):
            assert relative(got.gradients[name], want.gradients[name]) < 0.15, name
    assert len(kernels_on_cpu) == 2
    (count,) = rows_summed(kernels_on_cpu[-1])
    assert isinstance(count, torch.SymInt)
    assert not any(n.target is torch.ops.aten.tanh.default for n in kernels_on_cpu[-1].nodes)


class GatedByOne(nn.Module):
    """A gated unit with gate and up in one linear layer, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(64, 256), nn.Linear(128, 64)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


@pytest.mark.long
def test_kernels_read_the_halves_of_a_product(graphs, monkeypatch):
    """Row kernels of the forward and tile kernels of the backward do not copy gate or up."""
    model, x = GatedByOne().bfloat16(), torch.randn(2, 32, 64).bfloat16()
    want = gradients(model, x, Config(), kernels_off=True, monkeypatch=monkeypatch)
    graphs.clear()
    got = gradients(model, x, Config(), kernels_off=False, monkeypatch=monkeypatch)
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter
    parts = [
        {(x.operand, x.width, x.offset) for x in program.loads if x.width}
        for g in graphs
        for node in g.nodes
        if node.target in (tiles, rows)
        for program in Batch.parse(node.args[1]).programs
    ]
    assert {("full", 256, 0), ("full", 256, 128)} in parts
    assert {("groups", 256, 0), ("groups", 256, 128)} in parts


class FunctionModel(nn.Module):
    """A model that calls a function with its modules and parameters."""

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
    # Two layers share the quantized gradient.
    "a sum of layers": (
        lambda m, x: m.l(torch.tanh(x)) + m.b(torch.tanh(x)),
        {"b": lambda: nn.Linear(64, 96, bias=False)},
        (32, 64),
    ),
    # In a square matrix, values by row and values by column have the same shape.
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


@pytest.mark.long
@pytest.mark.parametrize("case", AWKWARD)
def test_unusual_models_have_the_same_gradients(case, graphs, monkeypatch):
    function, members, shape = AWKWARD[case]
    made = {name: make() for name, make in members.items()}
    model = FunctionModel(function, l=nn.Linear(64, 96), **made).bfloat16()
    x = (torch.randn(shape) * torch.rand(shape[0], 1).clamp_min(0.1)).bfloat16()
    want = gradients(model, x, Config(), kernels_off=True, monkeypatch=monkeypatch)
    got = gradients(model, x, Config(), kernels_off=False, monkeypatch=monkeypatch)
    for a, b in zip(
        compat.tensor_leaves(got.outputs), compat.tensor_leaves(want.outputs), strict=True
    ):
        if a.is_floating_point():
            assert cosine(a, b) > 0.999
    for parameter, gradient in want.gradients.items():
        assert cosine(got.gradients[parameter], gradient) > 0.99, parameter
