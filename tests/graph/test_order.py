"""Nodes come after their operands."""

from __future__ import annotations

from cProfile import Profile

import pytest
import torch
from torch import fx

from fp8pass.graph.order import depends_on, sort_around, sort_topologically


def test_circular_kernels_are_an_error():
    """Each of two kernels reads the result of the other one."""
    g = fx.Graph()
    a, b = g.placeholder("a"), g.placeholder("b")
    first = g.call_function(torch.neg, (a,))
    second = g.call_function(torch.neg, (b,))
    g.output((first, second))
    first.args, second.args = (second,), (first,)
    with pytest.raises(AssertionError, match="needs its own result"):
        sort_topologically(g)


def test_a_new_node_moves_between_operands_and_users():
    """The new node comes before one of its operands, and has an earlier user."""
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


def test_dependence_search_is_local():
    """A search of the whole graph for each kernel would take quadratic time."""
    g = fx.Graph()
    chain = [g.placeholder("x")]
    for _ in range(1000):
        chain.append(g.call_function(torch.neg, (chain[-1],)))
    g.output(chain[-1])
    with Profile() as profile:
        assert depends_on([chain[3]], [chain[1]])
        assert not depends_on([chain[3]], [chain[3]])
    assert sum(entry.callcount for entry in profile.getstats()) < 100
