"""`memory_budget`: sizes, shares and bytes, and errors for other values."""

from __future__ import annotations

import math

import pytest

from fp8pass.config import Config
from fp8pass.option_checks import ConfigError, bytes_text, parse_bytes


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("24GiB", 24 * 2**30),
        ("800MB", 800e6),
        ("512 MiB", 2**29),
        (" 1.5gb ", 1.5e9),
        ("2TiB", 2**41),
        ("64KiB", 2**16),
        ("100B", 100),
    ],
)
def test_sizes(text, bytes_):
    assert parse_bytes(text) == bytes_
    assert parse_bytes(bytes_text(bytes_)) == pytest.approx(bytes_, rel=0.01)
    assert Config(memory_budget=text).budget_bytes(7) == bytes_


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("24", "a size such as '24GiB' or '800MB', got '24'"),
        ("lots", "a size such as '24GiB'"),
        ("1.2.3GB", "a size such as '24GiB'"),
        ("-1GB", "a size such as '24GiB'"),
        ("0GB", "must be positive and finite, got '0GB'"),
        ("", "a size such as '24GiB'"),
        (True, "must be positive and finite, got True"),
        (0, "must be positive and finite, got 0"),
        (-0.5, "must be positive and finite, got -0.5"),
        (10**400, "must be positive and finite, got 1000"),
        (-5, "must be positive and finite, got -5"),
        (math.nan, "must be positive and finite, got nan"),
        ([1], "must be positive and finite, got \\[1\\]"),
        (2.5, "a float is a share, up to 2.0. For bytes give an int, or a size such as '24GiB'"),
    ],
)
def test_errors_name_valid_budgets(budget, says):
    with pytest.raises(ConfigError, match=says):
        Config(memory_budget=budget)


def test_shares_and_bytes():
    assert Config().budget_bytes(100) == math.inf
    assert Config(memory_budget=0.25).budget_bytes(100) == 25
    assert Config(memory_budget=1.0).budget_bytes(100) == 100
    assert Config(memory_budget=1).budget_bytes(100) == 1
