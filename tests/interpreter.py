"""Patch Triton's interpreter, so that it converts floats like a GPU and takes a fifth of the time.

By default the interpreter truncates and overflows in conversions to narrow formats, and reads NaN
as a number. It reduces a tensor element by element, and patches Triton's language in each call.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

NARROW = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16}


def patch_interpreter() -> None:
    """Patch Triton's interpreter in this process."""
    from triton.runtime import interpreter

    interpreter._convert_float = _convert_as_gpus_do(interpreter._convert_float)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter.ReduceOps.generic_reduce = _reduce_by_halves


def _convert_as_gpus_do(original: Any) -> Any:
    """Return a function that converts from and to fp32 like PyTorch and GPUs."""

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

    return convert


def _by_name(original: Any) -> Any:
    """Return a function that remembers the numpy dtype of each Triton dtype."""
    found: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = original(dtype)
        return found[name]

    return np_dtype


def _patch_once(original: Any, scope: Any) -> Any:
    """Return a function that replaces Triton's language for a function once in a process."""

    @functools.cache
    def patch(function: Any) -> Any:
        original(function)
        return scope()  # restores nothing

    return patch


def _reduce_by_halves(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Combine the halves of an axis repeatedly. Triton's axes have powers of two as lengths."""
    arrays, axis = self.unravel(inputs, self.axis)
    dtypes = [x.dtype for x in arrays]
    parts = [np.moveaxis(x.handle.data, axis, 0) for x in arrays]
    while (half := len(parts[0]) // 2) > 0:
        pairs = [(part[:half], part[half:]) for part in parts]
        operands = [map(self.to_tensor, each, dtypes) for each in zip(*pairs, strict=True)]
        combined = self.combine_fn.fn(*operands[0], *operands[1])
        combined = combined if isinstance(combined, tuple) else (combined,)
        parts = [x.handle.data for x in combined]
    results = [part[0] for part in parts]
    if self.keep_dims:
        shape = inputs[0].handle.data.shape
        kept = [1 if self.axis in (None, i) else size for i, size in enumerate(shape)]
        results = [x.reshape(kept) for x in results]
    return [self.to_tensor(x, dtype) for x, dtype in zip(results, dtypes, strict=True)]
