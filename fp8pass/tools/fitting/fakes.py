"""A model and its batch as tensors without memory, on a CPU that stands for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import compat


@contextmanager
def without_memory(module: nn.Module, values: Any) -> Iterator[Any]:
    """A context in which a module's tensors are fake; gives `values` with theirs fake, too.

    Parameters and buffers come from any device, the meta device included, and are back afterwards.
    `torch.autocast` of the GPU is meanwhile that of the CPU, which stands for it.
    """
    # Not by setattr, for which classes and PyTorch's hooks may do something else.
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    twins = _Twins()
    with twins.mode:
        for m, parameters, buffers in before:
            m._parameters.update({name: twins.of(p) for name, p in parameters.items()})
            m._buffers.update({name: twins.of(b) for name, b in buffers.items()})
        given = compat.tree_map_only(Tensor, twins.of, values)
        try:
            with compat.RealPositions(), compat.autocast_for_cpu():
                yield given
        finally:
            for m, parameters, buffers in before:
                m._parameters.update(parameters)
                m._buffers.update(buffers)


class _Twins:
    """Fake tensors in the place of others, one for each."""

    def __init__(self) -> None:
        self.mode = compat.use_fake_tensors()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # what is replaced stays alive

    def of(self, x: Tensor | None) -> Any:
        """The tensor in the place of `x`."""
        if x is None:
            return None
        if id(x) not in self._made:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            if isinstance(x, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=x.requires_grad)
            elif x.requires_grad:
                fake.requires_grad_()
            self._made[id(x)] = x, fake
        return self._made[id(x)][1]
