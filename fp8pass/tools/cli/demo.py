"""`fp8pass demo`: train a small model with and without fp8pass (`fp8pass/demo/`)."""

from __future__ import annotations

import argparse

from fp8pass.demo import options as demo
from fp8pass.tools.cli.parsing import Command


def run(options: argparse.Namespace) -> None:
    """Run the demo."""
    from fp8pass.demo.compare import run_demo

    run_demo(options)


COMMAND = Command(
    "demo",
    "train a small language model with and without fp8pass, and compare",
    demo.DESCRIPTION,
    ("fp8pass demo", "fp8pass demo --steps 50 --recipe agoq", "fp8pass demo --data my/texts"),
    demo.add_options,
    run,
)
