"""The tables of states: where they are empty the input raises, and nothing changes."""

from __future__ import annotations

import itertools

import pytest

from lightning_sdpipe.membership.pipelines import PIPELINES, PROCESSES, ImpossibleChange, PipelineStart


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
            with pytest.raises(ImpossibleChange, match=f"what is {state} cannot change by this: {what}"):
                change()
        found = start.state if which == "pipeline" else start.processes[0]
        assert found == table[state].get(what, state)


def test_what_is_gone_stays_gone() -> None:
    assert PIPELINES["gone"] == PROCESSES["gone"] == {}
