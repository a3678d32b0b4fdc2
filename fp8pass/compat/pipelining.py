"""Schedules of `torch.distributed.pipelining`, imported late, because some builds lack it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import wraps
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "PipelineAction", "count_schedules", "find_schedule", "gradient_divisor", "in_shape_inference",
    "pipeline_actions",
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
    """Return the newest pipeline schedule that trains `model` or a part of it, or None.

    The search covers all objects, because modules and stages hold no reference to their schedule.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        return None
    parameters = {id(p) for p in model.parameters()}
    found = [
        x
        for x in gc.get_objects()
        if issubclass(type(x), schedules._PipelineSchedule)
        and any(id(p) in parameters for m in _iterate_modules(x) for p in m.parameters())
        and x._loss_fn is not None  # otherwise it only evaluates
    ]
    return max(found, key=lambda x: vars(x).get(_NUMBER, 0), default=None)


def count_schedules() -> int:
    """Return how many schedules were created since the first call; -1 before their import."""
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        return -1
    kind = schedules._PipelineSchedule
    if not hasattr(kind, _COUNT):
        _number_schedules(kind)
    return getattr(kind, _COUNT)


_COUNT, _NUMBER = "fp8pass_count", "fp8pass_number"


def _number_schedules(kind: Any) -> None:
    construct = kind.__init__

    @wraps(construct)
    def construct_and_count(schedule: Any, *args: Any, **kwargs: Any) -> None:
        construct(schedule, *args, **kwargs)
        setattr(kind, _COUNT, getattr(kind, _COUNT) + 1)
        setattr(schedule, _NUMBER, getattr(kind, _COUNT))

    setattr(kind, _COUNT, 0)
    kind.__init__ = construct_and_count


def in_shape_inference() -> bool:
    """Whether a pipeline stage infers shapes on uninitialized memory."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _SHAPE_INFERENCE:
            return frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage"
        frame = frame.f_back  # type: ignore[assignment]
    return False


# The functions that infer shapes, in PyTorch 2.11 and in newer versions.
_SHAPE_INFERENCE = ("_shape_inference", "_forward_metadata_inference")


def gradient_divisor(schedule: Any) -> int:
    """Return the number by which the schedule divides gradients after the last micro-batch."""
    return schedule._n_microbatches if schedule.scale_grads else 1


def _iterate_modules(schedule: Any) -> Iterator[nn.Module]:
    """Yield the modules of the stages. Stages that `pipeline_configs` plans have no module."""
    one = getattr(schedule, "_stage", None)
    for stage in getattr(schedule, "_stages", [one]):
        if (module := getattr(stage, "submod", None)) is not None:
            yield module
