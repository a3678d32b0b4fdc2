"""The factor that `torch.amp.GradScaler` leaves in gradients.

It divides gradients before the step, or lets the optimizer do it (`_step_supports_amp_scaling`),
which finds factor and verdict as attributes within its step. PyTorch's fused ones then divide, too,
unless gradients are not finite; `fp8pass.optim.AdamW` leaves them as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8pass.optim.adamw import AdamW
from fp8pass.stability.guard.norms import ABSENT


class LossScale:
    """Follows the scale of an optimizer's gradients, as its last step left them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._factor: Tensor | None = None
        self._skipped: Tensor | None = None
        self._leaves_factor = isinstance(optimizer, AdamW)
        self._handle = optimizer.register_step_pre_hook(self._read)

    def unscaled(self, norms: Tensor) -> Tensor:
        """Norms of gradients without the scale; those of a step that was skipped are `ABSENT`."""
        there = norms != ABSENT
        if self._factor is not None:
            norms = norms / self._factor.to(norms.device)
        if self._skipped is not None:
            there &= self._skipped.to(norms.device) == 0
        return torch.where(there, norms, ABSENT)

    def close(self) -> None:
        """Leave the optimizer alone."""
        self._handle.remove()

    def _read(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factor = getattr(optimizer, "grad_scale", None)
        self._factor = factor if self._leaves_factor else None
        self._skipped = getattr(optimizer, "found_inf", None)
