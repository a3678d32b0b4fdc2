"""Tools run a model and its backward without side effects."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8pass

EAGER = fp8pass.Config(compiler="eager")
TOOLS = [fp8pass.diagnose, fp8pass.bisect, fp8pass.calibrate]


def mean_square(model, batch):
    return model(batch).square().mean()


def trained() -> tuple[nn.Sequential, nn.Module, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    program = torch.compile(model, backend="fp8pass", options={"compiler": "eager"})
    return model, program, torch.randn(32, 32)


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_an_optimizer_in_the_backward_does_not_step(tool):
    model, program, batch = trained()
    fp8pass.optim.step_in_backward(model, fp8pass.optim.AdamW(model.parameters(), lr=1e-2))
    mean_square(program, batch).backward()
    before = model[0].weight.clone()
    tool(program, mean_square, batch)
    assert torch.equal(model[0].weight, before)
    mean_square(program, batch).backward()
    assert not torch.equal(model[0].weight, before)


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
def test_hooks_of_gradients_are_not_called(tool):
    model, program, batch = trained()
    called: list[nn.Parameter] = []
    hook = model[0].weight.register_post_accumulate_grad_hook(called.append)
    tool(program, mean_square, batch)
    assert not called
    mean_square(program, batch).backward()
    assert len(called) == 1
    hook.remove()
    mean_square(program, batch).backward()
    assert len(called) == 1


class Counted(nn.Module):
    """A layer that replaces a buffer in every forward, and resizes another buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(0))

    def forward(self, x):
        self.seen = self.seen + 1
        self.latest.resize_(32).copy_(x.detach().mean(0))
        return self.linear(x)


@pytest.mark.parametrize(
    "tool",
    [
        *(lambda m, x, tool=tool: tool(m, mean_square, x, config=EAGER) for tool in TOOLS),
        lambda m, x: fp8pass.explain(m, x),
        lambda m, x: fp8pass.sharpness(m, mean_square, x, search=False),
    ],
    ids=["diagnose", "bisect", "calibrate", "explain", "sharpness"],
)
def test_buffers_and_random_state_do_not_change(tool):
    torch._dynamo.reset()
    outer = nn.Sequential(Counted(), nn.Dropout(0.5), nn.Linear(32, 32))
    outer[0].forward = torch.compiler.disable(outer[0].forward)
    counted, state = outer[0], torch.random.get_rng_state()
    seen, latest = counted.seen, counted.latest
    tool(outer, torch.ones(32, 32))
    assert counted.seen is seen
    assert not seen.any()
    assert counted.latest is latest
    assert latest.shape == (0,)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_and_sums_do_not_change(tool, accumulate):
    """Gradients are accumulated in `.grad`, or by an optimizer in the backward."""
    found = []
    for uses_tool in (False, True):
        model, program, _ = trained()
        optimizer = fp8pass.optim.AdamW(model.parameters(), lr=1e-2)
        if accumulate > 1:
            fp8pass.optim.step_in_backward(model, optimizer, accumulate=accumulate)
        generator = torch.Generator().manual_seed(0)
        for i in range(4):
            x = torch.randn(32, 32, generator=generator)
            mean_square(program, x).backward()
            if uses_tool and i == 2:
                tool(program, mean_square, 3 * x)
        if accumulate == 1:
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("tool", TOOLS)
def test_inference_mode_is_refused(tool):
    _, program, batch = trained()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"under torch.inference_mode"):
        tool(program, mean_square, batch)


class Signed(nn.Module):
    """Positions of 256 and more need uint16, which `iota` does not support in eager PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        return y @ y.T * (2 * torch.eye(len(x)) - 1)


@pytest.mark.long
def test_positions_may_need_16_bits():
    model, batch = Signed(), torch.randn(256, 64)
    assert all(layer.fp8 for g in fp8pass.explain(model, batch).graphs for layer in g.plan.linears)
    fp8pass.testing.assert_exact(model, batch)
