"""Master copies follow weights that the user writes, and keep their precision otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
from optim_helpers import (
    all_parameters,
    assert_same_state,
    moment_values,
    parameters,
    reload_from_file,
    run,
    set_gradients,
)
from torch import Tensor, nn

from fp8pass.optim import AdamW, offload_weights, step_in_backward
from fp8pass.optim.group_options import Storage
from fp8pass.optim.slots import state_key, to_rows
from fp8pass.optim.state_formats import Quantized, dequantize

SHAPES = ((3, 5), (2, 64, 3))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of log2(0)


def master_of(optimizer: AdamW, parameter: Tensor) -> Tensor:
    """Return the values of a master copy."""
    storage = Storage.of(optimizer.param_groups[0])
    format, state = storage.master(parameter.dtype), optimizer.state[parameter]
    rows = to_rows(state[state_key("master", format)], storage.group_size, format.storage_dtype)
    parts = [state[state_key("master", format, part)] for part in format.parts]
    values = dequantize(Quantized(rows, *parts), format)
    return values.reshape(-1)[: parameter.numel()].view_as(parameter)


@torch.no_grad()
def copy_into(params, values):
    for p, x in zip(params, values, strict=True):
        p.copy_(x)


def copy_into_data(params, values):
    for p, x in zip(params, values, strict=True):
        p.data.copy_(x)


def set_data(params, values):
    for p, x in zip(params, values, strict=True):
        p.data = x.clone()


def from_a_vector(params, values):
    nn.utils.vector_to_parameters(torch.cat([x.reshape(-1) for x in values]), params)


def clip(params, values):
    for p in params:
        p.data.clamp_(-0.25, 0.25)


WRITES = [copy_into_data, set_data, from_a_vector, clip]


@pytest.mark.long
@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [("fp32", torch.bfloat16), ("fp32", torch.float16), ("fp16", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_an_update_begins_with_the_weights_that_the_user_wrote(path, write, weights, dtype):
    params = parameters(SHAPES, dtype)
    optimizer = AdamW(params, 0.01, weights=weights, weight_decay=0.0)
    run(params, optimizer, range(2))
    write(params, parameters(SHAPES, dtype, seed=1))
    written = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["lr"] = 0.0
    run(params, optimizer, range(2, 4))
    for p, x in zip(params, written, strict=True):
        # Clipping changes scales, which rounds the other elements of FP16 copies again.
        torch.testing.assert_close(p, x, rtol=2.0**-7 if weights == "fp16" else 0.0, atol=0.0)
    optimizer.param_groups[0]["lr"] = 0.01
    run(params, optimizer, range(4, 5))
    for p, x in zip(params, written, strict=True):
        assert 0 < (p.float() - x.float()).abs().amax() <= 0.03


@pytest.mark.drawn(4)
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_parameters_are_their_rounded_master_copies(path, weights, dtype, rounding):
    """Otherwise an update would mistake a rounding difference for a write."""
    params = parameters(SHAPES, dtype)
    optimizer = AdamW(params, 0.01, weights=weights, state_rounding=rounding)
    for step in range(2):
        run(params, optimizer, range(step, step + 1))
        for p in params:
            assert torch.equal(p, master_of(optimizer, p).to(dtype))


@pytest.mark.long
def test_elements_that_are_not_written_keep_their_precision(path):
    found = []
    for write in (False, True):
        params = parameters(SHAPES, torch.bfloat16)
        optimizer = AdamW(params, 1e-4, weights="fp32")
        run(params, optimizer, range(3))
        if write:
            for p in params:
                p.data.view(-1)[::2] = 3.0
        run(params, optimizer, range(3, 6))
        found.append((optimizer, params))
    (untouched, params), (written, others) = found
    for p, q in zip(params, others, strict=True):
        a, b = (master_of(*x).view(-1) for x in ((untouched, p), (written, q)))
        assert torch.equal(a[1::2], b[1::2])
        assert ((b[::2] - 3.0).abs() <= 1e-3).all()
        assert (b != q.float().view(-1)).any()


@pytest.mark.long
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_small_updates_add_up_after_a_write(path, weights):
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=5e-4, weight_decay=0.0, weights=weights)
    run([p], optimizer, range(1))
    p.data.fill_(1.0)
    for _ in range(20):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert 1 - master_of(optimizer, p).mean().item() == pytest.approx(0.01, rel=0.25)


@pytest.mark.long
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_weights_that_are_swapped_and_swapped_back(path, weights):
    """An average is evaluated between two steps, and no bit of the result changes."""
    found = []
    for swap in (False, True):
        params = parameters(SHAPES, torch.bfloat16)
        optimizer = AdamW(params, 1e-4, weights=weights)
        run(params, optimizer, range(3))
        if swap:
            trained = [p.detach().clone() for p in params]
            copy_into(params, parameters(SHAPES, torch.bfloat16, seed=1))
            copy_into(params, trained)
        run(params, optimizer, range(3, 6))
        found.append(optimizer)
    assert_same_state(*found)


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(32, 16).bfloat16()


@pytest.mark.long
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_any_order_of_loading_resumes_bit_by_bit(path, weights, first):
    model = linear(0)
    optimizer = AdamW(model.parameters(), 1e-4, weights=weights)
    run(list(model.parameters()), optimizer, range(3))
    saved = reload_from_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = linear(1)
    resumed = AdamW(other.parameters(), weights=weights)
    parts = {"model": other, "optimizer": resumed}
    for name in (first, *(parts.keys() - {first})):
        parts[name].load_state_dict(saved[name])
    for each in (optimizer, resumed):
        run(all_parameters(each), each, range(3, 6))
    assert_same_state(optimizer, resumed)


def test_copies_that_a_checkpoint_lacks_begin_with_the_weights_of_the_first_step(path):
    model = linear(0)
    optimizer = AdamW(model.parameters())
    run(list(model.parameters()), optimizer, range(2))
    other = linear(1)
    resumed = AdamW(other.parameters(), weights="fp32")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    resumed.param_groups[0]["lr"] = 0.0
    run(list(other.parameters()), resumed, range(2, 3))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_values_that_are_not_finite_are_taken():
    (p,) = params = parameters(((256,),), torch.bfloat16)
    optimizer = AdamW(params, weights="fp32")
    run(params, optimizer, range(1))
    p.data[3] = torch.nan
    p.data[5] = torch.inf
    run(params, optimizer, range(1, 2))
    assert p[3].isnan()
    assert p[5].isinf()
    assert p.isfinite().sum() == 254
    p.data.fill_(0.5)
    run(params, optimizer, range(2, 3))
    assert (p - 0.5).abs().amax() < 0.01


@pytest.mark.long
@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("offload", [(), ("states",)], ids=str)
def test_writes_between_backwards_that_step(monkeypatch, path, weights, offload):
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 64)
    models = [linear(0), linear(0)]
    for i, model in enumerate(models):
        optimizer = AdamW(model.parameters(), 0.01, weights=weights, offload=offload)
        if i:
            step_in_backward(model, optimizer)
        for step in range(4):
            if step == 2:
                model.load_state_dict(linear(1).state_dict())
            x = torch.linspace(-1, 1, 256).view(8, 32).bfloat16()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        new = linear(1)
        assert (model.weight - new.weight).abs().amax() <= 0.05
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(p, q)


def test_writes_to_weights_on_the_host(monkeypatch):
    """The device has FP8 data of the weights; a state dict writes to the values in host memory."""
    monkeypatch.setattr("fp8pass.optim.offload.SMALLEST_OFFLOADED", 64)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)).bfloat16()
    new = {name: torch.full_like(x, 0.25) for name, x in model.state_dict().items()}
    offload_weights(model, "cpu", skip="1")
    optimizer = AdamW(model.parameters(), 0.01, weights="fp32", weight_decay=0.0)
    for step in range(3):
        if step == 2:
            model.load_state_dict(new)
        model(torch.ones(4, 64, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for x in model.state_dict().values():
        assert 0 < (x.float() - 0.25).abs().amax() <= 0.03


def test_skipped_steps_write_nothing(path):
    """GradScaler found an infinite gradient; an earlier write to the weights stays."""
    (p,) = params = parameters(((64,),), torch.bfloat16)
    optimizer = AdamW(params, weights="fp32")
    run(params, optimizer, range(1))
    p.data.fill_(0.5)
    set_gradients(params, 1)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert (p == 0.5).all()
    assert moment_values(optimizer, 0, "exp_avg").isfinite().all()
