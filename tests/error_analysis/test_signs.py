"""Inferred signs are right, and the decays of recurrent models have a known sign."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rules_helpers import gradient_cosines, plan_of
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fp8pass.error_analysis.signs import KnownSign, infer_signs

UNARY = [
    torch.exp, torch.neg, torch.sigmoid, torch.relu, torch.abs, torch.square, torch.tanh,
    torch.expm1, torch.log1p, torch.sqrt, torch.tril, F.softplus, F.logsigmoid,
    lambda x: x.cumsum(-1), lambda x: x.cumsum(0), lambda x: x.flip(0), lambda x: x.t(),
    lambda x: x / 3, lambda x: x / -2, lambda x: x * -0.5, lambda x: x**3, lambda x: x**-2,
    lambda x: x - 1, lambda x: 1 - x, lambda x: x + 2, lambda x: x.clamp(-1, 0),
    lambda x: x.clamp_min(0.5), lambda x: x.clamp_max(0.0),
    lambda x: x.sum(-1, keepdim=True) + 0 * x, lambda x: x.amax(0) + 0 * x,
    lambda x: F.pad(x[:, 1:], (1, 0)), lambda x: F.pad(x[1:], (0, 0, 0, 1), value=-1.0),
    lambda x: x.cumsum(-1)[:, -1:] - x.cumsum(-1), lambda x: x.cumsum(0)[:, -1:] - x.cumsum(0),
    lambda x: x.cumsum(-1)[:, :1] - x.cumsum(-1), lambda x: x.cumsum(-1) - x.cumsum(-1)[:, -1:],
    lambda x: x.masked_fill(torch.ones(4, 4).triu(1) > 0, float("-inf")).nan_to_num(neginf=-9.0),
]  # fmt: skip
BINARY = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum,
    lambda x, y: torch.where(x > 0.5, x, y), lambda x, y: torch.where(y > -0.5, x, y),
    lambda x, y: torch.add(x, y, alpha=-2), lambda x, y: torch.sub(x, y, alpha=-2),
    lambda x, y: torch.cat([x[:2], y[2:]]), lambda x, y: torch.stack([x, y]).sum(0),
]  # fmt: skip


def program(seed: int):
    """Return a function of two matrices that chains ten random operators."""
    rng = random.Random(seed)
    steps = [
        (rng.choice(BINARY), (rng.random(), rng.random()))
        if rng.random() < 0.4
        else (rng.choice(UNARY), (rng.random(),))
        for _ in range(10)
    ]

    def function(x, y):
        found = [x, y]
        for operator, places in steps:
            operands = (found[int(place * len(found))] for place in places)
            found.append(operator(*operands))
        return found[-1]

    return function


class Checked(fx.Interpreter):
    """Checks the inferred sign of every value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.signs = infer_signs(gm.graph)

    def run_node(self, n: fx.Node):
        result = super().run_node(n)
        sign = self.signs.get(n, KnownSign.UNKNOWN)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            assert KnownSign.NONNEGATIVE not in sign or not (result < 0).any(), n.format_node()
            assert KnownSign.NONPOSITIVE not in sign or not (result > 0).any(), n.format_node()
        return result


@given(st.integers(0, 2**32))
def test_signs_of_random_programs(seed):
    torch.manual_seed(seed)
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    checked = Checked(make_fx(program(seed), decomposition_table=DECOMPOSED)(x, y))
    for scale in (1.0, 30.0):
        checked.run(scale * x, scale * y)


KNOWN = [torch.exp, lambda x: -x.exp(), torch.zeros_like, lambda x: x]


def applied(operator, kinds, x, y):
    return operator(*(kind(operand) for kind, operand in zip(kinds, (x, y), strict=False))).neg()


@pytest.mark.long
@pytest.mark.parametrize("first", range(len(KNOWN)))
def test_signs_of_every_operator(first):
    """Operands are nonnegative, nonpositive, zero, or of unknown sign."""
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    unary = [partial(applied, operator, (KNOWN[first],)) for operator in UNARY]
    binary = [
        partial(applied, operator, (KNOWN[first], second))
        for operator in BINARY
        for second in KNOWN
    ]
    for function in (*unary, *binary):
        checked = Checked(make_fx(function, decomposition_table=DECOMPOSED)(x, y))
        for scale in (1.0, 30.0):
            checked.run(scale * x, scale * y)


OF_A_SIZE = {
    "power": lambda h, n: h * (torch.arange(1.0, h.shape[1] + 1) / 64) ** n,
    "sum": lambda h, n: torch.add(h, h.sigmoid(), alpha=n),
    "difference": lambda h, n: torch.sub(h, h.sigmoid(), alpha=n),
    "comparison": lambda h, n: torch.where(h > n, h, h.exp()),
    "clamp": lambda h, n: h.clamp(-n, n),
}


@pytest.mark.parametrize("name", OF_A_SIZE)
def test_symbolic_sizes_may_be_operands(name):
    """They are nodes of the graph and not numbers."""

    def function(m, x):
        return OF_A_SIZE[name](x, x.shape[0] // 16)

    assert min(gradient_cosines(function, "e4m3", dynamic=True)) > 0.97


DECOMPOSED = torch._decomp.get_decompositions(
    [torch.ops.aten.softplus, torch.ops.aten.log_sigmoid_forward, torch.ops.aten.masked_fill]
)
DECAYS = {
    "mamba": lambda a, b: -a.exp() * F.softplus(b),
    "mamba, times a number": lambda a, b: -1.0 * a.exp() * F.softplus(b).clamp(0.0, float("inf")),
    "gated linear attention": lambda a, b: F.logsigmoid(a) / 16,
    "recurrent gemma": lambda a, b: -8.0 * torch.sigmoid(a) * F.softplus(b),
    "retention": lambda a, b: torch.full_like(a, -0.1),
    "summed": lambda a, b: F.logsigmoid(a).cumsum(-1),
    "sum after each position": lambda a, b: (s := F.logsigmoid(a).cumsum(-1))[..., -1:] - s,
}


@pytest.mark.parametrize("name", DECAYS)
def test_decays_are_found(name):
    x = torch.randn(2, 4, 4)
    gm = make_fx(DECAYS[name], decomposition_table=DECOMPOSED)(*x)
    (result,) = gm.graph.output_node().all_input_nodes
    assert KnownSign.NONPOSITIVE in infer_signs(gm.graph)[result]


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.cumsum(-1)[:, -1:] - a.exp().cumsum(-1),  # two different sums
        lambda a: (s := (-a.exp()).cumsum(0))[:, -1:] - s,  # along another dimension
        lambda a: (s := (-a.exp()).cumsum(-1))[:, :1] - s,  # the sum before each position
        lambda a: 1 / -a.relu(),  # the divisor may be -0 or 0
        lambda a: -F.softplus(a) + 1,
        lambda a: torch.where(a > -1, a, 0.0) * -1,
    ],
)
def test_other_signs_are_unknown(function):
    gm = make_fx(function, decomposition_table=DECOMPOSED)(torch.randn(4, 4))
    (result,) = gm.graph.output_node().all_input_nodes
    assert KnownSign.NONPOSITIVE not in infer_signs(gm.graph).get(result, KnownSign.UNKNOWN)


def chunked_decay(m, x):
    """Mamba2 and gated delta rules within a chunk. Positions are columns."""
    decay = F.logsigmoid(x).view(4, -1, x.shape[1])
    later = decay.cumsum(-1)
    return ((later[..., -1:] - later).exp() * torch.tanh(decay)).view_as(x) + later.exp().view_as(x)


@pytest.mark.long
def test_bounded_decays_are_saved_in_formats_of_a_wide_range():
    for save_format in ("e4m3", "e2m1"):
        assert min(gradient_cosines(chunked_decay, save_format)) > 0.99
        formats = {s.saved_as.split()[0] for s in plan_of(chunked_decay, save_format).saved}
        assert "e4m3" in formats
        assert "e2m1" not in formats
