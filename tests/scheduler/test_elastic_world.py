"""Elastic runs in virtual time: whatever happens, everybody trains again soon after it has stopped happening."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_sdpipe.membership.run_state import Ending
from recipes.tools.elastic_world import NobodyLeft, World, live_through

LONG = settings.default.max_examples >= 10_000
HISTORIES = 10_000 if LONG else 12


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@settings(max_examples=HISTORIES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 8))
@example(794046052, 3)  # the last donor and the scheduler are lost before a newcomer hears that it begins anew
@example(1046, 4)  # one of those that begin together hears so when another has written a checkpoint
def test_everybody_trains_again_after_any_faults(seed: int, faults: int) -> None:
    live_through(seed, faults)


def test_pipelines_that_begin_anew_although_there_is_a_checkpoint_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ending, "resume", lambda self: "")
    world = World(3)
    world.run(12.0)
    assert world.checkpoint is not None
    for process in [*world.processes]:
        world.die(process, "killed", alone=True)
    with pytest.raises(AssertionError, match=r"begins with '', its run with '1-\d+\.ckpt'"):
        world.run(40.0)


@pytest.mark.parametrize("seed", range(5, 10))
def test_pairs_that_average_while_they_compute_go_on_after_any_faults(seed: int) -> None:
    world = live_through(seed, 8, pairs=True)
    assert world.pipelines == 1 or world.seen["Invitation"] > 100


@pytest.mark.parametrize("seed", range(20, 23))
def test_groups_that_are_read_long_after_the_scheduler_has_died_hold_nobody_up(seed: int) -> None:
    """The next scheduler gives another one for the same ready, and what others have begun is broken off at once."""
    world = World(seed, unread=0.3)
    world.run(5.0)
    with suppress(NobodyLeft):
        for _ in range(4):
            world.kill_scheduler(0.2)
            world.run(world.now + 6.0)
        world.check_that_all_train(10.0)


def test_stages_that_copy_their_state_a_turn_late_give_it_to_nobody() -> None:
    """That no newcomer starts with a torn state is checked in every history; here some are."""
    torn = 0
    for seed in range(11, 14):
        world = live_through(seed, 8, late=0.3)
        torn += sum(len(updates) > 1 for updates in world.copied_at.values())
    assert torn > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("seconds", [3.0, 30.0])
def test_a_scheduler_that_is_cut_off_from_all_loses_nobody(seed: int, seconds: float) -> None:
    world = World(seed)
    world.run(8.0)
    starts = {process.incarnation for process in world.processes}
    world.cut_off(seconds)
    world.run(world.now + seconds)
    world.check_that_all_train(5.0)
    assert {process.incarnation for process in world.processes} == starts


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_of_two_pipelines_that_cannot_reach_each_other_one_is_put_out_and_the_others_go_on(
    seed: int, pairs: bool
) -> None:
    world = World(seed, pairs=pairs)
    if world.pipelines < 2 or world.terms.min_pipelines > world.pipelines - 1:
        return
    world.loss = 0.0
    world.run(8.0)
    starts = {process.worker.pipeline: process.incarnation for process in world.processes}
    one, other = world.rng.sample(range(world.pipelines), 2)
    world.part(one, other)
    world.run(world.now + 40.0)  # of silence in an exchange, epochs that try, and some of both
    gone = {i for i, own in starts.items() if own not in {p.incarnation for p in world.processes}}
    assert len(gone) == 1, gone
    assert gone < {one, other}
    world.apart.clear()
    world.check_that_all_train(40.0)


def test_a_history_is_the_same_again_for_the_same_seed() -> None:
    told: list[list[str]] = [[], []]
    for said in told:
        live_through(5, 5, said.append)
    assert told[0] == told[1]
    assert any("dies" in text for text in told[0])
