"""All lowering passes accept graphs with values on a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_lowering import LoweredError, lowered_for_gpus
from helpers import FFN, gpt2, llama, tokens
from torch import nn
from torch.nn import functional as F

from fp8pass.config import Config
from fp8pass.dynamo import Backend

RECIPES = [{"recipe": name} for name in ("coat", "agoq", "linear", "block", "mxfp8")]
OPTIONS = [*RECIPES, {"offload": True, "memory_budget": 0.5}]


def lower(function, *args, dynamic=None, recipe="coat", **options) -> list[str]:
    """Return the operators of the forward and the backward."""
    torch._dynamo.reset()
    backend = Backend(Config.recipe(recipe, fp8_gemms="all", **options))
    with lowered_for_gpus() as halves, pytest.raises(LoweredError):
        torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    forward, backward = halves
    return [str(n.target) for gm in (forward, backward) for n in gm.graph.nodes]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_linear_layers(options, dynamic):
    x = torch.randn(256, 128).bfloat16().requires_grad_()
    operators = lower(FFN(128, 256).bfloat16(), x, dynamic=dynamic, **options)
    assert not [target for target in operators if target.startswith("fp8pass.")]
    # GEMMs of `block` also run in a Triton kernel, and GEMMs of `mxfp8` are emulated on an H200.
    fewest = {"block": 3, "mxfp8": 0}.get(options.get("recipe"), 6)
    assert operators.count("aten._scaled_mm.default") >= fewest


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", [llama, gpt2])
def test_language_models(model, options):
    network = model().bfloat16()
    assert lower(lambda ids: network(ids, labels=ids).loss, tokens(), **options)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 64, 128).bfloat16())
        self.down = nn.Parameter(torch.randn(3, 128, 64).bfloat16())

    def forward(self, x, ends):
        h = F.silu(torch._grouped_mm(x.sin(), self.up, ends))
        return torch._grouped_mm(h, self.down, ends)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("recipe", ["coat", "agoq", "block"])
def test_experts(recipe, dynamic):
    x = torch.randn(64, 64).bfloat16().requires_grad_()
    ends = torch.tensor([16, 48, 64], dtype=torch.int32)
    operators = lower(Experts(), x, ends, recipe=recipe, dynamic=dynamic)
    assert operators.count("aten._scaled_grouped_mm.default") == 6
