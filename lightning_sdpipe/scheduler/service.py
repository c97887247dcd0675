"""The scheduler without its sockets: frames in, frames out, around one policy.

Every request is answered so that repeating it is harmless: a worker that heard nothing asks again. Frames
that are malformed, speak for another worker, were seen before, or break a rule of the policy are counted,
logged, and change nothing. A worker whose heartbeats stop for ``worker_timeout`` seconds is treated as left.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Joined, Left, Ready, Tick, Worker
from lightning_sdpipe.policies.policy import Policy, RefusedEvent
from lightning_sdpipe.scheduler import messages as m
from lightning_sdpipe.scheduler.recovery import Recovery
from lightning_sdpipe.scheduler.status import Statistics, Status, WorkerStatus

log = logging.getLogger(__name__)

Frame = tuple[bytes, bytes]
"""A routing identity and the frame for it."""

REMEMBERED_SESSIONS = 64
"""Ended sessions per worker whose frames are still recognised as replays."""
LOGGED_PER_KIND = 20
"""Ignored frames of one kind that are logged; the rest are only counted."""


TRAINING, HEARTBEATS = 0, 1
"""The two sockets of a worker."""


class _Client:
    """What the service knows of one worker's client: one session."""

    __slots__ = (
        "active",
        "answer_frame",
        "answered",
        "averaging",
        "beats",
        "heard",
        "identity",
        "invitations",
        "last_group",
        "left_at",
        "lost",
        "numbers",
        "reported",
        "session",
        "waiting",
    )

    def __init__(self, session: int, identity: bytes) -> None:
        self.session = session
        self.identity = identity
        self.active = False
        self.lost = False
        self.averaging = False
        self.heard = 0.0
        self.beats = False
        """Only a client that ever sent a heartbeat can be missed."""
        self.numbers = [-1, -1]
        """The last number on the training's socket and on the heartbeats'."""
        self.left_at = -1
        self.waiting: int | None = None
        self.reported: int | None = None
        self.answered: int | None = None
        self.answer_frame = b""
        self.last_group: Group | None = None
        self.invitations = 0


class SchedulerService:
    """Keeps, besides the policy, who is known, what was answered, and the first failure of the run."""

    def __init__(
        self,
        policy: Policy,
        num_workers: int,
        *,
        description: str = "",
        worker_timeout: float = 30.0,
        recovery_grace: float = 10.0,
        now: float = 0.0,
    ) -> None:
        self.failure: m.Failure | None = None
        self.refused: Counter[str] = Counter()
        self._policy = policy
        self._num_workers = num_workers
        self._description = description
        self._worker_timeout = worker_timeout
        self._recovery_grace = recovery_grace
        self._started = now
        self._clients: dict[Worker, _Client] = {}
        self._ended_sessions: dict[Worker, list[int]] = {}
        self._names: dict[bytes, tuple[Worker, int]] = {}
        """Whose socket an identity is, and which of the two."""
        self._statistics = Statistics()
        self._recovery: Recovery | None = None
        self._first_sequence = 0
        self._next_roll_call = now + worker_timeout / 4

    def deadline(self) -> float:
        """When :meth:`tick` is due."""
        due = self._policy.deadline()
        if due is None or due > self._next_roll_call:
            due = self._next_roll_call
        if self._recovery is not None:
            due = min(due, self._recovery.until)
        return due

    def tick(self, now: float) -> list[Frame]:
        """Time passed."""
        frames: list[Frame] = []
        if now >= self._next_roll_call:
            frames += self._call_the_roll(now)
        frames += self._send(self._policy.on(Tick(), now))
        if self._recovery is not None and self._recovery.until <= now:
            frames += self._end_recovery(now)
        return frames

    def handle(self, identity: bytes, frame: bytes, now: float) -> list[Frame]:
        """One frame from the peer that calls itself ``identity``."""
        try:
            request = m.decode_request(frame)
        except m.MalformedFrame as error:
            return self._ignore("malformed", identity, str(error))
        if isinstance(request, m.AskStatus):
            return [(identity, m.encode(m.StatusReply(self.status(now))))]
        worker = request.worker
        owner, socket = self._names.get(identity) or _owner(identity, worker)
        if owner != worker:
            return self._ignore("impersonating", identity, f"it speaks for worker {worker}")
        client = self._clients.get(worker)
        if client is None or client.session != request.session:
            return self._from_a_stranger(request, identity, now)
        if request.number <= client.numbers[socket]:
            return self._ignore("replayed", identity, f"number {request.number} was seen before")
        client.numbers[socket] = request.number
        client.heard = now
        return self._carry_out(client, request, identity, now)

    def status(self, now: float) -> Status:
        """How the run is."""
        furthest: dict[int, int] = {}
        for worker, client in self._clients.items():
            if client.reported is not None:
                furthest[worker.stage] = max(furthest.get(worker.stage, 0), client.reported)
        uptime = now - self._started
        failure = self.failure
        return Status(
            policy=self._description,
            uptime=uptime,
            signals=self._statistics.signals,
            signals_per_second=self._statistics.rate(now, uptime),
            groups_by_size=dict(sorted(self._statistics.sizes.items())),
            groups_by_reason=dict(self._statistics.reasons),
            refused=dict(self.refused),
            failure=None if failure is None else f"worker {failure.worker}: {failure.reason}",
            workers=[
                WorkerStatus(
                    worker=worker,
                    state=_state(client),
                    iteration=client.reported,
                    staleness=None if client.reported is None else furthest[worker.stage] - client.reported,
                    last_group=client.last_group,
                    silent=now - client.heard,
                )
                for worker, client in sorted(self._clients.items())
            ],
        )

    def _from_a_stranger(self, request: m.Request, identity: bytes, now: float) -> list[Frame]:
        """The session is not the worker's current one: a new client, an ended one, or a restart of ours."""
        worker = request.worker
        if request.session in self._ended_sessions.get(worker, ()):
            return self._ignore("replayed", identity, f"its session of worker {worker} has ended")
        match request:
            case m.Join():
                return self._join_anew(request, identity, now)
            case m.Failed():
                return self._failed(request, identity)
            case m.AskFailure():
                return [(identity, m.encode(m.FirstFailure(request.number, self.failure)))]
            case m.AskMissing():
                return [(identity, m.encode(m.Missing(request.number, self._missing(worker.stage))))]
            case m.Heartbeat(joined=False):
                return [(identity, m.encode(m.Pulse(self.failure)))]
            case _:
                return [(identity, m.encode(m.Unknown(request.number)))]

    def _carry_out(self, client: _Client, request: m.Request, identity: bytes, now: float) -> list[Frame]:
        worker = request.worker
        match request:
            case m.Ready():
                return self._ready(client, request, identity, now)
            case m.Heartbeat():
                client.beats = True
                client.averaging = request.averaging
                if request.joined and not client.active and request.number > client.left_at:
                    return [(identity, m.encode(m.Unknown(request.number)))]
                return [(identity, m.encode(m.Pulse(self.failure)))]
            case m.Join():
                return self._join(client, request, identity, now)
            case m.Leave():
                client.left_at = request.number
                frames = self._leave(worker, client, now) if client.active else []
                client.lost = False
                return [*frames, (identity, m.encode(m.Acknowledged(request.number, client.invitations)))]
            case m.AskMissing():
                return [(identity, m.encode(m.Missing(request.number, self._missing(worker.stage))))]
            case m.AskFailure():
                return [(identity, m.encode(m.FirstFailure(request.number, self.failure)))]
            case m.Failed():
                return self._failed(request, identity)

    def _ready(self, client: _Client, request: m.Ready, identity: bytes, now: float) -> list[Frame]:
        worker, iteration = request.worker, request.iteration
        if self.failure is not None:
            return [(identity, m.encode(m.Abort(self.failure)))]
        if not client.active:
            return [(identity, m.encode(m.Unknown(request.number)))]
        if client.waiting == iteration:
            return []  # asked again; the answer is on its way to be decided
        if client.answered == iteration:
            return [(identity, client.answer_frame)]
        if client.waiting is not None:
            return self._refuse(request, identity, f"iteration {client.waiting} waits for an answer")
        if self._recovery is not None:
            client.waiting = client.reported = iteration
            self._recovery.held[worker] = iteration
            return []
        try:
            groups = self._policy.on(Ready(worker, iteration), now)
        except RefusedEvent as error:
            return self._refuse(request, identity, str(error))
        client.waiting = client.reported = iteration
        self._statistics.signal(now)
        return self._send(groups)

    def _join_anew(self, request: m.Join, identity: bytes, now: float) -> list[Frame]:
        """The first join of a session; an older session of the worker ends."""
        worker = request.worker
        frames: list[Frame] = []
        before = self._clients.get(worker)
        if before is not None and before.active:
            log.warning("worker %s came back as a new client; the old one never left", worker)
            frames += self._leave(worker, before, now)
        if before is not None:
            ended = self._ended_sessions.setdefault(worker, [])
            ended.append(before.session)
            del ended[:-REMEMBERED_SESSIONS]
        client = _Client(request.session, m.routing_id(worker))
        client.numbers[HEARTBEATS if identity == m.heartbeat_id(worker) else TRAINING] = request.number
        client.heard = now
        try:
            frames += self._join(client, request, identity, now)
        except RefusedEvent as error:  # no such worker
            return frames + self._refuse(request, identity, str(error))
        self._clients[worker] = client
        self._names[m.routing_id(worker)] = (worker, TRAINING)
        self._names[m.heartbeat_id(worker)] = (worker, HEARTBEATS)
        return frames

    def _join(self, client: _Client, request: m.Join, identity: bytes, now: float) -> list[Frame]:
        worker = request.worker
        if self.failure is not None:
            return [(identity, m.encode(m.Abort(self.failure)))]
        if request.number < client.left_at:
            return []  # the heartbeats' socket was slower than the leave that came after
        frames: list[Frame] = []
        if not client.active:
            frames = self._send(self._policy.on(Joined(worker), now))
            client.active, client.lost = True, False
            client.waiting = client.reported = client.answered = None
            if request.resumed:
                self._resume(client, request, now)
        return [*frames, (identity, m.encode(m.Acknowledged(request.number, client.invitations)))]

    def _resume(self, client: _Client, request: m.Join, now: float) -> None:
        if self._recovery is None and self._statistics.signals == 0:
            log.warning(
                "worker %s resumes a run that this scheduler did not start; it waits %g s for the others",
                request.worker,
                self._recovery_grace,
            )
            self._recovery = Recovery(self._num_workers, self._recovery_grace, now)
        if request.last is not None:
            client.reported = request.last.iteration_of(request.worker)
        if self._recovery is not None:
            self._recovery.resumed(request.worker, request.last)

    def _end_recovery(self, now: float) -> list[Frame]:
        recovery = self._recovery
        assert recovery is not None
        self._recovery = None
        self._first_sequence = recovery.next_sequence
        frames: list[Frame] = []
        for worker, iteration in recovery.held.items():
            client = self._clients[worker]
            answer = recovery.answer_heard_by_others(worker, iteration)
            if answer is not None:
                client.waiting, client.answered = None, iteration
                client.answer_frame, client.last_group = m.encode(answer), answer.group
                frames.append((client.identity, client.answer_frame))
                continue
            self._statistics.signal(now)
            frames += self._send(self._policy.on(Ready(worker, iteration), now))
        return frames

    def _leave(self, worker: Worker, client: _Client, now: float) -> list[Frame]:
        groups = self._policy.on(Left(worker), now)
        # A window of this very moment may still have answered the worker: send first.
        frames = self._send(groups)
        client.active = False
        client.waiting = client.answered = None
        if self._recovery is not None:
            self._recovery.held.pop(worker, None)
        return frames

    def _failed(self, request: m.Failed, identity: bytes) -> list[Frame]:
        if self.failure is None:
            self.failure = m.Failure(request.worker, request.reason[: m.MAX_REASON_CHARACTERS])
            log.error("worker %s failed: %s; the run is over", request.worker, self.failure.reason)
        abort = m.encode(m.Abort(self.failure))
        others = [m.routing_id(worker) for worker in self._clients]
        return [(peer, abort) for peer in sorted({identity, *others})]

    def _call_the_roll(self, now: float) -> list[Frame]:
        """Workers that were silent for too long are treated as left."""
        late = now - self._next_roll_call
        self._next_roll_call = now + self._worker_timeout / 4
        if late > self._worker_timeout / 4:
            # We were away ourselves (a machine asleep, a stopped process): first hear what has come meanwhile.
            log.warning("the scheduler was held up for %.1f s; nobody is called lost for that", late)
            return []
        frames: list[Frame] = []
        for worker, client in list(self._clients.items()):
            silent = now - client.heard
            if not (client.active and client.beats and silent >= self._worker_timeout):
                continue
            log.warning("worker %s was silent for %.1f s: the others go on without it", worker, silent)
            groups = self._leave(worker, client, now)
            client.lost = True
            lost = m.encode(m.Lost(worker, silent))
            frames += [(m.routing_id(peer), lost) for peer, other in self._clients.items() if other.active]
            frames += groups
        return frames

    def _missing(self, stage: int) -> tuple[Worker, ...]:
        return tuple(
            sorted(
                worker
                for worker, client in self._clients.items()
                if worker.stage == stage and client.active and client.waiting is None
            )
        )

    def _send(self, groups: list[Group]) -> list[Frame]:
        frames: list[Frame] = []
        if not groups:
            return frames
        verbose = log.isEnabledFor(logging.DEBUG)
        for group in groups:
            if self._first_sequence:
                group = msgspec.structs.replace(group, sequence=group.sequence + self._first_sequence)
            self._statistics.group(group)
            if verbose:
                log.debug("group %d of stage %d: %s", group.sequence, group.stage, group.reason)
            if group.passive:
                frames += self._send_with_bystanders(group)
                continue
            clients = [self._clients[member] for member in group.members]
            frame = m.encode(m.Answer(group, tuple([client.waiting for client in clients])))
            for client in clients:
                client.answered, client.waiting = client.waiting, None
                client.answer_frame, client.last_group = frame, group
                frames.append((client.identity, frame))
        return frames

    def _send_with_bystanders(self, group: Group) -> list[Frame]:
        """Passive members are invited; the others are answered."""
        frames: list[Frame] = []
        clients = {member: self._clients[member] for member in group.members}
        iterations = [None if w in group.passive else client.waiting for w, client in clients.items()]
        frame = m.encode(m.Answer(group, tuple(iterations)))
        invitation = m.encode(m.Invitation(group))
        for worker, client in clients.items():
            client.last_group = group
            if worker in group.passive:
                client.invitations += 1
                frames.append((m.heartbeat_id(worker), invitation))
            else:
                client.answered, client.waiting, client.answer_frame = client.waiting, None, frame
                frames.append((client.identity, frame))
        return frames

    def _refuse(self, request: m.Request, identity: bytes, reason: str) -> list[Frame]:
        self._ignore("refused", identity, reason)
        return [(identity, m.encode(m.Refused(request.number, reason)))]

    def _ignore(self, kind: str, identity: bytes, detail: str) -> list[Frame]:
        self.refused[kind] += 1
        if self.refused[kind] <= LOGGED_PER_KIND:
            more = "" if self.refused[kind] < LOGGED_PER_KIND else "; more of them will only be counted"
            log.warning("%s frame from %r ignored: %s%s", kind, identity[:32], detail[:200], more)
        return []


def _owner(identity: bytes, claimed: Worker) -> tuple[Worker | None, int]:
    """Whose socket ``identity`` is, if it is one of the claimed worker's, and which of the two."""
    if identity == m.routing_id(claimed):
        return claimed, TRAINING
    if identity == m.heartbeat_id(claimed):
        return claimed, HEARTBEATS
    return None, TRAINING


def _state(client: _Client) -> str:
    if client.lost:
        return "lost"
    if not client.active:
        return "away"
    if client.waiting is not None:
        return "ready"
    return "sync" if client.averaging else "compute"
