"""Train a pair of features with fp8pass and without it, and judge the outcome."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from typing import NamedTuple

import torch
from features import BY_NAME, REFUSED, Feature, Refused, trained_with
from training import Training, compare

from fp8pass import compat

# The largest number of sentences of a refusal: the problem, and the fix.
SENTENCES = 2


class Result(NamedTuple):
    """The outcome of a pair.

    Attributes:
        complaints: errors of the training with fp8pass.
        failed: "PyTorch" if the plain training failed, "fp8pass" if only the other one failed; or
            "".
        error: the error that the training failed with.
        where: the traceback of the error.
    """

    complaints: list[str]
    failed: str = ""
    error: str = ""
    where: str = ""


def train(features: Sequence[Feature]) -> Result:
    """Train features together, plain first."""
    trainings = []
    for by in ("PyTorch", "fp8pass"):
        torch._dynamo.reset()
        try:
            with compat.fresh_compilation():
                trainings.append(Training(tuple(features), plain=by == "PyTorch").run())
        except Exception as error:
            return Result([], by, f"{type(error).__name__}: {error}", traceback.format_exc())
    plain, ours = trainings
    return Result(compare(ours, plain))


def train_on_rank(device: str, names: Sequence[str]) -> Result:
    """Train features by their names, on each rank of a group."""
    return train(trained_with([BY_NAME[name] for name in names]))


def judge(names: tuple[str, ...], results: Sequence[Result]) -> list[str]:
    """Return complaints about a pair, which must train or be refused as in the table."""
    failed = [r for r in results if r.failed]
    refused = REFUSED.get(names)
    if refused is None:
        found = [f"{r.failed} raised {r.error}\n{r.where}" for r in failed]
        return [*found, *(c for r in results for c in r.complaints)]
    if len(failed) < len(results):
        return [f"{len(results) - len(failed)} of {len(results)} ranks trained a refused pair"]
    return [found for result in failed for found in _judge_refusal(refused, result)]


def _judge_refusal(refused: Refused, result: Result) -> list[str]:
    if result.failed != refused.by or not re.search(refused.error, result.error):
        return [f"expected {refused}, but {result.failed} raised {result.error}\n{result.where}"]
    if refused.by == "fp8pass" and result.error.count(". ") >= SENTENCES:
        return [f"a long refusal: {result.error}"]
    return []
