"""Passes that users add to the lists of `passes/__init__.py` by the option `passes`."""

from __future__ import annotations

import hashlib
import inspect
import os
import uuid
from collections.abc import Sequence
from functools import cache, wraps
from pathlib import Path

from torch import fx

from fp8pass.config import AddedPass, Config
from fp8pass.option_checks import ConfigError, unknown
from fp8pass.passes import ALL_PASSES, Pass
from fp8pass.passes.context import Context


def check_positions(config: Config) -> None:
    """Raise ConfigError if a pass is added before or after a pass that does not exist."""
    names = [p.__name__ for p in ALL_PASSES]
    for when, name, _ in config.passes:
        if name not in names:
            raise ConfigError(
                f"{unknown('pass', name, names)} A pass can run {when} one of {', '.join(names)}."
            )


def insert_passes(passes: Sequence[Pass], added: Sequence[AddedPass]) -> list[Pass]:
    found: list[Pass] = []
    for pass_ in passes:
        here = [
            (when, function if function in ALL_PASSES else _named(function))
            for when, name, function in added
            if name == pass_.__name__
        ]
        found += [function for when, function in here if when == "before"]
        found.append(pass_)
        found += [function for when, function in here if when == "after"]
    return found


def _named(function: Pass) -> Pass:
    """Name the user's pass in errors, also if it creates a node without a tensor."""

    @wraps(function)
    def run(gm: fx.GraphModule, ctx: Context) -> None:
        old = set(gm.graph.nodes)
        try:
            function(gm, ctx)
        except ConfigError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"The pass {function.__name__!r} of the option passes raised "
                f"{type(error).__name__}: {error}"
            ) from error
        for node in gm.graph.nodes:
            if node not in old and node.op == "call_function" and "val" not in node.meta:
                raise ConfigError(
                    f"The pass {function.__name__!r} created the node {node.name!r} without "
                    "meta['val']. Create nodes with fp8pass.graph.emit."
                )

    return run


def cache_keys(added: Sequence[AddedPass]) -> tuple[tuple[str, str, str], ...]:
    return tuple((when, name, cache_key(function)) for when, name, function in added)


@cache
def cache_key(function: Pass) -> str:
    """Return the name of a function with a hash of the file that defines it."""
    # Closures and functions from notebooks get a new key in each process, so later processes
    # do not reuse graphs that were compiled with them.
    plain = inspect.isfunction(function) and function.__closure__ is None
    file = inspect.getsourcefile(function) if plain else None
    code = Path(file).read_bytes() if file and os.path.isfile(file) else uuid.uuid4().bytes
    return f"{function.__module__}.{function.__qualname__} {hashlib.sha256(code).hexdigest()}"
