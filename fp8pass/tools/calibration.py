"""`fp8pass.calibrate`: means and standard deviations of activations, for the error rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8pass import graph
from fp8pass.config import Config, ValueMoments
from fp8pass.error_analysis.error_rules import Rules
from fp8pass.tools.recording import Record, record_step
from fp8pass.tools.running import check_configuration


def calibrate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Any,
    *,
    config: Config | None = None,
) -> tuple[ValueMoments, ...]:
    """Measure the mean and standard deviation of the values that the error rules use.

    Without these moments, the rules assume unit variance. Pass the result to the compiler:

        calibration = fp8pass.calibrate(model, loss_fn, batch)
        model = torch.compile(model, backend="fp8pass", options={"calibration": calibration})

    Names of values are relative to the compiled part. So compile the model in the same way for
    calibration and for training: as a whole, or in the same parts. If a value is in several graphs
    or runs, the result has the moments with the largest mean square. Runs one forward and backward;
    parameters, gradients, buffers and random number generators are restored.

    Args:
        model: a module. If it is compiled with `backend="fp8pass"`, its options are used.
        loss_fn: `loss_fn(model, batch)` returns the loss, for example `lambda m, b: m(**b).loss`.
        batch: passed to `loss_fn`.
        config: the configuration to compile with. Default: the model's own, or else the default
            recipe.

    Returns:
        (name, mean, standard deviation) of each value, as JSON-ready data.

    Raises:
        TypeError: `model` is not a module, `config` not a `Config`, or the loss not a scalar.
    """
    config = check_configuration("calibrate", model, config)
    records = record_step(model, loss_fn, batch, config)
    found: dict[str, ValueMoments] = {}
    for record in records:
        for moments in _measure_moments(record):
            found[moments[0]] = max(moments, found.get(moments[0], moments), key=_mean_square)
    return tuple(found.values())


def _mean_square(moments: ValueMoments) -> float:
    _, mean, std = moments
    return mean**2 + std**2


def _measure_moments(record: Record) -> list[ValueMoments]:
    names = graph.value_names(record.planned.graph)
    rules = Rules(record.planned.graph, record.ctx.config, record.ctx.facts)
    exact = record.planned_values(record.exact_values())
    values = {n: exact.get(n) for r in rules.regions for n in r.values}
    found = []
    for node, x in values.items():
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1:
            std, mean = torch.std_mean(x.double())
            found.append((names[node], float(mean), float(std)))
    return [m for m in found if math.isfinite(_mean_square(m))]
