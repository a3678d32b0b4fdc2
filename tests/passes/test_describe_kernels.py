"""The plan says how many kernels there are, and why there are none."""

from __future__ import annotations

import torch
from helpers import MLP
from kernel_helpers import Layers, counts

import fp8pass


def test_what_a_decoder_layer_launches(graphs):
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    torch.compile(model, backend="fp8pass")(x).sum().backward()
    forward, backward = (counts([g]) for g in graphs)
    # Seven weights; inputs of q/k/v, of o, of gate/up, of down: of each a scale for the backward.
    assert forward == {"rows": 2 * 11, "scales": 2 * 11}
    # Norms with a residual stream before them: all but the first. Of a layer: seven weights, four
    # gradients and three inputs again, gate's and up's gradient and down's input together. The
    # latter, and gradients of values, are measured before that; so is the gradient that the caller
    # hands in.
    assert backward == {"rows": 3, "tiles": 2 * 18 + 1, "scales": 2 * 2}


def test_explain_counts_kernels(graphs):
    model, x = Layers().bfloat16(), torch.randn(2, 16, 128).bfloat16().requires_grad_()
    explanation = fp8pass.explain(model, x)
    forward, backward = explanation.graphs[0].plan.kernels
    assert forward.programs == {"rows": 22, "scales": 22}
    assert backward.programs == {"rows": 3, "tiles": 37, "scales": 4}
    assert (forward.launches, backward.launches) == (11, 24)
    assert "Kernels: 25 × rows, 26 × scales, 37 × tiles, in" in str(explanation)


def test_explain_says_why_there_are_no_kernels():
    x = torch.randn(32, 64, requires_grad=True)
    assert " (Triton kernels run on NVIDIA GPUs only)." in str(fp8pass.explain(MLP(), x))
