"""Formats of pipeline stages: AGoQ's numbers, and stages that train."""

from __future__ import annotations

import pytest
import torch
from helpers import FFN, compiled, cosine
from torch import nn

from fp8pass import Config, ConfigError, stage_format
from fp8pass.distributed.stages import stage_bits, stored_batches

STAGES = 4


def test_the_paper_s_example():
    assert [stored_batches(4, i) for i in range(1, 5)] == [11, 9, 7, 5]
    assert [stage_bits(4, i) for i in range(1, 5)] == [4, 5, 6, 8]
    assert [stage_format(4, i) for i in range(1, 5)] == ["e2m1", "e2m2", "e2m3", "e4m3"]


@pytest.mark.parametrize("stages", range(1, 33))
def test_bits_never_fall_and_keep_to_the_first_stage_s_memory(stages):
    bits = [stage_bits(stages, i) for i in range(1, stages + 1)]
    assert bits[0] == 4
    assert bits == sorted(bits)
    assert set(bits) <= {4, 5, 6, 8}
    memory = [b * stored_batches(stages, i) for i, b in enumerate(bits, 1)]
    # Rounding to the nearest integer adds half a bit at most.
    assert all(m <= memory[0] + stored_batches(stages, i) / 2 for i, m in enumerate(memory, 1))


def test_seven_bits_become_six():
    assert 4 * stored_batches(2, 1) / stored_batches(2, 2) == pytest.approx(6.67, abs=0.01)
    assert stage_bits(2, 2) == 6


@pytest.mark.parametrize(
    ("stages", "stage", "names"),
    [
        (4, 0, "numbered from 1 to 4.*rank \\+ 1"),
        (4, 5, "numbered from 1 to 4"),
        (4, 1.0, "stage=1.0"),
        (4, True, "stage=True"),
        (0, 1, "how many stages.*got 0"),
        ("4", 1, "how many stages.*got '4'"),
    ],
)
def test_errors_say_what_to_do(stages, stage, names):
    for function in (stored_batches, stage_bits, stage_format):
        with pytest.raises(ConfigError, match=names):
            function(stages, stage)


class Block(nn.Module):
    """A residual SwiGLU block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(128), FFN(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ffn(self.norm(x))


def stage_config(stage: int) -> Config:
    return Config(save_format=stage_format(STAGES, stage), tolerance=float("inf"), compiler="eager")


def test_later_stages_keep_more():
    kept = []
    for stage in range(1, STAGES + 1):
        torch._dynamo.reset()
        program, spy = compiled(Block(), stage_config(stage))
        program(torch.randn(64, 128).requires_grad_())
        kept.append(spy.plan.saved_bytes)
        assert any(s.kept_as.startswith(stage_format(STAGES, stage)) for s in spy.plan.saved)
    assert kept == sorted(set(kept))


def test_stages_train_like_eager():
    """Stages as a schedule runs them: micro-batches forward, then backward from the last stage."""
    stages = [nn.Sequential(Block(), Block()) for _ in range(STAGES)]
    batches = torch.randn(3, 64, 128)
    parameters = [p for stage in stages for p in stage.parameters()]

    def gradients(programs) -> list[torch.Tensor]:
        for p in parameters:
            p.grad = None
        held = []
        for batch in batches:
            x, edges = batch, []
            for program in programs:
                x = x.detach().requires_grad_()  # what is received from the stage before
                edges.append((x, y := program(x)))
                x = y
            held.append(edges)
        for edges in held:
            gradient = edges[-1][1].detach()
            for received, sent in reversed(edges):
                sent.backward(gradient)
                gradient = received.grad
        return [p.grad for p in parameters]

    want = gradients(stages)
    got = gradients([compiled(s, stage_config(i))[0] for i, s in enumerate(stages, 1)])
    for a, b in zip(got, want, strict=True):
        assert cosine(a, b) > 0.98
