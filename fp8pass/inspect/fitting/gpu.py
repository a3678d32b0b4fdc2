"""The GPU that a model is to fit: its memory and its rates."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from fp8pass.config import ConfigError, parse_bytes, unknown
from fp8pass.dialect import hardware
from fp8pass.inspect.fitting.work import Work

GIB = 1 << 30

# What of a datasheet's operations and bytes a second an H200 reaches in a step of training.
FP8_SHARE = hardware.FP8_FLOPS / 1979e12
BF16_SHARE = hardware.BF16_FLOPS / 989e12
ATTENTION_SHARE = hardware.ATTENTION_FLOPS / 989e12
BANDWIDTH_SHARE = hardware.BANDWIDTH / 4.8e12


@dataclass(frozen=True)
class Gpu:
    """A GPU with FP8 tensor cores.

    Attributes:
        name: of the model.
        memory: bytes.
        fp8_flops, bf16_flops, attention_flops: operations a second that GEMMs and attention reach.
        bandwidth: bytes a second between its memory and its processors.
        link: bytes a second to the host, and as many from it at the same time.
    """

    name: str
    memory: float
    fp8_flops: float
    bf16_flops: float
    attention_flops: float
    bandwidth: float
    link: float

    def seconds(self, work: Work) -> float:
        """The time that some work takes by the roofline."""
        return (
            work.fp8_flops / self.fp8_flops
            + work.bf16_flops / self.bf16_flops
            + work.attention_flops / self.attention_flops
            + work.bytes / self.bandwidth
        )


def _gpu(
    name: str, gib: float, fp8: float, bf16: float, terabytes: float, link: float
) -> tuple[str, Gpu]:
    """A GPU by its datasheet: dense TFLOP/s with FP32 sums, TB/s; GB/s of the link each way."""
    return name, Gpu(
        name,
        gib * GIB,
        fp8 * 1e12 * FP8_SHARE,
        bf16 * 1e12 * BF16_SHARE,
        bf16 * 1e12 * ATTENTION_SHARE,
        terabytes * 1e12 * BANDWIDTH_SHARE,
        link * 1e9,
    )


# The rates of the H200, and its link with both ways in use, are measured; those of the others are
# the same share of theirs.
GPUS = dict(
    (
        _gpu("H200", 140, 1979, 989, 4.8, 42),
        _gpu("H100", 79, 1979, 989, 3.35, 42),
        _gpu("L40S", 44, 733, 362, 0.864, 20),
        _gpu("RTX 5090", 31.5, 419, 209.5, 1.79, 42),
        _gpu("RTX 4090", 23.5, 330, 165, 1.008, 20),
        _gpu("RTX 5060 Ti", 15.5, 95, 47.4, 0.448, 21),
    )
)
REFERENCE = "H200"


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
    same = {_plain(known): known for known in GPUS}
    if _plain(name) not in same:
        raise ConfigError(
            f"{unknown('gpu', name, GPUS)} Known are {', '.join(GPUS)}; a size such as '16GiB' "
            "does, too."
        )
    return GPUS[same[_plain(name)]]


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[\s-]", "", name.lower())


def _here() -> Gpu:
    """The GPU of this machine, with the rates of the known one whose name it has in its own."""
    device = torch.device("cuda", torch.cuda.current_device())
    if why := hardware.why_no_fp8_gemm(device):
        raise ConfigError(
            f"fit plans FP8 linear layers, which this GPU cannot run: {why}. Name the GPU to train "
            "on, such as gpu='RTX 4090'."
        )
    properties = torch.cuda.get_device_properties(device)
    known = next((g for n, g in GPUS.items() if _plain(n) in _plain(properties.name)), None)
    return replace(
        known or GPUS[REFERENCE], name=properties.name, memory=float(properties.total_memory)
    )


def _here_or_reference() -> Gpu:
    return _here() if torch.cuda.is_available() else GPUS[REFERENCE]
