"""Write the Triton source that locates, decodes and encodes packed elements.

An element's bits are in one or two planes (`Format.planes`). In a plane with w bits of each
element, a group of G elements has S = G · w / 8 bytes. Byte i contains elements i, i + S, i + 2S,
..., the first in the lowest bits, so that neighboring threads read neighboring bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8pass.dialect.formats import FORMATS


def locate_byte(column: str, size: int, width: int) -> str:
    """Return the position of the byte that contains the element at `column`, as an expression.

    The plane has `width` bits of each element. `size` is the number of elements in a group.
    """
    count = size * width // 8
    return f"{column} // {size} * {count} + {column} % {count}"


def extract_bits(planes: Sequence[str], column: str, size: int, format: str) -> str:
    """Return the int32 bits of the element at `column`, given its byte in each plane.

    Bits above the format's width are undefined. `size` is the number of elements in a group.
    """
    fields, offset = [], 0
    for byte, width in zip(planes, FORMATS[format].planes, strict=True):
        shift = f"{column} % {size} // {size * width // 8} * {width}"
        field = f"({byte}.to(tl.int32) >> ({shift}))"
        if offset + width < FORMATS[format].bits:
            field = f"({field} & {(1 << width) - 1})"
        fields.append(f"({field} << {offset})" if offset else field)
        offset += width
    return fields[0] if len(fields) == 1 else f"({' | '.join(fields)})"


def decode_bits(elements: str, format: str) -> str:
    fmt = FORMATS[format]
    factor = 2.0 ** (14 + fmt.min_exponent)
    return f"minifloat({elements}, {fmt.bits}, {10 - fmt.mantissa}, {factor!r})"


def encode_values(values: str, format: str) -> str:
    """Return the expression that rounds fp32 values to bits, as `dialect.encoding.encode` does."""
    fmt = FORMATS[format]
    dropped = 23 - fmt.mantissa
    rebias = (127 - (1 - fmt.min_exponent)) << fmt.mantissa
    exponent = dropped + fmt.min_exponent
    least, shift, shift_bits = 2.0**fmt.min_exponent, 2.0**exponent, 127 + exponent << 23
    numbers = f"{fmt.bits}, {dropped}, {rebias}, {fmt.max!r}, {least!r}, {shift!r}, {shift_bits}"
    return f"to_minifloat({values}, {numbers})"


def split_planes(elements: str, format: str) -> Iterator[tuple[str, int]]:
    """Yield, for each plane, an expression of the bits that it stores, and their number."""
    offset = 0
    for width in FORMATS[format].planes:
        field = f"({elements} >> {offset})" if offset else elements
        offset += width
        is_last = offset == FORMATS[format].bits
        yield field if is_last else f"({field} & {(1 << width) - 1})", width
