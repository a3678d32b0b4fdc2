"""The selection of tests that `make test` runs."""

from __future__ import annotations

from dataclasses import dataclass

import draw
import pytest


@dataclass(frozen=True)
class Case:
    """The attributes of a test that the draw reads."""

    nodeid: str
    mark: pytest.Mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark if self.mark.name == name else None


LONG = [Case(f"tests/a.py::test_long[{i}]", pytest.mark.long.mark) for i in range(1000)]
MANY = [Case(f"tests/a.py::test_many[{i}]", pytest.mark.drawn(3).mark) for i in range(20)]
OTHER = pytest.Mark("other", (), {})
PLAIN = [Case(f"tests/b.py::test_{i}[{j}]", OTHER) for i in range(9) for j in range(20)]
CHEAP = [Case(f"tests/dialect/test_a.py::test[{i}]", OTHER) for i in range(20)]


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    monkeypatch.setenv("FP8PASS_SEED", "1")
    monkeypatch.delenv("FP8PASS_ALL", raising=False)
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "ci")


def runs(tests: list[Case], *asked_for: str) -> list[Case]:
    left_out = {test.nodeid for test in draw.undrawn(tests, list(asked_for))}
    return [test for test in tests if test.nodeid not in left_out]


def test_each_seed_selects_different_tests(monkeypatch):
    long, many, plain = runs(LONG), runs(MANY), runs(PLAIN)
    assert 5 < len(long) < 20
    assert len(many) == 3
    assert len({case.nodeid.split("[")[0] for case in plain}) == len(plain) == 3
    assert len(runs(PLAIN[:20])) == 1
    assert runs(CHEAP) == CHEAP
    assert (long, many) == (runs(LONG), runs(MANY))
    assert runs(LONG[:500]) == [case for case in long if case in LONG[:500]]
    monkeypatch.setenv("FP8PASS_SEED", "2")
    assert long != runs(LONG)
    assert many != runs(MANY)
    assert plain != runs(PLAIN)


def test_a_test_named_on_the_command_line_runs():
    assert runs(MANY, "tests/a.py::test_many") == MANY
    assert len(runs(MANY, "tests/a.py")) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("FP8PASS_ALL", "1"), ("HYPOTHESIS_PROFILE", "thorough")]
)
def test_all_tests_run_if_an_environment_variable_is_set(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert runs(LONG + MANY) == LONG + MANY


def test_the_seed_depends_on_the_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    source = tmp_path / "tests" / "a.py"
    source.write_text("x = 1")
    before = draw.seed_of_sources()
    assert before == draw.seed_of_sources()
    source.write_text("x = 2")
    assert draw.seed_of_sources() != before
