"""Elastic runs and the scheduler's service without sockets: what comes and goes, and who trains which batches then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_sdpipe.dealing.leases import Book, Done, Lease, Segment
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Epoch, Exchanging, Member
from lightning_sdpipe.policies import Group, PolicyConfig, Worker, registry
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllPresent
from lightning_sdpipe.policies.local_sgd import LocalSGD
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import Beginning, EventLog, read_log
from lightning_sdpipe.scheduler.server.outbox import Addressed
from lightning_sdpipe.scheduler.server.service import SchedulerService

SAME = {"model": "linear"}
S = Segment(5, 0, 0, 8)
T_INF = SemiDecentralized(window=float("inf"))


class ElasticDialogue:
    """Talks to a service of two planned pipelines as their processes would."""

    def __init__(self, config: PolicyConfig = T_INF, stages: int = 1, log: EventLog | None = None) -> None:
        terms = ElasticConfig(start_pipelines=2, settle=0.0, recovery_grace=4.0)
        self.service = SchedulerService(config, stages, 2, worker_timeout=8.0, elastic=terms, log=log)
        self.number = 0

    def say(
        self, kind: type, worker: Worker, incarnation: int, *fields: object, now: float = 0.0, **named: object
    ) -> list[Addressed]:
        self.number += 1
        name = e.peer_of if issubclass(kind, e.MemberRequest) else m.routing_id
        request = kind(worker, incarnation, self.number, *fields, **named)
        replies = self.service.handle(name(worker, incarnation), request, now)
        self.service.validate()
        assert not any(isinstance(reply, e.Refused) for _, reply in replies), replies
        return replies

    def all_say(
        self, kind: type, *fields: object, of: Sequence[Member] = (), stages: int = 1, **named: object
    ) -> list[Addressed]:
        """The same of all stages of these members, by default A and B."""
        said = [(Worker(j, member.pipeline), member.incarnation) for member in of or (A, B) for j in range(stages)]
        return [reply for who in said for reply in self.say(kind, *who, *fields, **named)]  # type: ignore[arg-type]

    def holds(self, worker: Worker, member: Member, *epochs: int) -> list[Addressed]:
        """It has process groups of these."""
        return self.say(e.Beat, worker, member.incarnation, epochs, max(epochs), True)

    def all_hold(self, epoch: int, of: Sequence[Member] = (), stages: int = 1) -> None:
        self.all_say(e.Beat, (epoch,), epoch, True, of=of, stages=stages)

    def tells(self, member: Member, contains: int) -> list[Addressed]:
        """Its heartbeat says how many rounds its model contains."""
        worker = Worker(0, member.pipeline)
        return self.say(e.Beat, worker, member.incarnation, (4,), 4, True, joined=True, contains=contains)

    @staticmethod
    def groups(replies: list[Addressed]) -> list[tuple[int, ...]]:
        """The pipelines of those that went out."""
        found = {reply.group.sequence: reply.group for _, reply in replies if isinstance(reply, m.Answer)}
        return [tuple(worker.pipeline for worker in group.members) for group in found.values()]

    def tick(self, now: float) -> None:
        self.service.tick(now)
        self.service.validate()

    def resume(self, epoch: Epoch, *back: Member) -> None:
        """The processes of ``back`` were in ``epoch``, which another scheduler decided."""
        for pipeline, incarnation in ((member.pipeline, member.incarnation) for member in back):
            self.say(e.Enrol, Worker(0, pipeline), incarnation, SAME, e.Resumes(epoch, (epoch.number,)))

    def ask(
        self, member: Member, ordinal: int, batches: int, now: float = 0.0, stage: int = 0, segment: Segment = S
    ) -> list[m.Reply | e.Reply]:
        """What the pipeline is told when it asks for a lease."""
        worker = Worker(stage, member.pipeline)
        replies = self.say(m.AskLease, worker, member.incarnation, segment, ordinal, Done(batches), now=now)
        return [reply for _, reply in replies]


def donations(replies: list[Addressed]) -> list[tuple[bytes, tuple[str, ...]]]:
    return [(peer, reply.donate) for peer, reply in replies if isinstance(reply, e.Now) and reply.donate]


A, B, C = Member(0, 100), Member(1, 101), Member(2, 102)
EPOCH = Epoch(4, (A, B, C), "pipeline 2 has come")


def test_a_scheduler_that_was_started_again_hears_what_a_pipeline_beyond_the_plan_was_dealt(tmp_path: Path) -> None:
    """The log plays back."""
    log = EventLog(tmp_path / "log")
    d = ElasticDialogue(log=log)
    terms = d.service.members.membership.terms
    log.open(Beginning(registry.to_plain(T_INF), 1, 2, 0.0, "", terms))
    book = Book(S, (Lease(S, 2, 0, 1, 4, 8, 0.0, 2.0),), False, Done(1))
    d.say(e.Enrol, Worker(0, 2), C.incarnation, SAME, e.Resumes(EPOCH, (4,), book=book))
    d.resume(EPOCH, A, B)
    answered = [*d.ask(A, 0, 0), *d.ask(B, 0, 0)]
    leases = [reply.lease for reply in answered if isinstance(reply, m.Dealt)]
    assert [(lease.home, lease.start) for lease in leases] == [(0, 0), (1, 0)]
    (more,) = d.ask(C, 1, 4)
    assert isinstance(more, m.Dealt)
    log.close()
    (record,) = read_log(tmp_path / "log")
    assert list(record.differences()) == []


def test_a_run_goes_on_while_stages_of_a_pipeline_that_came_back_are_still_to_join() -> None:
    """The session of one that died with the start before is not looked at."""
    d, one_batch, again = ElasticDialogue(stages=2), Segment(5, 0, 0, 1), Member(1, 201)
    d.all_say(e.Enrol, SAME, stages=2)
    d.say(m.Join, Worker(1, 1), B.incarnation, None)
    d.say(e.Depart, Worker(0, 1), B.incarnation, False, "OSError: gone")
    for stage in (0, 1):
        replies = d.say(e.Enrol, Worker(stage, 1), again.incarnation, SAME)
    ((peer, (transfer,)),) = donations(replies)
    assert peer == e.peer_of(Worker(0, 0), A.incarnation)
    d.all_say(e.TellSnapshot, transfer, 3, of=(A,), stages=2)
    d.all_say(e.TellReceived, transfer, 3, of=(again,), stages=2)
    for stage in (0, 1):
        assert isinstance(d.ask(A, 0, 0, stage=stage, segment=one_batch)[0], m.Dealt)
    assert isinstance(d.ask(again, 0, 0, segment=one_batch)[0], m.Dealt)
    ordinal = 1
    for stage in (0, 1):
        while d.ask(A, ordinal, 1, stage=stage, segment=one_batch):
            ordinal += 1
    assert [(row.stage, row.pipeline, row.state) for row in d.service.status(0.0).workers()] == [(1, 1, "lost")]
    for now in (2.0, 4.0, 6.0, 8.0, 10.0):
        for member in (A, again):
            for stage in (0, 1):
                d.say(e.Beat, Worker(stage, member.pipeline), member.incarnation, (), 3, True, now=now)
        d.tick(now)
    assert d.service.failure is None


def test_a_leave_outdates_a_join_that_waits_for_a_process_group() -> None:
    """Else all would wait for groups with a worker that is at a pause."""
    d = ElasticDialogue(LocalSGD(every=1))
    epoch = Epoch(4, (A, B), "pipeline 1 has come")
    d.all_say(e.Enrol, SAME, e.Resumes(epoch, (), heard=3, joined=True))
    assert d.say(m.Ready, Worker(0, 1), B.incarnation, 4) == [], "it is told to join, which it has done"
    d.say(m.Leave, Worker(0, 1), B.incarnation)
    d.all_hold(5)
    replies = d.say(m.Ready, Worker(0, 0), A.incarnation, 4) + d.service.tick(0.0)
    assert [reply.group.members for _, reply in replies if isinstance(reply, m.Answer)] == [(Worker(0, 0),)]


@pytest.mark.parametrize(("config", "at_once"), [(OuterRounds(4), True), (LocalSGD(every=1), False)])
def test_a_join_waits_for_a_process_group_unless_rounds_are_apart(config: PolicyConfig, at_once: bool) -> None:
    d, third = ElasticDialogue(config), Member(2, 303)
    epoch = Epoch(4, (A, B, third), "pipeline 2 has come")
    d.all_say(e.Enrol, SAME, e.Resumes(epoch, (4,), heard=3, joined=True))
    d.say(e.Enrol, Worker(0, 2), third.incarnation, SAME, e.Resumes(epoch, (), heard=3))
    d.all_hold(4)
    trains = m.routing_id(Worker(0, 2), third.incarnation)
    replies = d.say(m.Join, Worker(0, 2), third.incarnation, None)
    assert [isinstance(reply, e.Noted) for peer, reply in replies if peer == trains] == [True] * at_once
    replies = d.holds(Worker(0, 2), third, 4)
    assert [isinstance(reply, e.Noted) for peer, reply in replies if peer == trains] == [True] * (not at_once)


def equal_replicas(stages: int = 1) -> ElasticDialogue:
    """Pipelines 0 and 1 of a run whose replicas are equal have enrolled, and hold process groups of epoch 1."""
    d = ElasticDialogue(AllPresent(), stages)
    d.all_say(e.Enrol, SAME, stages=stages)
    d.all_hold(1, stages=stages)
    return d


def test_who_shares_no_process_group_with_its_neighbour_goes_on_alone_until_all_make_another_one() -> None:
    """A pair is not kept until the other one, which computes, has made its process group."""
    d, first, second = ElasticDialogue(ADPSGD(asynchronous=True)), Worker(0, 0), Worker(0, 1)
    d.all_say(e.Enrol, SAME)
    d.all_say(m.Join, None)
    assert d.groups(d.say(m.Ready, first, A.incarnation, 0)) == [(0,)]
    d.all_hold(1)
    replies = d.say(m.Ready, first, A.incarnation, 1, now=1.0)
    assert d.groups(replies) == [(0, 1)]
    (invited,) = (peer for peer, reply in replies if isinstance(reply, m.Invitation))
    assert invited == e.peer_of(second, B.incarnation)
    d.say(e.Beat, second, B.incarnation, (), 1, True, now=2.0)  # an exchange has broken off
    assert d.groups(d.say(m.Ready, first, A.incarnation, 2, now=2.0)) == [(0,)]
    assert d.groups(d.say(m.Ready, first, A.incarnation, 3, now=3.0)) == [(0,)]
    d.tick(6.9)
    assert d.service.members.membership.epoch.number == 1
    d.tick(7.0)
    epoch = d.service.members.membership.epoch
    assert (epoch.number, epoch.tries) == (2, True)
    d.all_hold(2)
    assert d.groups(d.say(m.Ready, first, A.incarnation, 4, now=7.5)) == [(0, 1)]
    d.say(e.Beat, second, B.incarnation, (), 2, True, now=7.5)
    assert d.groups(d.say(m.Ready, first, A.incarnation, 5, now=7.5)) == [(0,)]
    d.say(e.Depart, second, B.incarnation, False, now=8.0)
    assert d.groups(d.say(m.Ready, first, A.incarnation, 6, now=8.0)) == [(0,)]
    d.tick(13.0)
    assert d.service.members.membership.epoch.number == 3, "that of the departure"


def test_replicas_that_are_to_stay_equal_set_out_together() -> None:
    d, first, second = equal_replicas(), Worker(0, 0), Worker(0, 1)
    assert d.say(m.Join, first, A.incarnation, None) == []
    assert [type(reply) for _, reply in d.say(m.Join, second, B.incarnation, None)] == [e.Noted, e.Noted]
    assert d.say(m.Ready, first, A.incarnation, 0) == []
    assert d.groups(d.say(m.Ready, second, B.incarnation, 0)) == [(0, 1)]
    assert d.say(m.Ready, first, A.incarnation, 1) == []
    assert d.groups(d.say(m.Leave, second, B.incarnation)) == [(0,)], "which had heard later that all is trained"
    d.say(m.Leave, first, A.incarnation)
    d.say(m.Join, second, B.incarnation, None)
    assert d.service.groups.sessions.active_in(0) == [], "it waits for the other"
    d.say(m.Join, first, A.incarnation, None)
    assert d.service.groups.sessions.active_in(0) == [first, second]


def come_back(d: ElasticDialogue, epoch: Epoch, *heard: int | None) -> None:
    """The processes of pipelines 0, 1, … were in rounds, and heard of groups up to these; one with None has joined
    none."""
    for member, highest in zip((A, B, C), heard, strict=False):
        last = -1 if highest is None else highest
        resumes = e.Resumes(epoch, (epoch.number,), heard=last, joined=highest is not None)
        d.say(e.Enrol, Worker(0, member.pipeline), member.incarnation, SAME, resumes)


def test_replicas_go_on_in_their_rounds_when_the_scheduler_is_started_again() -> None:
    d = ElasticDialogue(AllPresent())
    come_back(d, Epoch(4, (A, B), "pipeline 1 has come"), 8, 7)
    assert d.say(m.Ready, Worker(0, 0), A.incarnation, 5) == []
    assert d.groups(d.say(m.Ready, Worker(0, 1), B.incarnation, 5)) == [(0, 1)]


def test_one_that_joins_after_a_restart_is_not_held_back_until_the_others_pause() -> None:
    """They wait for it only then; what it lacks by that time is handed over, or it comes anew."""
    d, first, second = ElasticDialogue(AllPresent()), Worker(0, 0), Worker(0, 1)
    come_back(d, Epoch(4, (A, B), "pipeline 1 has come"), 8, None)
    assert [type(reply) for _, reply in d.say(m.Join, second, B.incarnation, None)] == [e.Noted]
    assert d.say(m.Ready, first, A.incarnation, 5, 8) == []
    assert d.groups(d.say(m.Ready, second, B.incarnation, 0, 8)) == [(0, 1)]


def test_a_new_start_takes_the_place_of_one_that_died_as_soon_as_it_had_come_back() -> None:
    """Its lifeline was not open yet, and the heartbeats of the new one are not its own."""
    d, first, again = ElasticDialogue(), Worker(0, 0), Member(0, 200)
    come_back(d, EPOCH, 8, 8)
    d.say(e.Enrol, first, again.incarnation, SAME)
    d.say(e.Enrol, Worker(0, 2), C.incarnation, SAME, e.Resumes(EPOCH, (4,), heard=8, joined=True))
    assert d.service.members.membership.roster.is_member(0, A.incarnation)
    for now in range(2, 14, 2):
        for member in (B, C, again):
            d.say(e.Beat, Worker(0, member.pipeline), member.incarnation, (), 5, True, now=float(now))
        d.tick(float(now))
    d.say(e.Enrol, first, again.incarnation, SAME, now=14.0)
    assert d.service.members.membership.states()[0].startswith("receives from")


def test_a_late_return_does_not_undo_a_leave() -> None:
    """The heartbeats' socket may be slower than the training's."""
    d, second, epoch = ElasticDialogue(), Worker(0, 1), Epoch(4, (A, B), "pipeline 1 has come")
    come_back(d, epoch, 8, 8)
    late = e.Enrol(second, B.incarnation, d.number + 1, SAME, e.Resumes(epoch, (4,), heard=8, joined=True))
    d.number += 1
    d.say(m.Leave, second, B.incarnation)
    d.service.handle(e.peer_of(second, B.incarnation), late, 0.0)
    assert d.service.groups.sessions.active_in(0) == [Worker(0, 0)]
    assert d.groups(d.say(m.Ready, Worker(0, 0), A.incarnation, 5)) == [(0,)], "none waits for one that stays away"


def stuck(replies: list[Addressed]) -> list[tuple[bytes, tuple[int, ...]]]:
    return [(peer, reply.stuck) for peer, reply in replies if isinstance(reply, e.Now) and reply.stuck]


@pytest.mark.parametrize("late", [False, True])
def test_an_exchange_that_a_member_never_heard_of_is_broken_off_at_once_after_a_restart(late: bool) -> None:
    """The scheduler before died when one of two members had heard of group 8: the other one gets another group. Either
    of them may come back first."""
    d, epoch = ElasticDialogue(), Epoch(4, (A, B, C), "pipeline 2 has come")
    exchange = Exchanging(8, (0, 1), 0)
    for member, heard in ((A, 8), (C, 9), (B, 7))[:: -1 if late else 1]:
        resumes = e.Resumes(epoch, (4,), heard=heard, joined=True)
        d.say(e.Enrol, Worker(0, member.pipeline), member.incarnation, SAME, resumes)
        if member == A:
            d.say(e.Beat, Worker(0, 0), A.incarnation, (4,), 4, True, 0, exchange)
    told = e.peer_of(Worker(0, 0), A.incarnation), (8,)
    assert stuck(d.service.tick(0.0)) == [told]
    d.say(e.Beat, Worker(0, 0), A.incarnation, (4,), 4, True, 0, None, (8, -1))
    group = Exchanging(10, (0, 1), 0)
    d.say(e.Beat, Worker(0, 0), A.incarnation, (4,), 4, True, 0, group)
    assert stuck(d.service.tick(3.0)) == [], "of this scheduler's groups all hear"


def test_a_stage_goes_on_whose_other_stage_was_answered_by_the_scheduler_before() -> None:
    """Which computes for the next iteration, and waits for what this one has still to train."""
    d, epoch = ElasticDialogue(PartialReduce(group_size=2), 2), Epoch(4, (A, B), "pipeline 1 has come")
    for member in (A, B):
        for stage, answered in ((0, 4), (1, 5)):
            resumes = e.Resumes(epoch, (4,), heard=8 + stage, joined=True, answered=answered)
            d.say(e.Enrol, Worker(stage, member.pipeline), member.incarnation, SAME, resumes)
    assert d.groups(d.say(m.Ready, Worker(0, 0), A.incarnation, 5)) == []
    assert d.groups(d.say(m.Ready, Worker(0, 1), B.incarnation, 5)) == [(0, 1)]


@pytest.mark.parametrize("dies", [False, True])
def test_a_newcomer_is_in_the_round_after_its_donor_has_copied(dies: bool) -> None:
    d, new, stages = equal_replicas(2), C.incarnation, range(2)
    d.all_say(m.Join, None, stages=2)
    replies = [d.say(e.Enrol, Worker(stage, 2), new, SAME) for stage in stages]
    ((peer, (transfer,)),) = [told for each in replies for told in donations(each)]
    donor, other = (A, B) if peer == e.peer_of(Worker(0, 0), A.incarnation) else (B, A)
    d.all_say(m.Ready, 7, of=(other,), stages=2)
    d.all_say(e.TellSnapshot, transfer, 7, of=(donor,), stages=2)
    assert d.all_say(m.Ready, 7, of=(donor,), stages=2) == [], "the newcomer is waited for"
    if dies:
        assert d.groups(d.say(e.Depart, Worker(1, 2), new, False)) == [(0, 1), (0, 1)]
        return
    d.all_say(e.TellReceived, transfer, 7, of=(C,), stages=2)
    d.all_hold(2, (A, B, C), 2)
    for stage in stages:
        assert [type(reply) for _, reply in d.say(m.Join, Worker(stage, 2), new, None)] == [e.Noted]
        assert d.groups(d.say(m.Ready, Worker(stage, 2), new, 7)) == [(0, 1, 2)]


def test_a_newcomer_whose_donor_dies_is_not_waited_for_until_another_one_has_copied() -> None:
    d, new = equal_replicas(), C.incarnation
    d.all_say(m.Join, None)
    replies = d.say(e.Enrol, Worker(0, 2), new, SAME)
    ((peer, (transfer,)),) = donations(replies)
    donor, other = (A, B) if peer == e.peer_of(Worker(0, 0), A.incarnation) else (B, A)
    d.say(e.TellSnapshot, Worker(0, donor.pipeline), donor.incarnation, transfer, 7)
    assert d.say(m.Ready, Worker(0, other.pipeline), other.incarnation, 7) == []
    replies = d.say(e.Depart, Worker(0, donor.pipeline), donor.incarnation, False)
    assert d.groups(replies) == [(other.pipeline,)]
    ((_, (again,)),) = donations(replies)
    d.say(e.TellSnapshot, Worker(0, other.pipeline), other.incarnation, again, 8)
    assert d.say(m.Ready, Worker(0, other.pipeline), other.incarnation, 8) == []


def broken_round() -> tuple[ElasticDialogue, Group]:
    """Of pipelines 0, 1 and 2, of which the last one lacks the outcome of the ninth round."""
    epoch = Epoch(4, (A, B, C), "pipeline 2 has come")
    d = ElasticDialogue(AllPresent())
    resumes = e.Resumes(epoch, (epoch.number,), heard=8, joined=True)
    d.all_say(e.Enrol, SAME, resumes, of=(A, B, C))
    d.tick(4.0)
    for member in (A, B, C):
        replies = d.say(m.Ready, Worker(0, member.pipeline), member.incarnation, 5, 8, now=4.0)
    (group,) = {reply.group for _, reply in replies if isinstance(reply, m.Answer)}
    assert len(group.members) == 3
    assert d.say(m.Ready, Worker(0, 2), C.incarnation, 6, 8, now=4.0) == [], "no other one has told what it has"
    return d, group


def handed(replies: list[Addressed]) -> list[tuple[int, ...]]:
    """The sources of the groups that went out, with those that are handed something over."""
    (invited,) = {reply.group for _, reply in replies if isinstance(reply, m.Invitation)}
    (answered,) = {reply.group for _, reply in replies if isinstance(reply, m.Answer)}
    assert invited == answered
    assert answered.source is not None
    others = [worker.pipeline for worker in answered.members if worker != answered.source]
    return [(answered.source.pipeline, *others)]


def test_who_has_the_outcome_of_a_round_hands_it_over_and_another_one_does_if_that_one_dies() -> None:
    d, _ = broken_round()
    assert handed(d.tells(A, 9)) == [(0, 2)], "its heartbeat is enough"
    d.say(e.Depart, Worker(0, 0), A.incarnation, False)
    assert d.say(m.Ready, Worker(0, 2), C.incarnation, 7, 8) == []
    assert handed(d.say(m.Leave, Worker(0, 1), B.incarnation, None, 9)) == [(1, 2)], "even if it has left"


def test_if_nobody_has_the_outcome_any_more_those_that_are_left_make_the_round_again() -> None:
    d, group = broken_round()
    assert d.say(m.Ready, Worker(0, 1), B.incarnation, 6, 8) == []
    replies = d.say(e.Depart, Worker(0, 0), A.incarnation, False)
    (again,) = {reply.group for _, reply in replies if isinstance(reply, m.Answer)}
    assert (again.source, again.members) == (None, (Worker(0, 1), Worker(0, 2)))
    assert again.sequence > group.sequence


def test_a_group_in_which_something_is_handed_over_waits_for_a_process_group_unless_its_source_dies() -> None:
    d, _ = broken_round()
    d.say(e.Beat, Worker(0, 2), C.incarnation, (), 4, True)
    assert not [reply for _, reply in d.tells(A, 9) if isinstance(reply, m.Answer)]
    replies = d.say(e.Depart, Worker(0, 0), A.incarnation, False)
    assert d.groups(replies) == [(0, 2)], "it finds that the source is gone, and is ready again"
    assert d.say(m.Ready, Worker(0, 2), C.incarnation, 7, 8) == []
    assert not [reply for _, reply in d.tells(B, 9) if isinstance(reply, m.Answer)]
    epoch = d.service.members.membership.epoch.number
    d.holds(Worker(0, 1), B, 4, epoch)
    assert handed(d.holds(Worker(0, 2), C, epoch)) == [(1, 2)]


def test_the_exchange_of_a_round_that_a_member_lacks_is_broken_off_for_all_that_are_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The one that lacks it may never have begun it."""
    d, group = broken_round()
    exchange = Exchanging(group.sequence, (0, 1, 2), 0)
    d.say(e.Beat, Worker(0, 0), A.incarnation, (4,), 4, True, 0, exchange, now=4.0)
    assert stuck(d.service.tick(4.1)) == [(e.peer_of(Worker(0, 0), A.incarnation), (group.sequence,))]
    assert "stuck" not in caplog.text


def test_a_new_epoch_is_one_message_for_all_that_are_told_the_same_and_again_for_those_that_have_not_seen_it() -> None:
    d, members = ElasticDialogue(), tuple(Member(i, 100 + i) for i in range(64))
    d.resume(Epoch(4, members, "pipeline 63 has come"), *members)

    def beat(member: Member, seen: int, epoch: int) -> m.Reply | e.Reply:
        return d.say(e.Beat, Worker(0, member.pipeline), member.incarnation, (), epoch, True, seen)[-1][1]

    first = beat(members[0], 0, 0)
    assert isinstance(first, e.Now)
    assert first.line is not None
    assert first.epoch is not None
    for member in members:
        now = beat(member, 0, 0)
        assert isinstance(now, e.Now)
        assert isinstance(beat(member, now.version, 5), e.Noted), "it has seen all"
    nonces = {of.pipeline: nonce for nonce, (of, _) in d.service.lines._given.items()}
    told = [reply for _, reply in d.service.line_ended(nonces[9], 1.0) if isinstance(reply, e.Now)]
    (now,) = {id(reply): reply for reply in told if reply.over is None}.values()
    assert len(told) == 64, "63 others, and the one that must end"
    assert (now.epoch, now.line) == (d.service.members.membership.epoch, None)
    again = beat(members[0], now.version - 1, 5)
    assert isinstance(again, e.Now)
    assert again.epoch == now.epoch
    later = beat(members[0], again.version - 1, 6)
    assert isinstance(later, e.Now)
    assert later.epoch is None, "it is known to have that"


def test_a_scheduler_of_unlike_pipelines_serves_an_ordinary_run_only() -> None:
    service = SchedulerService(T_INF, 2, 2, elastic=ElasticConfig.of_fixed(2, depths=(1, 2)))
    for worker in (Worker(0, 1), Worker(0, 2)):
        ((_, refused), *_) = service.handle(e.peer_of(worker, 9), e.Enrol(worker, 9, 1, SAME), 0.0)
        assert isinstance(refused, e.Refused)
        assert "pipelines do not come and go" in refused.reason or "serves 2 pipelines" in refused.reason
