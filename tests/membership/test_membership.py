"""Who is in an elastic run: scripted events and whole lists of decisions, and promises against all histories."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Epoch, Member, MemberDecision, MemberEvent, Met
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies import Worker

LONG = settings.default.max_examples >= 10_000  # --hypothesis-profile=long
HISTORIES = 100_000 if LONG else 2 * settings.default.max_examples
SAME = {"model": "linear", "seed": "1"}
Decided = TypeVar("Decided")


class Run:
    """A scheduler's core, spoken to by name; it is looked for contradictions after each event."""

    def __init__(self, stages: int = 1, **terms: float) -> None:
        self.core = Membership(stages, ElasticConfig(**{"settle": 0.0, **terms}))  # type: ignore[arg-type]
        self.stages = stages
        self.incarnations: dict[int, int] = {}

    def of(self, pipeline: int) -> range:
        """Its stages."""
        return range(self.stages)

    def on(self, event: MemberEvent, now: float = 0.0) -> list[MemberDecision]:
        decisions = self.core.on(event, now)
        self.core.validate()
        return decisions

    def say(self, kind: type, pipeline: int, *fields: object, stage: int = 0, now: float = 0.0) -> list[MemberDecision]:
        return self.on(kind(Worker(stage, pipeline), self.incarnations[pipeline], *fields), now)

    def enrol(self, pipeline: int, incarnation: int = 0, now: float = 0.0, **other: str) -> list[MemberDecision]:
        """All stages of it."""
        self.incarnations[pipeline] = incarnation or 100 + pipeline
        decisions = []
        for stage in self.of(pipeline):
            decisions += self.say(w.Enrolled, pipeline, SAME | other, stage=stage, now=now)
        return decisions

    def gives(self, donate: w.Donate, update: int = 10) -> list[MemberDecision]:
        """All stages of the donor have copied their state after that update."""
        decisions: list[MemberDecision] = []
        for stage in self.of(donate.donor):
            decisions += self.say(w.Snapshot, donate.donor, donate.transfer, update, stage=stage)
        return decisions

    def comes(self, pipeline: int, incarnation: int = 0) -> list[MemberDecision]:
        """A newcomer, until it is a member."""
        donate = only(self.enrol(pipeline, incarnation), w.Donate)
        (receive,) = (d for d in self.gives(donate) if isinstance(d, w.Receive))
        decisions = []
        for stage in self.of(pipeline):
            decisions += self.say(w.Received, pipeline, receive.transfer, receive.update, stage=stage)
        return decisions


def begun(pipelines: int = 2, stages: int = 1, **terms: float) -> Run:
    """So many pipelines have started together."""
    run = Run(stages, start_pipelines=pipelines, **terms)
    for pipeline in range(pipelines):
        run.enrol(pipeline)
    return run


def only(decisions: list[MemberDecision], kind: type[Decided]) -> Decided:
    """The one decision, which is of that kind."""
    (decision,) = decisions
    assert isinstance(decision, kind)
    return decision


def kinds(decisions: list[MemberDecision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def test_pipelines_start_together_when_all_their_stages_are_there() -> None:
    run = Run(stages=2, start_pipelines=2)
    assert run.enrol(1) == []
    run.incarnations[0] = 7
    assert run.say(w.Enrolled, 0, SAME) == []
    epoch, *started = run.say(w.Enrolled, 0, SAME, stage=1)
    assert epoch == Epoch(1, (Member(0, 7), Member(1, 101)), "pipelines 0, 1 start together")
    assert started == [w.Started(0, epoch, True), w.Started(1, epoch, True)]
    assert run.say(w.Enrolled, 0, SAME) == started[:1], "the answer may have been lost"


def test_those_who_are_there_start_without_the_others_after_a_while() -> None:
    run = Run(start_pipelines=3, gather=60.0)
    assert run.enrol(2, now=5.0) == []
    assert run.core.deadline() == 65.0
    assert "training starts when 3 pipelines are there; pipeline 2 waits" in run.core.missing()
    assert kinds(run.on(w.Passed(), 65.0)) == ["Epoch", "Started"]


def test_who_waits_for_the_start_of_many_is_told_of_some() -> None:
    run = Run(start_pipelines=20)
    for pipeline in range(12):
        assert run.enrol(pipeline) == []
    said = run.core.missing()
    assert said.startswith("training starts when 20 pipelines are there; pipeline 0 waits, pipeline 1 waits, ")
    assert said.endswith("pipeline 7 waits, and 4 more")
    assert run.core.states() == dict.fromkeys(range(12), "waits")


def test_fewer_than_the_least_never_start() -> None:
    run = Run(min_pipelines=2, hold_limit=100.0)
    assert run.enrol(0) == []
    over = only(run.on(w.Passed(), 100.0), w.RunOver)
    assert over.failed
    assert "2 pipelines are there; pipeline 0 waits" in over.reason


def test_a_newcomer_gets_the_state_of_a_member_at_one_update_of_all_its_stages() -> None:
    run = begun(stages=2)
    (first,) = run.enrol(2)
    assert first == w.Donate(1, 2, "state-2-1-65"), "the leader is spared"
    assert run.core.donations.unheard(Worker(0, 1)) == (first.transfer,)
    assert run.core.donations.unheard(Worker(1, 1)) == (), "stage 0 tells it"
    assert run.say(w.Snapshot, 1, "state-2-1-65", 45) == []
    assert run.say(w.Snapshot, 1, "state-2-1-65", 45) == [], "it may be said again"
    assert run.say(w.Received, 2, "state-2-1-65", 45, stage=1) == [], "nothing was given yet"
    assert run.say(w.Snapshot, 1, "state-2-1-65", 45, stage=1) == [w.Receive(2, 1, "state-2-1-65", 45)]
    assert run.say(w.Received, 2, "state-2-1-65", 45, stage=1) == []
    epoch, started = run.say(w.Received, 2, "state-2-1-65", 45)
    assert run.core.members == [0, 1, 2]
    assert epoch == run.core.epoch
    assert started == w.Started(2, run.core.epoch, False)


def test_a_donor_whose_stages_name_different_updates_gives_nothing_and_trains_on() -> None:
    run = begun(stages=2)
    donate = only(run.enrol(2), w.Donate)
    assert run.say(w.Snapshot, 1, donate.transfer, 6, stage=1) == []
    void = "stage 1 after 6, stage 0 after 5 updates, so the copies are not of one state"
    abandoned, again = run.say(w.Snapshot, 1, donate.transfer, 5)
    assert abandoned == w.Abandoned(1, donate.transfer, void)
    assert again == w.Donate(0, 2, "state-2-2-64"), "another member gives its own"
    assert run.core.members == [0, 1]
    assert run.say(w.Snapshot, 1, donate.transfer, 6) == [w.Abandoned(1, donate.transfer)]


def test_a_newcomer_that_has_loaded_another_update_than_it_was_given_is_refused() -> None:
    run = begun()
    donate = only(run.enrol(2), w.Donate)
    run.gives(donate, 12)
    denied, gone, abandoned = run.say(w.Received, 2, donate.transfer, 11)
    wrong = "the state that it has loaded of state-2-1-65 is that after 11 updates, and pipeline 1 gave that after 12"
    assert denied == w.Denied(Worker(0, 2), 102, wrong)
    assert gone == w.Gone(2, 102, f"stage 0 is refused: {wrong}", was_member=False)
    assert abandoned == w.Abandoned(1, donate.transfer)
    assert run.core.members == [0, 1]


def test_the_oldest_leads_and_the_next_oldest_after_it() -> None:
    run = Run()
    run.enrol(3)
    run.comes(1)
    run.comes(0)
    assert run.core.epoch.members[0].pipeline == 3
    assert run.core.epoch.pipelines == (0, 1, 3)
    decisions = run.say(w.Ended, 3, "ended")
    assert kinds(decisions) == ["Gone", "Epoch"]
    assert run.core.epoch.members[0].pipeline == 1
    assert run.core.epoch.lost == (3,)
    run.comes(3, incarnation=900)
    assert run.core.members == [1, 0, 3]


def test_all_stages_of_a_pipeline_go_with_one_and_never_come_back() -> None:
    run = begun(stages=2)
    gone, epoch = run.say(w.Ended, 1, "was silent for 2.0 s", stage=1)
    assert gone == w.Gone(1, 101, "stage 1 was silent for 2.0 s", was_member=True)
    assert isinstance(epoch, Epoch)
    assert epoch.reason == "pipeline 1 lost (stage 1 was silent for 2.0 s)"
    for event in (w.Enrolled(Worker(0, 1), 101, SAME), w.Meets(Worker(1, 1), 101, "pause", b"")):
        assert run.on(event) == [w.Denied(event.worker, 101, "stage 1 was silent for 2.0 s", must_end=True)]


def test_another_donor_gives_its_state_when_one_is_lost() -> None:
    run = begun(3)
    donate = only(run.enrol(3), w.Donate)
    (receive,) = run.gives(donate)
    assert receive == w.Receive(3, 2, "state-3-1-66", 10)
    gone, epoch, again = run.say(w.Ended, 2, "ended")
    assert (type(gone), type(epoch)) == (w.Gone, Epoch)
    assert again == w.Donate(1, 3, "state-3-2-65")
    assert run.say(w.Received, 3, "state-3-1-66", 10) == [], "of a donor that is gone: the other stages may not have it"


def test_a_donor_that_fails_a_newcomer_is_asked_last() -> None:
    run = begun()
    donate = only(run.enrol(2), w.Donate)
    receive = only(run.gives(donate), w.Receive)
    abandoned, again = run.say(w.Received, 2, receive.transfer, -1, "connection reset")
    assert abandoned == w.Abandoned(1, receive.transfer)
    assert isinstance(again, w.Donate)
    assert again.donor == 0


def test_the_run_is_over_when_nobody_is_left_to_give_a_state() -> None:
    run = begun(1)
    run.enrol(1)
    *_, over = run.say(w.Ended, 0, "ended")
    assert over == w.RunOver(
        "all pipelines are lost (pipeline 0 lost (stage 0 ended)); no checkpoint was written; start it again, under a "
        "new scheduler",
        failed=True,
    )
    only(run.enrol(2), w.Denied)


def test_the_newest_checkpoint_is_named_when_nobody_is_left() -> None:
    run = begun(1)
    run.say(w.Published, 0, "/shared/last.ckpt", 40)
    over = only(run.say(w.Departed, 0, False)[-1:], w.RunOver)
    assert "the newest checkpoint is /shared/last.ckpt, after update 40; continue from it" in over.reason


def test_a_new_start_is_made_from_the_newest_checkpoint_when_that_was_asked_for() -> None:
    run = begun(1, resume=True)
    run.say(w.Published, 0, "/shared/1.ckpt", 40)
    run.say(w.Published, 0, "/shared/2.ckpt", 80)
    run.enrol(1)
    *_, started = run.say(w.Ended, 0, "ended")
    assert started == w.Started(1, run.core.epoch, True, "/shared/2.ckpt")
    assert run.core.epoch.reason == "pipelines 1 start again from /shared/2.ckpt, since no member was left"
    assert run.enrol(1) == [started], "the answer may have been lost"
    run.comes(2)
    *_, epoch = run.say(w.Ended, 1, "ended")
    assert isinstance(epoch, Epoch), "a newcomer has the state"


def test_a_bug_that_ends_the_last_two_is_named_rather_than_that_nobody_is_left() -> None:
    run = begun()
    run.say(w.Ended, 0, "ValueError: 3", "failed")
    over = only(run.say(w.Ended, 1, "ValueError: 3", "failed")[-1:], w.RunOver)
    assert "same exception" in over.reason


def test_a_pipeline_that_others_cannot_reach_is_let_in_again_after_a_pause() -> None:
    run = begun(3)
    now, decisions = 0.0, list[MemberDecision]()
    while 1 in run.core.members:
        assert (now == 0.0) or run.core.epoch.tries
        run.say(w.Misses, 0, run.core.epoch.number, (1,))
        run.say(w.Misses, 1, run.core.epoch.number, (0,))
        now += 5.0
        decisions = run.on(w.Unreachable(0, (0, 1, 2)), now)
    (gone,) = (decision for decision in decisions if isinstance(decision, w.Gone))
    assert "cannot reach pipelines 0" in gone.reason
    assert run.enrol(1, incarnation=900, now=now) == []
    assert "others could not reach it" in run.core.waits_for(Worker(0, 1), 900)
    assert run.core.deadline() == now + 60.0
    only(run.on(w.Passed(), now + 60.0), w.Donate)
    assert run.core.deadline() == float("inf")


def test_below_the_least_all_are_held_until_there_are_enough() -> None:
    run = begun(min_pipelines=2, hold_limit=50.0)
    *_, held = run.say(w.Ended, 1, "ended", now=10.0)
    assert held == w.Held("1 of at least 2 pipelines are left (0)")
    assert run.core.deadline() == 60.0
    _, held = run.enrol(1, incarnation=900)
    assert held == w.Held(""), "who is held could not give its state"
    run.say(w.Ended, 1, "ended", now=20.0)
    (over,) = run.on(w.Passed(), 70.0)
    assert over == w.RunOver("1 of at least 2 pipelines are left (0) for 50 s", failed=True)


def test_a_job_that_differs_is_refused_with_what_was_found_and_expected() -> None:
    run = begun(1)
    denied = only(run.enrol(1, seed="2"), w.Denied)
    assert "(seed: found 2, expected 1)" in denied.reason
    assert run.core.members == [0]
    denied = only(run.enrol(5000), w.Denied)
    assert "give SDPIPE_PIPELINE from 0 to 1023" in denied.reason
    denied = only(run.on(w.Enrolled(Worker(1, 1), 5, SAME)), w.Denied)
    assert "pipelines of 1 stages" in denied.reason


def test_a_second_job_of_one_number_is_refused_when_the_first_is_heard_of() -> None:
    run = begun(1)
    assert run.on(w.Enrolled(Worker(0, 0), 999, SAME)) == [], "the first may be about to end"
    assert run.core.doubts(Worker(0, 0), 100)
    denied = only(run.say(w.Heard, 0), w.Denied)
    assert (denied.incarnation, "another job, which is alive" in denied.reason) == (999, True)
    assert not run.core.doubts(Worker(0, 0), 100)


def test_a_second_job_of_one_number_takes_the_place_of_one_that_is_gone() -> None:
    run = begun()
    assert run.on(w.Enrolled(Worker(0, 1), 999, SAME)) == []
    assert kinds(run.say(w.Ended, 1, "was silent for 2.0 s")) == ["Gone", "Epoch"]
    assert not run.core.is_here(Worker(0, 1), 999), "it may have died meanwhile"
    assert kinds(run.on(w.Enrolled(Worker(0, 1), 999, SAME))) == ["Donate"]


def test_barriers_wait_for_the_living_and_are_decided_once() -> None:
    run = begun(3)
    assert run.say(w.Meets, 0, "pause/1", b"a") == []
    assert run.say(w.Meets, 1, "pause/1", b"b") == []
    *_, met = run.say(w.Ended, 2, "ended")
    assert met == Met(0, "pause/1", (0, 1), (b"a", b"b"), 0)
    assert run.say(w.Meets, 1, "pause/1", b"b") == [met], "the answer may have been lost"
    run.comes(2, incarnation=900)
    (late,) = run.say(w.Meets, 2, "pause/1", b"c")
    assert late == Met(0, "pause/1", (2,), (b"c",), 0, past=True)


def test_stages_that_have_finished_first_do_not_keep_others_from_their_last_barrier() -> None:
    run = begun(stages=2)
    assert run.say(w.Meets, 0, "last", b"", stage=1) == []
    run.say(w.Departed, 0, True), run.say(w.Departed, 1, True)
    met = only(run.say(w.Meets, 1, "last", b"", stage=1), Met)
    assert met.pipelines == (0, 1)


def test_a_barrier_waits_for_a_newcomer_whose_state_has_been_taken() -> None:
    run = begun(1)
    donate = only(run.enrol(1), w.Donate)
    (receive,) = run.gives(donate)
    assert run.say(w.Meets, 0, "pause", b"") == []
    assert isinstance(receive, w.Receive)
    run.say(w.Received, 1, receive.transfer, receive.update)
    met = only(run.say(w.Meets, 1, "pause", b""), Met)
    assert met.pipelines == (0, 1)


def test_pipelines_that_wait_at_different_places_are_refused_instead_of_waiting_for_ever() -> None:
    run = begun()
    run.say(w.Meets, 0, "batch 10", b"")
    first, second = run.say(w.Meets, 1, "batch 12", b"")
    assert isinstance(first, w.Denied)
    assert isinstance(second, w.Denied)
    assert "pipeline 0 at batch 10, pipeline 1 at batch 12" in first.reason


def test_two_pipelines_that_fail_alike_end_the_run() -> None:
    run = begun(3)
    assert kinds(run.say(w.Ended, 1, "ValueError: bad batch 17", "failed")) == ["Gone", "Epoch"]
    over = only(run.say(w.Ended, 0, "ValueError: bad batch 4", "failed")[-1:], w.RunOver)
    assert over.failed
    assert "pipelines 0 and 1 failed with the same exception" in over.reason
    denied = only(run.enrol(1, incarnation=900), w.Denied)
    assert "the run is over" in denied.reason


def test_a_failure_is_forgotten_when_the_pipeline_has_come_back_and_met_others() -> None:
    for meets in (True, False):
        run = begun()
        run.say(w.Ended, 1, "RuntimeError: CUDA out of memory", "failed")
        run.comes(1, 900)
        if meets:
            run.say(w.Meets, 0, "pause", b"")
            assert kinds(run.say(w.Meets, 1, "pause", b"")) == ["Met"]
        assert ("RunOver" in kinds(run.say(w.Ended, 0, "RuntimeError: CUDA out of memory", "failed"))) == (not meets)


def test_who_cannot_join_does_not_end_the_run_of_those_that_train() -> None:
    run = begun()
    for pipeline in (2, 3):
        run.enrol(pipeline)
        assert "RunOver" not in kinds(
            run.say(w.Ended, pipeline, "ConfigurationError: its state cannot be sent", "failed")
        )


def test_what_the_scheduler_or_others_have_caused_is_no_bug_unless_it_refused() -> None:
    for kind, over in (("SchedulerError", False), ("RefusedError", True)):
        run = begun(3)
        run.say(w.Ended, 1, f"{kind}: no answer", "failed")
        assert ("RunOver" in kinds(run.say(w.Ended, 0, f"{kind}: no answer", "failed"))) == over


def test_who_has_finished_is_not_missed_and_the_run_is_over_when_all_have() -> None:
    run = begun()
    assert run.say(w.Departed, 0, True) == []
    assert run.say(w.Ended, 0, "ended") == []
    assert run.say(w.Meets, 1, "the end", b"")[0] == Met(0, "the end", (1,), (b"",), 0)
    assert run.say(w.Departed, 1, True) == [w.RunOver("all pipelines have finished their training", failed=False)]


def test_who_departs_with_notice_has_left() -> None:
    run = begun(stages=2)
    gone, epoch = run.say(w.Departed, 0, False)
    assert gone == w.Gone(0, 100, "stage 0 was told to end", was_member=True, left=True)
    assert isinstance(epoch, Epoch)
    assert epoch.members[0].pipeline == 1


def resumed(worker: Worker, incarnation: int, epoch: Epoch, *met: Met) -> w.Resumed:
    return w.Resumed(worker, incarnation, SAME, epoch, met)


def test_a_new_scheduler_waits_for_the_members_of_the_newest_epoch() -> None:
    old, new = Epoch(6, (Member(1, 11), Member(0, 10)), ""), Epoch(7, (Member(1, 11), Member(0, 10), Member(2, 12)), "")
    run = Run()
    assert run.on(resumed(Worker(0, 0), 10, old)) == []
    assert run.enrol(3) == []
    assert run.on(resumed(Worker(0, 1), 11, new)) == []
    epoch, donate = run.on(resumed(Worker(0, 2), 12, new))
    assert epoch == Epoch(8, new.members, "the scheduler was started again")
    assert isinstance(donate, w.Donate), "who enrolled meanwhile"
    assert (donate.donor, run.core.epoch.members[0].pipeline) == (2, 1)


def test_a_new_scheduler_goes_on_without_those_who_do_not_come_back() -> None:
    epoch = Epoch(7, (Member(1, 11), Member(0, 10)), "")
    run = Run(recovery_grace=10.0)
    run.on(resumed(Worker(0, 0), 10, epoch), 5.0)
    assert run.core.deadline() == 15.0
    gone, new = run.on(w.Passed(), 15.0)
    assert isinstance(gone, w.Gone)
    assert (gone.pipeline, gone.was_member) == (1, True)
    assert new == Epoch(8, (Member(0, 10),), "the scheduler was started again", lost=(1,))
    ended = only(run.on(resumed(Worker(0, 1), 11, epoch), 20.0), w.Denied)
    assert ended.must_end
    (over,) = run.on(w.Departed(Worker(0, 0), 10, finished=True), 21.0)
    assert over == w.RunOver("all pipelines have finished their training", failed=False), "also if it had finished"


@pytest.mark.parametrize(("come_back", "lost"), [(True, False), (True, True), (False, False)])
def test_a_newcomer_that_has_heard_of_members_waits_for_them_under_a_new_scheduler(come_back: bool, lost: bool) -> None:
    """Also if those of which it has heard were all lost: others may have begun since."""
    epoch = Epoch(7, (Member(1, 11), Member(0, 10)), "")
    run, heard_of = Run(recovery_grace=10.0), Epoch(6, (), "pipeline 3 lost") if lost else epoch
    assert run.on(w.Enrolled(Worker(0, 2), 12, SAME, heard_of), 5.0) == []
    assert run.core.deadline() == 15.0
    assert "waits for the members of the run" in run.core.waits_for(Worker(0, 2), 12)
    if come_back:
        assert run.on(resumed(Worker(0, 0), 10, epoch), 6.0) == []
        assert kinds(run.on(resumed(Worker(0, 1), 11, epoch), 7.0)) == ["Epoch", "Donate"]
        assert run.core.epoch.members == epoch.members
    else:
        assert kinds(run.on(w.Passed(), 15.0)) == ["Gone", "Gone", "Epoch", "RunOver"]


@pytest.mark.parametrize("starts", [0, 1])
def test_a_newcomer_with_its_state_that_has_not_heard_that_it_is_a_member_is_one(starts: int) -> None:
    """But for one that has begun again with others, and has still heard of the state of an earlier start."""
    epoch = Epoch(7, (Member(0, 10), Member(1, 11)), "pipeline 1 has come", starts=starts)
    run = Run(stages=2)
    run.incarnations = {0: 10, 1: 11}
    for stage in range(2):
        run.on(resumed(Worker(stage, 0), 10, epoch))
        run.say(w.Enrolled, 1, SAME, Epoch(5, (Member(2, 12),), ""), stage=stage)
    assert run.say(w.Received, 1, "state-1-6001-a", 10) == []
    decisions = run.say(w.Received, 1, "state-1-6001-a", 10, stage=1)
    if starts:
        assert decisions == []
        assert only(run.on(w.Passed(), 60.0)[:1], w.Gone).pipeline == 1
    else:
        again, *started = decisions
        assert again == Epoch(8, epoch.members, "the scheduler was started again")
        assert {*started} == {w.Started(1, run.core.epoch, False)}


def test_a_process_that_was_replaced_does_not_come_back_to_a_new_scheduler() -> None:
    run = Run()
    run.on(resumed(Worker(0, 2), 5, Epoch(3, (Member(2, 5), Member(0, 10)), "")))
    run.on(resumed(Worker(0, 0), 10, now := Epoch(9, (Member(0, 10), Member(2, 12)), "")))
    decisions = run.on(resumed(Worker(0, 2), 12, now))
    assert run.core.epoch.members == now.members
    assert kinds(decisions) == ["Gone", "Epoch"], "the one that was replaced"
    ended = only(run.on(resumed(Worker(0, 2), 5, now)), w.Denied)
    assert ended.must_end


def test_barriers_that_a_member_heard_of_are_not_decided_again() -> None:
    epoch = Epoch(7, (Member(0, 10), Member(1, 11)), "")
    met = Met(0, "pause/4", (0, 1), (b"a", b"b"), 17)
    run = Run()
    run.incarnations = {0: 10, 1: 11}
    run.on(resumed(Worker(0, 0), 10, epoch, met))
    run.on(resumed(Worker(0, 1), 11, epoch))
    assert run.say(w.Meets, 1, "pause/4", b"b") == [met]
    run.say(w.Meets, 0, "pause/5", b"")
    after = only(run.say(w.Meets, 1, "pause/5", b""), Met)
    assert after.sequence == 18


def test_nobody_starts_anew_before_members_of_an_older_run_can_make_themselves_heard() -> None:
    run = Run(settle=1.5)
    assert run.enrol(0, now=0.1) == []
    assert run.core.deadline() == 1.5
    assert kinds(run.on(w.Passed(), 1.5)) == ["Epoch", "Started"]


@pytest.mark.parametrize(
    ("terms", "name"),
    [
        ({"min_pipelines": 0}, "min_pipelines"),
        ({"min_pipelines": 3, "start_pipelines": 2}, "start_pipelines"),
        ({"depths": (1,)}, r"depths=\[1\] .* 1 pipelines of a fixed roster"),
        ({"min_pipelines": 3, "depths": (1, 2), "fixed": True}, r"depths=\[1, 2\] .*the stages of each of 3 pipelines"),
        ({"min_pipelines": 2, "depths": (1, 0), "fixed": True}, "depths"),
    ],
)
def test_terms_that_cannot_be_met_are_refused(terms: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        ElasticConfig(**terms)


# ------------------------------------------------------------------------------------------------ all histories


def any_event(rng: random.Random, stages: int, transfers: list[str], epochs: list[Epoch]) -> MemberEvent:
    """Of processes that follow no rule: each of three starts of each pipeline may say anything at any time."""
    pipeline = rng.randrange(4)
    worker, incarnation = Worker(rng.randrange(stages), pipeline), 10 * pipeline + rng.randrange(3)
    transfer, key = rng.choice(transfers), f"pause/{rng.randrange(3)}"
    match rng.choice("eeeeeessssrrmMMMdfDhruPxp"):
        case "e":
            heard_of = rng.choice(epochs) if rng.random() < 0.2 else None
            return w.Enrolled(worker, incarnation, SAME if rng.random() < 0.95 else {"model": "other"}, heard_of)
        case "s":
            return w.Snapshot(worker, incarnation, transfer, rng.randrange(2))
        case "r":
            return w.Received(worker, incarnation, transfer, rng.randrange(2))
        case "m":
            return w.Received(worker, incarnation, transfer, -1, "reset")
        case "M":
            return w.Meets(worker, incarnation, key, b"x")
        case "d":
            return w.Ended(worker, incarnation, "ended")
        case "f":
            return w.Ended(worker, incarnation, f"ValueError: {rng.randrange(50)}", "failed")
        case "D":
            return w.Departed(worker, incarnation, rng.random() < 0.2)
        case "h":
            return w.Heard(worker, incarnation)
        case "u":
            return w.Unreachable(worker.stage, (pipeline,), rng.random() < 0.8)
        case "P":
            return w.Published(worker, incarnation, "last.ckpt", rng.randrange(9))
        case "x":
            return w.Misses(worker, incarnation, epochs[-1].number, (rng.randrange(4),))
        case _:
            return w.Passed() if rng.random() < 0.7 else w.Resumed(worker, incarnation, SAME, rng.choice(epochs))


class Promises:
    """What holds in every history."""

    def __init__(self, core: Membership) -> None:
        self.core = core
        self.number = 0
        self.transfers, self.epochs = ["state-0-1"], [Epoch(3, (Member(0, 0), Member(1, 10)), "")]
        self.gone, self.started = set[Member](), set[Member]()
        self.met: dict[tuple[int, str], tuple[int, ...]] = {}

    def on(self, event: MemberEvent, now: float) -> None:
        before = self.core.members
        for decision in self.core.on(event, now):
            match decision:
                case Epoch(number, members):
                    assert number > self.number, "epochs' numbers grow"
                    assert not self.gone & set(members), "who was gone never comes back"
                    self.number = number
                    self.epochs.append(decision)
                case w.Started(pipeline, epoch, fresh):
                    (member,) = (member for member in epoch.members if member.pipeline == pipeline)
                    assert not fresh or member in self.started or not before, "nobody starts anew beside a member"
                    if fresh and member not in self.started:
                        self.met.clear()  # nobody is left of those who met
                    self.started.add(member)
                case w.Gone(pipeline, incarnation):
                    self.gone.add(Member(pipeline, incarnation))
                    before = [i for i in before if i != pipeline]
                case w.Donate(transfer=transfer):
                    self.transfers.append(transfer)
                case w.Receive(donor=donor):
                    assert donor in self.core.members
                case Met(stage, key, pipelines, past=False):
                    assert self.met.setdefault((stage, key), pipelines) == pipelines, "a barrier is decided once"
        self.core.validate()


def keep_the_promises(seed: int) -> None:
    """One history; it is the same again for the same seed."""
    rng = random.Random(seed)
    stages, now = rng.randint(1, 3), 0.0
    terms = ElasticConfig(
        rng.randint(1, 2), rng.choice([None, 2, 3]), 5.0, 40.0, 6.0, rng.choice([0.0, 1.0]), rng.random() < 0.8
    )
    core = Membership(stages, terms)
    promises = Promises(core)
    for _ in range(rng.randint(5, 120)):
        now += rng.choice([0.0, 0.1, 3.0])
        promises.on(any_event(rng, stages, promises.transfers, promises.epochs), now)
        if core.deadline() <= now:
            promises.on(w.Passed(), now)
            assert core.deadline() > now, "time that has passed is not due again"


@settings(max_examples=HISTORIES, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_no_history_breaks_a_promise(seed: int) -> None:
    keep_the_promises(seed)


@pytest.mark.parametrize("ends", [False, True])
def test_a_new_start_beside_one_that_came_back_in_part_is_let_in_when_it_asks_again(ends: bool) -> None:
    """It was not there, so nobody looks whether it lives."""
    run, epoch = Run(2), Epoch(5, (Member(0, 10), Member(1, 11)), "x")
    for worker, incarnation in ((Worker(0, 0), 10), (Worker(1, 0), 10), (Worker(0, 1), 11)):
        run.on(w.Resumed(worker, incarnation, SAME, epoch), 1.0)
    run.enrol(1, 12, 2.0)
    if ends:
        run.say(w.Departed, 1, False, now=3.0)
    run.on(w.Passed(), run.core.deadline())
    assert list(run.core.roster.here) == [0]
    run.enrol(1, 13 if ends else 12, 20.0)
    assert run.core.roster.here[1].incarnation == run.incarnations[1]
