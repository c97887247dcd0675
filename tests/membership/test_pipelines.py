"""The tables of states: where they are empty the input raises, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from lightning_sdpipe.membership.pipelines import PIPELINES, PROCESSES
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m


def test_the_tables_in_the_documentation_are_the_ones_that_hold() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    for first, table in (("a process", PROCESSES), ("a start", PIPELINES)):
        (begins,) = [place for place, row in enumerate(rows) if row[0] == first]
        happens, told = rows[begins][1:], rows[begins + 2 : begins + 2 + len(table)]
        assert {
            state: {what: after for what, after in zip(happens, cells, strict=True) if after} for state, *cells in told
        } == table


def test_the_documentation_names_each_message() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    kinds = [kind for union in (m.Request, m.Reply, e.Request, e.Reply) for kind in get_args(union)]
    for told_to_people in (m.StatusReply, m.RowsReply, m.SpansReply):
        kinds.remove(told_to_people)
    assert [kind.__name__ for kind in kinds if f"`{kind.__name__}`" not in text] == []
    assert f"A frame is a version byte ({m.VERSION}) " in text
