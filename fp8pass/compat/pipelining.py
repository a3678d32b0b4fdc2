"""Schedules of `torch.distributed.pipelining`: in which order each rank runs which stages.

PyTorch is imported where it is used: there are builds without torch.distributed.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn


class PipelineAction(NamedTuple):
    """A step of one rank.

    Attributes:
        kind: `F` forward, `B` backward, `I` and `W` backward for inputs and for weights, or others,
            which compute nothing.
        stage: number of the stage, from 0.
    """

    kind: str
    stage: int


def pipeline_actions(schedule: object) -> list[list[PipelineAction]]:
    """The actions of each rank in order, for one batch; empty if the schedule has no such table."""
    order = getattr(schedule, "pipeline_order", None) or {}
    return [[*_actions(order[rank])] for rank in sorted(order)]


def _actions(row: list[Any]) -> Iterator[PipelineAction]:
    for step in row:
        if step is not None:  # a bubble
            # A forward that overlaps with a backward is one step.
            for action in step.sub_actions or (step,):
                yield PipelineAction(action.computation_type.value, action.stage_index)


def find_schedule(model: nn.Module) -> Any:
    """The schedule that trains `model` as a stage of a pipeline, or some of it; None without one.

    Modules do not refer to their stages, and stages not to their schedules.
    """
    schedules = sys.modules.get("torch.distributed.pipelining.schedules")
    if schedules is None:
        return None
    parameters = {id(p) for p in model.parameters()}
    for found in gc.get_objects():
        if issubclass(type(found), schedules._PipelineSchedule) and any(
            id(p) in parameters for module in _modules(found) for p in module.parameters()
        ):
            return found
    return None


def gradient_divisor(schedule: Any) -> int:
    """Return what a schedule divides gradients by after the last micro-batch."""
    return schedule._n_microbatches if schedule.scale_grads else 1


def _modules(schedule: Any) -> Iterator[nn.Module]:
    """The modules of the stages that a schedule runs on this rank.

    Stages that only plan memory have no module.
    """
    one = getattr(schedule, "_stage", None)
    for stage in getattr(schedule, "_stages", [one]):
        if (module := getattr(stage, "submod", None)) is not None:
            yield module


def schedule_names() -> list[str]:
    """The schedules that `schedule_class` knows."""
    from torch.distributed.pipelining import schedules

    bases = ("PipelineScheduleSingle", "PipelineScheduleMulti")
    classes = (n for n in schedules.__all__ if n.startswith("Schedule") and n not in bases)
    return [name.removeprefix("Schedule") for name in classes]


def schedule_class(name: str) -> type:
    """The schedule of a name as torchtitan's and PyTorch's options have it, `1F1B` say.

    Raises:
        ValueError: there is none.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(name)


def runs_one_stage_a_rank(schedule: type) -> bool:
    """Whether each rank has one stage, as in 1F1B and GPipe, and not several."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return issubclass(schedule, PipelineScheduleSingle)


def planned_schedule(schedule: type, stages: int, ranks: int, microbatches: int) -> object:
    """A schedule of stages that do not exist: it cannot run, but knows its order.

    Raises:
        ValueError: the schedule does not take these numbers.
    """
    place = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "submod": None}
    local = [SimpleNamespace(stage_index=i, **place) for i in range(0, stages, ranks)]
    of = local[0] if runs_one_stage_a_rank(schedule) else local
    return schedule(of, microbatches)
