"""Memory budgets for the stages of a pipeline: who holds few micro-batches keeps more of each.

A rank holds at once what its stages keep for the backward of several micro-batches, the first rank
of the most. AGoQ (section 4.2, DBCA-PP) gives every rank the memory that the first one needs with 4
bits: B_i = 4 · N_1 / N_i bits where rank i holds N_i micro-batches (Eq. 22). Here N_i is read off
the schedule that PyTorch runs, and stages have budgets of bytes instead of bits, for which the
planner chooses formats value by value (`activation_memory/more_bits.py`).

    for stage, config in zip(stages, configs("1F1B", len(stages), microbatches=8)):
        stage.compile(backend=fp8pass.backend(config))
"""

from __future__ import annotations

from dataclasses import replace

from fp8pass import compat
from fp8pass.compat import PipelineAction
from fp8pass.config import MOST_SHARE, Config, ConfigError, checked_config, unknown
from fp8pass.dialect.formats import SAVED_FORMATS

# What each action adds to the micro-batches whose activations a rank holds. Of a backward in two
# parts the second, for weights, lets go of them.
HELD = {"F": 1, "B": -1, "W": -1}


def configs(
    schedule: object,
    stages: int | None = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    base: Config | None = None,
) -> list[Config]:
    """The configurations of a pipeline's stages, from the first stage to the last.

    They differ in `memory_budget`: at its peak each rank may hold the same bytes for the backward,
    of all its stages and micro-batches together. By default these are what the rank with most
    micro-batches keeps in the smallest format of `base`. Stages of other ranks keep more of each,
    in formats of more bits, up to twice as much: 8 bits for 4. Where ranks hold 11, 9, 7 and 5, as
    four with two stages each do, that is 4, 4.9, 6.3 and 8 bits on average (AGoQ's Eq. 21 and 22).

    What PyTorch holds of each micro-batch itself, inputs and outputs of stages, comes on top.

    `base.memory_budget` is here the budget of a rank. In bytes ("24GiB") it holds for any stages,
    each compiled as one graph. A share is one of the default, and holds for stages that are alike:
    one that keeps more than the others, such as logits, may keep as many times more.

    Args:
        schedule: a schedule of `torch.distributed.pipelining`; or, where stages are compiled before
            there is one, its class or name ("1F1B", "Interleaved1F1B"), with these numbers:
        stages: how many stages (chunks of the model) the pipeline has, all ranks together.
        ranks: how many ranks it has; not needed where each runs one stage.
        microbatches: how many micro-batches a batch has.
        base: all other options, by default those of recipe `agoq`.

    Raises:
        ConfigError: there is no such schedule, it cannot have these numbers, or `base` leaves no
            choice: no budget, and a `save_format` that is the largest already.
        TypeError: `base` is no `Config`.
    """
    base = Config.recipe("agoq") if base is None else checked_config(base, "base")
    _check_choice_left(base)
    order = _order(schedule, stages, ranks, microbatches)
    held = [_peak(actions) for actions in order]
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return [
        replace(base, memory_budget=_budget(base, held[rank_of[stage]], max(held)))
        for stage in sorted(rank_of)
    ]


def held_microbatches(
    schedule: object,
    stages: int | None = None,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
) -> list[int]:
    """How many micro-batches each rank holds at its peak, from the first rank to the last.

    A micro-batch counts once for each stage of the rank, from the end of its forward to the end of
    its backward: of that for weights where it is apart from that for inputs (zero bubbles).

    AGoQ's Eq. 21 is the case of interleaved 1F1B with two stages on each of n ranks: rank i, from
    1, holds 3n - 2i + 1. It is printed as n + 2i - 1, with i running backwards.

    Args:
        schedule: as `configs` takes it, like the numbers.
        stages: how many stages the pipeline has.
        ranks: how many ranks it has.
        microbatches: how many micro-batches a batch has.

    Raises:
        ConfigError: there is no such schedule, or it cannot have these numbers.
    """
    return [_peak(actions) for actions in _order(schedule, stages, ranks, microbatches)]


def _peak(actions: list[PipelineAction]) -> int:
    held = peak = 0
    for action in actions:
        held += HELD.get(action.kind, 0)
        peak = max(peak, held)
    return peak


def _budget(base: Config, held: int, most: int) -> float | int:
    """Of one micro-batch on a rank that holds `held`, where another rank holds `most`."""
    if isinstance(base.memory_budget, (str, int)):
        return int(base.budget_bytes(0) // held)
    share = 1.0 if base.memory_budget is None else base.memory_budget
    return min(share * most / held, MOST_SHARE)


def _check_choice_left(base: Config) -> None:
    if base.memory_budget is None and base.save_format in ("none", SAVED_FORMATS[-1].name):
        raise ConfigError(
            f"save_format={base.save_format!r} leaves nothing to choose: stages that hold few "
            "micro-batches keep them in formats of more bits than save_format. Give a smaller one, "
            "as base=Config.recipe('agoq', ...) does, or a memory_budget ('24GiB', 0.6), for which "
            "stages that hold many compute more again."
        )


# --- the order in which a schedule runs stages ----------------------------------------------------


def _order(
    schedule: object, stages: int | None, ranks: int | None, microbatches: int | None
) -> list[list[PipelineAction]]:
    """The actions of each rank."""
    planned = isinstance(schedule, (str, type))
    if isinstance(schedule, (str, type)):
        schedule = _planned(_class_of(schedule), stages, ranks, microbatches)
    order = compat.pipeline_actions(schedule)
    if not order:
        raise ConfigError(
            f"{schedule!r} has no table of what each rank runs (pipeline_order). Give a schedule "
            "of torch.distributed.pipelining, its class, or its name, such as '1F1B'."
        )
    if not planned and (stages, ranks, microbatches) != (None, None, None):
        raise ConfigError(
            f"{type(schedule).__name__} knows its stages, ranks and microbatches: leave them out. "
            "They are for the name or the class of a schedule."
        )
    return order


def _class_of(schedule: str | type) -> type:
    if isinstance(schedule, type):
        return schedule
    try:
        return compat.schedule_class(schedule)
    except ValueError as error:
        names = compat.schedule_names()
        raise ConfigError(
            f"{unknown('schedule', schedule, names)} Schedules are: {', '.join(names)}."
        ) from error


def _planned(
    schedule: type, stages: int | None, ranks: int | None, microbatches: int | None
) -> object:
    """The schedule of these numbers, without the stages themselves."""
    one_each = compat.runs_one_stage_a_rank(schedule)
    ranks = stages if one_each and ranks is None else ranks
    numbers = [
        _count(name, number)
        for name, number in (("stages", stages), ("ranks", ranks), ("microbatches", microbatches))
    ]
    described = "{} stages on {} ranks and {} microbatches".format(*numbers)
    if numbers[0] % numbers[1] or (one_each and numbers[0] != numbers[1]):
        several = "one stage" if one_each else "the same number of stages"
        raise ConfigError(
            f"{schedule.__name__} has {several} on every rank, which {described} are not."
        )
    try:
        return compat.planned_schedule(schedule, *numbers)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{schedule.__name__} cannot have {described}: {error}") from error


def _count(name: str, number: int | None) -> int:
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return number
    raise ConfigError(
        f"{name}={number!r}: the name or the class of a schedule needs how many {name} there are, "
        "at least 1. A schedule itself needs no numbers."
    )
