"""Memory budgets for the stages of a pipeline.

In the paper AGoQ (section 4.2, DBCA-PP), the first rank holds the most micro-batches, and saves
tensors in 4 bits. Every rank gets the memory that the first rank needs. If rank i holds N_i
micro-batches, it saves tensors in B_i = 4 · N_1 / N_i bits (Eq. 22). This module computes N_i from
PyTorch's schedule.

    for stage, config in zip(stages, pipeline_configs("1F1B", len(stages), microbatches=8)):
        stage.compile(backend=fp8pass.backend(config))
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from torch.distributed.pipelining import schedules

from fp8pass import compat
from fp8pass.compat import PipelineAction
from fp8pass.config import Config, checked_config
from fp8pass.dialect.formats import SAVED_FORMATS
from fp8pass.option_checks import LARGEST_SHARE, ConfigError, is_whole, unknown

# For each kind of action, the change of the number of micro-batches that a rank holds. A backward
# in two parts releases its micro-batch after the second part (W), which computes weight gradients.
HELD_CHANGE = {"F": 1, "B": -1, "W": -1}


def pipeline_configs(
    schedule: object,
    stages: int | None = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    base: Config | None = None,
) -> list[Config]:
    """Return the configurations of a pipeline's stages, from the first stage to the last.

    The configurations differ in `memory_budget`. All ranks have the same budget for the tensors
    that they save for backwards, in all stages and micro-batches. By default, this is the memory
    that the rank with the most micro-batches needs with `base.save_format`. Stages of other ranks
    save tensors in up to twice as many bits (AGoQ, Eq. 21 and 22). Budgets do not include inputs
    and outputs of stages, which PyTorch holds for each micro-batch.

    In this function, `base.memory_budget` is the budget of a rank. A number of bytes ("24GiB")
    also works for unequal stages, if each stage is compiled as one graph. A share is only useful if
    stages are similar: a stage that saves more, such as the last stage with its logits, gets
    proportionally more memory.

    Args:
        schedule: a schedule of `torch.distributed.pipelining`. If stages are compiled before the
            schedule exists, pass its class or name ("1F1B", "Interleaved1F1B"), and `stages`,
            `ranks` and `microbatches`.
        stages: number of stages (model chunks) on all ranks together.
        ranks: number of ranks; not needed if each rank has one stage.
        microbatches: number of micro-batches in a batch.
        base: all other options; by default `Config(save_format="e2m1")`.

    Raises:
        ConfigError: the schedule is unknown, or does not support this number of stages, ranks or
            micro-batches. Also raised if `base` has no `memory_budget` and its `save_format` is
            already the largest format.
        TypeError: `base` is not a `Config`.
    """
    base = Config(save_format="e2m1") if base is None else checked_config(base, "base")
    if base.memory_budget is None and base.save_format in ("none", SAVED_FORMATS[-1].name):
        raise ConfigError(
            "Stages with few micro-batches get a larger format than save_format, but save_format="
            f"{base.save_format!r} is the largest format. Pass a smaller format, such as base="
            "Config(save_format='e2m1', ...), or a memory_budget, such as '24GiB' or 0.6."
        )
    order = read_order(schedule, stages, ranks, microbatches)
    held = [most_held(actions) for actions in order]
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return [
        replace(base, memory_budget=_compute_budget(base, held[rank_of[stage]], max(held)))
        for stage in sorted(rank_of)
    ]


def most_held(actions: list[PipelineAction]) -> int:
    """Return how many micro-batches a rank holds at its peak.

    For interleaved 1F1B with two stages on each of n ranks, rank i, counted from 1, holds
    3n - 2i + 1. Eq. 21 of AGoQ is n + 2i - 1, because it counts ranks backwards.
    """
    held = peak = 0
    for action in actions:
        held += HELD_CHANGE.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def _compute_budget(base: Config, held: int, most: int) -> float | int:
    """Return the budget of one micro-batch in one stage: bytes, or a share of the default.

    The rank of the stage holds `held` micro-batches at its peak. The maximum over ranks is `most`.
    """
    if isinstance(base.memory_budget, (str, int)):
        return int(base.budget_bytes(0) // held)
    share = 1.0 if base.memory_budget is None else base.memory_budget
    return min(share * most / held, LARGEST_SHARE)


def read_order(
    schedule: object, stages: int | None, ranks: int | None, microbatches: int | None
) -> list[list[PipelineAction]]:
    """Return the schedule's actions on each rank, in order."""
    numbers = {"stages": stages, "ranks": ranks, "microbatches": microbatches}
    has_numbers = any(number is not None for number in numbers.values())
    planned = isinstance(schedule, (str, type))
    if isinstance(schedule, (str, type)):
        schedule = _plan(_find_class(schedule), numbers)
    order = compat.pipeline_actions(schedule)
    if not order:
        raise ConfigError(
            f"{schedule!r} is not a pipeline schedule, or has no table of actions "
            "(pipeline_order). Pass a schedule of torch.distributed.pipelining, its class, or its "
            "name, such as '1F1B'."
        )
    if not planned and has_numbers:
        raise ConfigError(
            f"{type(schedule).__name__} has its own stages, ranks and microbatches: leave out "
            "these arguments. Pass them only with the name or the class of a schedule."
        )
    return order


def _find_class(schedule: str | type) -> type:
    if isinstance(schedule, type):
        return schedule
    try:
        return schedules.get_schedule_class(schedule)
    except ValueError as error:
        names = schedule_names()
        raise ConfigError(
            f"{unknown('schedule', schedule, names)} Schedules are: {', '.join(names)}."
        ) from error


def schedule_names() -> list[str]:
    classes = (n for n in schedules.__all__ if n.startswith("Schedule"))
    return [name.removeprefix("Schedule") for name in classes]


def _plan(schedule: type, numbers: dict[str, int | None]) -> object:
    one_each = issubclass(schedule, schedules.PipelineScheduleSingle)
    if one_each and numbers["ranks"] is None:
        numbers["ranks"] = numbers["stages"]
    stages, ranks, microbatches = (_check_count(*pair) for pair in numbers.items())
    described = f"{stages} stages on {ranks} ranks and {microbatches} microbatches"
    if stages % ranks or (one_each and stages != ranks):
        several = "one stage" if one_each else "the same number of stages"
        raise ConfigError(f"{schedule.__name__} needs {several} on every rank, got {described}.")
    try:
        return planned_schedule(schedule, stages, ranks, microbatches)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{schedule.__name__} does not support {described}: {error}") from error


def planned_schedule(schedule: type, stages: int, ranks: int, microbatches: int) -> object:
    """Return a schedule of stages without models. The schedule cannot run."""
    place = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "submod": None}
    local = [SimpleNamespace(stage_index=i, **place) for i in range(0, stages, ranks)]
    is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
    return schedule(local[0] if is_single else local, microbatches)


def _check_count(name: str, number: int | None) -> int:
    if number is not None and is_whole(number) and number >= 1:
        return number
    raise ConfigError(
        f"{name}={number!r} must be a whole number, at least 1, if schedule is a name or a class. "
        "If schedule is an object, leave this argument out."
    )
