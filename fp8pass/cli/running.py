"""Running the tools of `fp8pass.inspect` on TARGET, and printing their results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fp8pass.cli import target
from fp8pass.cli.parsing import UsageError
from fp8pass.cli.target import Target
from fp8pass.cli.tasks import task

REPORT = "--traceback shows where; to report it, add the output of fp8pass env."


def show(result: Any, as_json: bool) -> None:
    """Print the result of a command, as tables or as JSON."""
    print(result.to_json() if as_json else str(result).rstrip())


def explained(options: argparse.Namespace) -> Any:
    """`fp8pass.explain` of TARGET."""
    config = target.config_of(options)
    found = target.load(options)
    run_alone(found)
    import fp8pass

    with task("fp8pass.explain", REPORT):
        return fp8pass.explain(
            found.model,
            *found.args,
            config=config,
            frontier=options.frontier,
            rules=options.rules,
            **found.kwargs,
        )


def measured(name: str, options: argparse.Namespace) -> Any:
    """`fp8pass.<name>(model, loss_fn, batch, config=...)` of TARGET, for diagnose and bisect."""
    config = target.config_of(options)
    found = target.load(options)
    loss = loss_function(found)
    loss(run_alone(found))
    import fp8pass

    def loss_of_batch(model: Any, batch: Any) -> Any:
        args, kwargs = batch
        return loss(model(*args, **kwargs))

    with task(f"fp8pass.{name}", REPORT):
        return getattr(fp8pass, name)(
            found.model, loss_of_batch, (found.args, found.kwargs), config=config
        )


def run_alone(found: Target) -> Any:
    """The output of the model without fp8pass, so that its own errors are not taken for ours.

    Raises:
        Failure: the model fails.
    """
    import torch

    from fp8pass.inspect.running import unchanged

    shapes = [_described(x) for x in (*found.args, *found.kwargs.items())]
    fix = f"Its inputs are {', '.join(shapes) or 'none'}; --input gives others."
    with (
        task("running the model without fp8pass", fix),
        torch.compiler.set_stance("force_eager"),
        unchanged(found.module),
        torch.no_grad(),
    ):
        return found.module(*found.args, **found.kwargs)


def loss_function(found: Target) -> Callable[[Any], Any]:
    """A function from the model's output to a scalar loss."""
    import torch

    def loss(output: Any) -> torch.Tensor:
        value = found.loss(output) if found.loss else getattr(output, "loss", output)
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return value
        returned = ("the loss function", value) if found.loss else ("the model", output)
        raise UsageError(
            f"No loss: {returned[0]} returned {_described(returned[1])}, no scalar. Have module:"
            "function return a loss function last, such as lambda output: output.square().mean(), "
            "or give the model its labels, --input labels=4x128:int64:32000."
        )

    return loss


def _described(value: Any) -> str:
    """A value as text in a message: its name if it is a keyword argument, type and shape."""
    import torch

    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}={_described(value[1])}"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape))}"
    return type(value).__name__
