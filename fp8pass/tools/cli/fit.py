"""`fp8pass fit`: whether a model trains on a GPU, and how."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fp8pass.config import ConfigError
from fp8pass.tools.cli import target
from fp8pass.tools.cli.parsing import Command, Failure, UsageError, check_plot, output_file
from fp8pass.tools.cli.running import loss_function, show
from fp8pass.tools.cli.tasks import task

# The model runs within fp8pass alone, where there is no memory: an error may be its own.
WHOSE = (
    "--traceback shows where; unless that is in the model or its loss_fn, report it with the "
    "output of fp8pass env."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fp8pass fit`."""
    target.add_options(parser, runs=False)
    add = parser.add_argument
    add(
        "--gpu", help="the GPU by name, memory or both: RTX4090, 16GiB, H200,16GiB (default: yours)"
    )
    add("--host", help="memory of the host: 64GiB (default: what is left here)")
    add(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches whose gradients are added up before an update (default: 1)",
    )
    add(
        "--blocks",
        action="append",
        default=[],
        metavar="PATH",
        help="modules that are compiled one by one, such as model.layers, once for each; by "
        "default the model is compiled as a whole",
    )
    add(
        "--plot",
        type=output_file,
        metavar="FILE",
        help="also draw memory over a step, as PNG, SVG or PDF",
    )
    add("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> None:
    """Fit TARGET.

    Raises:
        UsageError: an option has an invalid value.
        Failure: no way to train fits, or a plot is asked for and matplotlib missing.
    """
    if options.plot:
        check_plot(options.plot)
    config = target.config_of(options)
    found = target.load(options)
    result = _fitted(options, config, found)
    if found.note:
        result.notes.insert(0, found.note)
    if options.plot:
        with task("drawing the plot", "Give another --plot FILE."):
            result.plot(options.plot)
    show(result, options.json)
    if not result.fits:
        raise Failure("no way to train the model fits; the output says what is in the way.")


def _fitted(options: argparse.Namespace, config: Any, found: target.Target) -> Any:
    """`fp8pass.fit` of TARGET."""
    import fp8pass

    wrong: ConfigError | None = None
    with task("fp8pass.fit", WHOSE):
        try:
            return fp8pass.fit(
                found.model,
                *found.args,
                gpu=options.gpu,
                host=options.host,
                config=config,
                accumulate=options.accumulate,
                blocks=options.blocks,
                loss_fn=_loss_fn(found),
                **found.kwargs,
            )
        except ConfigError as error:
            wrong = error
    raise UsageError(str(wrong)) from wrong


def _loss_fn(found: target.Target) -> Callable[[Any, Any], Any]:
    """The loss of TARGET for the batch as `fit` passes it: one tensor, too, is in a tuple."""
    import torch

    loss_fn = loss_function(found)
    if not isinstance(found.batch, torch.Tensor):
        return loss_fn
    return lambda model, batch: loss_fn(model, batch[0])


COMMAND = Command(
    "fit",
    "whether a model trains on a GPU of some GiB, and the options that make it so",
    "Show what training takes of a GPU and its host, and the fastest options that fit, as lines\n"
    "to paste. Runs nothing and allocates nothing: a Hugging Face config is built on PyTorch's\n"
    "meta device, as a function may do, and the GPU need not be there (docs/memory.md).\n\n"
    + target.DESCRIPTION,
    (
        "fp8pass fit llama/config.json --gpu RTX4090 --host 64GiB --blocks model.layers",
        "fp8pass fit llama/ --gpu 16GiB --accumulate 8 --input input_ids=4x2048:int64:32000 "
        "--input labels=4x2048:int64:32000",
        "fp8pass fit models:build --gpu RTX4090 --plot memory.png",
        "fp8pass fit model.py:MLP --input 32x64:bfloat16 --gpu H200,2GiB --json",
    ),
    add_options,
    run,
)
