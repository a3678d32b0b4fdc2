"""Comparison of two explanations: bytes, time and formats by module add up to the totals."""

from __future__ import annotations

import pytest
import torch
from helpers import MLP, Residuals

from fp8pass import Config, explain
from fp8pass.activation_memory.costs import recompute_seconds
from fp8pass.tools.report.comparison import compare
from fp8pass.tools.report.page import render
from fp8pass.tools.running import find_recipe


@pytest.fixture(scope="module")
def in_8_bits():
    return explain(Residuals(4), torch.randn(32, 64))


@pytest.fixture(scope="module")
def exact():
    return explain(Residuals(4), torch.randn(32, 64), config=Config.recipe("exact"))


@pytest.fixture(scope="module")
def comparison(in_8_bits, exact):
    return compare(in_8_bits, exact)


@pytest.mark.long
def test_bytes_add_up(comparison, in_8_bits, exact):
    ours = sum(r.count * r.ours.bytes for r in comparison.rows)
    theirs = sum(r.count * r.theirs.bytes for r in comparison.rows)
    assert (ours, theirs) == (in_8_bits.saved_bytes, exact.saved_bytes)
    assert sum(r.more_bytes for r in comparison.rows) == theirs - ours > 0


@pytest.mark.long
def test_gemms_in_fp8_are_compared(comparison):
    (down,) = (r for r in comparison.rows if r.module == "layers.*.down")
    assert down.count == 4
    assert down.ours.fp8 == ("forward", "dgrad", "wgrad")
    assert down.theirs.fp8 == ()


def test_seconds_add_up(comparison, in_8_bits, exact):
    nodes = [e.graphs[0].gm.graph.nodes for e in (in_8_bits, exact)]
    wanted = [sum(map(recompute_seconds, own)) for own in nodes]
    assert list(comparison.seconds) == pytest.approx(wanted)
    assert min(wanted) > 0


def test_formats_of_saved_tensors_are_compared(comparison, in_8_bits, exact):
    for explanation, of in ((in_8_bits, "ours"), (exact, "theirs")):
        saved = [s for s in explanation.graphs[0].plan.saved if s.bytes and not s.is_scalar]
        formats = {name for r in comparison.rows for name in getattr(r, of).formats}
        assert formats == {s.saved_as for s in saved}


def test_the_largest_difference_comes_first(comparison):
    differences = [abs(r.more_bytes) for r in comparison.rows]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] > 0


def test_an_explanation_does_not_differ_from_itself(in_8_bits):
    rows = compare(in_8_bits, in_8_bits).rows
    assert rows
    assert not any(r.more_bytes or r.more_seconds for r in rows)


def test_another_model_is_refused(in_8_bits):
    other = explain(MLP((64, 128, 32)), torch.randn(32, 64))
    with pytest.raises(ValueError, match="the same model"):
        compare(in_8_bits, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beside": Config()}, "beside must be a return value of fp8pass.explain, got Config"),
        ({"diagnosis": "a.html"}, "diagnosis must be a return value of fp8pass.diagnose, got str"),
    ],
)
def test_other_arguments_are_refused(in_8_bits, tmp_path, options, message):
    with pytest.raises(TypeError, match=message):
        in_8_bits.save(tmp_path / "report.html", **options)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), ("coat", {})),
        (Config.recipe("agoq"), ("agoq", {})),
        (Config.recipe("exact", compiler="eager"), ("exact", {})),
        (Config(memory_budget=0.5), ("coat", {"memory_budget": 0.5})),
        (Config.recipe("linear", skip=("up",)), ("linear", {"skip": ("up",)})),
    ],
)
def test_the_recipe_and_changed_options_are_found(config, expected):
    assert find_recipe(config) == expected


def test_the_page_shows_both(in_8_bits, exact):
    assert 'id="comparison"' not in render(in_8_bits)
    page = render(in_8_bits, other=exact)
    assert "<code>coat</code>" in page
    assert "<code>exact</code>" in page
    assert page.index('id="comparison"') < page.index("layers.*.down")
