"""A fixed roster: what has ended ends the run, by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies import Worker
from tests.membership.test_membership import only

SAME = FIXED
STAGES, PIPELINES = 2, 2
ALL = [Worker(j, i) for i in range(PIPELINES) for j in range(STAGES)]


def started(incarnation: int = 7) -> Membership:
    """All processes have enrolled, in one job."""
    core = Membership(STAGES, ElasticConfig.of_fixed(PIPELINES))
    enrol(core, incarnation)
    return core


def enrol(core: Membership, incarnation: int) -> None:
    decisions = [decision for worker in ALL for decision in core.on(w.Enrolled(worker, incarnation, SAME), 0.0)]
    assert [type(decision).__name__ for decision in decisions] == ["Epoch", "Started", "Started"]
    core.validate()


def test_it_starts_at_once_when_all_are_there_and_takes_no_others() -> None:
    core = started()
    assert core.members == [0, 1]
    for pipeline in (PIPELINES, -1):
        denied = only(core.on(w.Enrolled(Worker(0, pipeline), 9, SAME), 1.0), w.Denied)
        assert "this scheduler serves 2 pipelines, 0 to 1" in denied.reason
    with pytest.raises(ConfigurationError, match="all of a fixed roster"):
        ElasticConfig(2, 3, fixed=True)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (w.Ended(Worker(1, 0), 7, "ended (its connection closed)"), "its process ended (its connection closed)"),
        (w.Ended(Worker(1, 0), 7, "ValueError: no", "failed"), "ValueError: no"),
        (w.Departed(Worker(1, 0), 7, finished=False), "was told to end"),
    ],
)
def test_a_process_that_has_ended_ends_the_run_by_name(event: w.MemberEvent, said: str) -> None:
    core = started()
    over, gone = core.on(event, 1.0)
    assert isinstance(gone, w.Gone)
    assert over == w.RunOver(said, failed=True, worker=Worker(1, 0))
    core.validate()
    only(core.on(w.Ended(Worker(0, 1), 7, "ended"), 2.0), w.Gone)  # the first one counts
    only(core.on(w.Enrolled(Worker(0, 0), 8, SAME), 3.0), w.Denied)  # a failed run makes no room


def test_one_that_finished_makes_room_for_the_next() -> None:
    core = started()
    decisions = [d for worker in ALL for d in core.on(w.Departed(worker, 7, finished=True), 1.0)]
    assert decisions == [w.RunOver("all pipelines have finished their training", failed=False)]
    assert core.on(w.Ended(ALL[0], 7, "ended"), 1.1) == []
    enrol(core, 8)
    assert core.members == [0, 1]
    assert core.on(
        w.Meets(ALL[0], 7, "end", b""),  # of the run before
        2.0,
    ) == [w.Denied(ALL[0], 7, "its run is over, and another has begun", must_end=True)]


def test_a_scheduler_for_both_kinds_of_run_serves_that_whose_process_comes_first() -> None:
    core = Membership(1, ElasticConfig(settle=0.0), num_pipelines=2)
    for incarnation in (7, 8):
        for pipeline in (0, 1):
            core.on(w.Enrolled(Worker(0, pipeline), incarnation, FIXED), 0.0)
        assert core.members == [0, 1]
        denied = only(core.on(w.Enrolled(Worker(0, 2), 9, {"model": "linear"}), 0.0), w.Denied)
        for pipeline in (0, 1):
            core.on(w.Departed(Worker(0, pipeline), incarnation, finished=True), 1.0)
    epoch, started = core.on(w.Enrolled(Worker(0, 2), 9, {"model": "linear"}), 2.0)
    assert isinstance(epoch, w.Epoch)
    assert isinstance(started, w.Started)
    core.validate()
    denied = only(core.on(w.Enrolled(Worker(0, 0), 10, FIXED), 3.0), w.Denied)
    assert "set SDPIPE_PIPELINE, or give it a scheduler of its own" in denied.reason


EVENTS = st.tuples(st.sampled_from(ALL), st.sampled_from([6, 7, 8]), st.integers(0, 7))


@given(st.booleans(), st.lists(EVENTS, max_size=30))
def test_an_end_always_ends_it_and_nothing_else_does(begun: bool, history: list[tuple[Worker, int, int]]) -> None:
    core, now = started() if begun else Membership(STAGES, ElasticConfig.of_fixed(PIPELINES)), 0.0
    ended, finished = False, set[Worker]()
    for worker, incarnation, kind in history:
        now += 1.0
        here = core.is_here(worker, incarnation)
        event: w.MemberEvent = [
            w.Enrolled(worker, incarnation, SAME),
            w.Enrolled(worker, 7, SAME),
            w.Ended(worker, incarnation, "was silent", "silent"),
            w.Heard(worker, incarnation),
            w.Meets(worker, incarnation, "k", b""),
            w.Passed(),
            w.Departed(worker, incarnation, finished=True),
            w.Ended(worker, incarnation, "ended"),
        ][kind]
        over = core.ending.over
        decisions = core.on(event, now)
        core.validate()
        if here and over is None and isinstance(event, w.Ended) and worker not in finished:
            ended = True
            assert any(isinstance(d, w.RunOver) and d.failed and d.worker == worker for d in decisions)
        if isinstance(event, w.Departed) and here:
            finished.add(worker)
        denied = any(isinstance(d, w.Denied) and not d.must_end for d in decisions)
        if isinstance(event, w.Enrolled) and not here and not denied:
            finished.discard(worker)
        failed = core.ending.over is not None and core.ending.over.failed
        assert failed == ended
        assert not any(isinstance(decision, w.Held | w.Donate) for decision in decisions)
        if any(isinstance(d, w.Epoch) for d in decisions):
            finished.clear()


def test_pipelines_may_have_unlike_numbers_of_stages() -> None:
    core = Membership(3, ElasticConfig.of_fixed(2, depths=(1, 3)))
    workers = [Worker(0, 0), *(Worker(j, 1) for j in range(3))]
    decisions = [decision for worker in workers for decision in core.on(w.Enrolled(worker, 7, SAME), 0.0)]
    assert [type(decision).__name__ for decision in decisions] == ["Epoch", "Started", "Started"]
    core.validate()
    assert core.awaited(2) == [1]
    denied = only(core.on(w.Enrolled(Worker(1, 0), 7, SAME), 1.0), w.Denied)
    assert "this scheduler serves pipelines of 1 stages" in denied.reason
    for worker in workers:
        core.on(w.Departed(worker, 7, True), 2.0)
        core.validate()
    assert core.ending.over is not None
    assert not core.ending.over.failed
    with pytest.raises(ConfigurationError, match="depths"):
        ElasticConfig.of_fixed(2, depths=(1,))
