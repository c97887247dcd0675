"""The tables of states: where they are empty the input raises, and nothing changes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest

from lightning_sdpipe.membership.pipelines import PIPELINES, PROCESSES, PipelineStart
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m


@pytest.mark.parametrize("which", ["pipeline", "process"])
def test_each_changes_as_its_table_says(which: str) -> None:
    table = {"pipeline": PIPELINES, "process": PROCESSES}[which]
    happens = {what for row in table.values() for what in row}
    assert {after for row in table.values() for after in row.values()} < table.keys()
    for state, what in itertools.product(table, happens):
        start = PipelineStart(7)
        start.state, start.processes = state, {0: state}

        def change(start: PipelineStart = start, what: str = what) -> None:
            start.move(what) if which == "pipeline" else start.move_process(0, what)

        if what in table[state]:
            change()
        else:
            with pytest.raises(KeyError, match=what):
                change()
        found = start.state if which == "pipeline" else start.processes[0]
        assert found == table[state].get(what, state)


def test_what_is_gone_stays_gone() -> None:
    assert PIPELINES["gone"] == PROCESSES["gone"] == {}


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
