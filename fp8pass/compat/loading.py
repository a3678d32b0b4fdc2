"""A hook into loads of `torch.distributed.checkpoint` (DCP), between metadata and data."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

Convert = Callable[[], None]
# Takes the flat state dict and the checkpoint's metadata. It may replace entries of the former, and
# returns by entry what to call as soon as all entries with the same callable have been read.
Prepare = Callable[[dict[str, Any], Mapping[str, Any]], Mapping[str, Convert]]


def prepare_loads(prepare: Prepare) -> None:
    """Have DCP call `prepare` in every load from now on, if the process uses DCP at all."""
    if "torch.distributed.checkpoint" in sys.modules:
        _patch_planner(prepare)


@cache
def _patch_planner(prepare: Prepare) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    set_up = DefaultLoadPlanner.set_up_planner

    @wraps(set_up)
    def prepared(planner: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("finish_plan", "commit_tensor"):  # of an earlier load by the same planner
            vars(planner).pop(name, None)
        set_up(planner, *args, **kwargs)
        # Otherwise the state dict is the caller's, which must keep its entries.
        if planner.metadata is not None and planner.flatten_state_dict:
            conversions = prepare(planner.state_dict, planner.metadata.state_dict_metadata)
            _call_after_reads(planner, conversions)

    DefaultLoadPlanner.set_up_planner = prepared  # type: ignore[method-assign, assignment]


def _call_after_reads(planner: Any, conversions: Mapping[str, Convert]) -> None:
    """Call each conversion when the last read into its entries is done."""
    left: Counter[Convert] = Counter()
    planner.finish_plan = partial(_count_reads, planner.finish_plan, conversions, left)
    planner.commit_tensor = partial(_note_read, planner.commit_tensor, conversions, left)


def _count_reads(
    finish_plan: Callable[[Any], Any],
    conversions: Mapping[str, Convert],
    left: Counter[Convert],
    plan: Any,
) -> Any:
    plan = finish_plan(plan)
    entries = (item.dest_index.fqn for item in plan.items)
    left.update(conversions[entry] for entry in entries if entry in conversions)
    return plan


def _note_read(
    commit: Callable[[Any, Any], None],
    conversions: Mapping[str, Convert],
    left: Counter[Convert],
    item: Any,
    tensor: Any,
) -> None:
    commit(item, tensor)
    convert = conversions.get(item.dest_index.fqn)
    if convert is not None:
        left[convert] -= 1
        if not left[convert]:
            convert()
