"""The command line: `fp8pass --help`, or `python -m fp8pass --help`.

explain.py fit.py diagnose.py bisect.py demo.py env.py    one command each
target.py inputs.py huggingface.py                        the model of a command, and its inputs
running.py tasks.py                                       its runs, their progress and errors
parsing.py                                                arguments and their errors
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from fp8pass import __version__
from fp8pass.config import unknown
from fp8pass.tools.cli import bisect, demo, diagnose, env, explain, fit
from fp8pass.tools.cli.parsing import Command, Failure, Parser, UsageError
from fp8pass.tools.cli.tasks import cause

COMMANDS = {m.COMMAND.name: m.COMMAND for m in (explain, fit, diagnose, bisect, demo, env)}

EXIT_CODES = """\
exit codes:
  0  done
  1  the model or fp8pass failed: one line on stderr says why, --traceback shows where
  2  wrong usage"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the arguments of the process.

    Returns:
        The exit code: 0, or 1, or 130 after Ctrl-C.

    Raises:
        SystemExit: with code 2 for wrong usage, with 0 after `--help` and `--version`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, parsers = _parsers()
    if not argv:
        parser.exit(2, parser.format_help())
    named = next((word for word in argv if not word.startswith("-")), None)
    if named is not None and named not in COMMANDS:
        parser.error(f"{unknown('command', named, COMMANDS)} Commands: {', '.join(COMMANDS)}.")
    options = parser.parse_args(argv)
    command = parsers[options.command]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            COMMANDS[options.command].run(options)
        sys.stdout.flush()
    except UsageError as error:
        command.error(str(error))
    except BrokenPipeError:  # the reader of stdout, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        known = isinstance(error, Failure)
        message = str(error) if known else f"{cause(error)} --traceback shows where."
        print(f"{command.prog}: error: {message}", file=sys.stderr)
        return 1
    return 0


def _show_warning(message: Warning | str, *where: object) -> None:
    """Print a warning without the line of source that gives it."""
    print(f"warning: {message}", file=sys.stderr)


def _parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and the parser of each command."""
    parser = Parser(
        prog="fp8pass",
        description="See what FP8 linear layers and low-bit saved activations do to a model.",
        epilog=_epilog(["fp8pass explain models:build", "fp8pass explain --help"]),
    )
    parser.add_argument("--version", action="version", version=f"fp8pass {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    return parser, {name: _add(commands, command) for name, command in COMMANDS.items()}


def _add(commands: Any, command: Command) -> Parser:
    parser: Parser = commands.add_parser(
        command.name,
        help=command.summary,
        description=command.description,
        epilog=_epilog(command.examples),
    )
    command.add_options(parser)
    parser.add_argument("--traceback", action="store_true", help="show where something failed")
    return parser


def _epilog(examples: Sequence[str]) -> str:
    return "\n  ".join(["examples:", *examples]) + f"\n\n{EXIT_CODES}"
