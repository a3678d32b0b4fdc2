"""Divide the gradients of a pipeline's stage by the number of its micro-batches.

The schedules of PyTorch do so after the last micro-batch, when an optimizer that steps in the
backward has used the gradients already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import nn

from fp8pass import compat
from fp8pass.config import ConfigError

# The parts of a backward that runs in two, where autograd calls no hooks of parameters.
IN_TWO_PARTS = {"I", "W"}


@dataclass(eq=False)
class Microbatches:
    """The schedule that trains a model, which exists in the first backward at the latest.

    Attributes:
        model: the model, which this does not keep alive.
    """

    model: ref[nn.Module]
    _schedule: ref[Any] | None = None
    _has_begun: bool = False

    def find(self) -> None:
        """Find the schedule, if there is one already.

        Raises:
            ConfigError: it computes gradients of weights apart from those of inputs.
        """
        model = self.model()
        if model is None or self._schedule is not None:
            return
        schedule = compat.find_schedule(model)
        if schedule is not None:
            _check_calls_hooks(schedule)
            self._schedule = ref(schedule)

    def divisor(self) -> int:
        """The number by which the schedule divides gradients; 1 without a pipeline.

        Raises:
            ConfigError: as `find`, in the first backward.
        """
        if not self._has_begun:
            self.find()
            self._has_begun = True
        schedule = self._schedule() if self._schedule else None
        return 1 if schedule is None else compat.gradient_divisor(schedule)


def _check_calls_hooks(schedule: Any) -> None:
    """Raise ConfigError if a schedule runs a backward in two parts."""
    rows = compat.pipeline_actions(schedule)
    if any(action.kind in IN_TWO_PARTS for row in rows for action in row):
        raise ConfigError(
            f"{type(schedule).__name__} computes gradients of weights without the hooks that attach"
            " updates in. Call optimizer.step() instead of attach, or use a schedule with whole "
            "backwards, such as 1F1B or Interleaved1F1B."
        )
