"""Who trains which batches: scripted events and times, and whole leases that follow."""

from __future__ import annotations

import re

import pytest

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, Book, Books, Done, Lease, Returned, Segment, Trained
from lightning_sdpipe.policies import Joined, PolicyConfig, Ready, RefusedEvent, Worker, registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.events import Widened
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized

S = Segment(1, 0, 0, 8)
NEXT = Segment(1, 0, 8, 12)
BookOf = tuple[Worker, Book]


class Desk:
    """Pipelines of one stage, unless told otherwise, that ask a dealer."""

    def __init__(self, pipelines: int, stages: int = 1, segment: Segment = S) -> None:
        self.dealer = Dealer(stages, pipelines)
        self.segment = segment
        self.pipelines, self.stages = pipelines, stages
        self.ordinals = [0] * pipelines

    def begin(self) -> list[Lease]:
        return [lease for pipeline in range(self.pipelines) for lease in self.ask(pipeline)]

    def book(self, pipeline: int, *leases: Lease, over: bool = False, batches: int = 0, stage: int = 0) -> BookOf:
        return Worker(stage, pipeline), Book(self.segment, leases, over, Done(batches))

    def resume(self, *books: BookOf) -> list[Lease]:
        return self.dealer.on(Books(books), 0.0)

    def ask(
        self, pipeline: int, batches: int = 0, seconds: float | None = None, now: float = 0.0, stage: int = 0
    ) -> list[Lease]:
        worker, ordinal = Worker(stage, pipeline), self.ordinals[pipeline]
        leases = self.dealer.on(Asked(worker, self.segment, ordinal, Done(batches, seconds)), now)
        for lease in leases:
            self.ordinals[lease.pipeline] = lease.ordinal + 1
        return leases


def begun(pipelines: int, batches: int = 8, stages: int = 1) -> Desk:
    """Each has asked for its first lease of the first so many batches of an epoch."""
    desk = Desk(pipelines, stages, Segment(1, 0, 0, batches))
    desk.begin()
    return desk


def brief(leases: list[Lease]) -> list[tuple[int, int, int, int]]:
    """Pipeline, home, start and stop of each."""
    return [(lease.pipeline, lease.home, lease.start, lease.stop) for lease in leases]


def test_leases_grow_until_the_speed_is_known_and_then_are_two_seconds_or_half_of_what_is_left() -> None:
    desk = Desk(2, segment=Segment(1, 0, 0, 64))
    assert brief(desk.begin()) == [(0, 0, 0, 1), (1, 1, 0, 1)]
    assert brief(desk.ask(0)) == [(0, 0, 1, 2)]
    assert brief(desk.ask(1)) == [(1, 1, 1, 2)]
    assert brief(desk.ask(0)) == [(0, 0, 2, 4)]
    desk.ask(1)
    assert brief(desk.ask(0, 4, 0.25, now=4.0)) == [(0, 0, 4, 12)]
    assert brief(desk.ask(1, 4, 0.05, now=4.0)) == [(1, 1, 4, 44)]
    assert brief(desk.ask(1, 44, 0.05, now=6.0)) == [(1, 1, 44, 64)]


def test_of_a_long_segment_a_lease_is_a_small_part() -> None:
    """So a worker keeps few."""
    desk = begun(1, 256_001)
    assert brief(desk.ask(0, 1, 1.0, now=1.0)) == [(0, 0, 1, 1001)]


def test_a_stop_ends_the_segment_when_all_is_trained_that_was_dealt() -> None:
    desk = begun(2, 64)
    heard = [lease for pipeline in (0, 1) for lease in desk.ask(pipeline, 1, 1.0, now=1.0)]
    assert brief(heard) == [(0, 0, 1, 3), (1, 1, 1, 3)]
    assert desk.dealer.on(Trained(Worker(0, 1), desk.segment, Done(2, 1.0, stops=True)), 2.0) == []
    assert brief(desk.ask(0, 3, 1.0, now=3.0)) == [(0, 0, 64, 64)]
    assert desk.ask(0, 3, 1.0, now=3.0) == [], "the other one still trains"
    _, over = desk.ask(1, 3, 1.0, now=3.0)
    assert over == Lease(desk.segment, 0, 3, 0, 3, 3, 6.0, 0.0, over=True)
    assert [lease.stop for lease in desk.ask(1, 3, 1.0, now=3.0)] == [3]

    before, desk.segment, desk.ordinals = desk.segment, Segment(1, 0, 3, 64), [0, 0]
    again = brief(desk.ask(0, 0, 1.0, now=4.0))
    assert again == [(0, 0, 3, 5)], "training goes on where the user does not stop it after all"
    assert desk.dealer.answer(0, before, 4) == Lease(before, 0, 4, 0, 3, 3, 6.0, 0.0, over=True)

    new = Desk(2, segment=before)
    new.resume(new.book(0, heard[0], over, over=True), new.book(1, heard[1], batches=3))
    new.ordinals = [4, 1]
    (lease,) = new.ask(1, 3)
    assert (lease.over, lease.stop) == (True, 3), "a scheduler that was started since knows where it ended"


def test_who_is_faster_takes_from_the_tail_of_who_would_end_last() -> None:
    desk = begun(3, 4)
    assert brief(desk.ask(0, 1, 1.0, now=1.0)) == [(0, 0, 1, 3)]
    assert brief(desk.ask(1, 1, 1.0, now=1.0)) == [(1, 1, 1, 3)]
    assert desk.dealer.on(Trained(Worker(0, 2), desk.segment, Done(0, 4.0, 1.0)), 1.0) == []
    assert brief(desk.ask(0, 3, 1.0, now=3.0)) == [(0, 0, 3, 4)]
    assert brief(desk.ask(1, 3, 1.0, now=3.0)) == [(1, 1, 3, 4)]
    assert brief(desk.ask(0, 4, 1.0, now=4.0)) == [(0, 2, 3, 4)], "the tail of the slow one's shard"
    assert brief(desk.ask(1, 4, 1.0, now=4.0)) == [(1, 2, 2, 3)]
    assert brief(desk.ask(2, 1, 4.0, now=4.0)) == [(2, 2, 4, 4)], "others will have finished the rest sooner"


def test_an_empty_lease_is_followed_by_more_or_by_the_end() -> None:
    desk = Desk(2, segment=Segment(1, 0, 0, 1))
    assert brief(desk.begin()) == [(0, 0, 0, 1), (1, 1, 0, 1)]
    (empty,) = desk.ask(0, 1, 1.0, now=1.0)
    assert (empty.size, empty.over, empty.progress) == (0, False, 2.0)
    assert desk.ask(0, 1, 1.0, now=1.0) == [], "it stays open"
    assert desk.dealer.still_training() == [1]
    assert desk.ask(1, 1, 3.0, now=3.0) == [
        Lease(desk.segment, 1, 1, 1, 1, 1, 2.0, 0.0),
        Lease(desk.segment, 0, 2, 0, 1, 1, 2.0, 0.0, over=True),
    ]
    (over,) = desk.ask(1, 1, 3.0, now=3.0)
    assert over.over


def test_a_pipeline_that_waits_is_called_when_another_stalls() -> None:
    desk = begun(2, 3)
    for batches in (1, 2):
        desk.ask(0, batches, 1.0, now=float(batches))
    assert brief(desk.ask(1, 1, 1.0, now=2.0)) == [(1, 1, 1, 2)]
    assert brief(desk.ask(0, 3, 1.0, now=3.0)) == [(0, 0, 3, 3)]
    assert desk.ask(0, 3, 1.0, now=3.0) == []
    assert desk.dealer.on(Trained(Worker(0, 1), desk.segment, Done(1, 1.0, 1.0)), 3.0) == []
    assert brief(desk.dealer.on(Trained(Worker(0, 1), desk.segment, Done(1, 1.0, 9.0)), 11.0)) == [(0, 1, 2, 3)]


def test_what_breaks_the_rules_is_refused_and_changes_nothing() -> None:
    desk = begun(2)
    ask = desk.dealer.on
    for event, message in (
        (Asked(Worker(0, 0), S, 2, Done(0)), "asked for lease 2 of its pipeline, which was dealt 1"),
        (Asked(Worker(0, 0), NEXT, 0, Done(0)), "a lease in batches 8 to 12 of epoch 0, while batches 0 to 8"),
        (Asked(Worker(0, 0), Segment(1, 0, 0, 7), 1, Done(0)), "must pause at the same batches"),
    ):
        with pytest.raises(RefusedEvent, match=re.escape(message)):
            ask(event, 1.0)
    assert brief(desk.ask(0)) == [(0, 0, 1, 2)]


def test_the_next_segment_and_another_run_begin_anew_and_late_asks_are_still_answered() -> None:
    desk = begun(1, 1)
    desk.ask(0, 1)
    (over,) = desk.ask(0, 1)
    before, desk.segment, desk.ordinals = desk.segment, NEXT, [0]
    assert brief(desk.ask(0)) == [(0, 0, 8, 9)]
    assert desk.dealer.answer(0, before, 2) == over
    desk.segment, desk.ordinals = Segment(2, 0, 0, 5), [0]
    assert brief(desk.ask(0)) == [(0, 0, 0, 1)], "a run that begins anew does not wait for the end of another"


@pytest.mark.parametrize(
    "told", [[Done(2, 1.0), Done(1, 1.0)], [Done(2, 1.0, loose=1)]], ids=["of one stage", "only in its own model"]
)
def test_what_a_pipeline_returns_is_trained_by_others(told: list[Done]) -> None:
    """Its second batch is one that only one of its stages has trained, or that only the lost model has."""
    desk = begun(2, 4, stages=len(told))
    desk.ask(1, 1)  # its second lease
    for stage, done in enumerate(told):
        desk.dealer.on(Trained(Worker(stage, 1), desk.segment, done), 2.0)
    desk.dealer.on(Returned(1), 2.0)
    got = [lease for batches in range(1, 7) for lease in desk.ask(0, batches, 1.0, now=2.0 + batches)]
    trained = [(lease.home, number) for lease in got for number in range(lease.start, lease.stop)]
    assert sorted(trained) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    "wrong",
    [
        Lease(S, 1, 0, 1, 5, 7, 0.0, 2.0),
        Lease(S, 1, 0, 1, 6, 9, 0.0, 2.0),
        Lease(S, 1, 0, 2, 0, 1, 0.0, 2.0),
        Lease(S, 0, 0, 1, 4, 6, 0.0, 2.0),
    ],
)
def test_a_book_that_contradicts_another_is_left_out_and_what_follows_it_refused(wrong: Lease) -> None:
    desk = Desk(2)
    mine = Lease(S, 0, 0, 1, 4, 6, 0.0, 2.0)
    assert desk.resume(desk.book(0, mine), desk.book(1, wrong)) == []
    assert desk.dealer.answer(0, S, 0) == mine
    desk.ordinals[1] = 1
    with pytest.raises(RefusedEvent, match="asked for lease 1 of its pipeline, which was dealt 0"):
        desk.ask(1)


def test_a_scheduler_that_was_restarted_at_the_end_hears_that_it_was_the_end() -> None:
    desk = Desk(2)
    desk.resume(desk.book(0, over=True), desk.book(1))
    (lease,) = desk.ask(1)
    assert lease.over


@pytest.mark.parametrize("first", [0, 1])
def test_a_stage_whose_book_is_of_an_older_segment_hears_that_this_is_over(first: int) -> None:
    """The first stages have been told so before, and go on; what stage 1 of pipeline 1 was dealt is lost on its way."""
    desk = Desk(2, stages=2)
    late = desk.book(1, stage=1, batches=8)
    desk.segment = NEXT
    books = [desk.book(0), desk.book(1)]
    desk.resume(*books[:first], late, *books[first:])
    over = desk.dealer.answer(1, S, 2)
    assert over is not None
    assert (over.ordinal, over.size, over.over) == (2, 0, True)
    assert desk.dealer.answer(1, NEXT, 0) is None


def test_a_pipeline_beyond_the_shards_trains_of_those_of_others() -> None:
    desk = begun(2)
    dealer = desk.dealer
    assert dealer.on(Widened(4), 0.0) == []
    (lease,) = dealer.on(Asked(Worker(0, 3), S, 0, Done(0)), 0.0)
    assert (lease.pipeline, lease.size > 0, lease.home in (0, 1)) == (3, True, True)
    assert dealer.still_training() == [0, 1, 3]
    dealer.on(Returned(3), 1.0)
    for pipeline in (0, 1):
        dealer.on(Trained(Worker(0, pipeline), S, Done(1, 0.1)), 1.0)
    assert 3 not in dealer.still_training()
    assert dealer.answer(3, S, 0) is None, "its next start begins anew"


def test_a_pipeline_beyond_the_plan_brings_its_book_too() -> None:
    """It may hold leases of a scheduler that is no more, and ask after the others."""
    desk, mine = Desk(2), Lease(S, 2, 0, 1, 4, 8, 0.0, 2.0)
    assert desk.dealer.on(Widened(4), 0.0) == []
    assert desk.resume(desk.book(0), desk.book(1), desk.book(2, mine, batches=1)) == []
    assert desk.dealer.answer(2, S, 0) == mine
    assert desk.dealer.still_training() == [2]


@pytest.mark.parametrize("config", [SemiDecentralized(window=0.0), AllReduceModels(), NoSync()])
def test_pipelines_beyond_the_plan_join_and_are_answered(config: PolicyConfig) -> None:
    policy, stages = registry.build(config, 1, 2), (0, 1, 4)
    with pytest.raises(RefusedEvent, match="does not exist"):
        policy.on(Joined(Worker(0, 4)), 0.0)
    assert policy.on(Widened(5), 0.0) == []
    for pipeline in stages:
        policy.on(Joined(Worker(0, pipeline)), 0.0)
    for iteration in range(12):
        groups = [
            group for pipeline in stages for group in policy.on(Ready(Worker(0, pipeline), iteration), float(iteration))
        ]
        assert sorted(worker.pipeline for group in groups for worker in group.members) == [0, 1, 4]


def test_a_policy_with_fixed_groups_refuses_more_pipelines_than_planned() -> None:
    policy = registry.build(PHDPSGD(group_size=1), 1, 2)
    with pytest.raises(RefusedEvent, match="divides the 2 pipelines of the plan"):
        policy.on(Widened(3), 0.0)
    with pytest.raises(RefusedEvent, match="does not exist"):
        policy.on(Joined(Worker(0, 2)), 0.0)


def test_pipelines_may_have_unlike_numbers_of_stages() -> None:
    dealer, segment = Dealer(3, 2, depths=(1, 3)), Segment(1, 0, 0, 2)
    workers = [Worker(0, 0), *(Worker(j, 1) for j in range(3))]
    for worker in workers:
        assert dealer.on(Trained(worker, segment, Done(0)), 0.0) == [], "nothing is dealt yet"
    leases = [lease for worker in workers for lease in dealer.on(Asked(worker, segment, 0, Done(0)), 0.0)]
    assert [lease.pipeline for lease in leases] == [0, 1]
    for stage in (2, 1):
        dealer.on(Trained(Worker(stage, 1), segment, Done(1)), 1.0)
        assert dealer.still_training() == [0, 1], "a batch counts when all stages have trained it"
    dealer.on(Trained(Worker(0, 1), segment, Done(1)), 1.0)
    assert dealer.still_training() == [0]
