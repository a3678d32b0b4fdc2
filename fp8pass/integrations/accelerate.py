"""`fp8pass` as a name among the Dynamo backends of Hugging Face accelerate.

    import fp8pass.integrations.accelerate

`torch.compile` finds fp8pass by its entry point; accelerate has an enum of the names that it lets
through. With this import, before or after accelerate's own, it lets ours through, too: in
`Accelerator(dynamo_backend=...)`, `TorchDynamoPlugin`, `ACCELERATE_DYNAMO_BACKEND`, and the
`torch_compile_backend` of transformers' and TRL's Trainers. A script that is to stay as it is can
be run, by `accelerate launch`, `torchrun` or alone, as

    accelerate launch -m fp8pass.integrations.accelerate train.py --its arguments

which sets the environment variable. Where accelerate takes the name by itself
(docs/upstream/accelerate_dynamo_backends.md), the import changes nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import DynamoBackend

NAME = "FP8PASS"  # accelerate's names are in capitals; torch.compile gets them in small letters
VARIABLE = "ACCELERATE_DYNAMO_BACKEND"
USAGE = "usage: python -m fp8pass.integrations.accelerate (SCRIPT | -m MODULE) [ARGUMENT ...]"


def register() -> None:
    """Let accelerate take `fp8pass` for the name of a backend, in any case; once is enough."""
    if NAME in DynamoBackend:
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    otherwise = DynamoBackend._missing_

    def missing(cls: type[DynamoBackend], value: Any) -> Any:
        return member if str(value).upper() == NAME else otherwise(value)

    # What Python's enum asks about values that it does not have.
    DynamoBackend._missing_ = classmethod(missing)
    DynamoBackend.FP8PASS = member


def run(arguments: Sequence[str]) -> None:
    """Run a script, or with `-m` a module, whose models accelerate compiles with fp8pass.

    Raises:
        SystemExit: there is no script, or the environment asks for another backend.
    """
    is_module = list(arguments[:1]) == ["-m"]
    rest = list(arguments[is_module:])
    if not rest or rest[0].startswith("-"):
        raise SystemExit(USAGE)
    chosen = os.environ.get(VARIABLE, "no")
    if chosen.upper() not in ("NO", NAME):
        raise SystemExit(f"{VARIABLE} is {chosen}: leave out --dynamo_backend, or this module.")
    os.environ[VARIABLE] = NAME
    sys.argv = rest
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))  # as Python does for a script
        runpy.run_path(rest[0], run_name="__main__")


register()

if __name__ == "__main__":
    run(sys.argv[1:])
