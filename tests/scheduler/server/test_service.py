"""The scheduler without sockets: messages and times in, whole lists of messages out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_sdpipe.dealing.leases import Done, Segment
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.policies import Decision, Group, GroupPolicy, PolicyConfig, Reason, Worker, registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.events import SEGMENT
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.outer_rounds import OuterRounds
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.status_page import render
from lightning_sdpipe.scheduler.rows import About, NewRows
from lightning_sdpipe.scheduler.server.service import SchedulerService
from tests.scheduler.rows import rows

A, B = Worker(0, 0), Worker(0, 1)
Addressed = tuple[bytes, m.Reply | e.Reply]


def line(worker: Worker, incarnation: int = 7) -> bytes:
    """By which its training is answered."""
    return m.routing_id(worker, incarnation)


def beats(worker: Worker, incarnation: int = 7) -> bytes:
    """By which its other thread is."""
    return e.peer_of(worker, incarnation)


def of_interest(replies: list[Addressed]) -> list[Addressed]:
    """Without what is true now, unless it is the end."""
    return [(peer, reply) for peer, reply in replies if not isinstance(reply, e.Now) or reply.over is not None]


class Dialogue:
    """Talks to a service as workers would, which enrol before they say anything; numbers the requests, and has it look
    for contradictions in itself."""

    def __init__(
        self,
        config: PolicyConfig | None = None,
        joined: tuple[Worker, ...] = (),
        workers: int = 2,
        stages: int = 1,
        **options: Any,
    ) -> None:
        self.service = SchedulerService(config or AllReduceModels(), stages, workers, worker_timeout=8.0, **options)
        self.number = 0
        self.enrolled: set[tuple[Worker, int]] = set()
        for worker in joined:
            self.join(worker)

    def enrol(self, worker: Worker, incarnation: int, now: float) -> None:
        if (worker, incarnation) not in self.enrolled:
            self.enrolled.add((worker, incarnation))
            self.number += 1
            self.hear(beats(worker, incarnation), e.Enrol(worker, incarnation, self.number, FIXED), now)

    def say(self, kind: type, worker: Worker, *fields: Any, now: float = 0.0, incarnation: int = 7) -> list[Addressed]:
        self.enrol(worker, incarnation, now)
        self.number += 1
        name = beats if issubclass(kind, e.MemberRequest) else line
        return self.hear(name(worker, incarnation), kind(worker, incarnation, self.number, *fields), now)

    def join(self, worker: Worker, now: float = 0.0, incarnation: int = 7) -> list[Addressed]:
        return self.say(m.Join, worker, None, now=now, incarnation=incarnation)

    def beat(
        self,
        worker: Worker,
        joined: bool,
        rows: NewRows | None = None,
        dealt: tuple[Segment, Done] | None = None,
        now: float = 0.0,
        awaits: tuple[str, ...] = (),
    ) -> list[Addressed]:
        """What it is told, but for that the beat was heard."""
        known = self.service.members.membership.epoch.number
        beliefs = (), known, True, 0, None, (-1, -1), (), -1, joined, rows, dealt, None, awaits
        replies = self.say(e.Beat, worker, *beliefs, now=now)
        return [(peer, reply) for peer, reply in replies if not isinstance(reply, e.Noted)]

    def hear(self, identity: bytes, request: m.Request | e.Request, now: float = 0.0) -> list[Addressed]:
        replies = self.service.handle(identity, request, now)
        self.service.validate()
        return of_interest(replies)

    def tick(self, now: float) -> list[Addressed]:
        replies = self.service.tick(now)
        self.service.validate()
        return of_interest(replies)

    def states(self) -> list[str]:
        return [row.state for row in self.service.status(0.0).workers()]

    def noted(self, worker: Worker, incarnation: int = 7) -> list[Addressed]:
        return [(line(worker, incarnation), e.Noted(self.number))]


def group(*members: Worker, sequence: int, reason: Reason = Reason.EVERYBODY_CAME) -> Group:
    return Group(members, (1 / len(members),) * len(members), sequence, reason)


def test_repeating_a_request_is_harmless() -> None:
    d = Dialogue()
    for worker in (A, B, A):
        assert d.join(worker) == d.noted(worker)
    assert d.say(m.Ready, A, 4) == []
    assert d.say(m.Ready, A, 4) == [(line(A), e.Waits(d.number, f"it waits for {B}"))], "which is who is missing"
    answers = d.say(m.Ready, B, 5)
    expected = m.Answer(group(A, B, sequence=0), (4, 5))
    assert answers == [(line(A), expected), (line(B), expected)]
    assert d.say(m.Ready, A, 4) == answers[:1], "the answer may have been lost"
    for _ in range(2):
        assert d.say(m.Leave, A) == d.noted(A)
    assert d.service.refused == {}


def test_one_start_of_a_worker_does_not_speak_in_another_that_lives() -> None:
    d = Dialogue(joined=(A,))
    ((peer, stranger),) = d.join(A, incarnation=8)
    assert (peer, type(stranger)) == (beats(A, 8), e.Stranger), "it has not been let in"
    for kind, fields in ((m.Ready, (0,)), (m.Leave, ()), (e.Depart, (False, "no"))):
        d.say(kind, A, *fields, incarnation=8)
    assert d.states() == ["computing"]
    assert d.service.failure is None
    d.beat(A, True, now=0.1)
    d.number += 1
    d.hear(beats(A, 9), e.Enrol(A, 9, d.number, FIXED), 0.2)
    for now in (0.3, 1.0):
        replies = d.say(e.Beat, A, (), 0, True, now=now)
    assert [(peer, reply.reason[:44]) for peer, reply in replies if isinstance(reply, e.Refused)] == [
        (beats(A, 9), "pipeline 0 is trained by another job, which ")
    ]


def test_a_run_that_has_finished_makes_room_for_the_next_one() -> None:
    d = Dialogue()
    for run in (7, 8, 9):
        for worker in (A, B):
            assert d.join(worker, incarnation=run) == d.noted(worker, run)
        d.say(m.Ready, A, 0, incarnation=run)
        answers = d.say(m.Ready, B, 0, incarnation=run)
        assert [peer for peer, reply in answers if isinstance(reply, m.Answer)] == [line(A, run), line(B, run)]
        d.say(e.Depart, A, True, incarnation=run)
        told = d.say(e.Depart, B, True, incarnation=run)
        ends = {
            (peer, reply.over.failed) for peer, reply in told if isinstance(reply, e.Now) and reply.over is not None
        }
        assert ends == {(beats(A, run), False), (beats(B, run), False)}
    assert d.service.refused == {}


def test_nobody_speaks_for_another() -> None:
    d = Dialogue(joined=(A, B))
    for identity in (line(B), beats(B), line(A, 8), b"0.0", b"\x00\x01", b""):
        assert d.hear(identity, m.Leave(A, 7, 50)) == []
    assert d.service.refused == {"impersonating": 6}
    assert d.states() == ["computing", "computing"], "it has not left"


def test_a_worker_that_does_not_exist_is_refused() -> None:
    d = Dialogue()
    ((_, reply),) = d.join(Worker(0, 2))
    assert isinstance(reply, e.Refused)
    assert "does not exist" in reply.reason
    assert d.states() == []


def test_a_scheduler_that_is_cut_off_from_all_calls_nobody_lost() -> None:
    d = Dialogue()
    for worker in (A, B):
        d.join(worker)
        d.beat(worker, True)
    d.beat(A, True, now=4.0)
    for now in (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0):
        assert d.tick(now) == []
    d.beat(A, True, now=15.0)
    assert d.tick(16.0) == []
    d.beat(B, True, now=17.0)
    for now in (18.0, 20.0, 22.0):
        assert d.tick(now) == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_worker_is_waited_for_as_long_as_its_machine_answers(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    d = Dialogue()
    monkeypatch.setattr(d.service.lines, "answers", lambda worker, incarnation, within: answers)
    for worker in (A, B):
        d.say(m.Join, worker, None, About(f"host {worker.pipeline}", "cpu", worker.pipeline))
        d.beat(worker, True)
    d.say(m.Ready, A, 0, now=4.0)
    assert d.service.deadline() == 2.0
    for now in (2.0, 4.0, 6.0, 7.5):
        assert d.tick(now) == []
    d.beat(A, True, now=8.5)
    replies, failure = d.tick(9.0), d.service.failure
    if answers:
        assert (replies, failure) == ([], None)
        d.tick(11.0)
        assert d.beat(B, True, now=12.0) == []
        assert {peer for peer, _ in d.say(m.Ready, B, 0, now=12.0)} == {line(A), line(B)}, "it was only stopped"
    else:
        reason = "it was silent for 9 s, and its process on host 1 cannot be reached; check that its machine and the "
        assert failure is not None
        assert (failure.worker, failure.reason) == (B, f"{reason}network to it are up")
        assert {(beats(worker), e.Now(0, over=failure)) for worker in (A, B)} <= set(replies)


@pytest.mark.parametrize("waiting", [1, 2, 3])
def test_the_run_ends_when_all_workers_wait_and_no_byte_moves(waiting: int) -> None:
    """Those that cannot reach each other are named first, of a run with all of its workers."""
    d, c = Dialogue(NoSync(), workers=3), Worker(0, 2)
    said = {A: ("receiving",), B: ("averaging", "10.0.0.9"), c: ("averaging",)}
    for now in (0.0, 2.0, 4.0):
        for number, worker in enumerate((B, c, A)):
            d.join(worker, now=now)
            d.beat(worker, True, now=now, awaits=said[worker] if number < waiting else ())
        assert bool(d.tick(now)) == (waiting == 3 and now == 2.0)
    failure = d.service.failure
    assert (failure is None) == (waiting < 3)
    if failure is not None:
        assert failure.worker == B
        named = f"worker {B} is averaging, and nothing that it sent to 10.0.0.9 is acknowledged; worker {A} is recei"
        assert f"no byte has come or gone between them for 8 s: {named}" in failure.reason


def test_a_scheduler_that_was_held_up_blames_nobody() -> None:
    d = Dialogue(joined=(A,))
    d.beat(A, True)
    assert d.tick(100.0) == []
    d.beat(A, True, now=100.1)  # it lay unread
    assert d.tick(102.0) == []
    assert d.states() == ["computing"]


def test_the_first_failure_reaches_all_and_stays_the_first() -> None:
    d = Dialogue(joined=(A, B))
    over = e.Now(0, over=e.End("out of memory", True, True, B))
    everywhere = {(name(worker), over) for worker in (A, B) for name in (line, beats)}
    assert set(d.say(e.Depart, B, False, "out of memory")) == everywhere | {(beats(B), e.Noted(d.number))}
    assert d.say(e.Depart, A, False, "lost its neighbour") == [(beats(A), e.Noted(d.number))]
    assert d.service.failure == over.over
    assert d.say(m.Ready, A, 0) == [(line(A), over)]
    assert d.beat(A, True) == [(beats(A), over)]
    ((_, reply),) = d.say(m.Hello, A, None, incarnation=8)
    assert isinstance(reply, e.Refused)
    assert "failed first: out of memory; start it again for the next run" in reply.reason


def test_status_counts_what_passed_by() -> None:
    d = Dialogue(NoSync(), joined=(A, B))
    for k in range(3):
        d.say(m.Ready, A, 3 * SEGMENT + k, now=float(k))  # as with overlap="free", whose numbers people do not see
    d.say(m.Ready, B, 3 * SEGMENT, now=3.0)
    d.service.ignore("malformed", b"x", "no message")
    status = d.service.status(4.0)
    assert (status.signals, status.groups_by_size, status.refused) == (4, {1: 4}, {"malformed": 1})
    assert status.signals_per_second == pytest.approx(1.0)
    assert [(w.iteration, w.staleness) for w in status.workers()] == [(2, 0), (0, 2)]
    assert status.workers()[1].last_group == 3


def test_the_policy_hears_what_the_models_of_workers_contain() -> None:
    d = Dialogue(OuterRounds(None), joined=(A, B))
    assert d.say(m.Ready, A, 2, 5) == []
    replies = [reply for _, reply in d.say(m.Ready, B, 2, 4)]
    assert [reply.group.source for reply in replies if isinstance(reply, m.Answer | m.Invitation)] == [A, A]


class Unruly(PolicyConfig, frozen=True):
    """Does wrong at the first ready."""

    mistake: str

    def make_policy(self, num_stages: int, num_pipelines: int) -> GroupPolicy:
        return UnrulyPolicy(self.mistake, num_stages, num_pipelines)


class UnrulyPolicy(GroupPolicy):
    def __init__(self, mistake: str, *mesh: int) -> None:
        super().__init__(*mesh)
        self.mistake: str | None = mistake
        self.due: float | None = None

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        match self.mistake:
            case "raises":
                raise KeyError("who")
            case "weights":
                return [Group((worker,), (0.5,), 0, "mine")]
            case "not waiting":
                return [Group((A, B), (0.5, 0.5), 0, "mine")]
            case "never joined":
                return [Group((Worker(0, 0), Worker(0, 2)), (0.5, 0.5), 0, "mine")]
            case "nothing":
                return None  # type: ignore[return-value]
        self.due = now + 1.0
        return []

    def sync_graph(self, stage: int) -> None:
        raise IndexError(stage)

    def time_passed(self, now: float) -> list[Decision]:
        if self.due is not None and self.due <= now:
            raise ZeroDivisionError("division by zero")
        return []

    def deadline(self) -> float | None:
        return self.due


class TestAPolicyThatFails:
    """The run ends, for everybody and with its name; nobody waits for ever."""

    @pytest.mark.parametrize(
        ("mistake", "message"),
        [
            ("raises", "Ready.*KeyError: 'who'"),
            ("weights", "BrokenRule.*weights"),
            ("not waiting", r"cannot go out: worker \(stage 0, pipeline 1\) gets a group while it is computing"),
            ("never joined", "cannot go out.*pipeline=2"),
            ("nothing", "TypeError"),
        ],
    )
    def test_when_it_decides(self, mistake: str, message: str) -> None:
        d = Dialogue(Unruly(mistake), joined=(A, B), workers=3)
        replies = d.say(m.Ready, A, 0)
        assert {peer for peer, reply in replies if isinstance(reply, e.Now)} == {
            *(line(A), beats(A), line(B), beats(B))
        }
        failure = d.service.failure
        assert failure is not None
        assert re.search(f"the scheduler failed first: its policy tests.*Unruly failed on.*{message}", str(failure))
        assert d.say(m.Ready, B, 0) == [(line(B), e.Now(0, over=failure))]
        assert d.say(m.Leave, A) == d.noted(A)
        assert d.beat(B, True) == [(beats(B), e.Now(0, over=failure))]

    def test_when_time_passes(self) -> None:
        d = Dialogue(Unruly("time"), joined=(A,))
        assert d.say(m.Ready, A, 0, now=1.0) == []
        assert d.service.deadline() == 2.0
        assert [stage.groups[0].pipelines for stage in d.service.status(1.0).stages] == [[0]], "from the log"
        replies = d.tick(2.0)
        assert [peer for peer, _ in replies] == [line(A), beats(A)]
        assert "failed on Tick(): ZeroDivisionError: division by zero" in str(d.service.failure)
        assert d.tick(2.0) == []
        assert d.service.deadline() == 4.0, "it is not due again and again"
        assert d.tick(3.0) == []


def test_the_status_of_thousands_of_workers_is_a_fraction_of_the_largest_reply() -> None:
    for config in (AllReduceModels(), SemiDecentralized()):
        stages, pipelines = 8, 256
        service = SchedulerService(config, stages, pipelines)
        workers = [Worker(j, i) for j in range(stages) for i in range(pipelines)]
        for worker in workers:
            service.handle(beats(worker, 1), e.Enrol(worker, 1, 1, FIXED), 0.0)
            service.handle(line(worker, 1), m.Join(worker, 1, 1, None), 0.0)
        for k in range(4):
            for worker in workers:
                service.handle(line(worker, 1), m.Ready(worker, 1, 2 + k, k), k + 0.5)
        for worker in workers:
            beat = e.Beat(worker, 1, 9, (), 1, True, joined=True, rows=rows(3, 4, 123_456, 12_300))
            service.handle(beats(worker, 1), beat, 5.0)
        frame = m.encode(m.StatusReply(service.status(6.0)))
        assert len(frame) < m.MAX_REPLY_BYTES / 8
        reply = m.decode_reply(frame)
        assert isinstance(reply, m.StatusReply)
        shown = reply.status.workers()
        assert [Worker(row.stage, row.pipeline) for row in shown] == workers
        assert {(row.iteration, row.step_seconds) for row in shown} == {(3, 0.123456)}


def test_a_policy_without_a_graph_of_its_own_has_one_of_its_decisions() -> None:
    d = Dialogue(LocalSGD(every=2), workers=3)
    for worker in (A, B, Worker(0, 2)):
        d.join(worker)
    for k in range(3):
        for worker in (A, B):
            d.say(m.Ready, worker, k)
        if k == 0:
            d.say(m.Leave, Worker(0, 2))
    (stage,) = d.service.status(0.0).stages
    assert [row.pipelines for row in stage.groups] == [[0, 1, 2], [0, 1], [0], [1], [0, 1]]
    assert stage.components() == [{0, 1}]
    assert stage.rounds_since_met() == {(0, 1): 1}


def test_another_mesh_is_refused_by_name() -> None:
    d = Dialogue()
    for kind in (m.Hello, m.Join):
        ((_, reply),) = d.say(kind, A, (4, 2))
        assert isinstance(reply, e.Refused)
        said = (
            "a run of 1 stage × 2 pipelines, and worker (stage 0, pipeline 0) belongs to one of 4 stages × 2 pipelines"
        )
        assert said in reply.reason
        assert "--stages 4 --pipelines 2" in reply.reason
    ((_, reply),) = d.say(m.Hello, A, (1, 2))
    assert isinstance(reply, m.Welcome)
    assert registry.from_json(reply.policy) == AllReduceModels()


class TestPipelinesOfUnlikeDepths:
    """One group, an answer for each worker of its pipelines."""

    FIRST, LAST = Worker(0, 1), Worker(1, 1)

    def dialogue(self, config: PolicyConfig | None = None) -> Dialogue:
        d = Dialogue(config, elastic=ElasticConfig.of_fixed(2, depths=(1, 2)), stages=2)
        for worker in (A, self.FIRST, self.LAST):
            d.enrol(worker, 7, 0.0)
            assert d.join(worker) == d.noted(worker)
        return d

    def test_a_pipeline_is_answered_when_its_last_worker_was_ready(self) -> None:
        d = self.dialogue()
        assert d.say(m.Ready, A, 3) == []
        assert d.say(m.Ready, self.FIRST, 3) == []
        assert d.say(m.Ready, A, 3) == [(line(A), e.Waits(d.number, f"it waits for {self.LAST}"))], (
            "which is who is missing"
        )
        answer = m.Answer(group(A, B, sequence=0), (3, 3))
        answers = d.say(m.Ready, self.LAST, 3)
        assert answers == [(line(worker), answer) for worker in (A, self.FIRST, self.LAST)]
        assert d.say(m.Ready, self.LAST, 3) == answers[2:], "the answer may have been lost"
        (first, second) = d.service.status(0.0).stages
        assert (first.states, second.states, first.last_groups, second.last_groups) == ("cc", "-c", [0, 0], [None, 0])
        page = render(d.service.status(0.0))
        assert "sync-graph of the pipelines" in page
        assert page.count("sync-graph") == 1

    def test_another_shape_is_refused_by_name(self) -> None:
        d = self.dialogue()
        for theirs, said in (
            ((2, 2), "one of 2 stages × 2 pipelines; .*--stages 2 --pipelines 2"),
            ((2, 2, 2, 1), "one of 2 pipelines of 2, 1 stages; .*--stages 2,1"),
        ):
            ((_, reply),) = d.say(m.Hello, A, theirs)
            assert isinstance(reply, e.Refused)
            assert re.search("a run of 2 pipelines of 1, 2 stages, and .*" + said, reply.reason)
        ((_, reply),) = d.say(m.Hello, A, (2, 2, 1, 2))
        assert isinstance(reply, m.Welcome)
