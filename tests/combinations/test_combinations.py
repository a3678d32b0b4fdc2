"""Features that meet: every pair of the table trains like plain PyTorch, or is refused.

A run draws a few pairs, `FP8PASS_SEED=...` the same again. `make test-long
ARGS=tests/combinations` trains all of them.
"""

from __future__ import annotations

import os
import random

import pytest
from features import FEATURES, Feature, Impossible, pairs
from training import Training, compare

from fp8pass import ConfigError

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
DRAWN = 10
# A refusal is no more than this: what is wrong, and what to do.
SENTENCES = 2


def drawn() -> list[tuple[Feature, Feature]]:
    """All pairs, or a few of them."""
    found = list(pairs())
    return found if LONG else random.Random(os.environ["FP8PASS_SEED"]).sample(found, DRAWN)


def complaints(*features: Feature) -> list[str]:
    """What is wrong with a training beside the plain one, or with the way it was refused."""
    try:
        ours, plain = (Training(features, plain=plain).run() for plain in (False, True))
    except (ConfigError, Impossible) as refusal:
        return [] if str(refusal).count(". ") < SENTENCES else [f"a long refusal: {refusal}"]
    return compare(ours, plain)


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_one_feature(feature):
    assert not complaints(feature)


@pytest.mark.parametrize("pair", drawn(), ids=lambda pair: " + ".join(f.name for f in pair))
def test_pair(pair):
    assert not complaints(*pair)


def test_a_training_that_loses_weights_is_found():
    """Each check of `compare` can fail."""

    class Lost(Feature):
        ours = True

        def after_step(self, t, step):
            t.model.layers[0].mlp.up_proj.weight.data.copy_(
                t.initial["layers.0.mlp.up_proj.weight"]
            )

    assert any("up_proj" in complaint for complaint in complaints(Lost("lost")))

    class Stuck(Feature):
        ours = True

        def start(self, t):
            for group in t.optimizer.param_groups:
                group["lr"] = 1e-6

    assert any("the loss ends at" in complaint for complaint in complaints(Stuck("stuck")))
