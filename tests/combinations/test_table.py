"""The page of combinations is made from the table of features."""

from table import PAGE, filled


def test_the_page_is_up_to_date():
    text = PAGE.read_text()
    assert filled(text) == text, "run python tests/combinations/table.py"
