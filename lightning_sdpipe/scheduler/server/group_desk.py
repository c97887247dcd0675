"""Desk of groups: sessions begin and end, the policy is told of readies, and groups answer them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from lightning_sdpipe.policies.decisions import Decision, Group
from lightning_sdpipe.policies.events import (
    Contains,
    Joined,
    Left,
    Lost,
    Ready,
    Tick,
    Vanished,
    Widened,
    Worker,
)
from lightning_sdpipe.policies.policy import RefusedEvent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.log.status import Overview
from lightning_sdpipe.scheduler.server.contradictions import Extent
from lightning_sdpipe.scheduler.server.outbox import Outbox
from lightning_sdpipe.scheduler.server.policy_driver import PolicyDriver, PolicyFailed
from lightning_sdpipe.scheduler.server.process_groups import ProcessGroupRegistry
from lightning_sdpipe.scheduler.server.row_desk import RowDesk
from lightning_sdpipe.scheduler.server.session import (
    COMPUTING,
    FALLS_SILENT,
    JOINS,
    LEAVES,
    IllegalInput,
    Input,
    Session,
    Sessions,
)

logger = logging.getLogger(__name__)


class GroupDesk:
    """Keeps the sessions, and the first failure of the run, which every worker is told.

    Args:
        driver: drives the policy.
        extent: the workers that there may be.
        overview: is widened with the run.
        outbox: takes the answers.
        process_groups: those of an elastic run, whose groups go out when their members share one.
        rows: keeps the rows that workers report.
    """

    def __init__(
        self,
        driver: PolicyDriver,
        extent: Extent,
        overview: Overview,
        outbox: Outbox,
        process_groups: ProcessGroupRegistry,
        rows: RowDesk,
    ) -> None:
        self.rows = rows
        self.sessions = Sessions()
        self.extent = extent
        self.life = -1
        """Distinguishes this scheduler's answers in an elastic run from those of earlier ones."""
        self.failure: e.End | None = None
        self.on_broken: Callable[[Group, float], None] = lambda *_: None
        """Called with a group whose outcome a worker did not get."""
        self._driver = driver
        self._overview = overview
        self._outbox = outbox
        self._process_groups = process_groups

    # -------------------------------------------------------- coming and going

    def join_anew(self, request: m.Join, peer: bytes, now: float) -> None:
        """Begin a session at the first join of a new start of the worker; an older start's session ends."""
        worker = request.worker
        self.extent.check_mesh(request)
        self.departs(worker, now)
        session = self.sessions.begin(worker, request.incarnation, now)
        session.received.is_new(request.number, peer)
        self.join(session, request, peer, now)

    def join(self, session: Session, request: m.Join, peer: bytes, now: float) -> None:
        """Let a client join, for the first time or again."""
        if self.failure is not None:
            self._outbox.say(peer, e.Now(0, over=self.failure))
            return
        if request.number < session.received.left_at:
            return  # a later leave has overtaken it on the other socket
        if not session.active:
            self.extent.check_mesh(request)
            self._begin(session, now)
            session.iteration = session.answer = session.answered = None
        self._outbox.say(peer, e.Noted(request.number, session.invitations))

    def expect(self, worker: Worker, incarnation: int, now: float) -> None:
        """Let ``worker`` take part before it joins: the others of its stage wait for it."""
        self.departs(worker, now)
        self._begin(self.sessions.begin(worker, incarnation, now), now)

    def resume(self, worker: Worker, incarnation: int, number: int, answered: int | None, now: float) -> None:
        """Let a worker take part that believes, as of its request ``number``, that it does: an earlier scheduler let it
        join, and last answered its ready of iteration ``answered``."""
        session = self.sessions.of(worker, incarnation)
        if session is None:
            self.departs(worker, now)
            session = self.sessions.begin(worker, incarnation, now)
        if self.failure is None and not session.active and number > session.received.left_at:
            self._begin(session, now, answered)

    def _begin(self, session: Session, now: float, answered: int | None = None) -> None:
        self.let_time_pass(now)
        decisions = self._driver.tell(Joined(session.worker, answered), now)
        session.move(JOINS)
        self._carry_out(decisions, now)

    def leave_unseen(self, request: m.Leave, now: float) -> None:
        """Note the leave of a client that this scheduler has never seen. An earlier join may still be on its way over
        the other socket, or be kept until its process group is there: the leave outdates it."""
        worker = request.worker
        if self.sessions.get(worker) is None and self.failure is None:
            session = self.sessions.begin(worker, request.incarnation, now)
            session.received.left_at = request.number

    def contains(self, worker: Worker, incarnation: int, rounds: int, now: float) -> None:
        """Note that the model of ``worker`` contains the outcomes of ``rounds`` rounds (-1: not counted). Even a worker
        that has left can hand them over."""
        session = self.sessions.of(worker, incarnation)
        if rounds < 0 or (session is None and self.sessions.get(worker) is not None):
            return
        session = session or self.sessions.begin(worker, incarnation, now)
        if rounds > session.contains:
            session.contains = rounds
            self._carry_out(self._driver.tell(Contains(worker, rounds), now), now)

    def leave(self, session: Session, now: float) -> None:
        """Let a client leave; the others go on without it."""
        decisions: list[Decision] = []
        if session.active:
            decisions = self._drop(session, Left(session.worker), LEAVES, now)
        else:
            session.move(LEAVES)
        session.answer = session.answered = None
        self._carry_out(decisions, now)

    def departs(self, worker: Worker, now: float) -> None:
        """End the participation of ``worker``, whose process ends."""
        session = self.sessions.get(worker)
        if session is not None and session.active:
            self.leave(session, now)

    def lose(self, pipeline: int, left: bool, now: float) -> None:
        """End the participation of ``pipeline`` of an elastic run: it has left, or is lost."""
        for session in self.sessions.values():
            if session.worker.pipeline != pipeline:
                continue
            active = session.active
            if active:
                event = (Left if left else Lost)(session.worker)
                decisions = self._drop(session, event, LEAVES if left else FALLS_SILENT, now)
                session.answer = None
                self._carry_out(decisions, now)
            if left or not active:
                self._carry_out(self._driver.tell(Vanished(session.worker), now), now)

    def _drop(self, session: Session, event: Left | Lost, input: Input, now: float) -> list[Decision]:
        self.let_time_pass(now)  # a window that ends now may still answer the worker
        decisions = self._driver.tell(event, now)
        session.move(input)
        return decisions

    def number_from(self, sequence: int, now: float) -> None:
        """Number new groups from ``sequence`` on; an earlier scheduler has made those below."""
        self._carry_out(self._driver.number_from(sequence, now), now)

    def widen(self, num_pipelines: int, now: float) -> None:
        """Make room for ``num_pipelines`` pipelines.

        Raises:
            RefusedEvent: the policy allows fewer.
        """
        self._driver.widen(Widened(num_pipelines), now)
        self.extent.num_pipelines = num_pipelines
        self._overview.widen(num_pipelines)

    def fail(self, failure: e.End) -> None:
        """End the run; every worker is told the first failure."""
        if self.failure is None:
            self.failure = failure
            logger.error("%s; the run is over", failure)
        over = e.Now(0, over=self.failure)
        for session in self.sessions.values():
            self._outbox.say(session.peer, over)
            self._outbox.say(session.member_peer, over)

    # ----------------------------------------------------------------- readies

    def ready(self, session: Session, request: m.Ready, peer: bytes, now: float) -> None:
        """Let a worker wait for a group.

        Raises:
            RefusedEvent: the worker already waits for the answer to another ready.
        """
        iteration = request.iteration
        if self.failure is not None:
            self._outbox.say(peer, e.Now(0, over=self.failure))
        elif session.state is not COMPUTING:
            if not session.active:
                self._outbox.say(session.member_peer, e.Stranger(known=True))
            elif session.iteration != iteration:
                raise RefusedEvent(f"iteration {session.iteration} waits for an answer")
            else:  # it asks again; the answer is still to be decided
                missing = [other for other in self.computing(session.worker) if other != session.worker]
                self._outbox.say(peer, e.Waits(request.number, f"it waits for {named(missing)}"))
        elif session.answer is not None and session.iteration == iteration:
            self._outbox.say(peer, session.answer)
        else:
            if self._driver.deadline <= now:
                self.let_time_pass(now)
            decisions = self._driver.tell(Ready(session.worker, iteration, request.contains, request.again), now)
            if request.contains is not None:
                if request.contains == session.ready_with and session.answer is not None:
                    self.on_broken(session.answer.group, now)
                session.ready_with = request.contains
                session.contains = max(session.contains, request.contains)
            session.is_ready(iteration)
            self._carry_out(decisions, now)

    def hear_beat(self, beat: e.Beat, peer: bytes, now: float) -> None:
        """Note a worker's heartbeat and its speed; correct a worker that wrongly believes that it takes part."""
        worker = beat.worker
        session = self.sessions.of(worker, beat.incarnation)
        progress = self.rows.hear(beat, session is not None, peer, now)
        self.contains(worker, beat.incarnation, beat.contains, now)
        if session is not None:
            session.heard = now
        if session is None or not session.active:
            if beat.joined and (session is None or beat.number > session.received.left_at):
                self._outbox.say(peer, e.Stranger(known=True))
        elif progress is not None:
            self.let_time_pass(now)
            self._carry_out(self._driver.tell(progress, now), now)

    def computing(self, worker: Worker) -> list[Worker]:
        """Return the active workers that are not ready and for which ``worker`` may wait: replicas of its stage, or all
        workers where groups are of whole pipelines."""
        among = (
            sorted(self.sessions.values(), key=lambda s: s.worker)
            if self.extent.depths
            else self.sessions.of_stage(worker.stage)
        )
        return [session.worker for session in among if session.state is COMPUTING]

    # --------------------------------------------------------------- decisions

    def let_time_pass(self, now: float) -> None:
        """Tell the policy the time, if it is due."""
        if self._driver.deadline <= now:
            self._carry_out(self._driver.tell(Tick(), now), now)

    def send(self, group: Group) -> None:
        """Answer the readies of its members, and of the workers that they represent, with ``group``; invite the passive
        ones.

        Raises:
            PolicyFailed: one of these workers is not ready.
        """
        try:
            members = [self.sessions[member] for member in group.members]
            represented = [self.sessions[worker] for worker in self.extent.represented_by(group.members)]
            passive = group.passive
            invited = tuple([session.invitations for session in members])
            iterations = tuple([None if session.worker in passive else session.iteration for session in members])
            life = self.life if self._process_groups.in_use else -1
            answer = m.Answer(group, iterations, invited if any(invited) else (), life)
            for session in represented:
                if passive and self.extent.stands_for(session.worker) in passive:
                    session.invitations += 1
                    self._outbox.say(session.member_peer, m.Invitation(group, session.answered))
                else:
                    session.is_answered(answer)
                    self._outbox.say(session.peer, answer)
        except (IllegalInput, KeyError) as error:
            raise PolicyFailed(f"{group} cannot go out: {error}") from error

    def _carry_out(self, decisions: list[Decision], now: float) -> None:
        for group in decisions:
            logger.debug("group %d of stage %d: %s", group.sequence, group.stage, group.reason)
            if (ready := self._process_groups.ready_to_go(group, now)) is not None:
                self.send(ready)


def named(workers: Collection[Worker]) -> str:
    """List workers for people."""
    return ", ".join(map(str, workers)) or "no worker"
