"""The scheduler without its sockets: messages in, messages out, around one policy.

Every request is answered so that repeating it is harmless: a worker that heard nothing asks again. Messages that speak
for another worker, were seen before, or break a rule of the policy are counted, logged, and change nothing. A worker
whose heartbeats stop for ``worker_timeout`` seconds is lost: the others go on without it.

The policy hears of everything through the :class:`~lightning_sdpipe.scheduler.server.policy_driver.PolicyDriver`, which
keeps the log of the run. A policy that raises, or decides what cannot be carried out, ends the run with a failure that
names it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import Asked, LeaseEvent, Segment, Told, Trained
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.membership import MOST_PIPELINES, Membership
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decisions import Decision, Group
from lightning_sdpipe.policies.events import Answered, Joined, Left, Lost, Progress, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent
from lightning_sdpipe.policies.sync_graph import SyncGraph
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import EventLog
from lightning_sdpipe.scheduler.log.status import Overview, Status, graph_of
from lightning_sdpipe.scheduler.server.contradictions import contradiction
from lightning_sdpipe.scheduler.server.elastic_run import ElasticService
from lightning_sdpipe.scheduler.server.membership_desk import MembershipDesk
from lightning_sdpipe.scheduler.server.policy_driver import PolicyDriver, PolicyFailed
from lightning_sdpipe.scheduler.server.recovery import Recovery
from lightning_sdpipe.scheduler.server.session import (
    COMPUTING,
    FALLS_SILENT,
    HELD,
    IS_HELD,
    IS_READY,
    JOINS,
    LEAVES,
    IllegalInput,
    Session,
    Sessions,
)

logger = logging.getLogger(__name__)

Addressed = tuple[bytes, m.Reply | e.Reply]
"""A routing identity and the message for it."""

EVENTS_PER_WORKER = 16
"""That the log keeps in memory at least, times the workers: about the last rounds."""
LOGGED_PER_KIND = 20
"""Ignored messages of one kind that are logged; the rest are only counted."""


class SchedulerService:
    """Keeps, besides the policy, who is known, what was answered, and the first failure of the run.

    Args:
        config: the values of the policy.
        num_stages: M.
        num_pipelines: N.
        worker_timeout: seconds of silence after which a worker is lost.
        recovery_grace: seconds that a scheduler which finds itself in the middle of a run waits for all workers.
        elastic: what an elastic run needs; None if pipelines cannot come and go.
        now: the time, in seconds of any clock that never runs backwards.
        log: gets every event and decision.

    Raises:
        ConfigurationError: there is no such policy for so many workers.
    """

    def __init__(
        self,
        config: PolicyConfig,
        num_stages: int,
        num_pipelines: int,
        *,
        worker_timeout: float = 30.0,
        recovery_grace: float = 10.0,
        elastic: ElasticConfig | None = None,
        now: float = 0.0,
        log: EventLog | None = None,
    ) -> None:
        self.failure: m.Failure | None = None
        self.refused: Counter[str] = Counter()
        self.overview = Overview(num_stages, num_pipelines)
        self._name, self._description = registry.name_of(config), registry.to_json(config)
        self._looks_back = config.looks_back
        self._mesh = (num_stages, num_pipelines)
        self._capacity = num_pipelines
        self._most_pipelines = num_pipelines if elastic is None else max(num_pipelines, MOST_PIPELINES)
        self.log = EventLog() if log is None else log
        self.log.remember(EVENTS_PER_WORKER * num_stages * num_pipelines)
        self.log.tell(self.overview)
        policy = registry.build(config, num_stages, num_pipelines)
        self._decider = PolicyDriver(policy, Dealer(num_stages, num_pipelines), self.log)
        self._asking: dict[Worker, tuple[bytes, Segment, int]] = {}
        """Workers that asked for a lease which is not decided: where the answer goes, and for which."""
        self._worker_timeout = worker_timeout
        self._started = now
        self._sessions = Sessions()
        self._recovery = Recovery(num_stages * num_pipelines, recovery_grace)
        self._outbox: list[Addressed] = []
        self._next_roll_call = now + worker_timeout / 4
        self._cut_off = False
        """Have all workers been silent for too long?"""
        self.elastic: MembershipDesk | None = None
        if elastic is not None:
            membership = Membership(num_stages, elastic, now)
            self.elastic = MembershipDesk(membership, ElasticService(self), num_pipelines, worker_timeout)
            self.elastic.on_decided = self.log.record_members

    # ------------------------------------------------------------------ inputs

    def deadline(self) -> float:
        """When :meth:`tick` is due."""
        due = min(self._decider.deadline, self._next_roll_call, self._recovery.until)
        return due if self.elastic is None else min(due, self.elastic.deadline())

    def tick(self, now: float) -> list[Addressed]:
        """Time passed."""
        try:
            if now >= self._next_roll_call:
                self._call_the_roll(now)
            self._let_time_pass(now)
            if self._recovery.until <= now:
                self._end_recovery(now)
            if self.elastic is not None:
                self.elastic.tick(now)
        except Exception as error:
            self._give_up(error)
        return self._sent()

    def handle(self, peer: bytes, request: m.Request | m.AskStatus | e.Request, now: float) -> list[Addressed]:
        """A message from the peer that calls itself ``peer``."""
        if isinstance(request, m.AskStatus):
            return [(peer, m.StatusReply(self.status(now)))]
        worker = request.worker
        if isinstance(request, e.ElasticRequest):
            speaks_for_itself = peer == e.peer_of(worker, request.incarnation)
        else:
            speaks_for_itself = self._sessions.is_socket_of(peer, worker, request.session)
        if not speaks_for_itself:
            self.ignore("impersonating", peer, f"it speaks for worker {worker}")
            return []
        if (reason := contradiction(request, self._mesh[0], self._most_pipelines)) is not None:
            self._deny(peer, request, reason)
            return self._sent()
        if isinstance(request, e.ElasticRequest):
            self._of_membership(peer, request, now)
            return self._sent()
        try:
            if self.elastic is not None and not self.elastic.admits(peer, request, now):
                return self._sent()
        except Exception as error:
            self._give_up(error)
            return self._sent()
        self._dispatch(peer, request, now)
        return self._sent()

    def line_ended(self, nonce: bytes, now: float) -> list[Addressed]:
        """The connection of the process of an elastic run that was given ``nonce`` is closed."""
        try:
            if self.elastic is not None:
                self.elastic.line_ended(nonce, now)
        except Exception as error:
            self._give_up(error)
        return self._sent()

    def _of_membership(self, peer: bytes, request: e.Request, now: float) -> None:
        if self.elastic is None:
            self._say(
                peer,
                e.Denial(
                    "this scheduler belongs to a run whose pipelines do not come and go; start `sdpipe scheduler`"
                ),
            )
            return
        if self.failure is not None and isinstance(request, e.Enrol | e.Beat):
            self._say(peer, e.Over(str(self.failure), failed=True))
            return
        try:
            self.elastic.handle(peer, request, now)
        except RefusedEvent as error:
            self.ignore("refused", peer, str(error))
            self._say(peer, e.Denial(str(error)))
        except Exception as error:
            self._give_up(error)

    def _dispatch(self, peer: bytes, request: m.Request, now: float) -> None:
        session = self._sessions.get(request.worker)
        try:
            if session is None or session.id != request.session:
                self._from_a_stranger(request, peer, now)
            elif session.received.is_new(request.number, peer):
                session.heard = now
                self._from_its_client(session, request, peer, now)
            else:
                self.ignore("replayed", peer, f"number {request.number} was seen before")
        except RefusedEvent as error:
            self._refuse(request, peer, str(error))
        except Exception as error:
            self._give_up(error)

    def restore(self, event: LeaseEvent, now: float) -> None:
        """What the journal of an earlier scheduler says was dealt."""
        self._decider.deal(event, now)

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        """A message from ``peer`` changes nothing; it is counted, and logged unless there were many."""
        self.refused[kind] += 1
        if self.refused[kind] <= LOGGED_PER_KIND:
            more = "" if self.refused[kind] < LOGGED_PER_KIND else "; more of them will only be counted"
            logger.warning("%s message from %r ignored: %s%s", kind, peer[:32], detail[:200], more)

    def status(self, now: float) -> Status:
        """How the run is."""
        overview, uptime = self.overview, now - self._started
        return Status(
            policy=self._description,
            uptime=uptime,
            signals=overview.signals,
            signals_per_second=overview.rate(now, uptime),
            groups_by_size=dict(sorted(overview.sizes.items())),
            groups_by_reason=dict(overview.reasons),
            broken=overview.broken,
            refused=dict(self.refused),
            failure=None if self.failure is None else str(self.failure),
            held=len(self._recovery.held),
            looks_back=self._looks_back,
            stages=overview.stages(
                {session.worker: session.state.value for session in self._sessions},
                {session.worker: round(now - session.heard, 3) for session in self._sessions},
                self._sync_graphs(),
            ),
            members=None if self.elastic is None else self.elastic.status(now),
        )

    def validate(self) -> None:
        """Raise AssertionError if what is known here contradicts itself; for tests, after each step."""
        assert self._recovery.holds == (self._recovery.until < math.inf)
        self._sessions.validate()
        held = {session.worker for session in self._sessions if session.state is HELD}
        assert held == self._recovery.held.keys(), (held, self._recovery.held)
        assert not held or self._recovery.holds
        assert not self._outbox

    # ---------------------------------------------------------------- requests

    def _from_a_stranger(self, request: m.Request, peer: bytes, now: float) -> None:
        """The session is not the worker's current one: a new client, an ended one, or a restart of ours."""
        if self._sessions.has_ended(request.worker, request.session):
            self.ignore("replayed", peer, f"its session of worker {request.worker} has ended")
            return
        match request:
            case m.Join():
                self._join_anew(request, peer, now)
            case m.Heartbeat(joined=False):
                self._hear_dealt(request, peer, now)
                self._say(peer, m.Pulse(self.failure))
            case m.Leave():
                self._say(peer, m.Acknowledged(request.number))  # it takes no part in anything here
            case m.Hello() | m.Failed() | m.AskFailure() | m.AskMissing() | m.AskLease() | m.TellLeases():
                self._from_anybody(request, peer, now)
            case _:
                self._say(peer, m.Unknown(request.number))

    def _from_its_client(self, session: Session, request: m.Request, peer: bytes, now: float) -> None:
        match request:
            case m.Ready():
                self._ready(session, request, peer, now)
            case m.Heartbeat():
                self._heartbeat(session, request, peer, now)
            case m.Join():
                self._join(session, request, peer, now)
            case m.Leave():
                session.received.left_at = request.number
                self._leave(session, now)
                self._say(peer, m.Acknowledged(request.number, session.invitations))
            case _:
                self._from_anybody(request, peer, now)

    def _from_anybody(
        self,
        request: m.Hello | m.Failed | m.AskFailure | m.AskMissing | m.AskLease | m.TellLeases,
        peer: bytes,
        now: float,
    ) -> None:
        """What needs no session."""
        match request:
            case m.Hello():
                self._check_mesh(request)
                if self.failure is not None:
                    raise RefusedEvent(f"its run is over, since {self.failure}; start it again for the next run")
                self._say(peer, m.Welcome(request.number, self._description, self._mesh))
            case m.AskMissing():
                self._say(peer, m.Missing(request.number, self._missing(request.worker)))
            case m.AskFailure():
                self._say(peer, m.FirstFailure(request.number, self.failure))
            case m.Failed():
                self._fail(m.Failure(request.worker, request.reason[: m.MAX_REASON_CHARACTERS]), peer)
            case m.AskLease():
                self._ask_lease(request, peer, now)
            case m.TellLeases():
                told = Told(request.worker, request.segment, request.leases, request.over, request.done)
                self._deal(told, now)

    def _ready(self, session: Session, request: m.Ready, peer: bytes, now: float) -> None:
        iteration, recovery = request.iteration, self._recovery
        if self.failure is not None:
            self._say(peer, m.Abort(self.failure))
        elif session.state is not COMPUTING:
            if not session.active:
                self._say(peer, m.Unknown(request.number))
            elif session.iteration != iteration:
                self._refuse(request, peer, f"iteration {session.iteration} waits for an answer")
            # else it asks again; the answer is on its way to be decided
        elif session.answer is not None and session.iteration == iteration:
            self._say(peer, session.answer)
        elif recovery.holds:
            session.is_ready(iteration, IS_HELD)
            recovery.held[request.worker] = iteration
        elif recovery.answers and (answer := recovery.answer_to(request.worker, iteration)) is not None:
            session.is_ready(iteration, IS_HELD)  # it came back late
            self._answer_as_before(session, answer, now)
        else:
            self._decide_ready(session, iteration, now)

    def _decide_ready(self, session: Session, iteration: int, now: float) -> None:
        if self._decider.deadline <= now:
            self._let_time_pass(now)
        decisions = self._decider.tell(Ready(session.worker, iteration), now)
        session.is_ready(iteration, IS_READY)
        self._carry_out(decisions, now)

    def _heartbeat(self, session: Session, request: m.Heartbeat, peer: bytes, now: float) -> None:
        session.beats = True
        if request.joined and not session.active and request.number > session.received.left_at:
            self._say(peer, m.Unknown(request.number))
            return
        if request.steps is not None and session.active:
            steps = request.steps
            event = Progress(request.worker, steps.iteration, steps.count, steps.seconds, steps.waiting)
            self._let_time_pass(now)
            self._carry_out(self._decider.tell(event, now), now)
        self._hear_dealt(request, peer, now)
        self._say(peer, m.Pulse(self.failure))

    # ------------------------------------------------------------------ leases

    def _ask_lease(self, request: m.AskLease, peer: bytes, now: float) -> None:
        """Asks are told apart by segment and ordinal, so they need no session and may be repeated."""
        worker, segment, dealer = request.worker, request.segment, self._decider.dealer
        self._check_exists(worker)
        if self.failure is not None:
            self._say(peer, m.Abort(self.failure))
        elif (lease := dealer.answer(worker.pipeline, segment, request.ordinal)) is not None:
            self._say(peer, m.Dealt(lease))
        elif dealer.asks_for_book(worker, segment):
            self._say(peer, m.AskLeases())
        else:
            self._asking[worker] = peer, segment, request.ordinal
            try:
                self._deal(Asked(worker, segment, request.ordinal, request.done), now)
            except RefusedEvent:
                del self._asking[worker]
                raise

    def _hear_dealt(self, heartbeat: m.Heartbeat, peer: bytes, now: float) -> None:
        if heartbeat.dealt is None or self.failure is not None:
            return
        worker, (segment, done) = heartbeat.worker, heartbeat.dealt
        self._check_exists(worker)
        if self._decider.dealer.asks_for_book(worker, segment):
            self._say(peer, m.AskLeases())
        else:
            self._deal(Trained(worker, segment, done), now)

    def _deal(self, event: LeaseEvent, now: float) -> None:
        self._decider.deal(event, now)
        for worker, (peer, segment, ordinal) in list(self._asking.items()):
            lease = self._decider.dealer.answer(worker.pipeline, segment, ordinal)
            if lease is not None:
                self._say(peer, m.Dealt(lease))
                del self._asking[worker]

    # -------------------------------------------------------- coming and going

    def _join_anew(self, request: m.Join, peer: bytes, now: float) -> None:
        """The first join of a session; an older session of the worker ends."""
        worker = request.worker
        self._check_mesh(request)
        self._check_exists(worker)
        before = self._sessions.get(worker)
        if before is not None and before.active:
            logger.warning("worker %s came back as a new client; the old one never left", worker)
            self._leave(before, now)
        session = self._sessions.begin(worker, request.session, now, request.elastic)
        session.received.is_new(request.number, peer)
        if self.failure is None:
            self._recovery.joins(worker, request.heard is not None, now)
        self._join(session, request, peer, now)

    def _join(self, session: Session, request: m.Join, peer: bytes, now: float) -> None:
        if self.failure is not None:
            self._say(peer, m.Abort(self.failure))
            return
        if request.number < session.received.left_at:
            return  # the heartbeats' socket was slower than the leave that came after
        if not session.active:
            self._check_mesh(request)
            self._let_time_pass(now)
            if request.heard is not None:
                self._carry_out(self._decider.number_from(request.heard + 1, now), now)
            decisions = self._decider.tell(Joined(session.worker, request.answered if request.resumed else None), now)
            session.move(JOINS)
            if not request.resumed:
                session.iteration = session.answer = session.answered = None
                self._recovery.forget(session.worker)
            self._carry_out(decisions, now)
            self._recovery.keep(request.answers, session.worker)
        self._say(peer, m.Acknowledged(request.number, session.invitations))

    def _leave(self, session: Session, now: float) -> None:
        decisions: list[Decision] = []
        if session.active:
            self._let_time_pass(now)  # a window of this very moment may still answer the worker
            decisions = self._decider.tell(Left(session.worker), now)
            self._recovery.held.pop(session.worker, None)
        session.move(LEAVES)
        session.answer = session.answered = None
        self._carry_out(decisions, now)

    def _call_the_roll(self, now: float) -> None:
        """Workers that were silent for too long are lost."""
        late = now - self._next_roll_call
        self._next_roll_call = now + self._worker_timeout / 4
        if late > self._worker_timeout / 4:
            # We were away ourselves (a machine asleep, a stopped process): first hear what has come meanwhile.
            logger.warning("the scheduler was held up for %.1f s; nobody is called lost for that", late)
            return
        newest = max((session.heard for session in self._sessions if session.beats), default=now)
        if now - newest >= self._worker_timeout:  # of all: it is this scheduler that is cut off
            self._cut_off = True
            return
        if self._cut_off:
            logger.warning("workers are heard of again; nobody is called lost for the silence of all")
            self._cut_off = False
            for session in self._sessions:
                session.heard = now
            return
        for session in self._sessions:
            worker, silent = session.worker, now - session.heard
            if self.elastic is not None and self.elastic.in_use:
                continue  # which looks itself, and sooner
            if not (session.active and self._is_silent(session, newest)):
                continue
            logger.warning("worker %s was silent for %.1f s: the others go on without it", worker, silent)
            self._let_time_pass(now)
            decisions = self._decider.tell(Lost(worker), now)
            self._recovery.held.pop(worker, None)
            session.move(FALLS_SILENT)
            lost = m.Lost(worker, silent)
            for other in self._sessions:
                if other.active:
                    self._say(other.peer, lost)
            self._carry_out(decisions, now)
        self._end_if_all_wait_for_the_lost(now, newest)

    def _is_silent(self, session: Session, newest: float) -> bool:
        """For the limit before another worker was heard of at ``newest``."""
        return session.beats and newest - session.heard >= self._worker_timeout

    def _end_if_all_wait_for_the_lost(self, now: float, newest: float) -> None:
        """In an elastic run they would train its batches; here nobody may. Who waits for a lease is away, but beats."""
        if self.elastic is not None and self.elastic.in_use:
            return
        awaited = self._decider.dealer.awaited()
        lost = [s for s in self._sessions if s.worker.pipeline in awaited and self._is_silent(s, newest)]
        if awaited and {session.worker.pipeline for session in lost} == set(awaited) and self.failure is None:
            silent = now - lost[0].heard
            reason = f"it was silent for {silent:.1f} s, and the others wait for batches that only it may train"
            self._fail(m.Failure(lost[0].worker, reason))

    def _end_recovery(self, now: float) -> None:
        for worker, iteration in self._recovery.end().items():
            session = self._sessions[worker]
            answer = self._recovery.answer_to(worker, iteration)
            if answer is None:
                self._decide_ready(session, iteration, now)
            else:
                self._answer_as_before(session, answer, now)

    def _answer_as_before(self, session: Session, answer: m.Answer, now: float) -> None:
        """As another scheduler has decided."""
        assert session.iteration is not None
        event = Answered(session.worker, session.iteration)
        self._answer(session, answer)
        self._carry_out(self._decider.tell(event, now), now)

    # --------------------------------------------------------------- decisions

    def _let_time_pass(self, now: float) -> None:
        if self._decider.deadline <= now:
            self._carry_out(self._decider.tell(Tick(), now), now)

    def _carry_out(self, decisions: list[Decision], now: float) -> None:
        """Answer the members of each group."""
        if not decisions:
            return
        verbose = logger.isEnabledFor(logging.DEBUG)
        for group in decisions:
            if verbose:
                logger.debug("group %d of stage %d: %s", group.sequence, group.stage, group.reason)
            if self.elastic is None:
                self._send_group(group)
            elif (dressed := self.elastic.dressed(group, now)) is not None:
                self._send_group(dressed)

    def _send_group(self, group: Group) -> None:
        try:
            sessions = [self._sessions[member] for member in group.members]
            if group.passive:
                self._answer_and_invite(sessions, group)
                return
            invited = tuple([session.invitations for session in sessions])
            answer = m.Answer(
                group, tuple([session.iteration for session in sessions]), invited if any(invited) else ()
            )
            for session in sessions:
                self._answer(session, answer)
        except (IllegalInput, KeyError) as error:
            raise PolicyFailed(f"{group} cannot go out: {error}") from error

    def _answer_and_invite(self, sessions: list[Session], group: Group) -> None:
        """Passive members are invited; the others are answered."""
        answer = m.Answer(
            group,
            tuple(None if s.worker in group.passive else s.iteration for s in sessions),
            tuple(s.invitations for s in sessions),
        )
        for session in sessions:
            if session.worker in group.passive:
                session.invitations += 1
                self._say(session.heartbeat_peer, m.Invitation(group, session.answered))
            else:
                self._answer(session, answer)

    def _answer(self, session: Session, answer: m.Answer) -> None:
        session.is_answered(answer)
        self._outbox.append((session.peer, answer))

    # ----------------------------------------------------------------- replies

    def _say(self, peer: bytes, message: m.Reply | e.Reply) -> None:
        self._outbox.append((peer, message))

    def _sent(self) -> list[Addressed]:
        sent, self._outbox = self._outbox, []
        return sent

    def _deny(self, peer: bytes, request: m.Request | e.Request, reason: str) -> None:
        if isinstance(request, e.ElasticRequest):
            self.ignore("refused", peer, reason)
            self._say(peer, e.Denial(reason, request.number))
        else:
            self._refuse(request, peer, reason)

    def _refuse(self, request: m.Request, peer: bytes, reason: str) -> None:
        self.ignore("refused", peer, reason)
        self._say(peer, m.Refused(request.number, reason))

    def _give_up(self, error: Exception) -> None:
        """The policy, or this service, cannot go on, and so nobody can."""
        logger.error("the scheduler cannot go on", exc_info=error)
        self._decider.fail()
        self._outbox.clear()  # a group may have gone out to some of its members only
        what = f"its policy {self._name} failed on {error}" if isinstance(error, PolicyFailed) else repr(error)
        self._fail(m.Failure(None, what[: m.MAX_REASON_CHARACTERS]))

    def _fail(self, failure: m.Failure, teller: bytes | None = None) -> None:
        """Everybody hears of the first failure."""
        if self.failure is None:
            self.failure = failure
            logger.error("%s; the run is over", failure)
        abort = m.Abort(self.failure)
        peers = {session.peer for session in self._sessions} | ({teller} if teller is not None else set())
        for peer in sorted(peers):
            self._say(peer, abort)

    def _sync_graphs(self) -> list[SyncGraph]:
        """Of each stage: what the policy goes by, or else what the log says."""
        stages, pipelines = self._mesh[0], self._capacity
        graphs = []
        for stage in range(stages):
            graph = self._decider.sync_graph(stage)
            if graph is None:
                active = [session.worker.pipeline for session in self._sessions.of_stage(stage) if session.active]
                graph = graph_of(self.log.recent, stage, active, pipelines, self._looks_back)
            graphs.append(graph)
        return graphs

    def _missing(self, asker: Worker) -> tuple[Worker, ...]:
        """Those that ``asker`` may wait for: of its stage; for a lease of others too, with a session or without."""
        sessions, dealer = self._sessions.of_stage(asker.stage), self._decider.dealer
        workers = {session.worker for session in sessions if session.state is COMPUTING}
        if asker in self._asking:
            workers.update(dealer.behind(), dealer.untold())
        return tuple(sorted(workers - {asker}))

    def _check_mesh(self, request: m.Hello | m.Join) -> None:
        if request.mesh is not None and request.mesh != self._mesh:
            (stages, pipelines), (theirs, its) = self._mesh, request.mesh
            raise RefusedEvent(
                f"it serves a run of {stages} stages × {pipelines} pipelines, and worker {request.worker} belongs to "
                f"one of {theirs} × {its}; give the address of its own scheduler, or start this one with "
                f"--num-stages {theirs} --num-pipelines {its}"
            )

    def _check_exists(self, worker: Worker) -> None:
        stages, pipelines = self._mesh[0], self._capacity
        if not (0 <= worker.stage < stages and 0 <= worker.pipeline < pipelines):
            raise RefusedEvent(f"worker {worker} does not exist in {stages} stages × {pipelines} pipelines")
