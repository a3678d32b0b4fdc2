"""Row kernels store only values that have users."""

from __future__ import annotations

import torch
from kernel_helpers import by_rows, fused, random

from fp8pass.codegen.kernels.row_kernel import rows
from fp8pass.codegen.program.program_batch import Batch

fp8 = torch.ops.fp8pass


def test_a_value_saved_in_groups_is_not_stored_as_it_is(monkeypatch):
    how = "e4m3 1×16"

    def function(x):
        y = torch.tanh(x)
        scales = fp8.scale(fp8.amax(y, "1×16"), how)
        saved = fp8.quantize(y, scales, how)
        codes, _ = by_rows(y)
        return codes, saved.view(torch.uint8), scales

    gm = fused(monkeypatch, function, random(40, 64))
    (kernel,) = gm.graph.find_nodes(op="call_function", target=rows)
    (program,) = Batch.parse(str(kernel.args[1])).programs
    assert sorted(store.layouts for store in program.stores) == [("groups",), ("rows",)]
    assert not gm.graph.find_nodes(op="call_function", target=fp8.amax.default)
