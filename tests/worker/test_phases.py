"""The table of a worker's phases: every phase times every event, as the class's text has it."""

from __future__ import annotations

import inspect

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.worker.training import TRANSITIONS, Event, Phase, Phases

LASTING = (Phase.STEPPING, Phase.ABSENT)


def documented() -> dict[tuple[Phase, Event], Phase | None]:
    """The cells of the table in the class's text."""
    head, *rows = (inspect.getdoc(Phase) or "").split("\n\n")[1].splitlines()
    events = [Event[name] for name in head.upper().split()]
    table = {}
    for row in rows:
        name, *cells = row.split()
        for event, cell in zip(events, cells, strict=True):
            table[Phase[name], event] = None if cell == "." else Phase[cell]
    return table


def test_the_text_has_the_whole_table_and_the_code_has_the_same() -> None:
    table = documented()
    assert table.keys() == {(phase, event) for phase in Phase for event in Event}
    assert table == {(phase, event): TRANSITIONS[phase].get(event) for phase in Phase for event in Event}


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", Event)
def test_what_is_not_in_the_table_is_refused(phase: Phase, event: Event) -> None:
    after, it = documented()[phase, event], Phases()
    it.now = phase
    move = it.go if event in (Event.BATCH, Event.ABSENCE) else it.within
    if after is not None:
        move(event)
        assert it.now is after
        return
    with pytest.raises(ConfigurationError) as refused:
        move(event)
    leaves = event in (Event.DRAIN, Event.LEAVE)
    assert ("Do it in on_train_batch_end." if leaves else phase.value) in str(refused.value)


def test_events_of_turns_lead_to_phases_that_last_and_others_to_phases_that_end() -> None:
    for phase in Phase:
        for event, after in TRANSITIONS[phase].items():
            assert (after in LASTING) == (event in (Event.BATCH, Event.ABSENCE)), (phase, event)


def test_a_phase_ends_in_the_one_in_which_it_began_also_by_an_error() -> None:
    it = Phases()
    it.go(Event.ABSENCE)
    with it.within(Event.UPDATE):
        assert it.now is Phase.FINISHING
        assert (it.lasting, it.updating) == (Phase.ABSENT, True)
        with pytest.raises(ConfigurationError):
            _begin_a_turn_while_leaving(it)
        assert it.now is Phase.FINISHING
    assert (it.now, it.updating) == (Phase.ABSENT, False)
    it.go(Event.BATCH)
    assert it.now is Phase.STEPPING


def _begin_a_turn_while_leaving(it: Phases) -> None:
    with it.within(Event.LEAVE):
        assert it.now is Phase.LEAVING
        assert it.updating
        it.go(Event.BATCH)
