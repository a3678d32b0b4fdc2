"""Formats for the stages of a pipeline: early stages hold more micro-batches, in fewer bits each.

AGoQ section 4.2. Give the module of each stage the configuration of that stage:

    torch.compile(module, backend=fp8pass.backend(Config(save_format=stage_format(stages, stage))))
"""

from __future__ import annotations

import math

from fp8pass.config import ConfigError
from fp8pass.dialect.formats import SAVED_FORMATS, Format

# Bits of the first stage; those of the others follow from its memory.
FIRST_STAGE_BITS = SAVED_FORMATS[0].bits


def stored_batches(stages: int, stage: int) -> int:
    """Micro-batches whose activations `stage` of a 1F1B pipeline holds at its peak.

    N_i = 3n − 2i + 1 for stage i of n. AGoQ's Eq. 21 is printed as N_i = n + 2i − 1, with the index
    running backwards: by its text and Fig. 1 the first of four stages holds 11 and the last 5
    (interleaved 1F1B with two chunks of the model a stage).

    Args:
        stages: number of stages of the pipeline.
        stage: number of the stage, from 1.

    Raises:
        ConfigError: there is no such stage.
    """
    if not _is_count(stages):
        raise ConfigError(f"stages is how many stages the pipeline has, got {stages!r}.")
    if not _is_count(stage) or stage > stages:
        raise ConfigError(
            f"stage={stage!r} is none of a pipeline of {stages}: stages are numbered from 1 to "
            f"{stages}. For a rank that counts from 0 give rank + 1."
        )
    return 3 * stages - 2 * stage + 1


def stage_bits(stages: int, stage: int) -> int:
    """Bits with which `stage` needs about the memory that the first stage needs with 4.

    B_i = 4 · N_1 / N_i, rounded to the nearest integer, and then down to the bits of a format: 7
    gives 6, all above 8 give 8.

    Args:
        stages: number of stages of the pipeline.
        stage: number of the stage, from 1.

    Raises:
        ConfigError: there is no such stage.
    """
    return _format(stages, stage).bits


def stage_format(stages: int, stage: int) -> str:
    """The `save_format` of `stage`: e2m1, e2m2, e2m3 or e4m3, from the first stage to the last.

    Args:
        stages: number of stages of the pipeline.
        stage: number of the stage, from 1.

    Raises:
        ConfigError: there is no such stage.
    """
    return _format(stages, stage).name


def _format(stages: int, stage: int) -> Format:
    held, first = stored_batches(stages, stage), stored_batches(stages, 1)
    bits = math.floor(FIRST_STAGE_BITS * first / held + 0.5)
    return max((f for f in SAVED_FORMATS if f.bits <= bits), key=lambda f: f.bits)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
