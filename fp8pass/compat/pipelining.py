"""Schedules of `torch.distributed.pipelining`, imported late, because some builds lack it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "PipelineAction", "find_schedule", "gradient_divisor", "in_shape_inference", "pipeline_actions",
]  # fmt: skip


class PipelineAction(NamedTuple):
    # `F` for forward, `B` for backward, `I` and `W` for the backward of inputs and of weights.
    # Other kinds compute nothing.
    kind: str
    stage: int


def pipeline_actions(schedule: object) -> list[list[PipelineAction]]:
    """Return each rank's actions for one batch, in order; [] if the schedule does not list them."""
    order = getattr(schedule, "pipeline_order", None) or {}
    return [[*_flatten(order[rank])] for rank in sorted(order)]


def _flatten(row: list[Any]) -> Iterator[PipelineAction]:
    for step in row:
        if step is not None:  # None is a bubble
            # A forward that overlaps with a backward has two sub-actions.
            for action in step.sub_actions or (step,):
                yield PipelineAction(action.computation_type.value, action.stage_index)


def find_schedule(model: nn.Module) -> Any:
    """Return the pipeline schedule that trains `model` or a part of it, if any.

    Modules and stages hold no reference to their schedule, so this searches all objects.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        return None
    parameters = {id(p) for p in model.parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), schedules._PipelineSchedule) and any(
            id(p) in parameters for module in _iterate_modules(found) for p in module.parameters()
        ):
            return found
    return None


def in_shape_inference() -> bool:
    """Whether a pipeline stage infers shapes on uninitialized memory."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _SHAPE_INFERENCE:
            return frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage"
        frame = frame.f_back  # type: ignore[assignment]
    return False


# In PyTorch 2.11 and in newer versions.
_SHAPE_INFERENCE = ("_shape_inference", "_forward_metadata_inference")


def gradient_divisor(schedule: Any) -> int:
    """Return the divisor of gradients after the last micro-batch."""
    return schedule._n_microbatches if schedule.scale_grads else 1


def _iterate_modules(schedule: Any) -> Iterator[nn.Module]:
    """Stages of a schedule that `pipeline_configs` plans have no module."""
    one = getattr(schedule, "_stage", None)
    for stage in getattr(schedule, "_stages", [one]):
        if (module := getattr(stage, "submod", None)) is not None:
            yield module
