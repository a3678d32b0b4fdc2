"""Tile kernels store matrices in both layouts, and compute amaxes."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_helpers import fused, programs_of, random
from torch.fx.experimental.proxy_tensor import make_fx

from fp8pass import hardware
from fp8pass.codegen.kernels.tile_kernel import tiles
from fp8pass.codegen.program.program_batch import Batch
from fp8pass.config import Config
from fp8pass.graph import spec
from fp8pass.passes import Context
from fp8pass.passes.lowering.fuse_tiles import fuse_tiles

aten, fp8 = torch.ops.aten, torch.ops.fp8pass


@pytest.mark.parametrize("parts", ["ab", "aa", "aba"])
def test_concatenated_operands(parts, monkeypatch):
    """The kernels store the parts in place; a part that occurs twice is copied."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)

    def function(x, y, scale):
        codes = {
            "a": fp8.quantize(x, scale, "e4m3 tensor"),
            "b": fp8.quantize(y, scale, "e4m3 tensor"),
        }
        turned = [fp8.transpose(codes[name]).view(torch.uint8) for name in "ab"]
        return fp8.joined([codes[name] for name in parts]).view(torch.uint8), *turned

    args = torch.randn(32, 64), torch.randn(32, 48), torch.tensor(0.01)
    gm = make_fx(function, tracing_mode="fake")(*args)
    fuse_tiles(gm, Context(Config()))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    joined = fp8.joined.default in {n.target for n in gm.graph.nodes}
    assert joined == (len(set(parts)) < len(parts))
    for got, want in zip(gm(*args), function(*args), strict=True):
        assert torch.equal(got, want)


def test_one_concatenated_operand(monkeypatch):
    """The other operand of the GEMM is copied, since one of its parts has another user."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)

    def function(x, y, v, w, scale):
        a, b = (fp8.quantize(t, scale, "e4m3 tensor") for t in (x, y))
        c, d = (fp8.transpose(fp8.quantize(t, scale, "e4m3 tensor")) for t in (v, w))
        operands = fp8.joined([a, b]), scale, fp8.joined([c, d]), scale
        how = False, "e4m3 tensor", "e4m3 tensor"
        return fp8.scaled_mm(*operands, None, torch.bfloat16, *how), fp8.as_bytes(a)

    shapes = (32, 64), (32, 48), (64, 16), (48, 16)
    args = *(torch.randn(shape) for shape in shapes), torch.tensor(0.01)
    gm = make_fx(function, tracing_mode="fake")(*args)
    fuse_tiles(gm, Context(Config()))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    spec.verify(gm.graph)
    (joined,) = gm.graph.find_nodes(op="call_function", target=fp8.joined.default)
    assert [n.target for n in joined.users] == [fp8.scaled_mm.default]
    for got, want in zip(gm(*args), function(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [32, 40])
def test_received_data_is_transposed(rows, monkeypatch):
    """Bit by bit, padded as GEMMs require; NaN stays NaN."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)

    def function(data):
        codes = fp8.as_codes(data, "e4m3")
        return fp8.as_bytes(fp8.transpose(codes)), fp8.as_bytes(codes)

    data = torch.arange(rows * 64).view(rows, 64).to(torch.uint8)
    gm = make_fx(function, tracing_mode="fake")(data)
    fuse_tiles(gm, Context(Config()))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    spec.verify(gm.graph)
    assert fp8.transpose.default not in {n.target for n in gm.graph.nodes}
    for got, want in zip(gm(data), function(data), strict=True):
        is_nan = (want & 0x7F) == 0x7F
        assert torch.equal(got[~is_nan], want[~is_nan])
        assert ((got[is_nan] & 0x7F) == 0x7F).all()


def test_other_formats_are_not_transposed(monkeypatch):
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    data = torch.zeros(32, 64, dtype=torch.uint8)
    gm = make_fx(lambda x: fp8.transpose(fp8.as_codes(x, "e5m2")), tracing_mode="fake")(data)
    fuse_tiles(gm, Context(Config()))
    assert fp8.transpose.default in {n.target for n in gm.graph.nodes}


def heads(x):
    return x.view(2, 16, 4, 16).transpose(1, 2)


AT_HAND = {
    "input": lambda x, w: x,
    "view of an input": lambda x, w: x.view(2, -1, 64).view(64, 32),
    "product": lambda x, w: x @ w,
    "attention": lambda x, w: (
        aten._scaled_dot_product_flash_attention_for_cpu(*[heads(x)] * 3)[0]
        .transpose(1, 2)
        .reshape(32, 64)
    ),
}
COMPUTED = {
    "pointwise": lambda x, w: x @ w + 1,
    "copy": lambda x, w: heads(x).reshape(32, 64),
    "part of an input": lambda x, w: x[:, 1:],
    "one row for all": lambda x, w: w[0].expand(32, 64),
    "gathered": lambda x, w: torch.cat([x, w]),
    # Inductor chooses the layout of the result, and copies it.
    "convolution": lambda x, w: torch.conv1d(x[None], w[:32, :32, None]).view(32, 64),
}


@pytest.mark.parametrize("case", [*AT_HAND, *COMPUTED])
def test_amaxes_of_values_in_memory(case, monkeypatch):
    """Generated code that computes a value computes its amax as well."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    value = (AT_HAND | COMPUTED)[case]

    def function(x, w):
        return fp8.amax(value(x, w), "tensor")

    args = torch.randn(32, 64), torch.randn(64, 64)
    gm = make_fx(function, tracing_mode="fake")(*args)
    fuse_tiles(gm, Context(Config()))
    assert (tiles in {n.target for n in gm.graph.nodes}) == (case in AT_HAND)
    are_inputs = [n.op == "placeholder" for n in gm.graph.nodes]
    assert are_inputs == sorted(are_inputs, reverse=True)
    for special in (1.0, -1e30, math.nan, -math.inf):
        args[0][3, 17] = special
        assert torch.equal(gm(*args).nan_to_num(-1.0), function(*args).nan_to_num(-1.0))


def quantized(d):
    scale = fp8.scale(fp8.amax(d, "tensor"), "e4m3 tensor")
    data = fp8.quantize(d, scale, "e4m3 tensor")
    return data.view(torch.uint8), fp8.transpose(data).view(torch.uint8)


def gradient(dy, x, dtype=torch.bfloat16):
    return (dy.float() * torch.tanh(x.float())).to(dtype)


def in_groups(dy, x):
    scales = fp8.scale(fp8.amax(x, "1×16"), "e4m3 1×16")
    data = fp8.quantize(x, scales, "e4m3 1×16")
    return gradient(dy, fp8.dequantize([data], scales, "e4m3 1×16", torch.bfloat16))


def sum_before_a_cast(dy, x):
    d = gradient(dy, x, torch.float32)
    return *quantized(d.bfloat16()), d.sum(0)


def sum_after_a_cast(dy, x):
    d = gradient(dy, x)
    return *quantized(d), d.float().sum(0)


def sum_before_a_view(dy, x):
    d = gradient(dy.view(4, 20, 64), x.view(4, 20, 64))
    return *quantized(d.view(80, 64)), d.sum([0, 1])


def sums_of_concatenated_gradients(dy, x):
    gradients = gradient(dy, x), gradient(x, dy)
    scales = [fp8.scale(fp8.amax(d, "tensor"), "e4m3 tensor") for d in gradients]
    data = [fp8.quantize(d, s, "e4m3 tensor") for d, s in zip(gradients, scales, strict=True)]
    turned = [fp8.transpose(x).view(torch.uint8) for x in data]
    return fp8.joined(data).view(torch.uint8), *turned, *(d.sum(0) for d in gradients)


# Functions whose column sums are stored by the tile kernel, and the rounding before the sum.
SUMMED = {
    "of the result": (lambda dy, x: (*quantized(d := gradient(dy, x)), d.sum(0)), "bfloat16"),
    "in fp16": (
        lambda dy, x: (*quantized(d := gradient(dy, x, torch.float16)), d.sum(0, True)),
        "float16",
    ),
    "in FP32": (  # autograd on a GPU, under autocast
        lambda dy, x: (
            *quantized(d := gradient(dy, x)),
            d.sum(0, keepdim=True, dtype=torch.float32),
        ),
        "bfloat16",
    ),
    "of a value in groups": (
        lambda dy, x: (*quantized(d := in_groups(dy, x)), d.sum(0), d * 2),
        "bfloat16",
    ),
    "of an input": (lambda dy, x: (*quantized(dy), dy.sum(0)), ""),
    "of a product": (lambda dy, x: (*quantized(d := dy @ x.t()[:, :32]), d.sum(0)), ""),
    "before a cast": (sum_before_a_cast, ""),
    "after a cast": (sum_after_a_cast, "bfloat16"),
    "concatenated": (sums_of_concatenated_gradients, "bfloat16"),
    "before a view": (sum_before_a_view, "bfloat16"),
}
NOT_SUMMED = {
    "stored for another reader": lambda dy, x: (*quantized(d := gradient(dy, x)), d.sum(0), d * 2),
    "returned": lambda dy, x: (*quantized(d := gradient(dy, x)), d.sum(0), d),
    "in FP64": lambda dy, x: (
        *quantized(d := gradient(dy, x)),
        d.sum(0, dtype=torch.float64),
    ),
    "another dimension": lambda dy, x: (*quantized(d := gradient(dy, x)), d.sum(1)),
    "no kernel quantizes it": lambda dy, x: (
        fp8.amax(d := gradient(dy, x), "tensor"),
        fp8.quantize(d, d[0, 0].float(), "e4m3 tensor").view(torch.uint8),
        d.sum(0),
    ),
    "more inputs than the kernel may read": lambda dy, x: (
        *quantized(d := gradient(dy, x) * x.view(2, 40, 64).flip(1).view(80, 64)),
        d.sum(0),
    ),
}


@pytest.mark.parametrize("case", [*SUMMED, *NOT_SUMMED])
def test_column_sums(case, monkeypatch):
    """The kernel that computes the amax sums the columns, if no other node needs the matrix."""
    monkeypatch.setattr(hardware, "why_no_triton_kernels", lambda device: None)
    function, rounding = SUMMED.get(case) or (NOT_SUMMED.get(case), None)
    args = torch.randn(80, 64).bfloat16(), torch.randn(80, 64).bfloat16()
    gm = make_fx(function, tracing_mode="fake")(*args)
    fuse_tiles(gm, Context(Config()))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    kernels = gm.graph.find_nodes(op="call_function", target=tiles)
    stores = [s for n in kernels for p in Batch.parse(n.args[1]).programs for s in p.stores]
    assert {s.dtype for s in stores if s.layouts == ("tile_sums",)} == {rounding} - {None}
    sums = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    summed = {node.args[0].args[0] for node in sums if node.args[0].args}
    assert summed.isdisjoint(kernels) == (case in NOT_SUMMED)
    for got, want in zip(gm(*args), function(*args), strict=True):
        if want.dtype == torch.uint8:
            assert (got != want).float().mean() < 0.05  # the kernel does not round to BF16 first
        else:
            # Kernels do not round what they dequantize from groups.
            tolerance = 0.1 if "groups" in case else 1e-4
            torch.testing.assert_close(got, want, rtol=2**-7, atol=tolerance)


def in_blocks(x, how="e4m3 1×128 fp32"):
    """Quantize in blocks. Return the FP8 data as bytes, and the scales."""
    scales = fp8.scale(fp8.amax(x, how.split()[1]), how)
    return fp8.quantize(x, scales, how).view(torch.uint8), scales


def squares(x):
    """Quantize a weight for forward and dgrad."""
    how = "e4m3 128×128 fp32"
    scales = fp8.scale(fp8.amax(x, "128×128"), how)
    data = fp8.quantize(x, scales, how)
    return data.view(torch.uint8), fp8.transpose(data).view(torch.uint8), scales, scales.t()


def known_squares(x, scales):
    """Quantize a weight with the scales of the forward, in the backward."""
    data = fp8.quantize(x, scales, "e4m3 128×128 fp32")
    return fp8.transpose(data).view(torch.uint8)


def for_both(x):
    """Quantize a gradient for dgrad, and transposed for wgrad."""
    data = fp8.quantize(x, torch.tensor(0.5), "e4m3 tensor")
    return *in_blocks(x), fp8.transpose(data).view(torch.uint8)


BLOCKS = {
    "gradient": (lambda d, y: for_both(d * y), 1),
    "gradients": (lambda d, y: (*for_both(d * y), *for_both(d * 2)), 1),
    "weight": (lambda w, _: squares(w), 1),
    "gradient and weight": (lambda d, w: (*for_both(d), *squares(w)), 2),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_operands_in_blocks(case, monkeypatch):
    """The kernel reads a matrix once for scales and data in both layouts."""
    function, count = BLOCKS[case]
    gm = fused(monkeypatch, function, random(256, 384).bfloat16(), random(256, 384))
    assert sum(programs_of(gm, tiles)) == count
    for target in (fp8.amax.default, fp8.quantize.default, fp8.transpose.default):
        assert not gm.graph.find_nodes(op="call_function", target=target)


def test_scales_that_belong_to_other_data_are_not_computed_again(monkeypatch):
    """Data of the forward would be read with the scales of the recomputed matrix."""

    def function(w, scales):
        other = fp8.quantize(w * 0.5, scales, "e4m3 128×128 fp32").view(torch.uint8)
        return known_squares(w, scales), other, scales * 2

    w = random(256, 384).bfloat16()
    scales = 2 * fp8.scale(fp8.amax(w, "128×128"), "e4m3 128×128 fp32")
    gm = fused(monkeypatch, function, w, scales)
    assert len(gm.graph.find_nodes(op="call_function", target=fp8.quantize.default)) == 2


def test_scales_of_the_forward_are_computed_again(monkeypatch):
    """The backward quantizes the weight, or a recomputed matrix, for another GEMM."""
    w, how = random(256, 384).bfloat16(), "e4m3 128×128 fp32"
    scales = fp8.scale(fp8.amax(w, "128×128"), how)
    gm = fused(monkeypatch, known_squares, w, scales)
    assert sum(programs_of(gm, tiles)) == 1
    assert not gm.graph.find_nodes(op="call_function", target=fp8.quantize.default)
