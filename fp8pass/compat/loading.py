"""Call functions before and after `torch.distributed.checkpoint` (DCP) reads data."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

__all__ = ["prepare_loads"]

Convert = Callable[[], None]
# Gets the flat state dict, whose entries it may replace, and the checkpoint's metadata before data
# is read. Returns functions that convert entries, by the names of the entries. A function that
# several entries share is called when all of these entries have been read.
Prepare = Callable[[dict[str, Any], Mapping[str, Any]], Mapping[str, Convert]]


def prepare_loads(prepare: Prepare) -> None:
    """Make DCP call `prepare` in every load from now on, if DCP is imported."""
    if "torch.distributed.checkpoint" in sys.modules:
        _patch_planner(prepare)


@cache
def _patch_planner(prepare: Prepare) -> None:
    from torch.distributed.checkpoint import DefaultLoadPlanner

    set_up = DefaultLoadPlanner.set_up_planner

    @wraps(set_up)
    def set_up_and_prepare(planner: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("finish_plan", "commit_tensor"):  # from an earlier load of this planner
            vars(planner).pop(name, None)
        set_up(planner, *args, **kwargs)
        # Without flattening, `planner.state_dict` is the caller's own dict.
        if planner.metadata is not None and planner.flatten_state_dict:
            conversions = prepare(planner.state_dict, planner.metadata.state_dict_metadata)
            _call_after_reads(planner, conversions)

    DefaultLoadPlanner.set_up_planner = set_up_and_prepare  # type: ignore[method-assign, assignment]


def _call_after_reads(planner: Any, conversions: Mapping[str, Convert]) -> None:
    """Call each conversion when all its entries have been read."""
    remaining: Counter[Convert] = Counter()
    finish, commit = planner.finish_plan, planner.commit_tensor

    def finish_plan(plan: Any) -> Any:
        plan = finish(plan)
        entries = (item.dest_index.fqn for item in plan.items)
        remaining.update(conversions[entry] for entry in entries if entry in conversions)
        return plan

    def commit_tensor(item: Any, tensor: Any) -> None:
        commit(item, tensor)
        convert = conversions.get(item.dest_index.fqn)
        if convert is not None:
            remaining[convert] -= 1
            if not remaining[convert]:
                convert()

    planner.finish_plan, planner.commit_tensor = finish_plan, commit_tensor
