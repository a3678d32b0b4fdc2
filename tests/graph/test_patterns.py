"""`match_column_slice` finds the columns that a slice or split selects."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import graph
from fp8pass.graph.nodes import aten

COLUMN_SLICES = {
    "half of a chunk": (lambda x: x.chunk(2, -1)[1], (64, 32, 32)),
    "second of a split": (lambda x: aten.split_with_sizes(x, [16, 40, 8], 2)[1], (64, 16, 40)),
    "slice": (lambda x: x[..., 8:24], (64, 8, 16)),
    "slice from the end": (lambda x: x[..., -24:], (64, 40, 24)),
    "slice beyond the end": (lambda x: x[..., 48:100], (64, 48, 16)),
    "slice from before the beginning": (lambda x: x[..., -80:-32], (64, 0, 32)),
    "everything": (lambda x: aten.slice.Tensor(x, 2), (64, 0, 64)),
    "beginning": (lambda x: x[..., :16], (64, 0, 16)),
    "of a view": (lambda x: x.view(-1, 64)[:, 16:32], (64, 16, 16)),
}
OTHER_NODES = {
    "rows": lambda x: x[:, 4:8],
    "half of the rows": lambda x: x.chunk(2, 1)[0],
    "every other column": lambda x: x[..., ::2],
    "of a transpose": lambda x: x.transpose(1, 2)[..., 2:6],
    "one column": lambda x: x[..., 3],
    "no columns": lambda x: x[..., 64:],
    "all rows": lambda x: aten.slice.Tensor(x),
    "computed": lambda x: x + 1,
}


def last(function) -> torch.fx.Node:
    gm = make_fx(function, tracing_mode="fake")(torch.randn(2, 12, 64))
    return gm.graph.output_node().args[0]


@pytest.mark.parametrize("case", COLUMN_SLICES)
def test_column_slices(case):
    function, (width, offset, columns) = COLUMN_SLICES[case]
    part = graph.match_column_slice(last(function))
    assert (part.width, part.offset, part.columns) == (width, offset, columns)
    x = torch.arange(2 * 12 * 64).view(2, 12, 64)
    whole = x.view(part.whole.meta["val"].shape)
    assert torch.equal(function(x), whole[..., offset : offset + columns])


@pytest.mark.parametrize("case", OTHER_NODES)
def test_other_nodes_do_not_match(case):
    assert graph.match_column_slice(last(OTHER_NODES[case])) is None
