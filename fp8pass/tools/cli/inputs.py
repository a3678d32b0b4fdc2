"""Random inputs from the command line: `4x128:int64:32000`, `x=4x128x256:bfloat16`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8pass.config import unknown

if TYPE_CHECKING:
    import torch

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool")

_INPUT = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?(?::(?P<below>\d+))?"
)


@dataclass(frozen=True)
class Input:
    """A random tensor to make.

    Attributes:
        name: name of a keyword argument; empty for a positional one.
        shape: its sizes.
        dtype: name of its dtype; empty for the dtype of the model's parameters.
        below: exclusive upper bound of integers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    below: int

    def tensor(self, device: torch.device, default_dtype: torch.dtype) -> torch.Tensor:
        """The tensor: normal floats, or uniform integers or booleans."""
        import torch

        dtype = getattr(torch, self.dtype) if self.dtype else default_dtype
        if dtype.is_floating_point:
            return torch.randn(self.shape, dtype=dtype, device=device)
        below = 2 if dtype == torch.bool else self.below
        return torch.randint(below, self.shape, device=device).to(dtype)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.name}={sizes}" if self.name else sizes


def parse_input(text: str) -> Input:
    """The input that `[NAME=]SHAPE[:DTYPE[:BELOW]]` describes.

    Raises:
        argparse.ArgumentTypeError: `text` is not of this form.
    """
    match = _INPUT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not [NAME=]SHAPE[:DTYPE[:BELOW]], such as 4x128:int64:32000 or "
            "x=4x128x256:bfloat16"
        )
    dtype, below = match["dtype"] or "", match["below"]
    if dtype:
        dtype_name(dtype)
    if (dtype in INTEGERS) != bool(below):
        need = "integers need a bound" if dtype in INTEGERS else "only integers have a bound"
        raise argparse.ArgumentTypeError(f"{text!r}: {need}, such as 4x128:int64:32000")
    shape = tuple(int(size) for size in match["shape"].split("x"))
    return Input(match["name"] or "", shape, dtype, int(below or 0))


def dtype_name(text: str, among: tuple[str, ...] = DTYPES) -> str:
    """The name of a dtype.

    Raises:
        argparse.ArgumentTypeError: it is not `among` the dtypes of inputs.
    """
    if text not in among:
        message = f"{unknown('dtype', text, among)} dtype is one of {', '.join(among)}"
        raise argparse.ArgumentTypeError(message)
    return text
