"""The table in the docs is that of these tests."""

from __future__ import annotations

from tests.features.table import DOCUMENT, END, START, features, table


def test_the_table_is_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert text.partition(START)[2].partition(END)[0] == table(), "run python -m tests.features.table"


def test_no_feature_is_there_twice() -> None:
    names = [feature.name for feature in features()]
    assert len(names) == len(set(names)) > 30
