"""The error rules reproduce AGoQ's rules, and derive rules for other functions."""

from __future__ import annotations

import math
import time
from functools import cache

import pytest
import sympy
import torch
from helpers import capture_joint
from sympy import Symbol
from torch import Tensor, nn
from torch.nn import functional as F

from fp8pass import graph
from fp8pass.dialect.formats import E2M1, E4M3
from fp8pass.error_analysis import attention as attention_rule
from fp8pass.error_analysis.derivation import Derivation, InputFacts, derive
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.error_analysis.formulas import Formulas, Norm
from fp8pass.error_analysis.regions import Region
from fp8pass.error_analysis.samples import SCALES, Moments, Samples
from fp8pass.graph.symbols import Sigmoid, Underivable
from fp8pass.passes.joint.quantize_linears import quantize_linears

D = 128


class Between(nn.Module):
    """A non-linear function between linear layers."""

    def __init__(self, function, operands: int = 1, features: int = D) -> None:
        super().__init__()
        self.function = function
        self.inputs = nn.ModuleList(
            nn.Linear(features, features, bias=False) for _ in range(operands)
        )
        self.output = nn.Linear(features, features, bias=False)
        self.gain = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.function(self, *(y(x) for y in self.inputs)))


def rules_of(function, operands: int = 1, features: int = D, rows: int = 16) -> Rules:
    torch._dynamo.reset()
    joint = capture_joint(Between(function, operands, features), torch.randn(rows, features))
    return Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts)


@cache
def region_of(function, operands: int = 1) -> Region:
    """The largest region of a function."""
    return max(rules_of(function, operands).regions, key=lambda r: len(r.nodes))


def rms_norm(m: Between, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.gain


def swiglu(m: Between, x: Tensor, y: Tensor) -> Tensor:
    return x * y * torch.sigmoid(y)


class Symbols:
    """The derivation of a region, with access to its symbols."""

    def __init__(self, function, operands: int = 1) -> None:
        self.region = region_of(function, operands)
        self.derivation = Derivation(self.region)
        self.expressions = self.derivation.expressions
        self.formulas = Formulas(self.expressions, self.derivation.outputs)

    def of(self, target) -> Symbol:
        """The symbol of the first member that calls `target`."""
        node = next(n for n in self.region.nodes if n.target is target)
        return self.expressions.symbols[node]

    @property
    def gain(self) -> Symbol:
        """The parameter."""
        return next(c for c in self.expressions.constants if str(c).startswith("%primals"))

    @property
    def gradient_output(self) -> Symbol:
        """The gradient of the input, the last element-wise backward output."""
        symbols = self.expressions.symbols
        outputs = [symbols[n] for n in self.region.outputs if n in self.region.backward]
        return [s for s in outputs if s not in self.expressions.statistics][-1]


# --- AGoQ 4.1.1: RMSNorm ------------------------------------------------------------------------


def test_rms_norm_case_1_is_equation_15():
    """3 ‖γ‖∞ ‖δX‖∞ (‖X‖² / (d r³) + ‖X‖⁴ / (d² r⁵))."""
    s = Symbols(rms_norm)
    (x,) = s.expressions.values
    gain = s.gain
    inverse = s.of(torch.ops.aten.rsqrt.default)
    found = s.formulas.bounds(x, frozenset((x,)))[s.gradient_output]
    size, r = Norm(x, 2), 1 / inverse
    want = 3 * Norm(gain, sympy.oo) * (size**2 / (D * r**3) + size**4 / (D**2 * r**5))
    assert sympy.expand(found - want) == 0


def test_rms_norm_case_2_is_equation_20():
    """6 ‖γ‖∞ ε / r, where ‖X‖₂² = d r²."""
    s = Symbols(rms_norm)
    (x,), gain = s.expressions.values, s.gain
    inverse = s.of(torch.ops.aten.rsqrt.default)
    kept = frozenset((x, inverse))
    found = sum(s.formulas.bounds(k, kept)[s.gradient_output] for k in kept)
    found = sympy.expand(found).subs(Norm(x, 2), sympy.sqrt(D) / inverse)
    assert sympy.simplify(found - 6 * Norm(gain, sympy.oo) * inverse) == 0


def test_both_cases_of_rms_norm_have_equal_bounds():
    one, two = Symbols(rms_norm).derivation.cases()
    assert max(one.values()) <= max(two.values()) * (1 + 1e-5)


def test_rms_norm_and_gemm():
    """AGoQ 8.1.2. Case 1: ‖γ‖∞ (‖X‖/r + ‖X‖³/(d r³)). Case 2: ‖U‖.

    The paper prints both terms of Case 1 with another factor 1/r. That is a mistake: U does not
    change if X is scaled, so the bound for its relative error cannot change either. For r = 1 both
    formulas agree.
    """
    s = Symbols(rms_norm)
    (x,), gain = s.expressions.values, s.gain
    r = 1 / s.of(torch.ops.aten.rsqrt.default)
    output = next(n for n in s.region.outputs if n not in s.region.backward)
    u = s.expressions.symbols[output]
    size = Norm(x, 2)
    found = s.formulas.bounds(x, frozenset((x,)))[u]
    want = Norm(gain, sympy.oo) * (size / r + size**3 / (D * r**3))
    assert sympy.expand(found - want) == 0
    assert s.derivation.bounds([u])[u][u] == pytest.approx(1)


# --- AGoQ 8.1.1: SiLU and multiply --------------------------------------------------------------


def silu_bounds(case: int) -> dict[tuple[str, str], sympy.Expr]:
    """Bounds per output (∂z/∂x, ∂z/∂y) and source (x, y, s), as functions of x and y."""
    s = Symbols(swiglu, 2)
    x, y = s.expressions.values
    sigmoid = s.of(torch.ops.aten.sigmoid.default)
    kept = frozenset((x, y)) if case == 1 else frozenset((x, y, sigmoid))
    names = {x: "x", y: "y", sigmoid: "s"}
    found = {}
    for source in kept:
        for output, value in s.formulas.bounds(source, kept).items():
            factors = s.formulas.factors[output]
            if output in {s.expressions.symbols[n] for n in s.region.backward}:
                wrt = (
                    "x" if x not in s.expressions.expand(factors[0].diagonal).free_symbols else "y"
                )
                found[wrt, names[source]] = _inside(value).subs({x: X, y: Y})
    return found


X, Y = Symbol("x", real=True), Symbol("y", real=True)
SIGMA = 1 / (1 + sympy.exp(-Y))


def _inside(value: sympy.Expr) -> sympy.Expr:
    """Replace the norm of an element-wise bound with the absolute value of its operand."""
    return value.replace(lambda e: isinstance(e, Norm), lambda e: sympy.Abs(e.args[0]))


def _same(found: sympy.Expr, want: sympy.Expr) -> bool:
    """Whether absolute values are equal at random points."""
    points = [(0.3, -0.7), (1.7, 2.3), (-2.1, 0.4), (-0.2, -3.0)]

    found = found.replace(
        lambda e: isinstance(e, Sigmoid), lambda e: 1 / (1 + sympy.exp(-e.args[0]))
    )
    return all(
        math.isclose(
            abs(float(found.subs({X: x, Y: y}))), abs(float(want.subs({X: x, Y: y}))), rel_tol=1e-9
        )
        for x, y in points
    )


def test_silu_case_1():
    found = silu_bounds(1)
    want = {
        ("x", "y"): (SIGMA + Y * SIGMA * (1 - SIGMA)) * Y,
        ("y", "x"): X * SIGMA * (1 + Y * (1 - SIGMA)),
        ("y", "y"): X * SIGMA * (1 - SIGMA) * (2 + Y * (1 - 2 * SIGMA)) * Y,
    }
    assert all(_same(found[key], value) for key, value in want.items())
    assert found["x", "x"] == 0


def test_silu_case_2():
    found = silu_bounds(2)
    want = {
        ("x", "y"): Y * SIGMA,
        ("x", "s"): Y * SIGMA,
        ("y", "x"): X * SIGMA * (1 + Y * (1 - SIGMA)),
        ("y", "y"): X * Y * SIGMA * (1 - SIGMA),
        ("y", "s"): X * SIGMA * (1 + Y * (1 - 2 * SIGMA)),
    }
    assert all(_same(found[key], value) for key, value in want.items())


def test_silu_recomputed_is_tighter_for_small_operands():
    """For |x|, |y| < 1 Case 1 is below Case 2 in every gradient, everywhere."""
    case_1, case_2 = silu_bounds(1), silu_bounds(2)
    for output in "xy":
        sums = [
            sympy.lambdify(
                (X, Y), sum(abs(v) for (o, _), v in case.items() if o == output), MODULES
            )
            for case in (case_1, case_2)
        ]
        for x in (-0.99, -0.5, -0.1, 0.2, 0.7, 0.99):
            for y in (-0.99, -0.4, -0.05, 0.1, 0.6, 0.99):
                assert sums[0](x, y) <= sums[1](x, y) * (1 + 1e-12)


MODULES = [{"Sigmoid": lambda x: 1 / (1 + math.exp(-x))}, "math"]


# --- AGoQ 8.1.3: attention ----------------------------------------------------------------------


def test_the_bound_of_attention_grows_with_length():
    bound = attention_rule.bound_amplification(4096, 128)
    assert bound == 2 * attention_rule.bound_amplification(1024, 128)
    assert bound * E4M3.half_step > 10
    assert rule_of(rms_norm).bound < 4


@pytest.mark.parametrize(("length", "reason"), [(64, "may amplify"), (1, "few tokens")])
def test_attention_operands_stay_exact(length, reason):
    """For one token gradients of scores cancel only if the backward reads the exact values."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    operands = [torch.randn(1, 2, length, 32, requires_grad=True) * 1 for _ in range(3)]
    joint = capture_joint(attend, *operands)
    rules = Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts)
    for node in joint.ctx.facts.activations:
        assert reason in rules.why_exact(node)


def test_attention_of_one_token_amplifies_without_bound():
    assert attention_rule.estimate_amplification(1, 16) > 1e6
    assert 1 < attention_rule.estimate_amplification(64, 16) < 10
    assert attention_rule.estimate_amplification(1, 16, "o") > 1e6


def test_an_inexact_output_is_amplified_less_than_inexact_operands():
    of_output, of_operands = (
        attention_rule.estimate_amplification(256, 64, x) for x in ("o", "qkv")
    )
    assert 0 < of_output < of_operands


# --- rules for other functions ------------------------------------------------------------------


def rule_of(function, operands: int = 1):
    """The worst amplification of the operands of a function."""
    rules = rules_of(function, operands)
    values = {v for r in rules.regions for v in r.values}
    assert not any(rules.why_exact(v) for v in values), [rules.why_exact(v) for v in values]
    return max((rules.amplification(v) for v in values), key=lambda a: a.bound)


UNLISTED = {
    "layer norm": (lambda m, x: F.layer_norm(x, (D,), m.gain, m.shift), 1),
    "layer norm by hand": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(),
        1,
    ),
    "gelu": (lambda m, x: F.gelu(x), 1),
    "gelu tanh": (lambda m, x: F.gelu(x, approximate="tanh"), 1),
    "geglu": (lambda m, x, y: F.gelu(x) * y, 2),
    "relu": (lambda m, x: F.relu(x), 1),
    "squared relu": (lambda m, x: F.relu(x) ** 2, 1),
    "softcap": (lambda m, x: 30 * torch.tanh(x / 30), 1),
    "qk norm": (lambda m, x: F.rms_norm(x.unflatten(-1, (4, -1)), (D // 4,)).flatten(-2), 1),
    "sigmoid gate": (lambda m, x, y: torch.sigmoid(x) * y, 2),
    "group norm": (lambda m, x: F.group_norm(x, 4, m.gain, m.shift), 1),
    "leaky relu": (lambda m, x: F.leaky_relu(x), 1),
    "made up": (lambda m, x, y: torch.exp(-(x**2)) * torch.tanh(y) + (1 + x**2).log(), 2),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", UNLISTED)
def test_unlisted_functions_get_a_rule(name):
    """The bound is finite and allows FP8. It is not much smaller than the expected error."""
    rule = rule_of(*UNLISTED[name])
    assert 0.5 < rule.bound < 1 / E4M3.half_step
    assert 0 < rule.expected < 2 * rule.bound


@pytest.mark.parametrize("name", UNLISTED)
def test_expected_amplification_agrees_with_autograd(name):
    """The reference is autograd of the function itself, on other random numbers."""
    function, operands = UNLISTED[name]
    torch.manual_seed(1)
    module = Between(function, operands).double()
    inputs = [torch.randn(256, D, dtype=torch.float64) for _ in range(operands)]
    grad = torch.randn(256, D, dtype=torch.float64)
    worst = 0.0
    for i in range(operands):
        noisy = list(inputs)
        noisy[i] = inputs[i] * (1 + 1e-5 * torch.randn_like(inputs[i]))
        exact, changed = results(module, inputs, grad), results(module, noisy, grad)
        for a, b in zip(exact, changed, strict=True):
            if a is not None and a.norm() > 0:
                worst = max(worst, float((a - b).norm() / a.norm()) / 1e-5)
    rules = rules_of(function, operands)
    expected = max(rules.amplification(v).expected for r in rules.regions for v in r.values)
    assert 1 / 1.6 < expected / worst < 1.6


def results(module: Between, inputs: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    """Return the output, which a weight gradient reads, and the gradients."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = module.function(module, *inputs)
    wanted = (*inputs, module.gain, module.shift)
    return [y.detach(), *torch.autograd.grad(y, wanted, grad, allow_unused=True)]


def test_no_bound_where_a_slope_is_infinite():
    """The root of a variance has an infinite slope for equal data."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.eye(16), requires_grad=False)
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = x * (self.frozen @ self.frozen.t()).square().mean()
            return self.layer((x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.1))

    joint = capture_joint(Scaled(), torch.ones(1, 16))
    rules = Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts)
    (product,) = joint.calls(torch.ops.aten.mm.default)[:1]
    assert math.isinf(rules.amplification(product).bound)
    assert not rules.allows(product, E4M3)


UNDERIVABLE = {
    "reciprocal": (lambda m, x: 1 / x, "may be zero"),
    "norm without epsilon": (lambda m, x: x / x.pow(2).sum(-1, keepdim=True).sqrt(), "may be zero"),
    "logarithm": (lambda m, x: x.abs().log(), "may be zero"),
    "softmax": (lambda m, x: x.softmax(-1), "amax"),
    "fractional power": (lambda m, x: x.abs().pow(1.5) + x.pow(1.5), "negative"),
}


@pytest.mark.parametrize("name", UNDERIVABLE)
def test_values_without_a_bound_stay_exact_with_a_reason(name):
    function, reason = UNDERIVABLE[name]
    rules = rules_of(function)
    values = [v for r in rules.regions for v in r.values]
    reasons = [rules.why_exact(v) for v in values]
    assert any(reason in r for r in reasons), reasons


class Head(nn.Module):
    """A linear layer, a non-linear function, and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lm_head = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(torch.tanh(self.layer(x)))


@pytest.mark.parametrize("autocast", [False, True])
def test_inputs_of_a_head_in_high_precision_stay_exact(autocast):
    """A cast of the weight gradient makes the gradient enter a region."""
    model = Head()

    def step(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x)

    joint = capture_joint(step, torch.randn(32, 64))
    quantize_linears(joint.gm, joint.ctx)
    rules = Rules(joint.gm.graph, joint.ctx.config, joint.ctx.facts)
    (tanh,) = joint.calls(torch.ops.aten.tanh.default)
    assert any("options keep in high precision" in rules.why_exact(n) for n in (tanh, *tanh.users))
    rules.error_tolerance = math.inf  # no rule is derived, but the user's choice holds
    assert any("options keep in high precision" in rules.why_exact(n) for n in (tanh, *tanh.users))


def test_an_unknown_operator_in_the_backward_needs_exact_values():
    """The backward of a cumulative maximum reads indices. Its result enters a region."""
    rules = rules_of(lambda m, x: torch.cummax(torch.tanh(x), dim=-1).values * 2)
    assert "scatter" in "".join(rules.why_exact(v) for v in nodes_of(rules))


def nodes_of(rules: Rules):
    """Return the nodes of the graph with these rules."""
    return next(iter(rules.regions)).nodes[0].graph.nodes


def test_moments_change_the_amplification():
    """An exponential amplifies errors by its argument."""
    region = region_of(lambda m, x: torch.exp(x))
    (x,) = region.values
    narrow = derive(region, InputFacts({x: Moments(0.0, 0.1)})).amplifications[
        list(region.inputs).index(x)
    ]
    wide = derive(region, InputFacts({x: Moments(0.0, 3.0)})).amplifications[
        list(region.inputs).index(x)
    ]
    assert narrow.expected < 0.2 < 2 < wide.expected


def test_e2m1_is_allowed_where_agoq_uses_it():
    for function, operands in ((rms_norm, 1), (swiglu, 2)):
        assert rule_of(function, operands).allows(E2M1, 1.0)


@pytest.mark.parametrize("function", [lambda m, x: torch.relu(x), lambda m, x: F.leaky_relu(x)])
def test_operands_of_comparisons_with_zero_are_not_flushed_to_zero(function):
    """In 4 bits values below a 24th of the largest one are zero, and so is ReLU's gradient."""
    rule = rule_of(function)
    assert rule.allows(E4M3, 1.0)
    assert not rule.allows(E2M1, 1.0)


# --- regions ------------------------------------------------------------------------------------


def test_residual_sums_end_regions():
    def residual(m, x, y):
        return rms_norm(m, x + torch.tanh(y))

    rules = rules_of(residual, 2)
    sums = [n for n in rules.junctions if n.target is torch.ops.aten.add.Tensor]
    assert len(sums) == 1
    (norm,) = [r for r in rules.regions if any("rsqrt" in n.name for n in r.nodes)]
    assert sums[0] in norm.values


def test_repeated_regions_are_derived_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "fp8pass.error_analysis.derivation._derive", lambda region, facts: calls.append(region)
    )
    monkeypatch.setattr("fp8pass.error_analysis.derivation._rule_cache", {})
    region = region_of(rms_norm)
    derive(region, InputFacts())
    torch._dynamo.reset()
    again = max(rules_of(rms_norm).regions, key=lambda r: len(r.nodes))
    assert again is not region
    before = len(calls)
    derive(again, InputFacts())
    assert len(calls) == before


@pytest.mark.long
def test_deriving_is_fast():
    regions = [region_of(*UNLISTED[name]) for name in UNLISTED]
    start = time.perf_counter()
    for region in regions:
        try:
            Derivation(region)
        except Underivable:
            pytest.fail("has a rule")
    assert time.perf_counter() - start < 5


def test_samples_agree_with_pytorch():
    """The formulas of a region on samples give the results of PyTorch."""
    region = region_of(rms_norm)
    derivation = Derivation(region)
    samples: Samples = derivation.samples
    (x,) = derivation.expressions.values
    output = next(n for n in region.outputs if n not in region.backward)
    found = samples.values[derivation.expressions.symbols[output]]
    want = F.rms_norm(samples.values[x], (samples.width,), eps=1e-6)
    torch.testing.assert_close(found[: len(SCALES)], want[: len(SCALES)])  # with a gain of 1
    assert graph.tensor(output).shape[-1] == D
