"""The demo's command line: `python -m fp8pass.demo --help`, the same as `fp8pass demo`."""

from __future__ import annotations

from fp8pass.demo.compare import run_demo
from fp8pass.demo.options import DESCRIPTION, add_options
from fp8pass.demo.train import Run
from fp8pass.tools.cli.parsing import Parser, UsageError


def main(argv: list[str] | None = None) -> list[Run]:
    """Run the demo with a command line, by default the arguments of the process."""
    parser = Parser(prog="python -m fp8pass.demo", description=DESCRIPTION)
    add_options(parser)
    try:
        return run_demo(parser.parse_args(argv))
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
