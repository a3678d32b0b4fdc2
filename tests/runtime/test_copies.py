"""Copies to the host and back, their host memory, and the bandwidth of the link."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.runtime import copies
from fp8pass.runtime.arena import Buffers, round_size
from fp8pass.runtime.copies import STEPS, bandwidth, round_down

CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]
host = torch.ops.fp8pass_host


def copy_there_and_back(x: torch.Tensor) -> torch.Tensor:
    copy = copies.to_host(x)
    copy = copies.settled(copy, x)
    back = copies.from_host(copy, x.device, x)
    return copies.settled(back, copy)


TENSORS = {
    "matrix": torch.randn(20, 32).bfloat16(),
    "transposed": torch.randn(20, 32).t(),
    "fp8": torch.randn(20, 32).to(torch.float8_e4m3fn),
    "heads": torch.randn(2, 8, 4, 16).transpose(1, 2),
    "scalar": torch.tensor(3.0),
    "none": torch.empty(0, 4),
    "with gaps": torch.randn(20, 32)[:, :20],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(TENSORS))
def test_copies_return_equal_tensors(name, device):
    x = TENSORS[name].to(device)
    back = copy_there_and_back(x)
    assert back.dtype == x.dtype
    assert back.stride() == x.stride()
    assert back.device == x.device
    assert torch.equal(back.double(), x.double())
    assert back.numel() == 0 or back.data_ptr() != x.data_ptr()
    assert not copies._unsettled


@pytest.mark.parametrize("name", list(TENSORS))
def test_fake_copies_have_the_layout_of_real_copies(name):
    x = TENSORS[name]
    with FakeTensorMode() as mode:
        fake = copy_there_and_back(mode.from_tensor(x))
    assert (fake.shape, fake.stride(), fake.dtype) == (x.shape, x.stride(), x.dtype)


def test_the_copy_of_another_tensor_is_refused():
    x = torch.randn(4)
    copy = copies.to_host(x)
    with pytest.raises(RuntimeError, match="offload=False"):
        copies.settled(copy.clone(), x)
    copies.settled(copy, x)


@pytest.mark.long
def test_a_buffer_is_free_after_its_last_tensor():
    buffers = Buffers(CPU)
    x = buffers.empty_strided((64, 32), (32, 1), torch.bfloat16)
    address, part = x.data_ptr(), x.t()[3:5]
    other = buffers.empty_strided((64, 32), (32, 1), torch.bfloat16)
    assert other.data_ptr() != address
    assert buffers.used == 2 * round_size(64 * 32 * 2)
    del x
    gc.collect()
    assert buffers.used == 2 * round_size(64 * 32 * 2)
    del part
    assert buffers.used == round_size(64 * 32 * 2)
    assert buffers.empty_strided((2048,), (1,), torch.bfloat16).data_ptr() == address


def test_a_storage_has_the_bytes_of_its_tensor():
    x = Buffers(CPU).empty_strided((3, 7), (7, 1), torch.float32)
    assert x.untyped_storage().nbytes() == 84


def test_saved_tensors_keep_their_buffer():
    buffers = Buffers(CPU)

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(buffers.empty_strided(x.shape, x.stride(), x.dtype).copy_(x))
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    x = torch.randn(8, 16, requires_grad=True)
    y = Keep.apply(x)
    assert buffers.used
    y.sum().backward()
    assert torch.equal(x.grad, x.detach())
    assert buffers.used == 0


def test_threads_share_buffers():
    buffers, numbers = Buffers(CPU), []

    def work(number: int) -> None:
        for _ in range(200):
            x = buffers.empty_strided((100,), (1,), torch.int64).fill_(number)
            numbers.append(bool((x == number).all()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(numbers)
    assert buffers.used == 0


@given(st.integers(1, 1 << 40))
def test_sizes_of_buffers_are_rounded_up(size):
    assert size <= round_size(size) <= max(size * 9 / 8, 512, size + 512)
    assert round_size(round_size(size)) == round_size(size)


@given(st.floats(1e8, 1e12))
def test_bandwidths_are_rounded_down(rate):
    assert rate / 2 ** (1 / STEPS) * 0.999 <= round_down(rate) <= rate * 1.001


def test_a_cpu_simulates_the_link_of_a_gpu():
    assert bandwidth(CPU) == pytest.approx(5e10, rel=0.1)


@pytest.mark.gpu
def test_the_link_is_measured():
    assert 1e9 < bandwidth(torch.device("cuda", 0)) < 1e12


@pytest.mark.gpu
def test_copies_overlap_with_computation():
    """The CPU does not wait, the GPU continues to compute, and later reads are complete."""
    x = torch.randn(1 << 26, device="cuda")
    copy_there_and_back(x)  # locks pages
    a = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    want = x.clone()
    start.record()
    copy = copies.to_host(x)
    for _ in range(8):
        a = (a @ a).clamp(-1, 1)
    middle.record()
    copy = copies.settled(copy, x)
    x.zero_()  # after the copy in stream order
    back = copies.settled(copies.from_host(copy, x.device), copy)
    end.record()
    assert torch.equal(back, want)
    assert torch.equal(copy, want.cpu())
    assert start.elapsed_time(middle) > 0


@pytest.mark.gpu
def test_a_freed_source_is_not_overwritten():
    x = torch.full((1 << 26,), 3.0, device="cuda")
    copy, like = copies.to_host(x), x[:1]
    del x
    for _ in range(4):
        torch.zeros(1 << 26, device="cuda")
    copies.settled(copy, like)
    torch.cuda.synchronize()
    assert bool((copy == 3.0).all())


@pytest.mark.gpu
def test_copies_that_are_never_waited_for_are_freed():
    x = torch.ones(1 << 20, device="cuda")
    copies.from_host(copies.to_host(x), x.device)
    torch.cuda.synchronize()
    copy_there_and_back(x)
    assert all(entry is None for entry in copies._unsettled.values())
