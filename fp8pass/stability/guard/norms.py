"""The norms of every parameter, of its gradient, and of its change, measured on its device.

The change is that since the last measurement, of a part of each parameter alone, so that no
second copy of the weights is needed: up to `PART` elements, evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fp8pass import compat, graph
from fp8pass.optim.shards import local
from fp8pass.weights.quantized_parameter import CodedWeight

PART = 1024
ABSENT = -1.0


class Norms:
    """Measures the parameters of a model that are trained.

    Attributes:
        trained: their names in the model, when this was made.
        names: path of the module and name of the parameter, of each one.
        gradients_seen: whether any parameter had a gradient when it was measured last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained = trained_names(model)
        parameters = dict(model.named_parameters())
        named = [(graph.clean_path(name), parameters[name]) for name in self.trained]
        self.names = [(n.rpartition(".")[0], n.rpartition(".")[2]) for n, _ in named]
        self.gradients_seen = False
        self._parameters = [p for _, p in named]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def measure(self) -> Tensor:
        """fp32 [3, parameters]: norms of weights and gradients, and the relative change.

        `ABSENT` stands for the norm of a gradient that is not there, and for the first change. With
        weights that are sharded these are the norms of this rank's shards, and of weights in codes,
        which are on the host and may be on their way, those of the scales of their rows.
        """
        weights = [_measured(p) for p in self._parameters]
        parts = [_part(w) for w in weights]
        nothing = weights[0].new_full((), ABSENT, dtype=torch.float32)
        changes = [nothing] * len(parts)
        if self._before:
            moved = compat.foreach_sub(parts, self._before)
            sizes = zip(_norms(moved), _norms(parts), strict=True)
            changes = [change / size for change, size in sizes]
        self._before = [part.clone() for part in parts]
        rows = _norms(weights), self._gradients(nothing), changes
        return torch.stack([_together(row, nothing.device) for row in rows])

    def forget(self) -> None:
        """The weights were set anew: what they were before says nothing about the training."""
        self._before = []

    def _gradients(self, nothing: Tensor) -> list[Tensor]:
        given = [p.grad for p in self._parameters]
        found = [local(g) for g in given if g is not None and not g.is_sparse]
        self.gradients_seen = bool(found)
        norms = iter(_norms(found))
        return [nothing if g is None or g.is_sparse else next(norms) for g in given]


def trained_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters that require a gradient."""
    return tuple(name for name, p in model.named_parameters() if p.requires_grad)


def _measured(parameter: Tensor) -> Tensor:
    return parameter.scales if isinstance(parameter, CodedWeight) else local(parameter)


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """fp32 norms; those of fp64 are computed as they are, which PyTorch insists on."""
    if not tensors:
        return []
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    wide = any(x.dtype == torch.float64 for x in real)
    dtype = torch.float64 if wide else torch.float32
    return [x.float() for x in compat.foreach_norm(real, 2, dtype=dtype)]


def _together(numbers: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([x.to(device, non_blocking=True) for x in numbers])


def _part(weight: Tensor) -> Tensor:
    """At most `PART` elements of a weight."""
    elements = weight.detach().reshape(-1)
    return elements[:: max(1, elements.numel() // PART)][:PART]
