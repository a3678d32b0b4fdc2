"""The kernels of Muon compared with the update in PyTorch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_helpers import (
    KERNEL_CHUNK,
    KERNEL_DEVICES,
    assert_same_state,
    moment_values,
    parameters,
    set_gradients,
)
from torch import nn

from fp8pass import hardware
from fp8pass.optim import Muon, fused, muon
from fp8pass.optim.group_options import WEIGHTS
from fp8pass.optim.state_formats import ALL_FORMATS

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.usefixtures("everything_is_fused"),
    pytest.mark.parametrize("device", KERNEL_DEVICES),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, of log2(0)
]

# Unaligned and aligned sizes, tall and wide matrices, several chunks.
SHAPES = ((3, 5), (64, 16), (KERNEL_CHUNK // 128 + 3, 128))


def make(device: str, dtype: torch.dtype, shapes=SHAPES, **options: Any) -> Muon:
    params = [nn.Parameter(p.detach().to(device)) for p in parameters(shapes, dtype)]
    return Muon(params, **options)


def weights_of(optimizer: Muon) -> list[nn.Parameter]:
    return optimizer.param_groups[0]["params"]


def train(optimizer: Muon, steps: range = range(2), scale: float = 1.0) -> Muon:
    for step in steps:
        here = [nn.Parameter(p.detach().cpu()) for p in weights_of(optimizer)]
        set_gradients(here, step)
        for p, q in zip(weights_of(optimizer), here, strict=True):
            p.grad = q.grad.to(p.device) * scale
        optimizer.step()
    return optimizer


def train_both(device: str, monkeypatch, dtype: torch.dtype, **options: Any) -> tuple[Muon, Muon]:
    """Return an optimizer that fuses and one that does not, after the same steps."""
    got = train(make(device, dtype, **options))
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "why_no_triton_kernels", lambda device: "for comparison")
        return got, train(make(device, dtype, **options))


def assert_alike(got: Muon, want: Muon, dtype: torch.dtype) -> None:
    """Check that few quantized values differ, by one rounding step."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    for number, (p, q) in enumerate(zip(weights_of(got), weights_of(want), strict=True)):
        # The iteration is in BF16, so a rounding error of one entry changes every entry.
        assert (p - q).norm() <= (tolerance + 1e-3) * q.norm()
        assert got.state[p]["step"] == want.state[q]["step"]
        assert got.state[p].keys() == want.state[q].keys()
        a, b = (moment_values(x, number, "momentum_buffer") for x in (got, want))
        off = (a - b).abs() > 1e-4 * b.abs() + 1e-30
        assert ((a - b).abs() <= 0.3 * b.abs() + 0.01 * b.abs().amax()).all()
        # Cancellation in the smallest value of a group changes the range of the group.
        group = got.param_groups[0]["group_size"] if off.numel() > 1024 else 1
        assert off.sum() <= max(3 * group, 1 + 0.05 * off.numel())


@pytest.mark.long
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_every_format(device, monkeypatch, name):
    options = {"momentum_format": name, "lr": 0.01}
    assert_alike(*train_both(device, monkeypatch, torch.bfloat16, **options), torch.bfloat16)


@pytest.mark.long
@pytest.mark.drawn(4)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_weights(device, monkeypatch, weights, dtype):
    options = {"weights": weights, "adjust_lr_fn": "match_rms_adamw", "group_size": 32}
    assert_alike(*train_both(device, monkeypatch, dtype, **options), dtype)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fp32_momentum_equals_torch(device, nesterov):
    rate = torch.tensor(0.05, device=device)
    got = make(device, torch.float32, lr=rate, nesterov=nesterov, momentum_format="fp32")
    want = torch.optim.Muon(weights_of(make(device, torch.float32)), lr=0.05, nesterov=nesterov)
    for optimizer in (got, want):
        train(optimizer)
    for p, q in zip(weights_of(got), weights_of(want), strict=True):
        momentum = got.state[p]["momentum_buffer"], want.state[q]["momentum_buffer"]
        torch.testing.assert_close(*momentum, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def test_stochastic_rounding_draws_the_same_numbers(device, monkeypatch):
    options = {"momentum_format": "fp32", "ns_steps": 0, "seed": 5}
    got, want = train_both(device, monkeypatch, torch.bfloat16, **options)
    pairs = zip(weights_of(got), weights_of(want), strict=True)
    different = torch.cat([(p != q).flatten() for p, q in pairs])
    assert different.double().mean() < 0.01


def test_gradients_can_be_scaled_and_steps_skipped(device):
    scaled, plain = make(device, torch.bfloat16), make(device, torch.bfloat16)
    for step in range(3):
        scaled.grad_scale = torch.tensor(1024.0, device=device)
        scaled.found_inf = torch.tensor([float(step == 1)], device=device)
        train(scaled, range(step, step + 1), scale=1024.0)
        if step != 1:
            train(plain, range(step, step + 1))
    assert_same_state(scaled, plain)
    assert scaled.state[weights_of(scaled)[0]]["step"].item() == 2


def test_rounds_and_addresses_do_not_matter(device, monkeypatch):
    together, apart = make(device, torch.bfloat16), make(device, torch.bfloat16)
    train(together)
    monkeypatch.setattr(muon, "ROUND", 64)
    for step in range(2):
        train(apart, range(0))
        here = [nn.Parameter(p.detach().cpu()) for p in weights_of(apart)]
        set_gradients(here, step)
        for p, q in zip(weights_of(apart), here, strict=True):
            room = torch.empty(p.numel() + 1, dtype=p.dtype, device=device)
            p.grad = room[1:].view_as(p).copy_(q.grad)
        apart.step()
    assert_same_state(together, apart)


def test_resuming_is_bit_exact(device):
    straight = train(make(device, torch.bfloat16), range(3))
    first = train(make(device, torch.bfloat16), range(1))
    resumed = Muon(weights_of(first))
    resumed.load_state_dict(first.state_dict())
    assert_same_state(train(resumed, range(1, 3)), straight)


def test_offloaded_states_give_the_same_momentum(device):
    present = train(make(device, torch.bfloat16))
    streamed = train(make(device, torch.bfloat16, offload=("states",)))
    assert_alike(streamed, present, torch.bfloat16)


def test_eager_steps_replace_the_addresses_of_replays(device, monkeypatch):
    """Two graphs are captured, and replayed between eager steps."""
    update = fused.FusedUpdate.__new__(fused.FusedUpdate)
    update.device, update.firsts = torch.device(device), [0]
    update.addresses = torch.zeros(1, dtype=torch.int64, device=device)
    update.captures, update.pointers = 0, []
    update.pinned = [update._pin_memory()]
    first, second, eager = (torch.empty(8, device=device) for _ in range(3))

    def set_addresses(x: torch.Tensor, *, captures: bool) -> None:
        monkeypatch.setattr(fused, "_is_capturing", lambda device: captures)
        update._set_addresses([x])

    def replay(number: int) -> int:
        update.addresses.copy_(update.pinned[0][number])
        return update.addresses.item()

    set_addresses(eager, captures=False)
    for x in (first, second):
        set_addresses(x, captures=True)
    for number, x in enumerate((first, second)):
        assert replay(number) == x.data_ptr()
        set_addresses(eager, captures=False)
        assert update.addresses.item() == eager.data_ptr()
    for _ in range(fused.CAPTURES - 2):
        set_addresses(first, captures=True)
    with pytest.raises(RuntimeError, match="Run a step"):
        set_addresses(first, captures=True)
    set_addresses(eager, captures=False)
    set_addresses(first, captures=True)
    assert replay(0) == first.data_ptr()


def test_nonfinite_gradients_are_not_hidden(device):
    optimizer = train(make(device, torch.float32, shapes=((64, 16), (16, 32))), range(1))
    first, second = weights_of(optimizer)
    first.grad[3, 4] = torch.nan
    optimizer.step()
    assert not first.isfinite().any()  # the norm of the matrix
    assert second.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["stochastic", "fp32"])
def test_replays_of_cuda_graphs(device, weights):
    rate = torch.tensor(0.1, device="cuda")
    captured, plain = (make("cuda", torch.bfloat16, lr=rate, weights=weights) for _ in range(2))
    train(captured, range(1))
    train(plain, range(1))
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.step()
    for step in range(1, 7):
        rate.fill_(0.1 / step)
        train(plain, range(step, step + 1))
        for p, q in zip(weights_of(captured), weights_of(plain), strict=True):
            p.grad.copy_(q.grad)
        (graphs[0].replay, graphs[1].replay, captured.step)[step % 3]()
    assert_same_state(captured, plain)
