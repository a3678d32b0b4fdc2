"""The command line: `fp8pass --help`, or `python -m fp8pass --help`.

commands.py      the commands explain, fit, diagnose, bisect and demo
env.py           the command env: facts for a bug report
target.py        the argument TARGET: a model and its inputs
huggingface.py   a model and inputs from a Hugging Face config.json
model_run.py     runs a model without fp8pass, to see its own errors first; computes its loss
parsing.py       arguments, tasks and errors of all commands
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from fp8pass import __version__
from fp8pass.option_checks import ConfigError, unknown
from fp8pass.tools.cli import commands, env
from fp8pass.tools.cli.parsing import Failure, Parser, UsageError, describe_error

COMMANDS = {command.name: command for command in (*commands.COMMANDS, env.COMMAND)}

EXIT_CODES = """\
exit codes:
  0  done
  1  the model or fp8pass failed: one line on stderr gives the cause, --traceback shows where
  2  wrong usage"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default the arguments of the process.

    Returns:
        The exit code: 0, 1 after a failure, or 130 after Ctrl-C.

    Raises:
        SystemExit: with code 2 after wrong usage, with 0 after `--help` and `--version`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, parsers = _make_parsers()
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
    except (UsageError, ConfigError) as error:
        command.error(str(error))
    except BrokenPipeError:  # the reader of stdout, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        known = isinstance(error, Failure)
        message = str(error) if known else f"{describe_error(error)} --traceback shows where."
        print(f"{command.prog}: error: {message}", file=sys.stderr)
        return 1
    return 0


def _show_warning(message: Warning | str, *where: object) -> None:
    print(f"fp8pass: warning: {str(message).removeprefix('fp8pass: ')}", file=sys.stderr)


def _make_parsers() -> tuple[Parser, dict[str, Parser]]:
    parser = Parser(
        prog="fp8pass",
        description="See what FP8 linear layers and low-bit saved activations do to a model.",
        epilog=_format_epilog(["fp8pass explain models:build", "fp8pass explain --help"]),
    )
    parser.add_argument("--version", action="version", version=f"fp8pass {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers: dict[str, Parser] = {}
    for name, command in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            epilog=_format_epilog(command.examples),
        )
        command.add_options(parsers[name])
        help = "show where something failed"
        parsers[name].add_argument("--traceback", action="store_true", help=help)
    return parser, parsers


def _format_epilog(examples: Sequence[str]) -> str:
    return "\n  ".join(["examples:", *examples]) + f"\n\n{EXIT_CODES}"
