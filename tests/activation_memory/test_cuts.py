"""The minimum cut against brute force, and the guarantees of the plan."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import replace

import pytest
import torch
from helpers import (
    COAT_EAGER,
    EXACT_EAGER,
    FFN,
    MLP,
    JointGraph,
    benchmark_models,
    capture_joint,
    capture_joints,
    compiled,
    llama,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fp8pass import graph
from fp8pass.activation_memory import cuts
from fp8pass.activation_memory.cuts import Cut, components, min_cut
from fp8pass.activation_memory.reasons import SavedReason
from fp8pass.config import Config
from fp8pass.error_analysis.differences import COPIES, TOTALS
from fp8pass.error_analysis.regions import FORMULAS
from fp8pass.graph.classify import Kind, kind
from fp8pass.passes import JOINT_PASSES
from fp8pass.plan import Plan
from fp8pass.testing.strategies import programs

# --- the cut ------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Draw a random graph with costs: (values, needed, bytes, price)."""
    g = fx.Graph()
    values: list[fx.Node] = []
    sizes: dict[fx.Node, float] = {}
    prices: dict[fx.Node, float] = {}
    for i in range(draw(st.integers(1, 8))):
        used = draw(st.lists(st.sampled_from(values), max_size=3, unique=True)) if values else []
        node = g.call_function(operator.add, tuple(used)) if used else g.placeholder(f"x{i}")
        prices[node] = math.inf if not used else draw(st.sampled_from([0, 1, 3, 10, math.inf]))
        cannot_store = not math.isinf(prices[node]) and draw(st.integers(0, 5)) == 0
        sizes[node] = math.inf if cannot_store else draw(st.sampled_from([0, 1, 2, 5, 20, 100]))
        values.append(node)
    needed = set(draw(st.lists(st.sampled_from(values), min_size=1, unique=True)))
    return values, needed, sizes, prices


def cost(problem, saved, recomputed) -> float:
    """Return the cost of a choice; infinite if the backward would miss a needed value."""
    _, needed, sizes, prices = problem
    available = saved | recomputed
    if not needed <= available:
        return math.inf
    if any(n not in available for node in recomputed for n in node.all_input_nodes):
        return math.inf
    return sum(sizes[n] for n in saved) + sum(prices[n] for n in recomputed)


@pytest.mark.parametrize("early", [False, True])
@given(problem=problems())
def test_min_cut_is_optimal(early, problem):
    values, needed, sizes, prices = problem
    cut = min_cut(values, needed, sizes.__getitem__, prices.__getitem__, early=early)
    assert not cut.saved & cut.recomputed
    best = min(
        cost(
            problem,
            {n for n, choice in zip(values, choices, strict=True) if choice == 1},
            {n for n, choice in zip(values, choices, strict=True) if choice == 2},
        )
        for choices in itertools.product(range(3), repeat=len(values))
    )
    assert cost(problem, cut.saved, cut.recomputed) == best
    assert cut.cost == best


def test_min_cut_of_a_chain():
    """The cheapest value is saved, and the other values are recomputed from it."""
    g = fx.Graph()
    x = g.placeholder("x")
    y = g.call_function(operator.neg, (x,))
    z = g.call_function(operator.neg, (y,))
    sizes, prices = {x: 100, y: 10, z: 50}, {x: math.inf, y: 1, z: 1}
    cut = min_cut([x, y, z], {z, y}, sizes.__getitem__, prices.__getitem__)
    assert cut == Cut({y}, {z}, 11)
    sizes[x] = 5
    cut = min_cut([x, y, z], {z, y}, sizes.__getitem__, prices.__getitem__)
    assert cut == Cut({x}, {y, z}, 7)


def test_early_selects_among_equal_cuts():
    g = fx.Graph()
    x = g.placeholder("x")
    y = g.call_function(operator.neg, (x,))
    sizes, prices = {x: 10, y: 10}, {x: math.inf, y: 0}
    for early, saved in ((False, y), (True, x)):
        cut = min_cut([x, y], {y}, sizes.__getitem__, prices.__getitem__, early=early)
        assert (cut.saved, cut.cost) == ({saved}, 10)


@given(problems())
def test_components_can_be_solved_one_by_one(problem):
    values, needed, sizes, prices = problem
    whole = min_cut(values, needed, sizes.__getitem__, prices.__getitem__)
    parts = components(values, needed, prices.__getitem__)
    assert len({n for part in parts for n in part}) == sum(map(len, parts))
    total = sum(
        min_cut(part, needed & set(part), sizes.__getitem__, prices.__getitem__).cost
        for part in parts
    )
    assert total == whole.cost


def test_equal_components_are_solved_once():
    """The layers of a model have equal components. Another price is another problem."""

    def region(price: int) -> Cut:
        g = fx.Graph()
        x = g.placeholder("x")
        y = g.call_function(operator.neg, (x,))
        sizes, prices = {x: 10, y: 7}, {x: math.inf, y: price}
        return min_cut([x, y], {y}, sizes.__getitem__, prices.__getitem__)

    cuts.solve_cut.cache_clear()
    assert [region(price).cost for price in (1, 1, 1, 3, 3)] == [7, 7, 7, 7, 7]
    assert cuts.solve_cut.cache_info().misses == 2


# --- guarantees of the plan ---------------------------------------------------------------------


def plan_of(model, *args, config=COAT_EAGER, **options):
    program, spy = compiled(model, config, **options)
    program(*args)
    return spy.plan


def decoder(**options):
    models = benchmark_models()
    cos, sin = models.rope_tables(32, 32, torch.device("cpu"))
    x = torch.randn(2, 32, 128).bfloat16().requires_grad_()
    return plan_of(models.Stack(1, 128, 4, 352).bfloat16(), x, cos, sin, **options)


@pytest.mark.long
def test_attention_is_saved_exactly():
    """q, k, v and the output are the only values saved at full size."""
    plan = decoder()
    elements = 2 * 32 * 128
    exact = [s for s in plan.saved if s.saved_as == "exact"]
    kept = [s for s in exact if s.bytes == 2 * elements]
    assert len(kept) == 4
    assert sum("attention" in s.op for s in kept) == 1
    assert all("attention may amplify" in s.reason for s in kept)
    assert any("computed from this tensor" in s.reason for s in kept)  # attention reads a view of v


@pytest.mark.long
def test_saved_tensors_of_a_decoder_layer():
    """As in design.md: the residual stream, gate and up in FP8, attention in BF16."""
    plan = decoder()
    low = sorted(s.shape for s in plan.saved if s.expected_error)
    assert low == ["2×32×128", "2×32×352", "2×32×352"]
    u = 2 * 32 * 128 * 2
    tables = sum(s.bytes for s in plan.saved if s.op == "placeholder")
    # 4 U of attention, 0.5 U of the stream (its input is a leaf), 2 × 352/128/2 U; and scales.
    assert 7.25 * u <= plan.saved_bytes - tables <= 7.5 * u


def test_a_leaf_input_is_free_and_exact():
    plan = plan_of(FFN(64, 128), torch.randn(32, 64, requires_grad=True))
    (held,) = [s for s in plan.saved if s.op == "placeholder"]
    assert (held.bytes, held.saved_as) == (0, "exact")
    assert held.reason == SavedReason.LEAF


def test_an_input_that_is_not_a_leaf_is_saved_in_low_bits():
    """If blocks are compiled one by one, such an input is the previous block's output."""
    x = torch.randn(32, 64, requires_grad=True) * 1
    plan = plan_of(lambda x: F.silu(x) * x, x)
    (stored,) = plan.saved
    assert (stored.op, stored.saved_as) == ("placeholder", "e4m3 1×64")
    assert stored.bytes == plan.saved_bytes == 32 * 64 + 32 * 2


def test_an_input_without_gradient_stays_exact():
    """Examples are a table of rotary embeddings, a mask and data."""
    plan = plan_of(
        lambda x, w: (x * w) * 2, torch.randn(32, 64, requires_grad=True), torch.rand(64)
    )
    (table,) = plan.saved
    assert (table.op, table.saved_as, table.shape) == ("placeholder", "exact", "64")
    torch._dynamo.reset()
    x = torch.randn(32, 64, requires_grad=True) * 1
    plan = plan_of(lambda x, w: F.silu(x * w), x, torch.rand(32, 64))
    kept = {s.saved_as for s in plan.saved if s.reason == SavedReason.INPUT}
    assert kept == {"exact"}


@pytest.mark.parametrize("recipe", ["coat", "exact"])
def test_parameters_are_not_counted(recipe):
    plan = plan_of(MLP(), torch.randn(32, 64), config=Config.recipe(recipe, compiler="eager"))
    assert not [s for s in plan.saved if s.reason == SavedReason.PARAMETER]


@pytest.mark.long
def test_linear_recipe_saves_everything_exactly():
    plan = decoder(config=Config.recipe("linear", compiler="eager"))
    assert {s.expected_error for s in plan.saved} == {0.0}


@pytest.mark.long
def test_softmax_of_eager_attention_is_saved_exactly():
    plan = plan_of(llama("eager"), tokens())
    low = {s.op for s in plan.saved if s.expected_error}
    assert not {op for op in low if "softmax" in op or "exp" in op or "amax" in op}


def test_group_size_divides_the_row():
    plan = plan_of(FFN(64, 176), torch.randn(32, 64))
    kept = {s.shape: s.saved_as for s in plan.saved if s.expected_error}
    assert kept == {"32×176": "e4m3 1×88"}
    for s in plan.saved:
        if s.expected_error:
            assert s.bytes == 32 * 176 + 32 * 2 * 2


class Block(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.mlp, self.norm, self.recompute = FFN(64, 128), nn.LayerNorm(64), recompute

    def forward(self, x):
        def run(x):
            return self.mlp(self.norm(x))

        return x.sin() + (
            checkpoint(run, x.sin(), use_reentrant=False) if self.recompute else run(x)
        )


@pytest.mark.long
@pytest.mark.parametrize("config", [COAT_EAGER, EXACT_EAGER], ids=["coat", "exact"])
def test_checkpointed_regions_are_recomputed(config):
    plans = {}
    for recompute in (False, True):
        torch._dynamo.reset()
        x = torch.randn(32, 64, requires_grad=True)
        plans[recompute] = plan_of(Block(recompute), x, config=config)
    assert any("128" in s.shape for s in plans[False].saved)
    assert not any("128" in s.shape for s in plans[True].saved)


class Attention(nn.Module):
    """Attention on one projection, in a checkpointed region or not."""

    def __init__(self, recompute: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.proj, self.recompute, self.dropout = nn.Linear(64, 64), recompute, dropout

    def forward(self, x):
        def run(x):
            q = self.proj(x).unflatten(-1, (4, 16)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout)

        x = x.sin()
        return checkpoint(run, x, use_reentrant=False) if self.recompute else run(x)


def test_checkpointed_attention_is_recomputed():
    """The operator can draw random numbers for dropout, but does not here."""
    kept = {}
    for recompute in (False, True):
        torch._dynamo.reset()
        plan = plan_of(Attention(recompute), torch.randn(2, 32, 64, requires_grad=True))
        kept[recompute] = [s for s in plan.saved if "attention" in s.op]
    assert kept[False]
    assert not kept[True]


def test_random_masks_are_not_rounded():
    def run(x):
        return F.dropout(x.sin(), 0.3) * x

    plan = plan_of(run, torch.randn(32, 64, requires_grad=True) * 1)
    for s in plan.saved:
        assert not (s.expected_error and "rand" in s.op)


def has_derivation(node: fx.Node) -> bool:
    """Whether the error rules can derive the effect of inexact operands of `node`."""
    linear = (Kind.GEMM, Kind.CONVOLUTION, Kind.QUANTIZE, Kind.MOVEMENT)
    known = FORMULAS.keys() | COPIES | set(TOTALS)
    target = graph.operator_of(node).target
    return target in known or target is torch.ops.aten.var_mean.correction or kind(node) in linear


def reads_rounded(joint: JointGraph) -> list[fx.Node]:
    """Return operators that must be exact, but are computed from values in low-bit formats."""
    gradients = graph.tangent_dependent(joint.gm.graph)
    rounded: set[fx.Node] = set()
    wrong = []
    for node in joint.gm.graph.nodes:
        if node.target is torch.ops.fp8pass.dequantize.default:
            rounded.add(node)
        elif node.op == "call_function" and any(n in rounded for n in node.all_input_nodes):
            if not has_derivation(node):
                wrong.append(node)
            if node not in gradients:
                rounded.add(node)
    return wrong


@pytest.mark.long
@given(programs())
def test_operators_that_tolerate_no_error_read_exact_values(case):
    program, inputs = case
    torch._dynamo.reset()
    inputs = [x * 1 for x in inputs]  # not leaves, which would be saved at no cost
    if not any(t.requires_grad for t in (*inputs, *program.parameters())):
        return
    for joint in capture_joints(program, *inputs):
        for pass_ in JOINT_PASSES:
            pass_(joint.gm, joint.ctx)
        assert not reads_rounded(joint)


@pytest.mark.parametrize("sensitive", [torch.log, torch.cos, lambda x: x.softmax(-1), torch.cumsum])
def test_sensitive_operators_read_exact_values(sensitive):
    """Sensitive and tolerant operators share one value; another value is rounded."""

    def run(x, y):
        if sensitive is torch.cumsum:
            return (x * y).cumsum(-1).sin() * F.silu(y)
        return sensitive(x * y) * F.silu(y) + F.silu(x) * y

    x, y = (torch.randn(32, 64, requires_grad=True) * 1 for _ in range(2))
    joint = capture_joint(run, x, y)
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
    assert not reads_rounded(joint)


def test_a_sensitive_operator_with_a_rounded_operand_is_not_recomputed():
    def run(x, y, w):
        angle = torch.atan2(x.detach(), y.detach()) * 2
        return angle * w + F.silu(y) * y + x

    x = torch.randn(32, 64, requires_grad=True)  # a leaf, exact at no cost
    y, w = (torch.randn(32, 64, requires_grad=True) * 1 for _ in range(2))
    joint = capture_joint(run, x, y, w)
    for pass_ in JOINT_PASSES:
        pass_(joint.gm, joint.ctx)
    assert joint.calls(torch.ops.fp8pass.dequantize.default)
    assert not reads_rounded(joint)


# --- keep_exact ---------------------------------------------------------------------------------

UNRULED = Config.recipe("agoq", compiler="eager", error_tolerance=math.inf)


def low_bit(plan: Plan) -> dict[str, str]:
    """Return the names and formats of the values saved in low-bit formats."""
    return {s.value: s.saved_as for s in plan.saved if not s.saved_as.startswith("exact")}


def test_views_of_an_expanded_tensor_are_recomputed_from_its_copy():
    """A view may be invalid on the saved copy, because its rows do not share memory."""

    def model(x, weight):
        right = x.chunk(2, -1)[1]
        return nn.functional.rms_norm(torch.cat([right, right]), (16,), weight)

    x = torch.randn(1, 1, 32).expand(2, 1, 32)
    weight = torch.randn(16, requires_grad=True)
    compiled_model, _ = compiled(model)
    (got,) = torch.autograd.grad(compiled_model(x, weight).square().sum(), weight)
    (want,) = torch.autograd.grad(model(x, weight).square().sum(), weight)
    torch.testing.assert_close(got, want)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["coat", "agoq"])
def test_a_value_by_its_name(recipe):
    """Each value of a decoder layer is kept exactly, one at a time."""
    config = Config.recipe(recipe, compiler="eager")
    names = low_bit(decoder(config=config)).keys()
    assert len(names) == 3
    for name in names:
        torch._dynamo.reset()
        plan = decoder(config=replace(config, keep_exact=(name,)))
        assert low_bit(plan).keys() == names - {name}
        kept = [s for s in plan.saved if s.value == name]  # empty if recomputed exactly
        assert all(s.reason == f"matches keep_exact pattern {name!r}" for s in kept)


@pytest.mark.long
def test_values_by_module():
    found = {}
    for pattern in ("", "*.mlp", "layers.[01]"):  # not the FP8 data of its linear layers
        torch._dynamo.reset()
        config = replace(UNRULED, keep_exact=(pattern,) if pattern else ())
        plan = plan_of(llama(), tokens(), config=config)
        found[pattern] = {name.split(":")[0] for name in low_bit(plan)}
    in_mlp = {m for m in found[""] if ".mlp" in m}
    assert in_mlp
    assert found["*.mlp"] == found[""] - in_mlp
    assert not any(".layers." in m for m in found["layers.[01]"])


def exponential(x, y):
    """The gradient of `y` is an exponential, which can be recomputed from `x`."""
    return torch.exp(x) * y + F.silu(x) * x


@pytest.mark.parametrize("keep", ["", ":exp.default:0", ":placeholder:0"])
def test_exact_values_are_not_recomputed_from_rounded_values(keep):
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    gradients = []
    for config in (replace(UNRULED, keep_exact=(keep,) if keep else ()), EXACT_EAGER):
        torch._dynamo.reset()
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        program, _ = compiled(exponential, config)
        program(*(t * 1 for t in leaves)).sum().backward()
        gradients.append([t.grad for t in leaves])
    (x_grad, y_grad), (x_exact, y_exact) = gradients
    assert torch.equal(y_grad, y_exact) is bool(keep)
    assert not torch.equal(x_grad, x_exact)


def test_keep_exact_values_are_not_replaced_by_their_derivative():
    """With `down` in high precision, GELU's derivative would be saved instead of its input."""
    names = low_bit(plan_of(MLP(), torch.randn(32, 64))).keys()
    torch._dynamo.reset()
    config = replace(COAT_EAGER, skip=("up", "down"), keep_exact=tuple(names))
    assert names
    assert not low_bit(plan_of(MLP(), torch.randn(32, 64), config=config))


@pytest.mark.long
def test_names_depend_neither_on_sizes_nor_on_skipped_layers():
    model = nn.Sequential(MLP((64, 128, 64)), MLP((64, 128, 64)))
    found = []
    for dynamic, skip in ((False, ()), (True, ()), (False, ("up",))):
        torch._dynamo.reset()
        config = replace(COAT_EAGER, skip=skip)
        found.append(low_bit(plan_of(model, torch.randn(48, 64), config=config, dynamic=dynamic)))
    assert found[0].keys() == found[1].keys() == found[2].keys()
    assert "0.up:addmm.default:0" in found[0]


def test_places_of_saved_values():
    model = nn.Sequential(MLP((64, 128, 64)), MLP((64, 128, 64)))
    plan = plan_of(model, torch.randn(48, 64))
    places = {s.value: s.place for s in plan.saved if s.value in low_bit(plan)}
    assert places == {"0.up:addmm.default:0": 1, "1.up:addmm.default:0": 3}


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("layers.0.mpl", "matches no module of this graph. Did you mean"),
        ("up:addm.default:0", "matches no value of this graph. Did you mean 'up:addmm.default:0'"),
    ],
)
def test_a_pattern_that_matches_nothing_warns(pattern, says):
    model = llama() if "layers" in pattern else MLP()
    batch = tokens() if "layers" in pattern else torch.randn(32, 64)
    with pytest.warns(UserWarning, match=f"keep_exact pattern '{pattern}' {says}"):
        plan_of(model, batch, config=replace(COAT_EAGER, keep_exact=(pattern,)))


def test_checkpointed_values_are_recomputed_from_exact_values():
    config = replace(UNRULED, keep_exact=("norm",))
    plan = plan_of(Block(recompute=True), torch.randn(32, 64, requires_grad=True), config=config)
    assert not [s for s in plan.saved if s.module == "norm" and s.value in low_bit(plan)]
