"""The scheduler's state of one start of a worker, from its first join to the next start of that worker.

    state      | joins      is ready   gets a group   leaves   falls silent
    -----------+-----------------------------------------------------------
    AWAY       | COMPUTING                            AWAY
    COMPUTING  |            WAITING                   AWAY     LOST
    WAITING    |                       COMPUTING      AWAY     LOST
    LOST       | COMPUTING                            AWAY

Where the table is empty, the input is illegal: :meth:`Session.move` raises and changes nothing.
"""

from __future__ import annotations

from enum import Enum

from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m


class State(Enum):
    """States of a session; in the middle two the policy counts the worker as active."""

    AWAY = "away"
    COMPUTING = "computing"
    WAITING = "waiting"
    LOST = "lost"

    __hash__ = object.__hash__  # Enum's own is Python code, and every signal looks states up


class Input(Enum):
    """Inputs that change the state of a session."""

    JOINS = "joins"
    IS_READY = "is ready"
    GETS_GROUP = "gets a group"
    LEAVES = "leaves"
    FALLS_SILENT = "falls silent"

    __hash__ = object.__hash__


# Under short names, since an Enum looks its members up slowly before Python 3.12, and each signal needs several.
AWAY, COMPUTING, WAITING, LOST = State
JOINS, IS_READY, GETS_GROUP, LEAVES, FALLS_SILENT = Input

TRANSITIONS: dict[State, dict[Input, State]] = {
    AWAY: {JOINS: COMPUTING, LEAVES: AWAY},
    COMPUTING: {IS_READY: WAITING, LEAVES: AWAY, FALLS_SILENT: LOST},
    WAITING: {GETS_GROUP: COMPUTING, LEAVES: AWAY, FALLS_SILENT: LOST},
    LOST: {JOINS: COMPUTING, LEAVES: AWAY},
}

ACTIVE = frozenset({COMPUTING, WAITING})


class IllegalInput(ValueError):
    """The table of transitions has no such entry; the session is as it was before."""


class ReceivedRequests:
    """Requests of a session that have come: each counts once, and a leave outdates what was sent before it."""

    __slots__ = ("_last", "left_at")

    def __init__(self) -> None:
        self._last: dict[bytes, int] = {}
        self.left_at = -1
        """Number of the last leave, which may overtake what the other socket sent."""

    def is_new(self, number: int, peer: bytes) -> bool:
        """Return False for a request that was seen before; numbers grow on each socket of the worker."""
        if number <= self._last.get(peer, -1):
            return False
        self._last[peer] = number
        return True


def peers_of(worker: Worker, id: int) -> tuple[bytes, bytes]:
    """Return the identities of the sockets of that start of ``worker``: of its training, and of its heartbeats."""
    return m.routing_id(worker, id), e.peer_of(worker, id)


class Session:
    """One start of a worker; ``id`` is its incarnation."""

    __slots__ = (
        *("answer", "answered", "contains", "heard", "id", "invitations", "iteration", "member_peer", "peer", "peers"),
        *("ready_with", "received", "state", "worker"),
    )

    def __init__(self, worker: Worker, id: int, now: float) -> None:
        self.worker = worker
        self.id = id
        self.peers = self.peer, self.member_peer = peers_of(worker, id)
        self.state = AWAY
        self.iteration: int | None = None
        """Iteration of the last ready that was accepted."""
        self.answer: m.Answer | None = None
        """Answer to that ready; None until it is decided."""
        self.answered: int | None = None
        """Last iteration that was answered since the worker joined."""
        self.contains = -1
        """Number of rounds that its model contains, as it said last; -1 if it has not."""
        self.ready_with: int | None = None
        """That number when it was last ready."""
        self.invitations = 0
        """Invitations to groups that the worker was a passive member of."""
        self.received = ReceivedRequests()
        self.heard = now
        """Time at which any message of the worker last came."""

    @property
    def active(self) -> bool:
        """True if the policy counts on the worker."""
        return self.state in ACTIVE

    def move(self, input: Input) -> None:
        """Change the state as the table says.

        Raises:
            IllegalInput: the table has no entry; nothing has changed.
        """
        after = TRANSITIONS[self.state].get(input)
        if after is None:
            raise IllegalInput(f"worker {self.worker} {input.value} while it is {self.state.value}")
        self.state = after

    def is_ready(self, iteration: int) -> None:
        """Note that the ready of ``iteration`` was accepted."""
        self.move(IS_READY)
        self.iteration = iteration
        self.answer = None

    def is_answered(self, answer: m.Answer) -> None:
        """Note the answer to the ready."""
        self.move(GETS_GROUP)
        self.answer, self.answered = answer, self.iteration

    def validate(self) -> None:
        """Raise AssertionError if this session contradicts itself."""
        if self.state is WAITING:
            assert self.iteration is not None, self
            assert self.answer is None, self
        if self.answer is not None:
            assert m.iteration_of(self.worker, self.answer) == self.iteration, self
        if self.state is AWAY:
            assert self.answer is None, self

    def __repr__(self) -> str:
        return f"Session({self.worker}, {self.state.value}, iteration={self.iteration}, answer={self.answer})"


def _worker(session: Session) -> Worker:
    return session.worker


class Sessions(dict[Worker, Session]):
    """The current session of each worker that ever joined."""

    def __init__(self) -> None:
        super().__init__()
        self._by_stage: dict[int, list[Session]] = {}

    def begin(self, worker: Worker, id: int, now: float) -> Session:
        """Begin the session of a new start of ``worker``, in place of an older one."""
        session = self[worker] = Session(worker, id, now)
        self._by_stage[worker.stage] = sorted((s for s in self.values() if s.worker.stage == worker.stage), key=_worker)
        return session

    def of(self, worker: Worker, id: int) -> Session | None:
        """Return the session ``id`` of ``worker``, if it is the current one."""
        session = self.get(worker)
        return session if session is not None and session.id == id else None

    def of_stage(self, stage: int) -> list[Session]:
        """Return the sessions of ``stage``, by pipeline."""
        return self._by_stage.get(stage, [])

    def active_in(self, stage: int) -> list[Worker]:
        """Return the workers of ``stage`` that the policy counts on, by pipeline."""
        return [session.worker for session in self.of_stage(stage) if session.active]

    def takes_part(self, worker: Worker) -> bool:
        """Return whether the policy counts on ``worker``."""
        session = self.get(worker)
        return session is not None and session.active

    def validate(self) -> None:
        """Raise AssertionError if the sessions contradict each other or themselves."""
        for worker, session in self.items():
            session.validate()
            assert session.worker == worker, session
