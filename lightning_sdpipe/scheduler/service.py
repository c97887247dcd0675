"""The scheduler without its sockets: frames in, frames out, around one policy.

Every request is answered so that repeating it is harmless: a worker that heard nothing may ask again. Frames
that are malformed, speak for another worker, or break a rule of the policy are counted and change nothing.
"""

from __future__ import annotations

import logging
from collections import Counter

from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.policy import Group, GroupPolicy, RefusedEvent, Worker

log = logging.getLogger(__name__)

Frame = tuple[bytes, bytes]
"""A routing identity and the frame for it."""


class SchedulerService:
    """Keeps, besides the policy, who is known, what was answered, and the first failure of the run."""

    def __init__(self, policy: GroupPolicy) -> None:
        self.failure: m.Failure | None = None
        self.refused: Counter[str] = Counter()
        self._policy = policy
        self._active: dict[Worker, int] = {}
        """The session in which each active worker joined."""
        self._known: set[bytes] = set()
        self._waiting: dict[Worker, int] = {}
        self._answers: dict[Worker, m.Answer] = {}

    def deadline(self) -> float | None:
        """When :meth:`tick` is due."""
        return self._policy.deadline()

    def tick(self, now: float) -> list[Frame]:
        """Time passed."""
        return self._send(self._policy.tick(now))

    def handle(self, identity: bytes, frame: bytes, now: float) -> list[Frame]:
        """One frame from the peer that calls itself ``identity``."""
        try:
            request = m.decode_request(frame)
        except m.MalformedFrame as error:
            self._count("malformed", identity, str(error))
            return []
        if m.routing_id(request.worker) != identity:
            self._count("impersonating", identity, f"speaks for worker {request.worker}")
            return []
        try:
            return self._carry_out(request, identity, now)
        except RefusedEvent as error:
            self._count("refused", identity, str(error))
            return [(identity, m.encode(m.Refused(request.number, str(error))))]

    def _carry_out(self, request: m.Request, identity: bytes, now: float) -> list[Frame]:
        worker = request.worker
        match request:
            case m.Ready(iteration=iteration):
                return self._ready(worker, iteration, identity, now)
            case m.Join(session=session):
                return self._join(worker, session, identity, request.number, now)
            case m.Leave():
                groups = self._leave(worker, now) if worker in self._active else []
                return [*self._send(groups), (identity, m.encode(m.Acknowledged(request.number)))]
            case m.AskMissing():
                missing = sorted(
                    w for w in self._active if w.stage == worker.stage and w not in self._waiting
                )
                return [(identity, m.encode(m.Missing(request.number, tuple(missing))))]
            case m.AskFailure():
                return [(identity, m.encode(m.FirstFailure(request.number, self.failure)))]
            case m.Failed(reason=reason):
                self._known.add(identity)
                if self.failure is None:
                    self.failure = m.Failure(worker, reason)
                    log.error("worker %s failed: %s; the run is over", worker, reason)
                abort = m.encode(m.Abort(self.failure))
                return [(peer, abort) for peer in sorted(self._known)]

    def _ready(self, worker: Worker, iteration: int, identity: bytes, now: float) -> list[Frame]:
        if self.failure is not None:
            return [(identity, m.encode(m.Abort(self.failure)))]
        answered = self._answers.get(worker)
        if answered is not None and answered.iteration == iteration:
            return [(identity, m.encode(answered))]
        if self._waiting.get(worker) == iteration:
            return []
        groups = self._policy.ready(worker, iteration, now)
        self._waiting[worker] = iteration
        return self._send(groups)

    def _join(self, worker: Worker, session: int, identity: bytes, number: int, now: float) -> list[Frame]:
        if self.failure is not None:
            self._known.add(identity)
            return [(identity, m.encode(m.Abort(self.failure)))]
        groups: list[Group] = []
        if self._active.get(worker) != session:
            if worker in self._active:
                log.warning("worker %s came back as a new client: it left without saying so", worker)
                groups += self._leave(worker, now)
            groups += self._policy.join(worker, now)
            self._active[worker] = session
            self._known.add(identity)
            self._answers.pop(worker, None)
        return [*self._send(groups), (identity, m.encode(m.Acknowledged(number)))]

    def _leave(self, worker: Worker, now: float) -> list[Group]:
        groups = self._policy.leave(worker, now)
        del self._active[worker]
        self._waiting.pop(worker, None)
        self._answers.pop(worker, None)
        return groups

    def _send(self, groups: list[Group]) -> list[Frame]:
        frames = []
        for group in groups:
            log.debug("group %d of stage %d: %s", group.sequence, group.stage, group.reason.value)
            for worker in group.members:
                answer = m.Answer(self._waiting.pop(worker), group)
                self._answers[worker] = answer
                frames.append((m.routing_id(worker), m.encode(answer)))
        return frames

    def _count(self, kind: str, identity: bytes, detail: str) -> None:
        self.refused[kind] += 1
        log.warning("%s frame from %r ignored: %s", kind, identity[:32], detail)
