"""A session's states: the table at the top of the file is the one that holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.log.status import ACTIVE, STATES
from lightning_sdpipe.scheduler.server import session
from lightning_sdpipe.scheduler.server.session import TRANSITIONS, IllegalInput, Input, Session, State

W = Worker(0, 1)


def test_the_table_in_the_text_is_the_one_that_holds() -> None:
    assert session.__doc__ is not None
    lines = [line for line in session.__doc__.splitlines() if "|" in line]
    header, *rows = lines
    starts = {input: header.index(f" {input.value}") + 1 for input in Input}
    for row in rows:
        state = State(row.partition("|")[0].strip().lower())
        told = {
            input: State(word.lower())
            for input, start in starts.items()
            if (word := row[start:].split("  ")[0].strip()) and not row[start].isspace()
        }
        assert told == TRANSITIONS[state]
    assert len(rows) == len(State)


def test_each_state_has_a_letter_in_the_status() -> None:
    assert set(STATES.values()) == {state.value for state in State} | {"-"}
    assert {STATES[letter] for letter in ACTIVE} == {state.value for state in session.ACTIVE}


@given(st.lists(st.sampled_from(list(Input)), max_size=12))
def test_an_illegal_input_changes_nothing(inputs: list[Input]) -> None:
    one = Session(W, 7, 0.0)
    for input in inputs:
        before = one.state
        if input in TRANSITIONS[before]:
            one.move(input)
            assert one.state is TRANSITIONS[before][input]
        else:
            with pytest.raises(IllegalInput, match=rf"{input.value} while it is {before.value}"):
                one.move(input)
            assert one.state is before
