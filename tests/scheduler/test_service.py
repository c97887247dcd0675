"""The scheduler without sockets: frames and times in, whole lists of frames out."""

from __future__ import annotations

import pytest

from lightning_sdpipe.policies import Group, Reason, Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.registry import build
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.service import SchedulerService

A, B = Worker(0, 0), Worker(0, 1)
Addressed = tuple[bytes, m.Reply]


class Dialogue:
    """Talks to a service as workers would; numbers the requests."""

    def __init__(self, spec: PolicyConfig | None = None, workers: int = 2) -> None:
        self.service = SchedulerService(build(spec or AllReduceModels(), 1, workers), workers, worker_timeout=8.0)
        self.number = 0

    def say(self, kind: type, worker: Worker, *fields: object, now: float = 0.0, session: int = 7) -> list[Addressed]:
        self.number += 1
        request = kind(worker, session, self.number, *fields)
        identity = m.heartbeat_id(worker) if kind is m.Heartbeat else m.routing_id(worker)
        return decoded(self.service.handle(identity, m.encode(request), now))

    def acknowledged(self, worker: Worker) -> list[Addressed]:
        return [(m.routing_id(worker), m.Acknowledged(self.number))]


def decoded(frames: list[tuple[bytes, bytes]]) -> list[Addressed]:
    return [(identity, m.decode_reply(frame)) for identity, frame in frames]


def group(*members: Worker, sequence: int, reason: Reason = Reason.EVERYBODY_CAME) -> Group:
    return Group(members, (1 / len(members),) * len(members), sequence, reason)


def test_repeating_a_request_is_harmless() -> None:
    d = Dialogue()
    for worker in (A, B, A):
        assert d.say(m.Join, worker) == d.acknowledged(worker)
    assert d.say(m.Ready, A, 4) == []
    assert d.say(m.Ready, A, 4) == []
    answers = d.say(m.Ready, B, 5)
    expected = m.Answer(group(A, B, sequence=0), (4, 5))
    assert answers == [(b"0.0", expected), (b"0.1", expected)]
    assert d.say(m.Ready, A, 4) == answers[:1], "the answer may have been lost"
    for _ in range(2):
        assert d.say(m.Leave, A) == d.acknowledged(A)
    assert d.service.refused == {}


def test_a_frame_that_was_seen_before_changes_nothing() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    leave = m.encode(m.Leave(A, 7, 2))
    d.number = 2
    assert len(d.service.handle(b"0.0", leave, 0.0)) == 1
    d.say(m.Join, A)
    assert d.service.handle(b"0.0", leave, 0.0) == []
    assert d.say(m.Heartbeat, A, True, False) == [(b"0.0.heartbeat", m.Pulse(None))]
    assert d.service.refused == {"replayed": 1}


def test_frames_of_an_ended_session_change_nothing() -> None:
    d = Dialogue()
    d.say(m.Join, A, session=1)
    assert d.say(m.Join, A, session=2) == d.acknowledged(A)
    for kind, fields in ((m.Join, ()), (m.Ready, (0,)), (m.Leave, ()), (m.Failed, ("no",))):
        assert d.say(kind, A, *fields, session=1) == []
    assert d.service.failure is None
    assert d.service.refused == {"replayed": 4}


def test_nobody_speaks_for_another() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    d.say(m.Join, B)
    for identity in (b"0.1", b"0.1.heartbeat", b"0.0.", b"\x00\x01", b""):
        assert d.service.handle(identity, m.encode(m.Leave(A, 7, 50)), 0.0) == []
    assert d.service.refused == {"impersonating": 5}
    assert d.say(m.AskMissing, A) == [(b"0.0", m.Missing(d.number, (A, B)))]


def test_frames_that_make_no_sense_change_nothing() -> None:
    d = Dialogue(workers=1)
    d.say(m.Join, A)
    ready = m.encode(m.Ready(A, 7, 2, 0))
    nonsense = [b"", b"\x01", b"\x02" + ready[1:], ready[:-1], ready + b"\x00", ready * 100_000]
    for frame in nonsense:
        assert d.service.handle(b"0.0", frame, 0.0) == []
    assert d.service.refused == {"malformed": len(nonsense)}
    assert len(d.service.handle(b"0.0", ready, 0.0)) == 1


def test_a_worker_that_does_not_exist_is_refused() -> None:
    d = Dialogue()
    ((_, reply),) = d.say(m.Join, Worker(0, 2))
    assert isinstance(reply, m.Refused)
    assert "does not exist" in reply.reason
    assert d.service.status(0.0).workers == []


def test_a_second_ready_is_refused_while_the_first_waits() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    d.say(m.Join, B)
    d.say(m.Ready, A, 0)
    ((_, reply),) = d.say(m.Ready, A, 1)
    assert reply == m.Refused(d.number, "iteration 0 waits for an answer")


def test_a_restarted_worker_takes_the_place_of_the_old_one() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    d.say(m.Join, B)
    d.say(m.Ready, A, 0)
    assert d.say(m.Join, A, session=8) == d.acknowledged(A)
    assert d.say(m.Ready, B, 0) == []
    assert len(d.say(m.Ready, A, 0, session=8)) == 2


def test_a_silent_worker_is_lost_and_may_come_back() -> None:
    d = Dialogue()
    for worker in (A, B):
        d.say(m.Join, worker)
        d.say(m.Heartbeat, worker, True, False)
    d.say(m.Ready, A, 0, now=4.0)
    d.say(m.Heartbeat, A, True, False, now=7.0)
    assert d.service.deadline() == 2.0
    for now in (2.0, 4.0, 6.0, 7.5):
        assert d.service.tick(now) == []
    assert decoded(d.service.tick(9.0)) == [
        (b"0.0", m.Lost(B, 9.0)),
        (b"0.0", m.Answer(group(A, sequence=0, reason=Reason.WORKER_LOST), (0,))),
    ]
    assert [w.state for w in d.service.status(9.0).workers] == ["compute", "lost"]
    ((_, reply),) = d.say(m.Heartbeat, B, True, False, now=10.0)
    assert reply == m.Unknown(d.number)
    assert d.say(m.Join, B, True, None, now=10.0) == d.acknowledged(B)
    assert [w.state for w in d.service.status(9.0).workers] == ["compute", "compute"]


def test_a_worker_without_heartbeats_is_never_missed() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    for now in range(100):
        assert d.service.tick(float(now)) == []


def test_a_scheduler_that_was_held_up_blames_nobody() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    d.say(m.Heartbeat, A, True, False)
    assert d.service.tick(100.0) == []
    d.say(m.Heartbeat, A, True, False, now=100.1)  # it lay unread
    assert d.service.tick(102.0) == []
    assert d.service.status(102.0).workers[0].state == "compute"


def test_a_late_rejoin_does_not_undo_a_leave() -> None:
    """The heartbeats' socket may be slower than the training's."""
    d = Dialogue()
    d.say(m.Join, A)
    d.say(m.Heartbeat, A, True, False)
    late = m.encode(m.Join(A, 7, 10, True, None))
    d.number = 10
    d.say(m.Leave, A)
    assert d.service.handle(b"0.0.heartbeat", late, 0.0) == []
    assert d.service.status(0.0).workers[0].state == "away"


def test_the_first_failure_reaches_all_and_stays_the_first() -> None:
    d = Dialogue()
    d.say(m.Join, A)
    d.say(m.Join, B)
    abort = m.Abort(m.Failure(B, "out of memory"))
    assert d.say(m.Failed, B, "out of memory") == [(b"0.0", abort), (b"0.1", abort)]
    assert d.say(m.Failed, A, "lost its neighbour") == [(b"0.0", abort), (b"0.1", abort)]
    assert d.say(m.Ready, A, 0) == [(b"0.0", abort)]
    assert d.say(m.Heartbeat, A, True, False) == [(b"0.0.heartbeat", m.Pulse(abort.failure))]
    assert d.say(m.AskFailure, Worker(0, 1)) == [(b"0.1", m.FirstFailure(d.number, abort.failure))]


class TestRestart:
    """A scheduler that died comes back knowing nothing; the workers know."""

    def restarted(self) -> Dialogue:
        """The old one answered A and B with group 41 and died before B heard of it."""
        d = Dialogue()
        assert d.say(m.Ready, A, 6) == [(b"0.0", m.Unknown(1))]
        assert d.say(m.Join, A, True, m.Answer(group(A, B, sequence=41), (5, 5))) == d.acknowledged(A)
        assert d.say(m.Ready, A, 6) == []
        return d

    def test_an_answer_that_some_heard_is_given_to_the_others(self) -> None:
        d = self.restarted()
        d.say(m.Join, B, True, m.Answer(group(A, B, sequence=40), (4, 4)))
        assert d.say(m.Ready, B, 5) == []
        assert d.service.deadline() < 0.0, "it is due at once"
        same = m.Answer(group(A, B, sequence=41), (5, 5))
        assert decoded(d.service.tick(0.0)) == [(b"0.1", same)]
        new = m.Answer(group(A, B, sequence=42), (6, 6))
        assert d.say(m.Ready, B, 6) == [(b"0.0", new), (b"0.1", new)]

    def test_who_does_not_come_back_is_waited_for_no_longer_than_the_grace(self) -> None:
        d = self.restarted()
        assert d.service.tick(9.9) == []
        ((identity, answer),) = decoded(d.service.tick(10.0))
        assert identity == b"0.0"
        assert answer == m.Answer(group(A, sequence=42), (6,))

    def test_it_waits_for_nobody_else_once_all_are_back(self) -> None:
        d = Dialogue(NoSync())
        d.say(m.Join, A, True, None)
        d.say(m.Ready, A, 0)
        d.say(m.Join, B, True, None)
        ((identity, _),) = d.service.tick(0.0)
        assert identity == b"0.0"

    def test_who_left_while_it_was_held_is_not_answered(self) -> None:
        d = self.restarted()
        d.say(m.Leave, A)
        assert d.service.tick(100.0) == []


def test_status_counts_what_passed_by() -> None:
    d = Dialogue(NoSync())
    d.say(m.Join, A)
    d.say(m.Join, B)
    for k in range(3):
        d.say(m.Ready, A, k, now=float(k))
    d.say(m.Ready, B, 0, now=3.0)
    d.service.handle(b"x", b"y", 3.0)
    status = d.service.status(4.0)
    assert (status.signals, status.groups_by_size, status.refused) == (4, {1: 4}, {"malformed": 1})
    assert status.signals_per_second == pytest.approx(1.0)
    assert [(w.iteration, w.staleness) for w in status.workers] == [(2, 0), (0, 2)]
    assert status.workers[1].last_group == group(B, sequence=3, reason=Reason.LOCAL_STEP)
