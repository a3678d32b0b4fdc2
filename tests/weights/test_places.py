"""The places where CUDA graphs read codes of weights: whose memory it is, and for how long."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from fp8pass.weights import kept


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is known of weights of other tests."""
    monkeypatch.setattr(kept, "_kept", kept._Kept())


@pytest.mark.long
def test_places_of_dead_weights_are_given_up():
    """With the next new place, in no context at all."""
    for _ in range(3):
        weight = nn.Parameter(torch.randn(16, 32, dtype=torch.bfloat16))
        kept.codes_of([weight], in_place=True)
        del weight
        gc.collect()
    assert len(kept._kept.in_place) == 1


def test_places_count_their_versions_alone(monkeypatch):
    """Though one launch writes codes of several weights to one buffer."""
    separate = kept.coded

    def side_by_side(matrices, dtype):
        found = separate(matrices, dtype)
        codes = torch.cat([x.view(torch.uint8).flatten() for x, _ in found])
        parts = codes.view(torch.float8_e4m3fn).split([x.numel() for x, _ in found])
        return [
            (part.view(x.shape), scales) for part, (x, scales) in zip(parts, found, strict=True)
        ]

    monkeypatch.setattr(kept, "coded", side_by_side)
    weights = [nn.Parameter(torch.randn(16, 32, dtype=torch.bfloat16)) for _ in range(2)]
    places = kept.codes_of(weights, in_place=True)
    with torch.no_grad():
        weights[0].mul_(2)
    again = kept.codes_of(weights, in_place=True)
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in places]
    assert [x._version for x in places] == [1, 1, 0, 0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_places_outlive_evaluation(mode):
    weight = nn.Parameter(torch.randn(16, 32, dtype=torch.bfloat16))
    with mode():
        made = kept.codes_of([weight], in_place=True)
    assert not any(x.is_inference() for x in made)
