"""The passes take time linear in the depth of a model."""

from __future__ import annotations

from collections import Counter
from cProfile import Profile
from functools import wraps

import pytest
import torch
from helpers import FFN, compiled
from torch import nn

from fp8pass.activation_memory import cuts
from fp8pass.passes import JOINT_PASSES, LOWERING_PASSES, runner

# Layers of both models. The larger model has four times as many residual sums.
SMALL, LARGE = 3, 9
# Limit of the ratio of calls in a pass, larger model to smaller model.
MOST_GROWTH = 4.0


class Stack(nn.Module):
    """Blocks of a norm, a gated activation and a residual sum."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(layers))
        self.blocks = nn.ModuleList(FFN(64, 128) for _ in range(layers))

    def forward(self, x):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x


@pytest.mark.long
def test_passes_take_time_linear_in_depth(monkeypatch, kernels_on_cpu):
    """The test counts function calls, which do not depend on the machine."""
    counts: dict[int, Counter[str]] = {}
    monkeypatch.setenv("FP8PASS_CHECK", "0")
    select = runner._select_enabled

    def counting(pass_):
        @wraps(pass_)
        def counted(gm, ctx):
            with Profile() as profile:
                pass_(gm, ctx)
            counts[layers][pass_.__name__] += sum(entry.callcount for entry in profile.getstats())

        return counted

    monkeypatch.setattr(runner, "_select_enabled", lambda *args: map(counting, select(*args)))
    for layers in (SMALL, LARGE):
        torch._dynamo.reset()
        cuts.solve_cut.cache_clear()  # the larger model must not reuse these entries
        counts[layers] = Counter()
        program, _ = compiled(Stack(layers).bfloat16(), halves=True)
        program(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True))
    growth = {name: calls / counts[SMALL][name] for name, calls in counts[LARGE].items()}
    assert growth.keys() >= {p.__name__ for p in (*JOINT_PASSES, *LOWERING_PASSES)}
    assert {name: ratio for name, ratio in growth.items() if ratio > MOST_GROWTH} == {}
