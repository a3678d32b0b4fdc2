"""Nodes come after what they use."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fp8pass.graph.order import sort_topologically


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
