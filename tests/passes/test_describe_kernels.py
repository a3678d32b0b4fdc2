"""The plan reports the number of kernels, and why generated code quantizes other matrices."""

from __future__ import annotations

import pytest
import torch
from helpers import MLP
from kernel_helpers import Layers, counts

import fp8pass


@pytest.mark.long
def test_launches_of_a_decoder_layer(graphs):
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    forward, backward = (counts([g]) for g in graphs)
    # Seven weights and the inputs of q/k/v, o, gate/up and down. Each has a scale for the backward.
    assert forward == {"rows": 2 * 11, "scales": 2 * 11}
    # Rows: all norms. The first norm computes the gradient that the graph returns. Tiles of a
    # layer: seven weights, four gradients and three inputs; one kernel takes the gradients of gate
    # and up and the input of down. The amaxes of these and of the gradients of values have tiles of
    # their own. One more is the amax of the gradient from the caller.
    assert backward == {"rows": 4, "tiles": 2 * 18 + 1, "scales": 2 * 2}


@pytest.mark.long
def test_explain_counts_kernels(graphs):
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    explanation = fp8pass.explain(model, x)
    forward, backward = explanation.graphs[0].plan.kernels
    assert forward.programs == {"rows": 22, "scales": 22}
    assert backward.programs == {"rows": 4, "tiles": 37, "scales": 4}
    assert (forward.launches, backward.launches) == (11, 25)
    assert "Kernels: 26 × rows, 26 × scales, 37 × tiles, in" in str(explanation)


@pytest.mark.long
def test_explain_reports_why_there_are_no_kernels():
    x = torch.randn(32, 64, requires_grad=True)
    assert " (Triton kernels run on NVIDIA GPUs only)." in str(fp8pass.explain(MLP(), x))
