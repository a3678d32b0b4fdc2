"""The GPU that a model is to fit: that of this machine, or one by its name or size."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from fp8pass import hardware
from fp8pass.config import ConfigError, parse_bytes, unknown
from fp8pass.hardware import GPUS, REFERENCE, Gpu, known_gpu, plain

LEAST = 1 << 20  # bytes of a GPU; what is less is meant to be GiB


def find_gpu(wanted: str | int | Gpu | None) -> Gpu:
    """The GPU that is meant.

    Args:
        wanted: a name, a size, or both: `"RTX 4090"`, `"16GiB"`, `"H200, 16GiB"`; bytes; None for
            the one of this machine. Of a size alone the rates are those of this machine's GPU, or
            of an H200.

    Raises:
        ConfigError: there is no such GPU, or it has no FP8 tensor cores.
    """
    if isinstance(wanted, Gpu):
        return wanted
    if wanted is None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "There is no GPU here: say which one, gpu='RTX 4090', or how much memory it has, "
                "gpu='16GiB'."
            )
        return _here()
    if not isinstance(wanted, str):
        if isinstance(wanted, bool) or wanted < LEAST:
            raise ConfigError(f"gpu={wanted!r} would be bytes: say how many GiB, as in '16GiB'.")
        return replace(_here_or_reference(), memory=float(wanted))
    parts = [part.strip() for part in wanted.split(",")]
    sizes = [part for part in parts if re.match(r"[\d.]+\s*[KMGT]?i?B$", part, re.IGNORECASE)]
    names = [part for part in parts if part not in sizes]
    if len(sizes) > 1 or len(names) > 1 or not parts:
        raise ConfigError(
            f"gpu must be a name, a size or both, such as 'RTX 4090, 20GiB', got {wanted!r}."
        )
    gpu = _named(names[0]) if names else _here_or_reference()
    return replace(gpu, memory=parse_bytes(sizes[0])) if sizes else gpu


def _named(name: str) -> Gpu:
    same = {plain(known): known for known in GPUS}
    if plain(name) not in same:
        raise ConfigError(
            f"{unknown('gpu', name, GPUS)} Known are {', '.join(GPUS)}; a size such as '16GiB' "
            "does, too."
        )
    return GPUS[same[plain(name)]]


def _here() -> Gpu:
    """The GPU of this machine, with the rates of the known one whose name it has in its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    if why := hardware.why_no_fp8_gemm(device):
        raise ConfigError(
            f"fit plans FP8 linear layers, which this GPU cannot run: {why}. Name the GPU to train "
            "on, such as gpu='RTX 4090'."
        )
    properties = torch.cuda.get_device_properties(device)
    rates = known_gpu(properties.name) or GPUS[REFERENCE]
    return replace(rates, name=properties.name, memory=float(properties.total_memory))


def _here_or_reference() -> Gpu:
    return _here() if torch.cuda.is_available() else GPUS[REFERENCE]
