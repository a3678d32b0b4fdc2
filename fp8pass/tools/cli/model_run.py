"""Run the model of a command without fp8pass, and compute its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fp8pass.tools.cli.parsing import UsageError, task
from fp8pass.tools.cli.target import Target


def run_alone(found: Target, run: Callable[[], Any] | None = None) -> None:
    """Call the model, or `run`, without fp8pass, so that the model's own errors appear first.

    Raises:
        Failure: the call fails.
        UsageError: the model has no loss.
    """
    import torch

    from fp8pass.tools.running import restore_state

    shapes = [*map(_describe, found.args)]
    shapes += [f"{name}={_describe(x)}" for name, x in found.kwargs.items()]
    fix = f"The inputs were {', '.join(shapes) or 'none'}; pass other inputs with --input."
    with (
        task("running the model without fp8pass", fix),
        torch.compiler.set_stance("force_eager"),
        restore_state(found.module),
        torch.no_grad(),
    ):
        (run or partial(found.module, *found.args, **found.kwargs))()


def make_loss_fn(found: Target) -> Callable[[Any, Any], Any]:
    """Return TARGET's `loss_fn`, or a function that returns the model's own loss.

    The returned function raises UsageError if the loss is not a tensor of one element.
    """
    import torch

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if found.loss_fn:
            returned = loss = found.loss_fn(model, batch)
        else:
            returned = found.call(model, batch)
            loss = getattr(returned, "loss", returned)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss
        whose = "loss_fn" if found.loss_fn else "the model"
        raise UsageError(
            f"Expected a scalar loss, but {whose} returned {_describe(returned)}. Return a loss_fn "
            "at the end of TARGET's tuple, such as lambda model, batch: "
            "model(*batch).square().mean(), or pass labels to the model: --input "
            "labels=4x128:int64:32000."
        )

    return loss_fn


def _describe(value: Any) -> str:
    import torch

    from fp8pass import graph

    if isinstance(value, torch.Tensor):
        return f"{graph.dtype_text(value.dtype)} {'x'.join(map(str, value.shape))}"
    return type(value).__name__
