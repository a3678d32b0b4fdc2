"""Features in pairs: each pair trains like plain PyTorch, or is refused.

A run draws a few pairs by a hash of the sources, and `FP8PASS_SEED=...` draws the same pairs again.
`make test-all ARGS=tests/combinations` trains all pairs.
"""

from __future__ import annotations

import os
import random

import pytest
from draw import draws_all
from features import BY_NAME, FEATURES, REFUSED, Feature, pairs, ranks_of
from judging import Result, judge, train, train_on_rank

ALL = draws_all()
DRAWN = 2
DRAWN_RANKS = 2  # all on the same group of ranks, because starting a group is slow


def drawn() -> list[tuple[str, str]]:
    """Return all pairs, or some of them, so that pairs of as many ranks are together."""
    found = sorted(pairs(), key=ranks_of)
    if not ALL:
        draw = random.Random(os.environ["FP8PASS_SEED"])
        world = ranks_of(draw.choice([pair for pair in found if ranks_of(pair) > 1]))
        found = [
            *draw.sample([pair for pair in found if ranks_of(pair) == 1], DRAWN),
            *draw.sample([pair for pair in found if ranks_of(pair) == world], DRAWN_RANKS),
        ]
    return [(a.name, b.name) for a, b in found]


def results_of(names: tuple[str, ...], groups) -> list[Result]:
    """Train a pair, and return the result of each rank."""
    features = [BY_NAME[name] for name in names]
    world = ranks_of(features)
    if world == 1:
        return [train(features)]
    results = groups.of(world)(train_on_rank, names)
    if len({result.error for result in results}) > 1:
        groups.close()  # a rank may still wait for the ranks that failed
    return results


@pytest.mark.long
@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", [f.name for f in FEATURES if ALL or f.ranks == 1])
def test_one_feature(name, groups):
    assert not judge((name,), results_of((name,), groups))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("names", drawn(), ids=" + ".join)
def test_pair(names, groups):
    assert not judge(names, results_of(names, groups))


def test_refused_pairs_are_pairs():
    assert REFUSED.keys() <= {(a.name, b.name) for a, b in pairs()}


def complaints_of(feature: Feature) -> list[str]:
    return train([feature]).complaints


@pytest.mark.long
def test_a_training_that_loses_weights_is_found():
    """Each check of `compare` can fail."""

    class Lost(Feature):
        ours = True

        def after_step(self, t, step):
            t.model.layers[0].mlp.up_proj.weight.data.copy_(
                t.initial["layers.0.mlp.up_proj.weight"]
            )

    assert any("up_proj" in complaint for complaint in complaints_of(Lost("lost")))

    class Stuck(Feature):
        ours = True

        def start(self, t):
            for group in t.optimizers[0].param_groups:
                group["lr"] = 1e-6

    assert any("the loss ends at" in complaint for complaint in complaints_of(Stuck("stuck")))


@pytest.mark.long
def test_a_wrong_gradient_is_found():
    class Negated(Feature):
        ours = True

        def start(self, t):
            t.model.norm.weight.register_hook(lambda gradient: -gradient)

    found = complaints_of(Negated("negated"))
    assert any(complaint.startswith("the gradient of norm.weight") for complaint in found)


def test_a_refusal_must_be_in_the_table():
    refused, trained = next(iter(REFUSED)), ("recipe exact", "evaluation")
    entry = REFUSED[refused]
    assert not judge(refused, [Result([], entry.by, entry.error)])
    assert judge(refused, [Result([])])
    assert judge(refused, [Result([], entry.by, "another error")])
    assert judge(trained, [Result([], entry.by, entry.error)])
    assert not judge(trained, [Result([])])
