"""`fp8pass diagnose`: the gradient error of every layer."""

from __future__ import annotations

import argparse

from fp8pass.tools.cli import target
from fp8pass.tools.cli.parsing import Command, check_plot, output_file
from fp8pass.tools.cli.running import measured, show
from fp8pass.tools.cli.tasks import task


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fp8pass diagnose`."""
    target.add_options(parser)
    add = parser.add_argument
    add("--plot", type=output_file, metavar="FILE", help="also draw the errors, as PNG, SVG or PDF")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> None:
    """Diagnose TARGET.

    Raises:
        UsageError: an option has an invalid value.
        Failure: a plot is asked for and matplotlib missing.
    """
    if options.plot:
        check_plot(options.plot)
    diagnosis = measured("diagnose", options)
    if options.plot:
        with task("drawing the plot", "Give another --plot FILE."):
            diagnosis.plot(options.plot)
    show(diagnosis, options.json)


COMMAND = Command(
    "diagnose",
    "the gradient error that each layer of a model adds, measured and expected",
    "Measure the gradient error that each layer adds on one batch, and compare it with the error\n"
    "that the rules expect. Errors far above that are marked, with the option that avoids them.\n\n"
    + target.DESCRIPTION,
    (
        "fp8pass diagnose models:build",
        "fp8pass diagnose llama/config.json --recipe agoq --plot errors.png",
        "fp8pass diagnose models:build --option skip=layers.0 --json",
    ),
    add_options,
    run,
)
