"""Checkpoints of Muon: exact, converted between formats, from torch.optim, and refused ones."""

from __future__ import annotations

import pytest
import torch
from optim_helpers import assert_same_state, parameters, reload_from_file, run, set_gradients
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fp8pass
from fp8pass.optim import AdamW, Muon
from fp8pass.optim.group_options import WEIGHTS
from fp8pass.optim.state_formats import ALL_FORMATS

MATRICES = ((3, 5), (16, 8), (33, 128))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_resuming_is_bit_exact(name, weights):
    options = {"momentum_format": name, "weights": weights}
    straight, params = (parameters(MATRICES, torch.bfloat16) for _ in range(2))
    uninterrupted = Muon(straight, lr=0.01, seed=3, ns_steps=4, **options)
    run(straight, uninterrupted, range(4))
    optimizer = Muon(params, lr=0.01, seed=3, ns_steps=4, **options)
    run(params, optimizer, range(2))
    resumed = Muon(params, **options)
    resumed.load_state_dict(reload_from_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["ns_steps"] == 4
    run(params, resumed, range(2, 4))
    assert_same_state(resumed, uninterrupted)


def momentum(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return the momentum of each matrix in FP32."""
    exact = Muon(params, momentum_format="fp32")
    exact.load_state_dict(optimizer.state_dict())
    return [exact.state[p]["momentum_buffer"] for p in params]


@pytest.mark.parametrize("target", ["e4m3", "de8", "bf16", "fp32"])
@pytest.mark.parametrize("source", ["e4m3+expand", "e5m2", "fp16", "fp32"])
def test_checkpoints_are_converted_between_formats(source, target):
    params = parameters(MATRICES, torch.bfloat16)
    old = Muon(params, lr=0.5, momentum_format=source, weights="fp32")
    run(params, old, range(3))
    new = Muon(params, momentum_format=target, group_size=32)
    new.load_state_dict(reload_from_file(old.state_dict()))
    (group,) = new.param_groups
    assert (group["lr"], group["momentum_format"], group["group_size"]) == (0.5, target, 32)
    for x, y in zip(momentum(new, params), momentum(old, params), strict=True):
        assert (x - y).norm() <= 0.1 * y.norm()
    run(params, new, range(3, 4))


@pytest.mark.parametrize("name", ["fp32", "e4m3+expand"])
def test_checkpoints_of_torch(name):
    """`torch.optim.Muon` saves no number of updates, which only selects random bits here."""
    params, copies = parameters(MATRICES), parameters(MATRICES)
    theirs, ours = torch.optim.Muon(params, lr=0.3), Muon(copies, momentum_format=name)
    run(params, theirs, range(3))
    with torch.no_grad():
        for p, q in zip(copies, params, strict=True):
            p.copy_(q)
    ours.load_state_dict(reload_from_file(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 0.3
    run(params, theirs, range(3, 5))
    run(copies, ours, range(3, 5))
    for p, q in zip(copies, params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5 if name == "fp32" else 0.2)
    assert ours.state[copies[0]]["step"] == 2


def test_torch_continues_from_fp32_and_ignores_fp8():
    params, copies = parameters(MATRICES), parameters(MATRICES)
    exact, theirs = Muon(params, momentum_format="fp32"), torch.optim.Muon(copies)
    run(params, exact, range(2))
    with torch.no_grad():
        for p, q in zip(copies, params, strict=True):
            p.copy_(q)
    theirs.load_state_dict(reload_from_file(exact.state_dict()))
    run(params, exact, range(2, 4))
    run(copies, theirs, range(2, 4))
    for p, q in zip(copies, params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    fp8 = Muon(params)
    run(params, fp8, range(1))
    assert all("momentum_buffer" not in state for state in fp8.state_dict()["state"].values())


def test_checkpoints_of_other_optimizers_are_refused():
    params = parameters(MATRICES)
    adamw, muon, sgd = AdamW(params), Muon(params), torch.optim.SGD(params, momentum=0.9)
    for optimizer in (adamw, muon, sgd):
        run(params, optimizer, range(1))
    with pytest.raises(fp8pass.ConfigError, match=r"no momentum_buffer\. .* or torch\.optim\.Muon"):
        muon.load_state_dict(adamw.state_dict())
    with pytest.raises(fp8pass.ConfigError, match=r"no exp_avg\. .* or torch\.optim\.AdamW"):
        adamw.load_state_dict(muon.state_dict())
    with pytest.raises(fp8pass.ConfigError, match="no step"):
        adamw.load_state_dict(sgd.state_dict())
    other = Muon(parameters(((5, 3), (16, 8), (33, 128))))
    with pytest.raises(fp8pass.ConfigError, match=r"shape \(3, 5\), but the parameter has shape"):
        other.load_state_dict(muon.state_dict())


class Model(nn.Module):
    """Matrices of one optimizer."""

    def __init__(self, kind: type[torch.optim.Optimizer], **options) -> None:
        super().__init__()
        for i, p in enumerate(parameters(MATRICES)):
            self.register_parameter(f"p{i}", p)
        self.optimizer = kind(self.parameters(), lr=0.02, **options)

    def train_steps(self, steps: range) -> None:
        for step in steps:
            set_gradients(list(self.parameters()), step)
            self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return momentum(self.optimizer, list(self.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("target", ["fp32", "e4m3+expand", "bf16"])
@pytest.mark.parametrize("source", ["torch", "fp32", "e4m3", "e4m3+expand"])
def test_distributed_checkpoints(source, target, tmp_path):
    options = {} if source == "torch" else {"momentum_format": source}
    old = Model(torch.optim.Muon if source == "torch" else Muon, **options)
    old.train_steps(range(3))
    dcp.save({"o": get_optimizer_state_dict(old, old.optimizer)}, checkpoint_id=tmp_path)
    new = Model(Muon, momentum_format=target)
    content = {"o": get_optimizer_state_dict(new, new.optimizer)}
    dcp.load(content, checkpoint_id=tmp_path)
    set_optimizer_state_dict(new, new.optimizer, content["o"])
    for x, y in zip(new.values(), old.values(), strict=True):
        assert (x - y).norm() <= (0.1 if "e4m3" in target else 0.005) * y.norm()
    # `get_optimizer_state_dict` creates the states by a step with a learning rate of zero.
    steps = 1 if source == "torch" else 3
    assert all(state["step"] == steps for state in new.optimizer.state.values())
    if source == target:
        old.train_steps(range(3, 5))
        with torch.no_grad():
            for p, q in zip(new.parameters(), Model(Muon).parameters(), strict=True):
                p.copy_(q)
        new.train_steps(range(3, 5))
        for x, y in zip(new.values(), old.values(), strict=True):
            assert torch.equal(x, y)
