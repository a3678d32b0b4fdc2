"""Packed FP8 gradients and weights, and the kernels that pack, add up and unpack them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fp8pass import hardware
from fp8pass.distributed.weight_gather import PackedWeights, SendBuffers, ShardKey, unpack
from fp8pass.distributed.wire import add_up, pack, packed_bytes
from fp8pass.weights.quantized_parameter import quantize_rows_into, split_rows

# Largest relative error of an FP8 value.
ROUNDING = 2.0**-4 + 2.0**-20


def unpack_rows(wire: Tensor, length: int) -> Tensor:
    """Return the values of packed rows."""
    return add_up(wire.unsqueeze(0), torch.empty(len(wire), length))


@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 400),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_rows_of_any_length_are_packed_with_small_errors(rows, length, scale, dtype, seed):
    x = (torch.randn(rows, length, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    wire = pack(x)
    assert wire.dtype is torch.uint8
    assert wire.shape == (rows, length + length % 2 + 2 * -(-length // 128))
    assert wire.shape[-1] == packed_bytes(length)
    back = unpack_rows(wire, length)
    group = nn.functional.pad(x.float(), (0, -length % 128)).unflatten(-1, (-1, 128))
    smallest = (group.abs().amax(-1, keepdim=True) / 448 * 2.0**-9).expand_as(group)
    allowed = ROUNDING * x.float().abs() + smallest.flatten(-2)[:, :length]
    assert ((back - x.float()).abs() <= allowed).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_arrive_as_nan(value):
    x = torch.ones(2, 300)
    x[1, 200] = value
    back = unpack_rows(pack(x), 300)
    assert back[0].isfinite().all()
    assert back[1, 128:256].isnan().all()
    assert back[1, :128].isfinite().all()


def test_equal_numbers_do_not_shrink():
    """Scales truncated to bf16 would always shrink the largest value of a group."""
    for value in (3.0, 0.7, 1.99, 1e-3):
        x = torch.full((1, 256), value)
        assert ((unpack_rows(pack(x), 256) - x) / x).abs().max() <= 2.0**-8


def test_zeros_arrive_as_zeros():
    assert not unpack_rows(pack(torch.zeros(1, 130)), 130).any()


@pytest.mark.parametrize(("ranks", "accepted"), [(2, 0.025), (8, 0.017), (64, 0.008)])
def test_the_error_of_a_mean_is_small(ranks, accepted):
    """The gradients have as much noise as signal."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, 1 << 14, generator=generator)
    terms = common + torch.randn(ranks, 1 << 14, generator=generator)
    mean = terms.mean(0)
    got = add_up(pack(terms).unsqueeze(1), torch.empty(1, 1 << 14), 1 / ranks)[0]
    assert (got - mean).norm() <= accepted * mean.norm()


DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
]


@pytest.fixture
def fused(monkeypatch):
    """Enable kernels, which run in Triton's interpreter on a CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of nonfinite values
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 128, 4096 + 3])
def test_kernels_agree_with_pytorch(device, dtype, length, request):
    """Bits are equal, because sums of two terms have one order."""
    generator = torch.Generator().manual_seed(length)
    rows = torch.randn(4, length, generator=generator).to(device, dtype)
    rows[1] *= 1e-30 if dtype is torch.float32 else 1e-3
    rows[2, length // 2] = float("inf")
    rows[3, 0], rows[3, length // 3] = 0.0, float("nan")
    rows[0, : min(length, 128)] = 0.0
    found = []
    for fuses in (False, True):
        if fuses:
            request.getfixturevalue("fused")
        wire = pack(rows)
        each = add_up(wire.unsqueeze(0), torch.empty_like(rows))
        sums = add_up(wire.view(2, 2, -1), rows.new_empty(2, length), 0.5)
        found.append((each, sums))
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rests_in", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
def test_the_kernel_quantizes_weights_like_pytorch(device, rests_in, shift, request):
    generator = torch.Generator().manual_seed(shift)
    matrices = []
    for rows, length in ((6, 48), (5, 5008), (1, 16)):
        numbers = torch.randn(rows * length + shift, generator=generator)
        matrices.append(numbers.to(device, rests_in)[shift:].view(rows, length))
    small, large = matrices[0], matrices[1]
    small[1] *= 1e-30
    small[2] = 0.0
    large[3, 2500], large[4, 3] = float("inf"), float("nan")
    wanted = pack_weights(matrices).parts
    request.getfixturevalue("fused")
    for (codes, scales), (want, want_scales) in zip(
        pack_weights(matrices).parts, wanted, strict=True
    ):
        torch.testing.assert_close(scales, want_scales, rtol=0, atol=0, equal_nan=True)
        assert codes.shape == want.shape
        finite = want.float().isfinite()
        assert torch.equal(finite, codes.float().isfinite())
        assert torch.equal(codes.float()[finite], want.float()[finite])


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
def test_weights_are_requantized_in_place(device, shift, fused):
    """A second launch bypasses Triton, which must not happen for other addresses."""
    matrices = [torch.randn(m, 48).to(device) for m in (6, 16)]
    wanted = pack_weights(matrices).parts
    data = torch.empty(22 * 48, dtype=torch.float8_e4m3fn, device=device)
    places = torch.empty(22, device=device), torch.empty(22 + shift, device=device)[shift:]
    for _ in range(3):
        for scales in places:
            data.zero_(), scales.zero_()
            quantize_rows_into(matrices, torch.bfloat16, data, scales)
            parts = split_rows(data, scales, [x.shape for x in matrices])
            for got, want in zip(parts, wanted, strict=True):
                assert all(map(torch.equal, _bytes(got), _bytes(want)))


def test_modules_with_equal_shards_share_a_send_buffer():
    shards, lone = [torch.ones(4, 16), torch.ones(2, 16)], [torch.ones(8, 16)]
    others = [x.bfloat16() for x in shards]
    buffers = SendBuffers()
    alike, apart, once = map(ShardKey.of, (shards, others, lone))
    for each in (alike, alike, apart, apart, once):
        buffers.register(each)
    assert buffers.get(alike) is buffers.get(ShardKey.of(shards))
    assert buffers.get(apart) is not buffers.get(alike)  # both may be gathered at once
    assert buffers.get(once) is not buffers.get(once)


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("rows", [1, 4], ids=["by words", "aligned"])
def test_packed_shards_are_unpacked_to_quantized_weights(
    device, ranks, inference, fuses, rows, monkeypatch, request
):
    """Shards are smaller and larger than the block of a program."""
    shapes = (4, 48), (16, 5008), (rows, 32)
    weights = [torch.randn(m * ranks, k).to(device) for m, k in shapes]
    sent = []
    for rank in range(ranks):
        sent.append(pack_weights([x.chunk(ranks)[rank] for x in weights]).memory)
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: "none")
    if fuses:
        request.getfixturevalue("fused")
    with torch.inference_mode(inference):
        whole = PackedWeights([x.shape for x in weights], weights[0].device)
        versions = [] if inference else [x._version for x in whole.parts[0]]
        unpack(torch.stack(sent), whole)
    for got, want in zip(whole.parts, pack_weights(weights).parts, strict=True):
        assert all(map(torch.equal, _bytes(got), _bytes(want)))
    if not inference:  # autograd may have saved them
        assert [x._version for x in whole.parts[0]] == versions


def pack_weights(matrices):
    """Quantize matrices by row, in BF16."""
    packed = PackedWeights([x.shape for x in matrices], matrices[0].device)
    quantize_rows_into(matrices, torch.bfloat16, packed.data, packed.scales)
    return packed


def _bytes(tensors):
    return [x.view(torch.uint8) for x in tensors]


OFFLINE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fp8pass.weights import quantization_kernel
from fp8pass.distributed import wire_kernels

TYPES = {
    "rows": "*fp32", "data": "*fp8e4nv", "codes": "*fp8e4nv", "into": "*fp32", "factor": "fp32",
    "table": "*i64",
    "shards": "*i32", "whole": "*i32",
}
DTYPES = quantization_kernel.TRITON_DTYPES
BF16, FP32 = (DTYPES[getattr(quantization_kernel.torch, x)] for x in ("bfloat16", "float32"))
ROWS = {"FROM": FP32, "DTYPE": BF16, "COUNT": 7, "ALIGNED": 16, "BLOCK": 2048}
for function, constants in (
    (wire_kernels._pack, {"SIZE": 128, "GROUPS": 8}),
    (wire_kernels._add_up, {"SIZE": 128, "GROUPS": 8}),
    (quantization_kernel._quantize_rows, ROWS),
    (wire_kernels._unpack, {"COUNT": 14, "ALIGNED": 4, "WORDS": 4096}),
):
    quantizes = function is quantization_kernel._quantize_rows
    types = TYPES | {"scales": "*fp32" if quantizes else "*bf16"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    pointers = (i for i, x in enumerate(signature.values()) if x.startswith("*"))
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(function, signature, constants, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32))
    ptx = compiled.asm["ptx"]
    copies = function is wire_kernels._unpack
    assert copies or "e4m3x2" in ptx
    if copies or quantizes:
        assert "ld.global.v4" in ptx or "v4.b32" in ptx
"""


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles in every other test")
def test_kernels_compile_for_a_gpu(tmp_path):
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", OFFLINE], env=env, check=True, timeout=120)
