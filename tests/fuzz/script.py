"""Failing programs as scripts, with the source of the model and a check."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from .checks import Outcome, check
from .program import Input, Instruction, Parameter, Program

TEMPLATE = '''"""{title}

{message}

PyTorch {version}. Run it in the root of the repository: `python {name}`.
"""

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

{helpers}

{model}

# The program as data, with inputs and options. The check below runs it.
PROGRAM = """
{data}
"""

if __name__ == "__main__":
    import sys

    sys.path.insert(0, ".")
    from tests.fuzz.script import reproduce

    sys.exit(reproduce(PROGRAM, {device!r}))
'''


def save(program: Program, outcome: Outcome, folder: Path, title: str, device: str) -> Path:
    """Write a program as a script, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(repr(program).encode()).hexdigest()[:8]
    path = folder / f"{outcome.failure}_{program.recipe}_{digest}.py"
    path.write_text(
        TEMPLATE.format(
            title=title,
            message=outcome.message.replace("\\", "/").replace('"""', "'''"),
            version=torch.__version__,
            name=path,
            helpers=program.helper_source(),
            model=program.model_source(),
            data=repr(program),
            device=device,
        )
    )
    return path


def parse(text: str) -> Program:
    """Parse the `repr` of a program."""
    names = {c.__name__: c for c in (Program, Input, Instruction, Parameter)}
    return eval(text, names)


def reproduce(text: str, device: str) -> int:
    """Check a program again and print the outcome. Return exit code 1 if it fails."""
    outcome = check(parse(text), device)
    print(outcome.failure or "passes", outcome.message, sep="\n")
    return int(bool(outcome.failure))
