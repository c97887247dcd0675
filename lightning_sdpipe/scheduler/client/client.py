"""The scheduler client of a worker's training thread. It has a socket of its own, since requests through another thread
arrived late.

Its requests and beliefs are a part of the :class:`~lightning_sdpipe.scheduler.client.conversation.Conversation` of its
process; a :class:`~lightning_sdpipe.scheduler.client.membership_client.MembershipClient` sends all other parts of it.
An unanswered request is repeated, so a scheduler that restarts at the same address finds its workers again by itself: a
worker that it does not know joins again and repeats its unanswered ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from lightning_sdpipe import meter
from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import MustEndError, RefusedError, SchedulerError, WorkerFailedError
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client import effects as f
from lightning_sdpipe.scheduler.client.connection import GLANCE
from lightning_sdpipe.scheduler.client.membership_client import MembershipClient
from lightning_sdpipe.scheduler.client.training_asks import Came, Kind
from lightning_sdpipe.scheduler.rows import About

__all__ = ["Failure", "RunAborted", "SchedulerClient"]

Failure = m.Failure
_Reply = TypeVar("_Reply")

CONNECT_TIMEOUT = 15.0
"""Seconds in which a scheduler must answer for the first time."""
MEANWHILE = 0.02
"""Seconds between calls of ``meanwhile`` during a wait."""
REPEAT_AFTER = 1.0
"""Seconds after which an unanswered request is repeated."""


class RunAborted(WorkerFailedError):
    """The scheduler ended the run; ``failure`` names the worker that failed first, and the reason."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class SchedulerClient:
    """Speaks for one worker. Every wait ends after ``timeout`` seconds with a :class:`SchedulerError`, or with
    :class:`MustEndError` when the run went on without this process.

    All methods belong to one thread, the one that trains.

    Args:
        line: the membership client of the same process, which enrols before this one joins.
        timeout: seconds that a wait lasts at most.
    """

    def __init__(self, line: MembershipClient, timeout: float = 60.0) -> None:
        self.line, self.address, self.worker = line, line.address, line.worker
        self.credentials = line.credentials
        self.policy: str | None = None
        """Values of the scheduler's policy, as JSON, once it has answered."""
        self.serves: m.Shape | None = None
        """The stages and pipelines that the scheduler serves, once it has been greeted."""
        self.about: About | None = None
        """Description of this worker for people. It must be set before :meth:`join`."""
        self.meanwhile: Callable[[], object] | None = None
        """Called often during a wait for a lease."""
        self.on_invitation: Callable[[Group, int | None], None] | None = None
        """Called in the other thread, in order, for each group that the worker is a passive member of, with the last
        iteration that had been answered before, None if none had since the worker joined. It must be set before
        :meth:`join`."""
        self.invitations_are_lost_after: float | None = None
        """Seconds after which an invitation that was sent and has not come is not waited for any more; None if that
        is an error. It never comes if the connection has broken, or the scheduler was killed."""
        self._timeout = timeout
        self._thread, self._asks = line.thread, line.thread.talk.training
        self._outcomes: dict[Kind, m.Reply | e.Reply] = {}
        self._invited = 0
        self._iteration: int | None = None
        """Iteration of the ready whose group was not fetched yet."""
        self._repeat_at = 0.0
        """Time at which a ready that is only looked at is repeated."""
        self._group = -1
        """Sequence of the group that was fetched since the last step, -1 for none."""
        self._leasing: tuple[Segment, int] | None = None
        """The lease that was asked for, last at ``_lease_asked``, and has not come in time."""
        self._lease_asked = 0.0
        self._asks.spans.meter = meter.current()
        line.thread.on_invitation = self._follow
        self._connection = line.connect(m.routing_id(line.worker, line.incarnation))

    @property
    def aborted(self) -> Failure | None:
        """The first failure of the run, once this process has heard of it."""
        stop = self._thread.talk.stop
        return Failure(stop.worker, stop.reason) if stop is not None and stop.run and stop.failed else None

    def greet(self) -> None:
        """Make sure that the scheduler runs, and serves this run.

        Raises:
            SchedulerError: it does not answer, the keys do not fit, it speaks another version, or serves another mesh.
        """
        if self.policy is None:
            what = f"the scheduler at {self.address} to answer"
            self._ask(m.Hello)
            welcome = self._wait(m.Hello, m.Welcome, what, min(self._timeout, CONNECT_TIMEOUT))
            self.serves, self.policy = welcome.mesh, welcome.policy
            self._connection.established()

    def join(self) -> None:
        """Take part from now on; return when the scheduler has acknowledged it."""
        self.greet()
        self._asks.about = self.about
        self._ask(m.Join)
        self._wait(m.Join, e.Noted, "the scheduler to let it join")
        meter.current().start()

    def leave(self) -> None:
        """Pause or end the epoch; return when the scheduler has acknowledged it."""
        self._iteration = None
        self._ask(m.Leave)
        noted = self._wait(m.Leave, e.Noted, "the scheduler to let it leave")
        self._wait_for_invitations(noted.invitations)

    def withdraw(self) -> Group | None:
        """Leave, so that the last :meth:`ready` is void; return its group if that was decided before, and its members
        count on this worker."""
        self.leave()
        answer = self._outcomes.pop(m.Ready, None)
        return answer.group if isinstance(answer, m.Answer) else None

    def ready(self, iteration: int, base: int | None = None) -> None:
        """Report the local step of ``iteration`` as done, without waiting; :meth:`group` fetches the answer. ``base``
        is that of :class:`~lightning_sdpipe.policies.events.Ready`."""
        if not self._asks.joined:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} without having joined; call join() first"
            )
        if self._iteration is not None:
            raise SchedulerError(
                f"worker {self.worker} reported iteration {iteration} before it fetched the group of "
                f"iteration {self._iteration}; call group() after every ready()"
            )
        self._iteration, self._repeat_at = iteration, time.monotonic() + REPEAT_AFTER
        self._ask(m.Ready, iteration, base)

    def group(self) -> Group:
        """Wait for the answer to the last :meth:`ready`, and for the invitations that were sent before it."""
        if self._iteration is None:
            raise SchedulerError(f"worker {self.worker} asked for a group without being ready; call ready() first")
        answer = self._wait(m.Ready, m.Answer, f"the group of its iteration {self._iteration}")
        self._iteration = None
        self._wait_for_invitations(m.invitations_of(self.worker, answer))
        self._group = answer.group.sequence
        return answer.group

    def group_if_known(self) -> Group | None:
        """Return the group as :meth:`group` does, if the answer has come, else None. Called again and again, it repeats
        the ready as a wait would."""
        if self._iteration is not None and m.Ready not in self._outcomes:
            self._check()
            if (now := time.monotonic()) >= self._repeat_at:
                self._again()
                self._repeat_at = now + REPEAT_AFTER
            self._receive(0.0)
        return self.group() if m.Ready in self._outcomes else None

    @overload
    def lease(self, segment: Segment, ordinal: int) -> Lease: ...

    @overload
    def lease(self, segment: Segment, ordinal: int, seconds: float | None) -> Lease | None: ...

    def lease(self, segment: Segment, ordinal: int, seconds: float | None = None) -> Lease | None:
        """Wait for lease ``ordinal`` of this worker's pipeline in ``segment``; all its stages get the same.

        After a lease that is not empty, the answer comes at once: batches, or an empty lease. An empty lease tells the
        pipeline to train whatever it holds; the answer after it comes when there are batches again, or the segment is
        over. Returns None if that takes longer than ``seconds``. Then the lease can be asked for again, and the answer
        to an earlier request counts.
        """
        now = time.monotonic()
        if self._leasing != (segment, ordinal):
            self._leasing, self._lease_asked = (segment, ordinal), now
            self._ask(m.AskLease, segment, ordinal)
        elif now >= self._lease_asked + REPEAT_AFTER:
            self._lease_asked = now
            self._again()
        with meter.phase(meter.WAIT_GROUP):
            if seconds is not None and not self._comes(m.AskLease, seconds):
                return None
            self._leasing = None
            return self._wait(m.AskLease, m.Dealt, f"lease {ordinal} of {segment}").lease

    def trained(self, batches: int, loose: int = 0) -> None:
        """Note that this worker has trained so many batches of the segment, the last ``loose`` of which no other model
        has; heartbeats report it."""
        with self._thread.changed:
            self._asks.leases.trained(batches, loose)

    def step_ended(self, iteration: int, waited: float) -> None:
        """Note that the step of ``iteration`` is over; ``waited`` are all seconds so far that this worker waited for
        replicas.

        Heartbeats report the phases of the steps to the scheduler.
        """
        measured, group = meter.current(), self._group
        self._group = -1
        row = measured.update_ended(waited)
        measured.mark(meter.UPDATE, iteration)
        if row is None:
            return
        with self._thread.changed:
            much = self._asks.rows.add(iteration, row, group)
        if much:
            self.beat_soon()

    def beat_soon(self) -> None:
        """Bring the next heartbeat forward, to an eighth of a second after the last one at the soonest."""
        with self._thread.talking() as talk:
            talk.beat_soon()

    def first_failure(self, timeout: float) -> Failure | None:
        """Return the run's first failure, if this process hears of one within ``timeout`` seconds."""
        with self._thread.changed:
            self._thread.changed.wait_for(lambda: self._thread.talk.stop is not None, timeout)
        return self.aborted

    # ---------------------------------------------------------------------- inside

    def _ask(self, kind: Kind, *fields: Any) -> None:
        with self._thread.changed:
            request = self._asks.ask(kind, *fields)
            self._outcomes.pop(kind, None)
        self._transmit([request])

    def _again(self) -> None:
        """Repeat the open requests."""
        with self._thread.changed:
            requests = self._asks.again()
        self._transmit(requests)

    def _transmit(self, requests: Iterable[m.Request]) -> None:
        for request in requests:
            if not self._connection.send(m.encode(request)) and self.policy is not None:
                raise SchedulerError(
                    f"worker {self.worker} has no connection to the scheduler at {self.address}; check that it "
                    "runs, can be reached, and was started with the keys that belong to this worker's"
                )

    def _wait(self, kind: Kind, reply: type[_Reply], what: str, seconds: float | None = None) -> _Reply:
        """Return the reply to the request of that ``kind``, which is repeated until the reply comes."""
        now, seconds = time.monotonic(), self._timeout if seconds is None else seconds
        until, repeat_at = now + seconds, min(now + REPEAT_AFTER, now + seconds / 2)
        while (outcome := self._outcomes.pop(kind, None)) is None:
            self._check()
            if now >= until:
                raise SchedulerError(f"worker {self.worker} waited {seconds:g} s for {what}; {self._who_is_missing()}")
            if now >= repeat_at:
                self._again()
                repeat_at = now + REPEAT_AFTER
            left = min(until, repeat_at) - now
            if self.meanwhile is not None and kind is m.AskLease:
                self.meanwhile()
                left = min(left, MEANWHILE)
            if self.policy is None:
                self._connection.check()
                left = min(left, GLANCE)
            self._receive(left)
            now = time.monotonic()
        if isinstance(outcome, e.Refused):
            raise RefusedError(f"the scheduler at {self.address} refused: {outcome.reason}")
        assert isinstance(outcome, reply)
        return outcome

    def _comes(self, kind: Kind, seconds: float) -> bool:
        """Return whether the reply to the request of that ``kind`` comes within ``seconds``."""
        until = time.monotonic() + seconds
        while kind not in self._outcomes and (left := until - time.monotonic()) > 0:
            self._check()
            if self.meanwhile is not None:
                self.meanwhile()
            self._receive(min(left, MEANWHILE))
        return kind in self._outcomes

    def _receive(self, seconds: float) -> None:
        reply = self._connection.receive(seconds)
        if reply is None:
            return
        others: list[f.Effect] = []
        with self._thread.changed:
            for effect in self._thread.talk.hear_training(reply):
                match effect:
                    case Came(kind, came):
                        self._outcomes[kind] = came
                    case _:
                        others.append(effect)
            self._thread.changed.notify_all()
        if others:
            self._thread.carry_out(others)

    def _check(self) -> None:
        stop = self._thread.talk.stop
        if stop is None:
            return
        if not stop.run:
            raise MustEndError(self.worker.pipeline, stop.reason)
        raise RunAborted(Failure(stop.worker, stop.reason))

    def _wait_for_invitations(self, sent: int) -> None:
        lost_after = self.invitations_are_lost_after
        seconds = self._timeout if lost_after is None else lost_after
        with self._thread.changed:
            talk = self._thread.talk
            if not self._thread.changed.wait_for(lambda: self._invited >= sent or bool(talk.stop), seconds):
                if lost_after is not None:
                    self._invited = sent
                    return
                raise SchedulerError(
                    f"worker {self.worker} waited {self._timeout:g} s for {sent - self._invited} invitations that it "
                    f"was sent; its beats may not reach the scheduler at {self.address}"
                )
            if self._invited < sent:
                self._check()

    def _who_is_missing(self) -> str:
        if self.policy is None:
            return self._connection.silence()
        if not self._asks.waits_for:
            return f"the scheduler at {self.address} does not answer; check that it runs and can be reached"
        return f"the scheduler at {self.address} answers and says that it waits for {self._asks.waits_for}"

    # ------------------------------------------------------------- in the other thread

    def _follow(self, group: Group, after: int | None) -> None:
        if self.on_invitation is None:
            reason = (
                f"the policy made it a passive member of group {group.sequence}, and it cannot average while it "
                "computes; set SchedulerClient.on_invitation, or use another policy"
            )
            with self._thread.talking() as talk:
                talk.tell(e.Depart, False, reason)
            return
        self.on_invitation(group, after)
        with self._thread.changed:
            self._invited += 1
            self._thread.changed.notify_all()
