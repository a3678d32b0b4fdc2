"""Patch Triton's interpreter so that it converts floats like a GPU.

By default it truncates and overflows in conversions to narrow formats, and reads NaN as a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NARROW = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}


def convert_as_gpus_do() -> None:
    """Make the interpreter convert from and to fp32 like PyTorch and GPUs."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        narrow_source = NARROW.get(str(source))
        if narrow_source is not None and str(target) == "fp32":
            bits = torch.from_numpy(np.ascontiguousarray(values).copy())
            wide = bits.view(narrow_source).float().numpy()
            return wide.view(np.uint32).reshape(values.shape)
        dtype = NARROW.get(str(target))
        if dtype is None or str(source) != "fp32":
            return original(values, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        bound = torch.finfo(dtype).max
        narrow = (wide.clamp(-bound, bound) if dtype.itemsize == 1 else wide).to(dtype)
        bits = narrow.view(torch.uint8 if narrow.itemsize == 1 else torch.int16).numpy()
        return bits.view(f"uint{8 * narrow.itemsize}").reshape(values.shape)

    interpreter._convert_float = convert
