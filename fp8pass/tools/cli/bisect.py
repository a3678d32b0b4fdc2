"""`fp8pass bisect`: where a large gradient error comes from."""

from __future__ import annotations

import argparse

from fp8pass.tools.cli import target
from fp8pass.tools.cli.parsing import Command
from fp8pass.tools.cli.running import measured, show


def add_options(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fp8pass bisect`."""
    target.add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> None:
    """Bisect TARGET."""
    show(measured("bisect", options), options.json)


COMMAND = Command(
    "bisect",
    "the layers and saved tensors that a large gradient error comes from",
    "Find the linear layers and saved tensors that a large gradient error comes from, by running\n"
    "one step of the model with groups of them exact.\n\n" + target.DESCRIPTION,
    (
        "fp8pass bisect models:build",
        "fp8pass bisect model.py:build --recipe agoq --device cuda --json",
    ),
    add_options,
    run,
)
