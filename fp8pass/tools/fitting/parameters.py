"""The parameters of a model: their bytes, those of their states, and which may be on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fp8pass.config import ConfigError
from fp8pass.optim.adamw import WAITING
from fp8pass.optim.backward import default_buffer
from fp8pass.optim.formats import moment_format
from fp8pass.optim.offload import DEPTH, STAGED_BYTES, is_offloaded, layers_to_code
from fp8pass.optim.options import preset_options, state_bytes
from fp8pass.optim.sums import GROUP_SIZE
from fp8pass.tools.fitting.replay import Fate
from fp8pass.tools.fitting.setup import Setup
from fp8pass.weights.quantized_parameter import CodedWeight

GROUP: Mapping[str, Any] = {"group_size": 128}


@dataclass(frozen=True)
class Standing:
    """Bytes that are there from the first step on, on the GPU or on the host.

    Attributes:
        weights: parameters and buffers, or their codes.
        states: of the optimizer.
        sums: of gradients, from the first to the last backward that is added up.
        staging: buffers through which values of the host are computed with.
    """

    weights: float = 0.0
    states: float = 0.0
    sums: float = 0.0
    staging: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.weights + self.states + self.sums + self.staging


class Parameters:
    """The parameters of a model.

    Args:
        module: the model, on any device.

    Raises:
        ConfigError: a parameter is sharded, or of a dtype that the optimizer does not take.
    """

    def __init__(self, module: nn.Module) -> None:
        self.all = list(dict.fromkeys(module.parameters()))
        self.trained = [p for p in self.all if p.requires_grad]
        self.buffers = sum(x.numel() * x.itemsize for x in dict.fromkeys(module.buffers()))
        self.coded, self.why_not_coded = _coded(module)

    def place(self, setup: Setup, accumulate: int) -> tuple[Standing, Standing]:
        """What of a way to train is on the GPU, and what on the host."""
        gpu, host = {"weights": float(self.buffers)}, dict[str, float]()
        for p in self.all:
            size, in_codes = bytes_of(p), "weights" in setup.offload and p in self.coded
            if in_codes:
                _add(gpu, "weights", p.numel() + 4 * p.shape[0])  # E4M3, scales of rows in FP32
                _add(host, "weights", size)
            else:
                _add(gpu, "weights", size)
            if p.requires_grad:
                moved = in_codes or self._is_moved(setup, "states", p)
                _add(host if moved else gpu, "states", bytes_of_states(setup, p))
                if accumulate > 1:
                    moved = setup.attach and self._is_moved(setup, "gradients", p)
                    added = bytes_of_sum(p, accumulate) if setup.attach else size
                    _add(host if moved else gpu, "sums", added)
        if setup.offload:
            _add(gpu, "staging", DEPTH * STAGED_BYTES)
        return Standing(**gpu), Standing(**host)

    def fate_of_gradients(self, setup: Setup, accumulate: int) -> Fate:
        """What becomes of gradients that are final."""
        if not setup.attach:
            # Those of later micro-batches are added to what there is.
            return Fate(stay=accumulate == 1)
        if not setup.offload:
            return Fate(stay=False)
        everything = sum(p.numel() * p.itemsize for p in self.all)
        return Fate(stay=False, waiting=everything // WAITING)

    @staticmethod
    def _is_moved(setup: Setup, name: str, parameter: Tensor) -> bool:
        return is_offloaded({"offload": setup.offload}, name, parameter)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients."""
        return float(sum(p.numel() * p.itemsize for p in self.trained))


def _add(found: dict[str, float], name: str, size: float) -> None:
    found[name] = found.get(name, 0.0) + size


def _coded(module: nn.Module) -> tuple[frozenset[Tensor], str]:
    """The weights that `offload_weights` puts on the host; why there is none."""
    try:
        return frozenset(layers_to_code(module, ())), ""
    except ConfigError as error:
        return frozenset(), str(error)


def bytes_of(parameter: Tensor) -> int:
    """Bytes of a parameter, or of its codes where it is frozen in these."""
    if isinstance(parameter, CodedWeight):
        return parameter.codes.nbytes + parameter.scales.nbytes
    return parameter.nbytes


def bytes_of_states(setup: Setup, parameter: Tensor) -> float:
    """Bytes of a parameter's states."""
    if setup.preset is None:
        return 2.0 * parameter.numel() * parameter.itemsize
    return state_bytes({**GROUP, **preset_options(setup.preset, {})}, parameter)


def bytes_of_sum(parameter: Tensor, accumulate: int) -> float:
    """Bytes of the sum of a parameter's gradients."""
    format = moment_format(default_buffer(accumulate), signed=True)
    return parameter.numel() * (format.storage_dtype.itemsize + 2 / GROUP_SIZE)
