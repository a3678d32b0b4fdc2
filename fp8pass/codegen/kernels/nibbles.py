"""4-bit elements in Triton source: where they are in memory, and their values.

Two elements share a byte (`ops.quantize`): byte i of a group has element i in its low half
and element i + G / 2 in its high half, so that neighboring threads read neighboring bytes.
"""

from __future__ import annotations

from fp8pass.dialect.formats import FORMATS


def locate_byte(column: str, size: int) -> str:
    """Return the byte of a row that contains a column's element, in groups of `size`."""
    return f"{column} // {size} * {size // 2} + {column} % {size // 2}"


def extract_nibble(byte: str, column: str, size: int) -> str:
    """Extract a column's element from its byte, as int32; the higher bits are undefined."""
    return f"({byte}.to(tl.int32) >> ({column} % {size} // {size // 2} * 4))"


def decode_nibbles(nibbles: str, format: str) -> str:
    """Return the fp32 values of elements: fp16 numbers with another exponent bias."""
    fmt = FORMATS[format]
    return f"minifloat({nibbles}, {10 - fmt.mantissa}, {2.0 ** (14 + fmt.min_exponent)!r})"


def encode_nibbles(values: str, format: str) -> str:
    """Round fp32 values to elements, ties to even, as `dialect.encoding.encode` does."""
    fmt = FORMATS[format]
    dropped = 23 - fmt.mantissa
    rebias = (127 - (1 - fmt.min_exponent)) << fmt.mantissa
    exponent = dropped + fmt.min_exponent
    least, shift, shift_bits = 2.0**fmt.min_exponent, 2.0**exponent, 127 + exponent << 23
    numbers = f"{dropped}, {rebias}, {fmt.max!r}, {least!r}, {shift!r}, {shift_bits}"
    return f"to_minifloat({values}, {numbers})"
