"""Add `fp8pass` to the Dynamo backends of Hugging Face accelerate.

    import fp8pass.integrations.accelerate

accelerate allows only the names in an enum. The import adds the name `fp8pass`, for
`Accelerator(dynamo_backend=...)`, `TorchDynamoPlugin`, `ACCELERATE_DYNAMO_BACKEND`, and the
`torch_compile_backend` of transformers' and TRL's Trainers. To use a script without this import,
run the script through this module, with `accelerate launch`, `torchrun` or `python`:

    accelerate launch -m fp8pass.integrations.accelerate train.py --its arguments

This also sets `ACCELERATE_DYNAMO_BACKEND=FP8PASS`. The import has no effect if accelerate already
allows the name (docs/upstream/accelerate_dynamo_backends.md).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import DynamoBackend

NAME = "FP8PASS"  # accelerate passes the name to torch.compile in lower case
VARIABLE = "ACCELERATE_DYNAMO_BACKEND"
USAGE = "usage: python -m fp8pass.integrations.accelerate (SCRIPT | -m MODULE) [ARGUMENT ...]"


def register() -> None:
    """Add `fp8pass` to accelerate's backends, in upper or lower case. Repeated calls do nothing."""
    if NAME in DynamoBackend:
        return
    member = str.__new__(DynamoBackend, NAME)
    member._name_ = member._value_ = NAME
    original = DynamoBackend._missing_

    def missing(cls: type[DynamoBackend], value: Any) -> Any:
        return member if str(value).upper() == NAME else original(value)

    # Python's enum calls `_missing_` for unknown values.
    DynamoBackend._missing_ = classmethod(missing)
    DynamoBackend.FP8PASS = member


def run(arguments: Sequence[str]) -> None:
    """Run a script, or a module after `-m`. accelerate compiles the script's models with fp8pass.

    Raises:
        SystemExit: no script is given, or `ACCELERATE_DYNAMO_BACKEND` names another backend.
    """
    is_module = list(arguments[:1]) == ["-m"]
    rest = list(arguments[is_module:])
    if not rest or rest[0].startswith("-"):
        raise SystemExit(USAGE)
    chosen = os.environ.get(VARIABLE, "no")
    if chosen.upper() not in ("NO", NAME):
        raise SystemExit(
            f"{VARIABLE} selects the backend {chosen}, not {NAME.lower()}. Leave out "
            "--dynamo_backend, or run the script without fp8pass.integrations.accelerate."
        )
    os.environ[VARIABLE] = NAME
    sys.argv = rest
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))  # like `python script.py`
        runpy.run_path(rest[0], run_name="__main__")


register()

if __name__ == "__main__":
    run(sys.argv[1:])
