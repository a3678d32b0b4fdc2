"""Running the tools of `fp8pass.tools` on TARGET, and printing their results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from fp8pass.config import Config
from fp8pass.tools.cli import target
from fp8pass.tools.cli.parsing import UsageError
from fp8pass.tools.cli.target import Target
from fp8pass.tools.cli.tasks import task

REPORT = "--traceback shows where; to report it, add the output of fp8pass env."


def show(result: Any, as_json: bool) -> None:
    """Print the result of a command, as tables or as JSON."""
    print(result.to_json() if as_json else str(result).rstrip())


def explained(options: argparse.Namespace) -> tuple[Any, Any]:
    """`fp8pass.explain` of TARGET, and with the options `--beside`, None without these."""
    config = target.config_of(options)
    target.check_beside(options)
    found = target.load(options)
    run_alone(found)
    import fp8pass

    def explain(config: Config | None) -> Any:
        wanted = {"frontier": options.frontier, "rules": options.rules}
        return fp8pass.explain(found.model, *found.args, config=config, **wanted, **found.kwargs)

    with task("fp8pass.explain", REPORT):
        explanation = explain(config)
        other = target.config_beside(options, explanation.config)
        return explanation, explain(other) if other else None


def measured(name: str, options: argparse.Namespace) -> Any:
    """`fp8pass.<name>(model, loss_fn, batch, config=...)` of TARGET, for diagnose and bisect."""
    config = target.config_of(options)
    found = target.load(options)
    loss_fn = loss_function(found)
    run_alone(found, partial(loss_fn, found.module, found.batch))
    import fp8pass

    with task(f"fp8pass.{name}", REPORT):
        return getattr(fp8pass, name)(found.model, loss_fn, found.batch, config=config)


def run_alone(found: Target, run: Callable[[], Any] | None = None) -> None:
    """Call the model, or `run`, without fp8pass, so that errors of its own are not taken for ours.

    Raises:
        Failure: it fails.
        UsageError: there is no loss.
    """
    import torch

    from fp8pass.tools.running import unchanged

    shapes = [_described(x) for x in (*found.args, *found.kwargs.items())]
    fix = f"Its inputs are {', '.join(shapes) or 'none'}; --input gives others."
    with (
        task("running the model without fp8pass", fix),
        torch.compiler.set_stance("force_eager"),
        unchanged(found.module),
        torch.no_grad(),
    ):
        (run or partial(found.module, *found.args, **found.kwargs))()


def loss_function(found: Target) -> Callable[[Any, Any], Any]:
    """TARGET's `loss_fn`, or that of a model which returns its loss."""
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
            f"No loss: {whose} returned {_described(returned)}, no single number. Have "
            "module:function return loss_fn last, such as lambda model, batch: "
            "model(*batch).square().mean(), or give the model its labels, "
            "--input labels=4x128:int64:32000."
        )

    return loss_fn


def _described(value: Any) -> str:
    """A value as text in a message: its name if it is a keyword argument, type and shape."""
    import torch

    from fp8pass import graph

    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}={_described(value[1])}"
    if isinstance(value, torch.Tensor):
        return f"{graph.dtype_text(value.dtype)} {'x'.join(map(str, value.shape))}"
    return type(value).__name__
