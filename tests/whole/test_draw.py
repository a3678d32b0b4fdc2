"""What `make test` leaves out."""

from __future__ import annotations

from dataclasses import dataclass

import draw
import pytest


@dataclass(frozen=True)
class Case:
    """As much of a test as the draw looks at."""

    nodeid: str
    mark: pytest.Mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark if self.mark.name == name else None


LONG = [Case(f"tests/a.py::test_long[{i}]", pytest.mark.long.mark) for i in range(1000)]
MANY = [Case(f"tests/a.py::test_many[{i}]", pytest.mark.drawn(3).mark) for i in range(20)]
PLAIN = [Case(f"tests/a.py::test_plain[{i}]", pytest.Mark("other", (), {})) for i in range(20)]
CHEAP = [Case(f"tests/graph/test_a.py::test[{i}]", pytest.Mark("other", (), {})) for i in range(20)]


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    monkeypatch.setenv("FP8PASS_SEED", "1")
    monkeypatch.delenv("FP8PASS_ALL", raising=False)
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "ci")


def runs(tests: list[Case], *asked_for: str) -> list[Case]:
    left_out = {test.nodeid for test in draw.undrawn(tests, list(asked_for))}
    return [test for test in tests if test.nodeid not in left_out]


def test_a_part_runs_and_another_seed_draws_others(monkeypatch):
    long, many = runs(LONG), runs(MANY)
    assert 30 < len(long) < 120
    assert len(many) == 3
    assert len(runs(PLAIN)) == draw.CASES
    assert runs(CHEAP) == CHEAP
    assert (long, many) == (runs(LONG), runs(MANY))
    assert runs(LONG[:500]) == [case for case in long if case in LONG[:500]]
    monkeypatch.setenv("FP8PASS_SEED", "2")
    assert long != runs(LONG)
    assert many != runs(MANY)


def test_what_is_named_runs():
    assert runs(MANY, "tests/a.py::test_many") == MANY
    assert len(runs(MANY, "tests/a.py")) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("FP8PASS_ALL", "1"), ("HYPOTHESIS_PROFILE", "thorough")]
)
def test_all_run_where_there_is_time(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert runs(LONG + MANY) == LONG + MANY


def test_the_seed_follows_from_the_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    source = tmp_path / "tests" / "a.py"
    source.write_text("x = 1")
    before = draw.seed_of_sources()
    assert before == draw.seed_of_sources()
    source.write_text("x = 2")
    assert draw.seed_of_sources() != before
