"""Triton's interpreter, made to round and saturate where it narrows floats, as GPUs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

NARROW = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}


def round_to_nearest_even() -> None:
    """Have the interpreter narrow fp32 as PyTorch does, and as GPUs do."""
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        dtype = NARROW.get(str(target))
        if dtype is None or str(source) != "fp32":
            return original(values, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32).copy())
        bound = torch.finfo(dtype).max
        narrow = (wide.clamp(-bound, bound) if dtype.itemsize == 1 else wide).to(dtype)
        bits = narrow.view(torch.uint8 if narrow.itemsize == 1 else torch.int16).numpy()
        return bits.view(f"uint{8 * narrow.itemsize}").reshape(values.shape)

    interpreter._convert_float = convert
