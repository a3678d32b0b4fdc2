"""`fp8pass explain`: the decisions about a model, and why."""

from __future__ import annotations

import argparse

from fp8pass.tools.cli import target
from fp8pass.tools.cli.parsing import Command, UsageError, output_file
from fp8pass.tools.cli.running import explained, show
from fp8pass.tools.cli.tasks import task


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fp8pass explain`."""
    target.add_options(parser)
    add = parser.add_argument
    add(
        "--frontier",
        action="store_true",
        help="also the time that smaller memory budgets would cost",
    )
    add(
        "--rules",
        action="store_true",
        help="also how much each part of the model amplifies rounding errors",
    )
    add("--html", type=output_file, metavar="FILE", help="also write a report to open in a browser")
    add(
        "--beside",
        action="append",
        default=[],
        type=target.option,
        metavar="KEY=VALUE",
        help="show another recipe or other options beside these in the report, once for each: "
        "recipe=agoq, memory_budget=0.6",
    )
    add("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> None:
    """Explain TARGET.

    Raises:
        UsageError: there is no report that could show what is beside.
    """
    if options.beside and not options.html:
        raise UsageError("--beside is shown in the report: add --html report.html.")
    explanation, other = explained(options)
    if options.html:
        with task("writing the report", "Give another --html FILE."):
            explanation.save(options.html, beside=other)
    show(explanation, options.json)


COMMAND = Command(
    "explain",
    "what fp8pass would do to a model: formats, memory, and the reasons",
    "Show which linear layers run in FP8, the formats of tensors kept for the backward, and why.\n"
    "Runs one forward of the model and trains nothing.\n\n" + target.DESCRIPTION,
    (
        "fp8pass explain models:build",
        "fp8pass explain model.py:MLP --input 32x64:bfloat16",
        "fp8pass explain llama/config.json --recipe agoq --option memory_budget=0.6 --frontier",
        "fp8pass explain gpt2/ --input input_ids=8x1024:int64:50257 --html report.html",
        "fp8pass explain models:build --html report.html --beside recipe=agoq",
    ),
    add_options,
    run,
)
