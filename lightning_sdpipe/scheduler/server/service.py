"""The scheduler without its sockets: messages in, messages out, around one policy.

Every request is answered so that repeating it is harmless: a worker that heard nothing asks again. Messages that speak
for another worker, were seen before, or break a rule of the policy are counted, logged, and change nothing. A worker
whose heartbeats stop for ``worker_timeout`` seconds is lost: the others of an elastic run go on without it, and an
ordinary run ends if its machine does not answer either.

The service checks requests and passes them on to desks: groups
(:class:`~lightning_sdpipe.scheduler.server.group_desk.GroupDesk`), leases
(:class:`~lightning_sdpipe.scheduler.server.lease_desk.LeaseDesk`) and membership
(:class:`~lightning_sdpipe.scheduler.server.membership_desk.MembershipDesk`). The policy hears of everything through the
:class:`~lightning_sdpipe.scheduler.server.policy_driver.PolicyDriver`, which keeps the log of the run. A policy that
raises, or decides what cannot be carried out, ends the run with a failure that names it.
"""

from __future__ import annotations

import logging
from collections import Counter

from lightning_sdpipe.dealing.dealer import Dealer
from lightning_sdpipe.membership.elastic_config import MOST_PIPELINES, ElasticConfig
from lightning_sdpipe.membership.membership import Membership
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import PolicyConfig, RefusedEvent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.event_log import Entry, EventLog
from lightning_sdpipe.scheduler.log.status import Overview, Status
from lightning_sdpipe.scheduler.rows import MOST_UPDATES
from lightning_sdpipe.scheduler.server.contradictions import Extent, contradiction
from lightning_sdpipe.scheduler.server.group_desk import GroupDesk
from lightning_sdpipe.scheduler.server.lease_desk import LeaseDesk
from lightning_sdpipe.scheduler.server.lifelines import Lines
from lightning_sdpipe.scheduler.server.liveness import Liveness
from lightning_sdpipe.scheduler.server.membership_desk import MembershipDesk
from lightning_sdpipe.scheduler.server.outbox import Addressed, Outbox
from lightning_sdpipe.scheduler.server.policy_driver import PolicyDriver, PolicyFailed
from lightning_sdpipe.scheduler.server.process_groups import ProcessGroupRegistry
from lightning_sdpipe.scheduler.server.row_desk import RowDesk
from lightning_sdpipe.scheduler.server.session import Session, peers_of

logger = logging.getLogger(__name__)


class SchedulerService:
    """Checks each request, passes it on to the desk that it concerns, and gives the status of the run.

    Args:
        config: the values of the policy.
        num_stages: M.
        num_pipelines: N.
        worker_timeout: seconds of silence after which a worker is lost.
        elastic: terms of a run whose pipelines come and go; None to serve only runs of fixed pipelines.
        now: the time, in seconds of any clock that never runs backwards.
        log: gets every event and decision.

    Raises:
        ConfigurationError: the policy cannot serve so many workers.
    """

    def __init__(
        self,
        config: PolicyConfig,
        num_stages: int,
        num_pipelines: int,
        *,
        worker_timeout: float = 30.0,
        elastic: ElasticConfig | None = None,
        now: float = 0.0,
        log: EventLog | None = None,
    ) -> None:
        terms = elastic or ElasticConfig.of_fixed(num_pipelines)
        depths = terms.depths
        self.overview = Overview(num_stages, num_pipelines, depths, config.looks_back)
        self._name, self._description = registry.name_of(config), registry.to_json(config)
        self._looks_back = config.looks_back
        self._extent = Extent(num_stages, num_pipelines, depths)
        self._most_pipelines = num_pipelines if terms.fixed else max(num_pipelines, MOST_PIPELINES)
        self.log = log or EventLog()
        policy = registry.build(config, num_stages, num_pipelines, depths)
        dealer = Dealer(num_stages, num_pipelines, int(config.keeps_equal), depths)
        self._driver = PolicyDriver(policy, dealer, self.log, self.overview)
        self._started = now
        self._outbox = Outbox()
        self.limit = worker_timeout
        """Seconds of silence after which a worker counts as lost."""
        self.lines = Lines()
        """Lifelines, which tell at once that a process has ended."""
        membership = Membership(num_stages, terms, now, num_pipelines)
        presence = Liveness(worker_timeout, self.lines, now, membership.unit)
        process_groups = ProcessGroupRegistry(membership, presence)
        rows = RowDesk(self.log, self._outbox)
        self.groups = GroupDesk(self._driver, self._extent, self.overview, self._outbox, process_groups, rows)
        self.leases = LeaseDesk(self._driver, self.groups, self._outbox)
        self.members = MembershipDesk(
            membership, self.groups, self.leases, process_groups, presence, self._outbox, worker_timeout, config
        )
        self.members.on_decided = lambda now, event, decided: self.log.write(Entry(now, event, members=decided))

    @property
    def failure(self) -> e.End | None:
        """The first failure of the run."""
        return self.groups.failure

    @property
    def refused(self) -> Counter[str]:
        """Messages that changed nothing, by kind."""
        return self._outbox.ignored

    # ------------------------------------------------------------------ inputs

    def deadline(self) -> float:
        """Time at which :meth:`tick` is due."""
        return min(self._driver.deadline, self.members.deadline(), self.members.spans.deadline)

    def tick(self, now: float) -> list[Addressed]:
        """Let time pass; return the messages to send."""
        try:
            self.groups.let_time_pass(now)
            self.members.tick(now)
            self.members.spans.tick(now)
            self._dispatch_due(now)
        except Exception as error:
            self._give_up(error)
        return self._outbox.sent()

    def handle(self, peer: bytes, request: m.Request | m.Ask | e.Request, now: float) -> list[Addressed]:
        """Deal with a message from ``peer``; return the messages to send."""
        if not isinstance(request, e.FromWorker):
            return self._tell(peer, request, now)
        worker = request.worker
        session = self.groups.sessions.of(worker, request.incarnation)
        if peer not in (peers_of(worker, request.incarnation) if session is None else session.peers):
            self.ignore("impersonating", peer, f"it speaks for worker {worker}")
            return []
        try:
            reason = contradiction(request, self._extent, self._most_pipelines)
            if reason is not None:
                raise RefusedEvent(reason)
            if isinstance(request, e.MemberRequest):
                self.members.handle(peer, request, now)
                self._dispatch_due(now)
            elif (session is not None and session.active) or self.members.admits(peer, request, now):
                self._dispatch(peer, request, now)
            else:
                self._dispatch_due(now)
        except RefusedEvent as error:
            self._refuse(request, peer, str(error))
        except Exception as error:
            self._give_up(error)
        return self._outbox.sent()

    def line_ended(self, nonce: bytes, now: float) -> list[Addressed]:
        """Note that the lifeline of the process that was given ``nonce`` has closed."""
        of = self.lines.take(nonce)
        if of is None:
            return []
        try:
            self.members.process_ended(*of, now)
            self._dispatch_due(now)
        except Exception as error:
            self._give_up(error)
        return self._outbox.sent()

    def ignore(self, kind: str, peer: bytes, detail: str) -> None:
        """Count a message from ``peer`` that changes nothing."""
        self._outbox.ignore(kind, peer, detail)

    def status(self, now: float) -> Status:
        """Return the status of the run."""
        overview, uptime, sessions = self.overview, now - self._started, self.groups.sessions
        return Status(
            policy=self._description,
            uptime=uptime,
            started=self._started,
            signals=overview.signals,
            signals_per_second=overview.rate(now, uptime),
            groups_by_size=dict(sorted(overview.sizes.items())),
            groups_by_reason=dict(sum(overview.reasons, Counter())),
            refused=dict(self.refused),
            failure=None if self.failure is None else str(self.failure),
            held=self.members.held,
            looks_back=self._looks_back,
            stages=overview.stages(
                now,
                {session.worker: session.state.value for session in sessions.values()},
                {session.worker: round(now - session.heard, 3) for session in sessions.values()},
                [self._driver.sync_graph(stage) for stage in range(len(overview.graphs))],
            ),
            members=self.members.status(now),
            depths=self._extent.depths,
        )

    def validate(self) -> None:
        """Raise AssertionError if the desks contradict each other; for tests, after each step."""
        self.groups.sessions.validate()
        assert not self._outbox.sent()

    # ---------------------------------------------------------------- requests

    def _tell(self, peer: bytes, question: m.Ask, now: float) -> list[Addressed]:
        """Return the messages that answer a program other than a worker."""
        match question:
            case m.Ask("status"):
                return [(peer, m.StatusReply(self.status(now)))]
            case m.Ask("rows", since):
                return [(peer, self.groups.rows.answer(since, self.members.present, now))]
            case m.Ask("spans", updates):
                self.members.spans.ask(peer, min(max(1, updates), MOST_UPDATES), now)
        return self._outbox.sent()

    def _dispatch_due(self, now: float) -> None:
        """Deal with the kept requests that are due."""
        for peer, request in self.members.due(now):
            try:
                self._dispatch(peer, request, now)
            except RefusedEvent as error:
                self._refuse(request, peer, str(error))
        self.members.deliver(now)

    def _dispatch(self, peer: bytes, request: m.Request | e.Enrol, now: float) -> None:
        session = self.groups.sessions.of(request.worker, request.incarnation)
        if session is None:
            self._before_its_join(request, peer, now)
        elif session.received.is_new(request.number, peer):
            session.heard = now
            self._of_training(session, request, peer, now)
        else:
            self.refused["replayed"] += 1  # as on slow machines, where requests are repeated before they are answered

    def _before_its_join(self, request: m.Request | e.Enrol, peer: bytes, now: float) -> None:
        """Deal with a request of a worker's start that has not joined: it is new, or the scheduler is."""
        match request:
            case m.Join():
                self.groups.rows.introduce(request.worker, request.about)
                self.groups.join_anew(request, peer, now)
            case m.Leave():
                self.groups.rows.hear(request, False, peer, now)
                self.groups.leave_unseen(request, now)
                self._outbox.say(peer, e.Noted(request.number))
            case m.Ready(worker=worker, incarnation=incarnation):
                self._outbox.say(e.peer_of(worker, incarnation), e.Stranger(known=True))
            case _:
                self._of_any(request, peer, now)

    def _of_training(self, session: Session, request: m.Request | e.Enrol, peer: bytes, now: float) -> None:
        match request:
            case m.Ready():
                self.groups.ready(session, request, peer, now)
            case m.Join():
                self.groups.rows.introduce(request.worker, request.about)
                self.groups.join(session, request, peer, now)
            case m.Leave():
                self.groups.rows.hear(request, True, peer, now)
                session.received.left_at = request.number
                self.groups.contains(request.worker, request.incarnation, request.contains, now)
                self.groups.leave(session, now)
                self._outbox.say(peer, e.Noted(request.number, session.invitations))
            case _:
                self._of_any(request, peer, now)

    def _of_any(self, request: m.Hello | m.AskLease | e.Enrol, peer: bytes, now: float) -> None:
        """Deal with a request that needs no session."""
        match request:
            case m.Hello():
                self._extent.check_mesh(request)
                if self.failure is not None:
                    raise RefusedEvent(f"its run is over, since {self.failure}; start it again for the next run")
                self._outbox.say(peer, m.Welcome(request.number, self._description, self._extent.planned))
            case m.AskLease():
                self.leases.ask(request, peer, now)
            case e.Enrol(worker=worker, incarnation=incarnation, number=number, resumes=e.Resumes() as resumes):
                self.groups.rows.introduce(worker, resumes.about)
                if resumes.joined:
                    self.groups.resume(worker, incarnation, number, resumes.answered, now)
                self.groups.contains(worker, incarnation, resumes.contains, now)

    # ----------------------------------------------------------------- replies

    def _refuse(self, request: m.Request | e.Request, peer: bytes, reason: str) -> None:
        self.ignore("refused", peer, reason)
        self._outbox.say(peer, e.Refused(request.number, reason))

    def _give_up(self, error: Exception) -> None:
        """End the run, since the policy, or this service, cannot go on."""
        logger.error("the scheduler cannot go on", exc_info=error)
        self._driver.fail()
        self._outbox.clear()  # a group may have gone out to some of its members only
        what = f"its policy {self._name} failed on {error}" if isinstance(error, PolicyFailed) else repr(error)
        self.groups.fail(e.End(what[: m.MAX_REASON_CHARACTERS], run=True))
