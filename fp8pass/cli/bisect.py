"""`fp8pass bisect`: what of a rewrite goes wrong."""

from __future__ import annotations

import argparse

from fp8pass.cli import target
from fp8pass.cli.parsing import Command
from fp8pass.cli.running import measured, show


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fp8pass bisect`."""
    target.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> None:
    """Bisect TARGET."""
    show(measured("bisect", options), options.json)


COMMAND = Command(
    "bisect",
    "which part of what fp8pass does to a model goes wrong",
    "Search what fp8pass does to a model for the part that fails or gives wrong gradients, by\n"
    "leaving out more and less of it.\n\n" + target.DESCRIPTION,
    (
        "fp8pass bisect models:build",
        "fp8pass bisect model.py:build --recipe agoq --device cuda --json",
    ),
    add_options,
    run,
)
