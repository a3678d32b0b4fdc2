"""Codes of 4 bits in Triton source: where they lie, and their values.

Two elements share a byte (`ops.quantize`): byte i of a group has element i in its low half
and element i + G / 2 in its high half, so that neighbouring threads read neighbouring bytes.
"""

from __future__ import annotations

from fp8pass.dialect.formats import FORMATS


def byte_of(column: str, size: int) -> str:
    """The byte of a row that has the code of a column, in groups of `size`."""
    return f"{column} // {size} * {size // 2} + {column} % {size // 2}"


def nibble(byte: str, column: str, size: int) -> str:
    """The code of a column, int32, out of its byte; bits above its four are others'."""
    return f"({byte}.to(tl.int32) >> ({column} % {size} // {size // 2} * 4))"


def of_nibbles(codes: str, format: str) -> str:
    """The fp32 values of codes: as fp16 numbers of the same digits and another exponent bias."""
    fmt = FORMATS[format]
    return f"minifloat({codes}, {10 - fmt.mantissa}, {2.0 ** (14 + fmt.min_exponent)!r})"


def to_nibbles(values: str, format: str) -> str:
    """The nearest codes of fp32 values, ties to even, as `codegen/coding.py` finds them."""
    fmt = FORMATS[format]
    dropped = 23 - fmt.mantissa
    rebias = (127 - (1 - fmt.min_exponent)) << fmt.mantissa
    exponent = dropped + fmt.min_exponent
    least, shift, shift_bits = 2.0**fmt.min_exponent, 2.0**exponent, 127 + exponent << 23
    numbers = f"{dropped}, {rebias}, {fmt.max!r}, {least!r}, {shift!r}, {shift_bits}"
    return f"to_minifloat({values}, {numbers})"
