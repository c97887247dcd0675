"""The scheduler without its sockets: messages in, messages out, around one policy.

Every request is answered so that repeating it is harmless: a worker that heard nothing asks again. Messages that speak
for another worker, were seen before, or break a rule of the policy are counted, logged, and change nothing. A worker
whose heartbeats stop for ``worker_timeout`` seconds is lost: the others go on without it.

The service checks requests and passes them on to desks: groups
(:class:`~lightning_sdpipe.scheduler.server.group_desk.GroupDesk`), leases
(:class:`~lightning_sdpipe.scheduler.server.lease_desk.LeaseDesk`) and, in an elastic run, membership
(:class:`~lightning_sdpipe.scheduler.server.membership_desk.MembershipDesk`). The policy hears of everything through the
:class:`~lightning_sdpipe.scheduler.server.policy_driver.PolicyDriver`, which keeps the log of the run. A policy that
raises, or decides what cannot be carried out, ends the run with a failure that names it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.dealing.leases import LeaseEvent
from lightning_sdpipe.membership.elastic_config import MOST_PIPELINES, ElasticConfig
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.membership.silence import Silence
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent
from lightning_sdpipe.policies.sync_graph import SyncGraph
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import EventLog
from lightning_sdpipe.scheduler.log.status import Overview, Status, graph_of
from lightning_sdpipe.scheduler.server.contradictions import Extent, contradiction
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.lease_desk import LeaseDesk
from lightning_sdpipe.scheduler.server.lifelines import Lines
from lightning_sdpipe.scheduler.server.liveness import Liveness
from lightning_sdpipe.scheduler.server.membership_desk import MembershipDesk
from lightning_sdpipe.scheduler.server.outbox import Addressed, Outbox
from lightning_sdpipe.scheduler.server.policy_driver import PolicyDriver, PolicyFailed
from lightning_sdpipe.scheduler.server.process_groups import ProcessGroupRegistry
from lightning_sdpipe.scheduler.server.recovery import Recovery
from lightning_sdpipe.scheduler.server.row_desk import RowDesk
from lightning_sdpipe.scheduler.server.session import HELD, Session

logger = logging.getLogger(__name__)

EVENTS_PER_WORKER = 16
"""That the log keeps in memory at least, times the workers: about the last rounds."""


class SchedulerService:
    """Checks each request, passes it on to the desk that it concerns, and says how the run is.

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
        self.overview = Overview(num_stages, num_pipelines)
        self._name, self._description = registry.name_of(config), registry.to_json(config)
        self._looks_back = config.looks_back
        self._extent = Extent(num_stages, num_pipelines)
        self._most_pipelines = num_pipelines if elastic is None else max(num_pipelines, MOST_PIPELINES)
        self.log = EventLog() if log is None else log
        self.log.remember(EVENTS_PER_WORKER * num_stages * num_pipelines)
        self.log.tell(self.overview)
        policy = registry.build(config, num_stages, num_pipelines)
        self._driver = PolicyDriver(policy, Dealer(num_stages, num_pipelines), self.log)
        self._started = now
        self._silence = Silence(worker_timeout, now)
        self._outbox = Outbox()
        self._rows = RowDesk(self.log, self._outbox)
        everybody = [Worker(j, i) for i in range(num_pipelines) for j in range(num_stages)]
        self.lines = Lines()
        """By which it is known at once that a process has ended."""
        recovery = Recovery(everybody, recovery_grace)
        process_groups = None
        if elastic is not None:
            membership, presence = Membership(num_stages, elastic, now), Liveness(worker_timeout, self.lines, now)
            process_groups = ProcessGroupRegistry(membership, presence)
        self.groups = GroupDesk(
            self._driver, recovery, self._extent, self.overview, self._outbox, self.lines, process_groups
        )
        self.leases = LeaseDesk(self._driver, self.groups, self._outbox)
        self.elastic: MembershipDesk | None = None
        if process_groups is not None:
            self.elastic = MembershipDesk(
                membership, self.groups, self.leases, process_groups, presence, self._outbox, worker_timeout
            )
            self.elastic.on_decided = self.log.record_members

    @property
    def failure(self) -> m.Failure | None:
        """The first failure of the run."""
        return self.groups.failure

    @property
    def refused(self) -> Counter[str]:
        """Messages that changed nothing, by kind."""
        return self._outbox.ignored

    # ------------------------------------------------------------------ inputs

    def deadline(self) -> float:
        """When :meth:`tick` is due."""
        due = min(self.groups.deadline, self._silence.due)
        return due if self.elastic is None else min(due, self.elastic.deadline())

    def tick(self, now: float) -> list[Addressed]:
        """Time passed."""
        try:
            if now >= self._silence.due:
                self._call_the_roll(now)
            self.groups.let_time_pass(now)
            if self.groups.recovery.until <= now:
                self.groups.end_recovery(now)
            if self.elastic is not None:
                self.elastic.tick(now)
                self._dispatch_due(self.elastic, now)
        except Exception as error:
            self._give_up(error)
        return self._outbox.sent()

    def handle(self, peer: bytes, request: m.Request | m.Question | e.Request, now: float) -> list[Addressed]:
        """A message from the peer that calls itself ``peer``."""
        if isinstance(request, m.AskStatus):
            return [(peer, m.StatusReply(self.status(now)))]
        if isinstance(request, m.AskRows):
            return [(peer, self._rows.answer(request, now))]
        worker = request.worker
        if isinstance(request, e.ElasticRequest):
            speaks_for_itself = peer == e.peer_of(worker, request.incarnation)
        else:
            speaks_for_itself = self.groups.sessions.is_socket_of(peer, worker, request.session)
        if not speaks_for_itself:
            self.ignore("impersonating", peer, f"it speaks for worker {worker}")
        elif (reason := contradiction(request, self._extent.num_stages, self._most_pipelines)) is not None:
            self._deny(peer, request, reason)
        elif isinstance(request, e.ElasticRequest):
            self._of_membership(peer, request, now)
        elif self._is_admitted(peer, request, now):
            self._dispatch(peer, request, now)
        return self._outbox.sent()

    def line_ended(self, nonce: bytes, now: float) -> list[Addressed]:
        """The connection of the process that was given ``nonce`` is closed."""
        of = self.lines.take(nonce)
        if of is None:
            return []
        worker, number, elastic = of
        try:
            if not elastic:
                self.groups.process_ended(worker, number)
            elif self.elastic is not None:
                self.elastic.process_ended(worker, number, now)
                self._dispatch_due(self.elastic, now)
        except Exception as error:
            self._give_up(error)
        return self._outbox.sent()

    def restore(self, event: LeaseEvent, now: float) -> None:
        """What the journal of an earlier scheduler says was dealt."""
        self._driver.deal(event, now)

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        """A message from ``peer`` changes nothing."""
        self._outbox.ignore(kind, peer, detail)

    def status(self, now: float) -> Status:
        """How the run is."""
        overview, uptime, sessions = self.overview, now - self._started, self.groups.sessions
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
            held=len(self.groups.recovery.held),
            looks_back=self._looks_back,
            stages=overview.stages(
                now,
                {session.worker: session.state.value for session in sessions},
                {session.worker: round(now - session.heard, 3) for session in sessions},
                self._sync_graphs(),
            ),
            members=None if self.elastic is None else self.elastic.status(now),
        )

    def validate(self) -> None:
        """Raise AssertionError if what is known here contradicts itself; for tests, after each step."""
        recovery, sessions = self.groups.recovery, self.groups.sessions
        assert recovery.holds == (recovery.until < math.inf)
        sessions.validate()
        held = {session.worker for session in sessions if session.state is HELD}
        assert held == recovery.held.keys(), (held, recovery.held)
        assert not held or recovery.holds
        assert not self._outbox.sent()

    # ---------------------------------------------------------------- requests

    def _of_membership(self, peer: bytes, request: e.Request, now: float) -> None:
        if self.elastic is None:
            refusal = "this scheduler belongs to a run whose pipelines do not come and go; start `sdpipe scheduler`"
            self._outbox.say(peer, e.Denial(refusal))
            return
        if self.failure is not None and isinstance(request, e.Enrol | e.Beat):
            self._outbox.say(peer, e.Over(str(self.failure), failed=True))
            return
        try:
            self.elastic.handle(peer, request, now)
            self._dispatch_due(self.elastic, now)
        except RefusedEvent as error:
            self.ignore("refused", peer, str(error))
            self._outbox.say(peer, e.Denial(str(error)))
        except Exception as error:
            self._give_up(error)

    def _is_admitted(self, peer: bytes, request: m.Request, now: float) -> bool:
        """May ``request`` of a session be dealt with now, or is it kept, or answered, by the membership desk?"""
        if self.elastic is None:
            return True
        try:
            if isinstance(request, m.Failed) and self.elastic.hear_failure(peer, request, now):
                self._dispatch_due(self.elastic, now)
                return False
            return self.elastic.admits(peer, request, now)
        except Exception as error:
            self._give_up(error)
            return False

    def _dispatch_due(self, elastic: MembershipDesk, now: float) -> None:
        """What was kept, and is due."""
        for peer, request in elastic.due(now):
            self._dispatch(peer, request, now)
        elastic.deliver(now)

    def _dispatch(self, peer: bytes, request: m.Request, now: float) -> None:
        session = self.groups.sessions.get(request.worker)
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

    def _from_a_stranger(self, request: m.Request, peer: bytes, now: float) -> None:
        """The session is not the worker's current one: a new client, an ended one, or a restart of ours."""
        if self.groups.sessions.has_ended(request.worker, request.session):
            self.ignore("replayed", peer, f"its session of worker {request.worker} has ended")
            return
        match request:
            case m.Join():
                self._rows.introduce(request)
                self.groups.join_anew(request, peer, now)
            case m.Heartbeat(joined=False):
                self._rows.hear(request, None, peer, now)
                self.groups.recovery.joins(request.worker, False, now)  # it waits for no group
                self._answer_heartbeat(request, peer, now)
            case m.Leave():
                self._rows.hear(request, None, peer, now)
                self.groups.leave_unseen(request, peer, now)
                self._outbox.say(peer, m.Acknowledged(request.number))
            case m.Hello() | m.Failed() | m.AskFailure() | m.AskMissing() | m.AskLease() | m.TellLeases():
                self._from_anybody(request, peer, now)
            case _:
                self._outbox.say(peer, m.Unknown(request.number))

    def _from_its_client(self, session: Session, request: m.Request, peer: bytes, now: float) -> None:
        match request:
            case m.Ready():
                self.groups.ready(session, request, peer, now)
            case m.Heartbeat():
                progress = self._rows.hear(request, session.id, peer, now)
                if self.groups.hear_beat(session, request, progress, peer, now):
                    self._answer_heartbeat(request, peer, now)
            case m.Join():
                self._rows.introduce(request)
                self.groups.join(session, request, peer, now)
            case m.Leave():
                self._rows.hear(request, session.id, peer, now)
                session.received.left_at = request.number
                self.groups.leave(session, now)
                self._outbox.say(peer, m.Acknowledged(request.number, session.invitations))
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
                self._extent.check_mesh(request)
                if self.failure is not None:
                    raise RefusedEvent(f"its run is over, since {self.failure}; start it again for the next run")
                self._outbox.say(peer, m.Welcome(request.number, self._description, self._extent.planned))
            case m.AskMissing():
                self._outbox.say(peer, m.Missing(request.number, self.leases.missing(request.worker)))
            case m.AskFailure():
                self._outbox.say(peer, m.FirstFailure(request.number, self.failure))
            case m.Failed():
                self.groups.fail(m.Failure(request.worker, request.reason[: m.MAX_REASON_CHARACTERS]), peer)
            case m.AskLease():
                self.leases.ask(request, peer, now)
            case m.TellLeases():
                self.leases.hear_leases(request, now)

    def _answer_heartbeat(self, request: m.Heartbeat, peer: bytes, now: float) -> None:
        self.leases.hear_beat(request, peer, now)
        self._outbox.say(peer, m.Pulse(self.failure))

    def _call_the_roll(self, now: float) -> None:
        """Workers that were silent for too long are lost; an elastic run looks itself, and sooner."""
        for session in self.groups.sessions:
            if session.beats:
                self._silence.hear(session.worker, session.heard)
        silent = self._silence.look(now)
        if self.elastic is None or not self.elastic.in_use:
            self.groups.lose_silent(silent, now)
            self.leases.end_if_all_wait_for(self._silence.lost, now)

    # ----------------------------------------------------------------- replies

    def _deny(self, peer: bytes, request: m.Request | e.Request, reason: str) -> None:
        if isinstance(request, e.ElasticRequest):
            self.ignore("refused", peer, reason)
            self._outbox.say(peer, e.Denial(reason, request.number))
        else:
            self._refuse(request, peer, reason)

    def _refuse(self, request: m.Request, peer: bytes, reason: str) -> None:
        self.ignore("refused", peer, reason)
        self._outbox.say(peer, m.Refused(request.number, reason))

    def _give_up(self, error: Exception) -> None:
        """The policy, or this service, cannot go on, and so no worker can."""
        logger.error("the scheduler cannot go on", exc_info=error)
        self._driver.fail()
        self._outbox.clear()  # a group may have gone out to some of its members only
        what = f"its policy {self._name} failed on {error}" if isinstance(error, PolicyFailed) else repr(error)
        self.groups.fail(m.Failure(None, what[: m.MAX_REASON_CHARACTERS]))

    def _sync_graphs(self) -> list[SyncGraph]:
        """Of each stage: what the policy goes by, or else what the log says."""
        pipelines, sessions = self._extent.num_pipelines, self.groups.sessions
        graphs = []
        for stage in range(self._extent.num_stages):
            graph = self._driver.sync_graph(stage)
            if graph is None:
                active = [worker.pipeline for worker in sessions.active_in(stage)]
                graph = graph_of(self.log.recent, stage, active, pipelines, self._looks_back)
            graphs.append(graph)
        return graphs
