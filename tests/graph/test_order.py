"""Nodes come after what they use."""

from __future__ import annotations

from cProfile import Profile

import pytest
import torch
from torch import fx

from fp8pass.graph.order import depends_on, sort_around, sort_topologically


def test_kernels_do_not_need_each_other():
    """Two kernels, each of which would read what the other one stores."""
    g = fx.Graph()
    a, b = g.placeholder("a"), g.placeholder("b")
    first = g.call_function(torch.neg, (a,))
    second = g.call_function(torch.neg, (b,))
    g.output((first, second))
    first.args, second.args = (second,), (first,)
    with pytest.raises(AssertionError, match="needs its own result"):
        sort_topologically(g)


def test_a_new_node_between_its_operands_and_what_uses_it():
    """It comes in before one of its operands, and takes the place of what was used before."""
    g = fx.Graph()
    x = g.placeholder("x")
    new = g.call_function(torch.neg, (x,))
    early = g.call_function(torch.exp, (new,))
    follows = g.call_function(torch.sin, (early,))
    apart = g.call_function(torch.cos, (x,))
    operand = g.call_function(torch.abs, (apart,))
    g.output((follows, operand))
    new.args = (operand,)
    sort_around(new)
    g.lint()
    assert list(g.nodes)[:-1] == [x, apart, operand, new, early, follows]
    assert depends_on([follows], [apart])
    assert not depends_on([apart, operand], [new])


def test_nothing_behind_is_searched():
    """Or else kernels of a model of n layers would take n² time."""
    g = fx.Graph()
    chain = [g.placeholder("x")]
    for _ in range(1000):
        chain.append(g.call_function(torch.neg, (chain[-1],)))
    g.output(chain[-1])
    with Profile() as profile:
        assert depends_on([chain[3]], [chain[1]])
        assert not depends_on([chain[3]], [chain[3]])
    assert sum(entry.callcount for entry in profile.getstats()) < 100
