"""`AdamW(offload=...)`: offloaded states and sums give the same results bit for bit."""

from __future__ import annotations

import pytest
import torch
from optim_helpers import (
    all_parameters,
    assert_same_state,
    parameters,
    reload_from_file,
    run,
    set_gradients,
)
from torch import nn

from fp8pass import hardware
from fp8pass.optim import AdamW, fused, kernel, step_in_backward
from fp8pass.optim import offload as host_memory
from fp8pass.option_checks import ConfigError
from fp8pass.runtime.arena import SMALLEST_BLOCK, Arena

DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
STATES = ("states",)
# One piece, several pieces, and a remainder; the last parameters are small.
SHAPES = ((20, 1024), (100, 1000), (50, 100), (33,), ())


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Use pieces of a few thousand elements, and offload small parameters."""
    monkeypatch.setattr("fp8pass.optim.offload.STAGED_BYTES", 1 << 17)
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 1 << 10)


def on(device: str, params) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(device)) for p in params]


def steps(optimizer, device: str, numbers: range) -> None:
    for step in numbers:
        params = all_parameters(optimizer)
        on_host = [nn.Parameter(p.detach().cpu()) for p in params]
        set_gradients(on_host, step)
        for p, q in zip(params, on_host, strict=True):
            p.grad = q.grad.to(device)
        optimizer.step()


def both(device: str, dtype, numbers: range, **options):
    """Return an optimizer with offloaded states and one without, after the same steps."""
    found = []
    for offload in (STATES, ()):
        params = on(device, parameters(SHAPES, dtype))
        optimizer = AdamW(params, offload=offload, **options)
        steps(optimizer, device, numbers)
        found.append(optimizer)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "coat-paper"},
        {"preset": "fp8-lm"},
        {"weights": "fp32", "first_moment": "bf16"},
        {"group_size": 64},
    ],
    ids=str,
)
def test_no_number_changes(device, dtype, options):
    offloaded, plain = both(device, dtype, range(20 if device == "cuda" else 4), **options)
    for p in all_parameters(offloaded):
        state = offloaded.state[p]
        where = "cpu" if p.numel() >= host_memory.SMALLEST_OFFLOADED else device
        assert all(x.device.type == where for name, x in state.items() if name != "step")
        for name, x in state.items():
            state[name] = x.to(device)
    assert_same_state(offloaded, plain)


@pytest.mark.parametrize("device", DEVICES)
def test_weights_in_another_layout_keep_their_states(device):
    """Pieces of such weights (`channels_last`) are not views; other states are offloaded."""
    found = []
    for offload in (STATES, ()):
        convolution, linear = on(device, parameters(((32, 16, 3, 3), (64, 64)), torch.float32))
        convolution.data = convolution.data.to(memory_format=torch.channels_last)
        optimizer = AdamW([convolution, linear], offload=offload)
        steps(optimizer, device, range(3))
        found.append(optimizer)
    devices = [
        {x.device.type for name, x in found[0].state[p].items() if name != "step"}
        for p in all_parameters(found[0])
    ]
    assert devices == [{device}, {"cpu"}]
    for p, q in zip(*map(all_parameters, found), strict=True):
        assert torch.equal(p, q)
        assert p.is_contiguous() == q.is_contiguous() == (p.ndim == 2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of log2(0)
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_pieces_of_the_kernel(monkeypatch):
    """Each piece begins within a parameter, and draws the random bits of its elements."""
    pytest.importorskip("triton")
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    for module in (fused, kernel):
        monkeypatch.setattr(module, "CHUNK", 2 * kernel.TILE)
    monkeypatch.setattr("fp8pass.optim.offload.STAGED_BYTES", 1 << 14)
    kernel.kernel.cache_clear()
    params = [on("cpu", parameters(((40, 250), (7,)), torch.bfloat16)) for _ in range(2)]
    offloaded, plain = AdamW(params[0], offload=STATES), AdamW(params[1])
    for optimizer in (offloaded, plain):
        run(all_parameters(optimizer), optimizer, range(2))
    kernel.kernel.cache_clear()
    updates = [step.__self__ for *_, step in offloaded._prepared.values()]
    (update,) = [x for x in updates if isinstance(x, fused.StreamedUpdate)]
    assert len(update.pieces) > 2
    assert_same_state(offloaded, plain)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_in_the_backward(device):
    models = []
    for offload in (STATES, ()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)).to(device)
        optimizer = AdamW(model.parameters(), lr=0.01, offload=offload)
        step_in_backward(model, optimizer)
        for _ in range(5):
            model(
                torch.linspace(-1, 1, 64 * 8, device=device).view(8, 64)
            ).square().mean().backward()
        models.append(model)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert p.grad is None
        assert torch.equal(p, q)


@pytest.mark.long
@pytest.mark.drawn(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buffer", ["e4m3", "fp16", "de8"])
@pytest.mark.parametrize("offload", [("gradients",), ("states", "gradients")], ids="+".join)
def test_sums_of_gradients(device, buffer, offload, monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.STAGED_BYTES", 1 << 16)
    models = []
    for each in (offload, ()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 1500), nn.Tanh(), nn.Linear(1500, 64)).to(device)
        optimizer = AdamW(model.parameters(), lr=0.01, offload=each)
        attached = step_in_backward(model, optimizer, accumulate=3, buffer=buffer)
        for step in range(8):
            x = torch.linspace(-1, 1, 64 * 8, device=device).view(8, 64) * (step + 1)
            model(x).square().mean().backward()
        sum_ = attached.accumulated[model[0].weight]
        assert sum_.count == 2
        assert all(bool(piece.into) == bool(each) for piece in sum_.pieces)
        models.append(model)
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("device", DEVICES)
def test_checkpoints_go_both_ways(device):
    offloaded, plain = both(device, torch.bfloat16, range(2))
    for optimizer, other in ((offloaded, plain), (plain, offloaded)):
        other.load_state_dict(reload_from_file(optimizer.state_dict()))
        assert other.param_groups[0]["offload"] != optimizer.param_groups[0]["offload"]
    for optimizer in (offloaded, plain):
        steps(optimizer, device, range(2, 4))
    for p in all_parameters(offloaded):
        for name, x in offloaded.state[p].items():
            offloaded.state[p][name] = x.to(device)
    assert_same_state(offloaded, plain)


def test_a_gradient_that_is_not_finite_is_skipped():
    params = parameters(((64, 64),))
    optimizer = AdamW(params, offload=STATES)
    before = params[0].clone()
    params[0].grad = torch.ones_like(params[0])
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(params[0], before)


def test_wrong_options():
    for wrong, message in (
        ("states", "offload must be a tuple of names"),
        (("stats",), "Did you mean"),
    ):
        with pytest.raises(ConfigError, match=message):
            AdamW(parameters(), offload=wrong)


def test_a_host_that_is_too_small(monkeypatch):
    monkeypatch.setattr("fp8pass.optim.offload.available", lambda: 4096)
    with pytest.raises(ConfigError, match=r"GiB of host memory, but only 0.0 GiB"):
        AdamW(parameters(((64, 64),)), offload=STATES)


def test_tensors_share_blocks():
    arena = Arena(torch.device("cpu"))
    dtypes = (torch.bfloat16, torch.uint8)
    tensors = [arena.take(torch.full((n,), n).to(d)) for d in dtypes for n in (1, 300, 7)]
    assert [x.unique().tolist() for x in tensors] == [[1], [300], [7], [1], [300 % 256], [7]]
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(dtypes)
    assert arena.empty(torch.Size([SMALLEST_BLOCK]), torch.float32).numel() > 0
