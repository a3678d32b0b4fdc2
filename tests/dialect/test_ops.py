"""The references of the dialect against fp64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8pass.dialect.formats import FORMATS
from fp8pass.testing.strategies import DTYPES, edges, matrices

fp8 = torch.ops.fp8pass
LOSSY = ["e4m3", "e5m2", "e4m3_bytes"]
PACKED = ["e2m1", "e2m2", "e2m3"]
TINY = torch.finfo(torch.float32).tiny

ANY_WIDTH = st.integers(1, 70)


def values(data: Tensor) -> Tensor:
    """Return FP8 data as fp64 numbers."""
    return (data.view(torch.float8_e4m3fn) if data.dtype == torch.uint8 else data).double()


def half_step(v: Tensor, fmt) -> Tensor:
    """Return half the distance between the FP8 numbers around `v`."""
    exponent = v.abs().clamp_min(2.0**fmt.min_exponent).log2().floor()
    return (exponent - fmt.mantissa - 1).exp2()


def assert_rounded(data: Tensor, x: Tensor, scale: Tensor, fmt) -> None:
    """Check that `data * scale` is `x` within half a step, plus fp32's own rounding."""
    wanted = x.double() / scale.double()
    slack = half_step(wanted, fmt) * (1 + 1e-4)
    assert ((values(data) - wanted).abs() <= slack).all()


# --- one scale for the tensor -------------------------------------------------------------------


@given(matrices())
def test_amax(x):
    got = fp8.amax(x, "tensor")
    assert got.dtype == torch.float32
    assert got.shape == ()
    assert got.double() == x.double().abs().max()


@pytest.mark.parametrize("format", LOSSY)
@given(amax=st.floats(0, torch.finfo(torch.float32).max, width=32))
def test_scale(format, amax):
    got = fp8.scale(torch.tensor(amax), f"{format} tensor")
    assert got.dtype == torch.float32
    least = max(amax / FORMATS[format].max, TINY)
    assert math.frexp(got.item())[0] == 0.5
    assert least * (1 - 1e-6) <= got.item() < 2 * least * (1 + 1e-6)
    assert (1 / got).isfinite()


@given(x=matrices(), factor=st.integers(0, 3))
def test_requantizing_with_another_scale_rounds_nothing(x, factor):
    """First by row, then by tensor or with a larger scale: scales are powers of two."""
    by_row = fp8.scale(fp8.amax(x, "row"), "e4m3 row")
    once = fp8.dequantize([fp8.quantize(x, by_row, "e4m3 row")], by_row, "e4m3 row", torch.float32)
    scale = by_row.amax() * 2**factor
    twice = fp8.dequantize(
        [fp8.quantize(once, scale, "e4m3 tensor")], scale, "e4m3 tensor", torch.float32
    )
    normal = once.abs() >= scale * 2.0**-6
    torch.testing.assert_close(twice[normal], once[normal], rtol=0, atol=0)


@pytest.mark.parametrize("format", LOSSY)
def test_scale_of_nan_and_inf(format):
    assert fp8.scale(torch.tensor(float("nan")), f"{format} tensor").isnan()
    assert fp8.scale(torch.tensor(float("inf")), f"{format} tensor").isinf()


@pytest.mark.parametrize("format", LOSSY)
@given(x=matrices())
def test_quantize(format, x):
    fmt = FORMATS[format]
    scale = fp8.scale(fp8.amax(x, "tensor"), f"{format} tensor")
    data = fp8.quantize(x, scale, f"{format} tensor")
    assert data.dtype == fmt.dtype
    assert data.shape == x.shape
    assert data.is_contiguous()
    assert_rounded(data, x, scale, fmt)


@pytest.mark.parametrize("format", LOSSY)
@given(drawn=st.data())
def test_quantize_at_the_edges(format, drawn):
    fmt = FORMATS[format]
    x = drawn.draw(edges(fmt))
    scale = fp8.scale(fp8.amax(x, "tensor"), f"{format} tensor")
    assert_rounded(fp8.quantize(x, scale, f"{format} tensor"), x, scale, fmt)


@pytest.mark.parametrize("format", LOSSY)
def test_quantize_uses_the_whole_range(format):
    largest = FORMATS[format].max
    x = torch.tensor([[1.0, -1.0, 0.5, 0.0]]) * largest / 64
    data = values(
        fp8.quantize(x, fp8.scale(fp8.amax(x, "tensor"), f"{format} tensor"), f"{format} tensor")
    )
    assert data.tolist() == [[largest, -largest, largest / 2, 0]]


@pytest.mark.parametrize("format", LOSSY)
def test_beyond_the_range_is_the_largest_value(format):
    """A scale that is rounded down causes this. In E5M2 the value must not become Inf."""
    largest = FORMATS[format].max
    x = torch.tensor([[largest * 1.5, -largest * 1.5, largest, 1.0]])
    data = values(fp8.quantize(x, torch.ones(()), f"{format} tensor"))
    assert data.tolist() == [[largest, -largest, largest, 1.0]]


@pytest.mark.parametrize("format", LOSSY)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_keeps_nan_and_inf(format, poison, dtype):
    x = torch.randn(4, 16).to(dtype)
    x[1, 3] = poison
    scale = fp8.scale(fp8.amax(x, "tensor"), f"{format} tensor")
    back = values(fp8.quantize(x, scale, f"{format} tensor")) * scale.double()
    assert not back[1, 3].isfinite()


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@given(x=matrices())
def test_transpose_is_the_padded_transpose(format, x):
    data = fp8.quantize(x, fp8.scale(fp8.amax(x, "tensor"), f"{format} tensor"), f"{format} tensor")
    got = fp8.transpose(data)
    rows, columns = x.shape
    want = torch.zeros(columns, -(-rows // 16) * 16)
    want[:, :rows] = data.float().t()
    assert got.dtype == data.dtype
    assert got.is_contiguous()
    assert torch.equal(got.float(), want)


@given(matrices())
def test_exact_quantize_and_transpose_are_the_matrix_itself(x):
    scale = fp8.scale(fp8.amax(x, "tensor"), "exact tensor")
    data = fp8.quantize(x, scale, "exact tensor")
    assert scale == 1
    assert torch.equal(data, x)
    assert torch.equal(fp8.transpose(data), x.t())


# --- GEMM ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([16, 48, 256])),
    exponents=st.tuples(st.integers(-15, 15), st.integers(-15, 15)),
    with_bias=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_scaled_mm(formats, sizes, exponents, with_bias, dtype, seed):
    if dtype == torch.float16:
        exponents = (exponents[0] % 2, -1)
    torch.manual_seed(seed)
    m, n, k = sizes
    operands, codes = [], []
    for rows, exponent, format in zip((m, n), exponents, formats, strict=True):
        x = torch.randn(rows, k) * 10.0**exponent
        scale = fp8.scale(fp8.amax(x, "tensor"), f"{format} tensor")
        data = fp8.quantize(x, scale, f"{format} tensor")
        operands += [data, scale]
        codes.append(values(data) * scale.double())
    bias = (torch.randn(n) * 10.0 ** sum(exponents)).to(dtype) if with_bias else None
    got = fp8.scaled_mm(*operands, bias, dtype, False, *(f"{f} tensor" for f in formats))
    a, b = codes
    want, size = a @ b.t(), a.abs() @ b.abs().t()
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    assert got.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 * want.abs() + torch.finfo(dtype).smallest_normal
    assert ((got.double() - want).abs() <= 1e-5 * size + rounding).all()


@given(
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 40)),
)
def test_exact_scaled_mm_is_mm(dtype, with_bias, sizes):
    m, n, k = sizes
    a, b, one = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.ones(())
    bias = torch.randn(n).to(dtype) if with_bias else None
    want = a @ b.t() if bias is None else torch.addmm(bias, a, b.t())
    assert torch.equal(
        fp8.scaled_mm(a, one, b, one, bias, dtype, False, "e4m3 tensor", "e4m3 tensor"), want
    )


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_scaled_mm_propagates_nan_and_inf(poison, place):
    operands = [torch.randn(16, 32), torch.randn(16, 32)]
    operands[place][3, 4] = poison
    args = []
    for x in operands:
        scale = fp8.scale(fp8.amax(x, "tensor"), "e4m3 tensor")
        args += [fp8.quantize(x, scale, "e4m3 tensor"), scale]
    got = fp8.scaled_mm(*args, None, torch.float32, False, "e4m3 tensor", "e4m3 tensor")
    line = got[3] if place == 0 else got[:, 3]
    assert not line.isfinite().any()


# --- one scale for each group -------------------------------------------------------------------

GROUPED = st.sampled_from([(16, 16), (48, 16), (128, 64), (88, 44), (51, 17)])


@pytest.mark.parametrize("format", LOSSY)
@given(data=st.data(), sizes=GROUPED)
def test_groups_each_have_their_own_scale(format, data, sizes):
    length, group = sizes
    fmt = FORMATS[format]
    x = data.draw(matrices(columns=st.just(length)))
    scales = fp8.scale(fp8.amax(x, f"1×{group}"), f"{format} 1×{group}")
    assert scales.dtype == torch.bfloat16
    assert scales.shape == (x.shape[0], length // group)
    amax = x.double().abs().unflatten(-1, (-1, group)).amax(-1)
    want = (amax / fmt.max).clamp_min(TINY)
    truncated = want - scales.double()
    assert ((truncated >= -want * 2.0**-20) & (truncated <= want * 2.0**-7)).all()

    codes = fp8.quantize(x, scales, f"{format} 1×{group}")
    assert codes.dtype == fmt.dtype
    assert codes.shape == x.shape
    assert codes.stride() == torch.empty_like(x).stride()
    spread = scales.double().repeat_interleave(group, -1)
    assert_rounded(codes, x, spread, fmt)

    back = fp8.dequantize([codes], scales, f"{format} 1×{group}", x.dtype)
    assert back.dtype == x.dtype
    want = (values(codes) * spread).to(x.dtype)
    assert torch.allclose(back.double(), want.double(), rtol=torch.finfo(x.dtype).eps, atol=0)


def in_groups(x: Tensor, format: str, group: int) -> tuple[list[Tensor], Tensor]:
    """All planes of `x`, and its scales."""
    scales = fp8.scale(fp8.amax(x, f"1×{group}"), f"{format} 1×{group}")
    planes = range(len(FORMATS[format].planes))
    return [fp8.quantize(x, scales, f"{format} 1×{group}", i) for i in planes], scales


@pytest.mark.parametrize("format", [*LOSSY, *PACKED])
def test_groups_of_very_different_magnitude(format):
    x = torch.randn(4, 64) * torch.tensor([1e-30, 1.0, 1e-9, 1e30]).repeat_interleave(16)
    back = fp8.dequantize(*in_groups(x, format, 16), f"{format} 1×16", torch.float32)
    for group in range(4):
        part = slice(16 * group, 16 * group + 16)
        error = (back[:, part].double() - x[:, part].double()).norm() / x[:, part].double().norm()
        assert error < (0.15 if format == "e2m1" else 0.08)


@pytest.mark.parametrize("format", [*LOSSY, *PACKED])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_group(format, poison):
    x = torch.randn(2, 64)
    x[1, 20] = poison
    back = fp8.dequantize(*in_groups(x, format, 16), f"{format} 1×16", torch.float32)
    assert not back[1, 20].isfinite()
    assert back[0].isfinite().all()
    assert back[1, :16].isfinite().all()
    assert back[1, 32:].isfinite().all()


@given(matrices(columns=st.just(32)))
def test_exact_groups_are_a_copy(x):
    scales = fp8.scale(fp8.amax(x, "1×16"), "exact 1×16")
    data = fp8.quantize(x, scales, "exact 1×16")
    assert torch.equal(data, x)
    assert data.stride() == torch.empty_like(x).stride()
    assert data.data_ptr() != x.data_ptr()
    assert torch.equal(fp8.dequantize([data], scales, "exact 1×16", x.dtype), x)


def test_e4m3_bytes_equal_e4m3():
    x = torch.randn(8, 64)
    scales = fp8.scale(fp8.amax(x, "1×16"), "e4m3 1×16")
    assert torch.equal(fp8.scale(fp8.amax(x, "1×16"), "e4m3_bytes 1×16"), scales)
    codes = fp8.quantize(x, scales, "e4m3 1×16")
    as_bytes = fp8.quantize(x, scales, "e4m3_bytes 1×16")
    assert torch.equal(codes.view(torch.uint8), as_bytes)


# --- several elements in a byte -----------------------------------------------------------------


def code_values(fmt) -> Tensor:
    """Return the magnitudes of a format without Inf and NaN, by their bits, fp64."""
    found = []
    for code in range(1 << fmt.bits - 1):
        exponent, fraction = code >> fmt.mantissa, code % (1 << fmt.mantissa) / 2**fmt.mantissa
        normal = (1 + fraction) * 2.0 ** (fmt.min_exponent + exponent - 1)
        found.append(normal if exponent else fraction * 2.0**fmt.min_exponent)
    return torch.tensor(found, dtype=torch.float64)


def unpacked(planes: list[Tensor], fmt, group: int) -> Tensor:
    """Unpack planes element by element, as the docstring of `quantize` defines."""
    rows = [plane.flatten(0, -2).tolist() for plane in planes]
    length = planes[0].shape[-1] * 8 // fmt.planes[0]
    codes = torch.zeros(len(rows[0]), length, dtype=torch.int64)
    for row in range(len(codes)):
        for column in range(length):
            start, i, offset = column // group, column % group, 0
            for plane, width in zip(rows, fmt.planes, strict=True):
                count = group * width // 8
                byte = plane[row][start * count + i % count]
                codes[row, column] |= (byte >> i // count * width) % (1 << width) << offset
                offset += width
    return codes


def signed(codes: Tensor, fmt) -> Tensor:
    """Return the fp64 numbers of elements."""
    size = code_values(fmt)[codes % (1 << fmt.bits - 1)]
    return torch.where(codes >> fmt.bits - 1 == 1, -size, size)


@pytest.mark.parametrize("format", PACKED)
@given(group=st.sampled_from([16, 48, 128]), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_packing_keeps_every_bit_pattern(format, group, rows, seed):
    """At the place that the docstring of `quantize` defines, including -0."""
    fmt = FORMATS[format]
    length = 384
    codes = torch.arange(rows * length) % (1 << fmt.bits)
    generator = torch.Generator().manual_seed(seed)
    codes = codes[torch.randperm(len(codes), generator=generator)].view(rows, length)
    x = signed(codes, fmt).float()
    scales = torch.ones(rows, length // group, dtype=torch.bfloat16)
    planes = [fp8.quantize(x, scales, f"{format} 1×{group}", i) for i in range(len(fmt.planes))]
    for plane, width in zip(planes, fmt.planes, strict=True):
        assert plane.dtype == torch.uint8
        assert plane.shape == (rows, length * width // 8)
        assert plane.is_contiguous()
    assert torch.equal(unpacked(planes, fmt, group), codes)
    back = fp8.dequantize(planes, scales, f"{format} 1×{group}", torch.float32)
    assert torch.equal(back.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("format", PACKED)
@given(numbers=st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=64))
def test_rounding_is_to_the_nearest_and_to_even(format, numbers):
    """Compare with all numbers of the format, for ties and the fp32 numbers next to them."""
    fmt = FORMATS[format]
    values = code_values(fmt)
    ties = ((values[1:] + values[:-1]) / 2).float()
    near = [ties.nextafter(torch.tensor(to)) for to in (0.0, torch.inf)]
    x = torch.cat([torch.tensor(numbers), values.float(), ties, *near])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, -2 * len(x) % 16)).view(-1, 16)
    scales = torch.ones(len(x), 1, dtype=torch.bfloat16)
    planes = [fp8.quantize(x, scales, f"{format} 1×16", i) for i in range(len(fmt.planes))]
    got = unpacked(planes, fmt, 16)
    distance = (x.double().abs().unsqueeze(-1) - values).abs()
    is_odd = torch.arange(len(values)) % 2
    nearest = distance == distance.amin(-1, keepdim=True)
    want = (nearest * (2 - is_odd)).argmax(-1)
    assert torch.equal(got % (1 << fmt.bits - 1), want)
    assert torch.equal(got >> fmt.bits - 1 == 1, x.signbit())


@pytest.mark.parametrize("format", PACKED)
@given(data=st.data(), sizes=st.sampled_from([(16, 16), (48, 48), (96, 32), (128, 128)]))
def test_packed_groups_are_off_by_half_a_step(format, data, sizes):
    """Half a step of the binade, or of the denormals, that x / scale is in.

    This includes saturation. Truncation lowers a scale by less than 2^-7, so x / scale is below
    max / (1 - 2^-7), in the binade 2^E of max < 2·2^E. Its error is less than 2·2^E / 127, and
    half a step is 2^-(mantissa + 1)·2^E, at least 2^-4·2^E.
    """
    length, group = sizes
    fmt = FORMATS[format]
    x = data.draw(matrices(columns=st.just(length)))
    planes, scales = in_groups(x, format, group)
    spread = scales.double().repeat_interleave(group, -1)
    codes = signed(unpacked(planes, fmt, group), fmt)
    wanted = x.double() / spread
    assert (wanted.abs() <= fmt.max / (1 - 2.0**-7) * (1 + 2.0**-20)).all()
    assert ((codes - wanted).abs() <= half_step(wanted, fmt) * (1 + 1e-4)).all()

    back = fp8.dequantize(planes, scales, f"{format} 1×{group}", x.dtype)
    assert back.dtype == x.dtype
    assert back.is_contiguous()
    assert torch.equal(back, (codes * spread).float().to(x.dtype))


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("shape", [(0, 32), (32,), (3, 1, 5, 32), (7, 0, 32)])
def test_packed_groups_of_any_leading_sizes(format, shape):
    x = torch.randn(shape)
    planes, scales = in_groups(x, format, 16)
    back = fp8.dequantize(planes, scales, f"{format} 1×16", torch.float32)
    assert back.shape == x.shape
    flat, flat_scales = in_groups(x.reshape(-1, 32), format, 16)
    assert torch.equal(scales.reshape(-1, 2), flat_scales)
    for plane, want in zip(planes, flat, strict=True):
        assert plane.shape[:-1] == x.shape[:-1]
        assert torch.equal(plane.reshape(want.shape), want)


# --- shape rules --------------------------------------------------------------------------------


def calls(x: Tensor, format: str) -> list[tuple]:
    """Return calls of operators on `x`: (operator, arguments)."""
    planes, scales = in_groups(x, format, 16)
    found = [
        (fp8.amax.default, (x, "tensor")),
        (fp8.amax.default, (x, "1×16")),
        (fp8.scale.default, (fp8.amax(x, "1×16"), f"{format} 1×16")),
        *((fp8.quantize.default, (x, scales, f"{format} 1×16", i)) for i in range(len(planes))),
        (fp8.dequantize.default, (planes, scales, f"{format} 1×16", x.dtype)),
    ]
    if not FORMATS[format].emulated:
        how = f"{format} tensor"
        scale = fp8.scale(fp8.amax(x, "tensor"), how)
        data = fp8.quantize(x, scale, how)
        found.append((fp8.scale.default, (fp8.amax(x, "tensor"), how)))
        found.append((fp8.quantize.default, (x, scale, how)))
        found.append((fp8.transpose.default, (data,)))
        args = data, scale, data, scale, None, x.dtype, False, how, how
        found.append((fp8.scaled_mm.default, args))
    return found


@pytest.mark.parametrize("format", [*LOSSY, *PACKED, "exact"])
@given(x=matrices(columns=st.sampled_from([16, 48])))
def test_shape_rules_match_results(format, x):
    for op, args in calls(x, format):
        real = op(*args)
        with FakeTensorMode() as mode:
            fake = op(*torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args))
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype), op
        if real.numel() and min(real.shape, default=2) > 1:  # strides of sizes 1 are arbitrary
            assert fake.stride() == real.stride(), op


@pytest.mark.parametrize("format", [*LOSSY, *PACKED])
def test_operators_match_their_schema(format):
    """Functional, aliasing nothing, and traceable."""
    for op, args in calls(torch.randn(17, 48), format):
        takes_fp8 = any(
            isinstance(a, Tensor) and a.is_floating_point() and a.dtype.itemsize == 1
            for a in torch.utils._pytree.tree_leaves(args)
        )
        schema = () if takes_fp8 else ("test_schema",)  # which does arithmetic on arguments
        torch.library.opcheck(op, args, test_utils=(*schema, "test_faketensor"))


def test_exact_operators_alias_nothing():
    """PyTorch is about to refuse custom operators that return one of their inputs."""
    for op, args in calls(torch.randn(17, 48), "exact"):
        torch.library.opcheck(op, args, test_utils=("test_schema",))
