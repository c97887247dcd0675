"""A worker's side of membership: it enrols, passes barriers, retries broken groups, gives its state, and departs.

In short, for one worker (stage j of pipeline i, ``incarnation`` drawn by its pipeline's first stage, equal on all)::

    client = MembershipClient(address, Worker(j, i), incarnation, credentials=keys, told=Callbacks(epoch=...))
    answer = client.enrol({"version": ..., "model": ..., "seed": ...})      # waits: Start, or Receive
    while isinstance(answer, Receive):                     # get the state from pipeline answer.donor, and then
        answer = client.received(answer.transfer, n)       # that after n updates; waits: Start, or another Receive;
        # or client.missed(answer.transfer, why), likewise, if it did not come
    answer.epoch, answer.fresh                             # training may begin; fresh: there was nothing to receive

    client.epoch                                           # the newest: .number, .pipelines (sorted: ranks), .leader
    client.holds([3, 4])                                   # epochs of whose members this worker has a process group
    client.donations, client.held_up                       # what stage 0 goes by before a turn (turn_order)
    client.snapshot_taken(transfer, n)                     # the state after n updates is copied for that transfer
    client.meet(key, value)                                # waits for all replicas of the stage: Met
    client.completed(sequence)                             # the result of that group is in the model; cheap
    client.regroup(group)                                  # it is not, though all are to have it or none
    client.store                                           # the key-value store
    client.depart(finished=True); client.failed(reason); client.close()

Its state and its messages are those of a :class:`~lightning_sdpipe.scheduler.client.conversation.Conversation`.

Every method may be called from any thread. Every wait ends after its timeout with a SchedulerError that says what the
scheduler was waiting for, with :class:`MustEndError` when this process was declared lost, or with
:class:`RunOverError`. Groups of readies and leases come from
:class:`~lightning_sdpipe.scheduler.client.client.SchedulerClient`, made with this ``line``; their ``Group.epoch`` names
a process group that all members hold.

A scheduler that is started again hears of the run from its members by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import zmq

from lightning_sdpipe.errors import MustEndError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Epoch, Exchanging, Met, Receive
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.client_thread import Callbacks, CancelledError, ClientThread, RunOverError
from lightning_sdpipe.scheduler.client.connection import Connection
from lightning_sdpipe.scheduler.client.conversation import Conversation
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.membership_protocol import Start

__all__ = ["Callbacks", "CancelledError", "MembershipClient", "MustEndError", "Receive", "RunOverError", "Start"]

LAST_WORDS = 1.0
"""Most seconds that a failing process spends on reporting its failure."""


class MembershipClient:
    """The client of one process; see the module's text.

    Args:
        address: of the scheduler.
        worker: this process's worker.
        incarnation: number of this start of its pipeline's job, above 0.
        mesh: the shape of the run, which the scheduler must serve; None checks nothing.
        timeout: seconds that a wait lasts at most, unless a method is given another.
        credentials: the worker's keys; None on loopback.
        told: functions to call when something happens.
        host: the worker whose process the scheduler ends with; when it seems to have ended, that worker is taken to
        have failed. None for a scheduler that may be restarted.
    """

    def __init__(
        self,
        address: str,
        worker: Worker,
        incarnation: int,
        *,
        mesh: m.Shape | None = None,
        timeout: float = 60.0,
        credentials: WorkerKeys | None = None,
        told: Callbacks | None = None,
        host: Worker | None = None,
    ) -> None:
        self.address, self.worker, self.incarnation = address, worker, incarnation
        self._host, self.credentials = host, credentials
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connections: list[Connection] = []
        try:
            connection = self.connect(e.peer_of(worker, incarnation))
        except BaseException:
            self._context.term()
            raise
        talk = Conversation(worker, incarnation, mesh, host)
        self.thread = ClientThread(connection, address, talk, told or Callbacks(), timeout)
        self.thread.start()
        self.store = StoreClient(self.thread)
        """The key-value store that all processes of the run share."""

    # ------------------------------------------------------------ coming and going

    def enrol(self, fingerprint: Mapping[str, str], timeout: float | None = None) -> Start | Receive:
        """Wait until the run has begun with this worker's pipeline (:class:`Start`), or a member is about to give it
        its state (:class:`Receive`). ``fingerprint`` must be equal on all workers of a run.

        Raises:
            SchedulerError: the worker was refused (with what was found and expected), or waited in vain (with what is
            missing).
        """
        return self._start_or_receive("training to begin with its pipeline", timeout, e.Enrol, dict(fingerprint))

    def received(self, transfer: str, update: int) -> Start | Receive:
        """Report that the state of ``transfer`` after ``update`` updates has arrived; wait until all stages have it, or
        for another transfer if one does not get it."""
        what = f"the other stages to have the state of {transfer}"
        return self._start_or_receive(what, None, e.TellReceived, transfer, update)

    def missed(self, transfer: str, reason: str) -> Start | Receive:
        """Report that the state of ``transfer`` did not come; wait for another member to give its own."""
        what = f"another state than that of {transfer}"
        return self._start_or_receive(what, None, e.TellReceived, transfer, -1, reason or "it did not come")

    def depart(self, *, finished: bool, timeout: float | None = None) -> None:
        """Report that this process ends: its training has ``finished``, or it was told to. Return when the scheduler
        knows."""
        talk, what = self.thread.talk, "the scheduler to hear that it departs"
        ended = None if self._host is None else lambda: talk.away
        self.thread.ask(what, e.Depart, finished, timeout=timeout, cancelled=ended)

    def failed(self, reason: str) -> None:
        """Report that this process ends through an exception: ``reason`` is its type and text. Never raises."""
        try:
            what = "the scheduler to hear of its failure"
            self.thread.ask(what, e.Depart, False, reason[: m.MAX_REASON_CHARACTERS], timeout=LAST_WORDS)
        except (SchedulerError, WorkerFailedError):  # the failure that is being reported matters more
            return

    def close(self) -> None:
        """End the thread and free the sockets; safe to call twice. The scheduler takes the process for ended."""
        self.thread.close()
        for connection in self._connections:
            connection.close()
        self._context.term()

    def connect(self, name: bytes) -> Connection:
        """Open a socket to the scheduler for the calling thread, known there by ``name``; :meth:`close` closes it."""
        self._connections.append(Connection(self._context, self.address, self.credentials, name))
        return self._connections[-1]

    # ------------------------------------------------------------------ membership

    @property
    def epoch(self) -> Epoch:
        """Newest epoch of membership that this process heard of."""
        with self.thread.talking() as talk:
            return talk.epoch

    @property
    def held_up(self) -> str:
        """Reason why no turn may begin now; empty if one may.

        Raises:
            WorkerFailedError: the process must end, or the run is over.
        """
        self.thread.check()
        with self.thread.talking() as talk:
            return talk.held_up

    @property
    def limit(self) -> float:
        """Seconds after which a transfer that does not move is given up, as the scheduler said."""
        with self.thread.talking() as talk:
            return min(self.thread.timeout, talk.limit)

    def holds(self, epochs: Collection[int]) -> None:
        """Set the epochs whose process group this worker has."""
        with self.thread.talking() as talk:
            talk.holds(epochs)

    def exchanges(self, exchange: Exchanging | None, moved: Callable[[], int]) -> None:
        """Set the exchange that this worker is in, if any, and what returns how much it has ``moved``; cheap."""
        with self.thread.talking() as talk:
            talk.exchanges(exchange, moved)

    def misses(self, epoch: int, pipelines: Collection[int]) -> None:
        """Set the pipelines whose worker of this stage cannot be reached in the epoch ``epoch``, which tries
        (:attr:`~lightning_sdpipe.membership.members.Epoch.tries`)."""
        with self.thread.talking() as talk:
            talk.misses(epoch, pipelines)

    def has_made(self, updates: int) -> None:
        """Set the number of updates that this worker has made, for people; cheap."""
        with self.thread.talking() as talk:
            talk.updates = updates

    # ---------------------------------------------------------------------- states

    @property
    def donations(self) -> tuple[str, ...]:
        """On stage 0: the transfers for which this pipeline still has to copy its state, between two turns."""
        with self.thread.talking() as talk:
            return talk.donations

    @property
    def offered(self) -> str:
        """Newest transfer by which this pipeline is to get its state; earlier ones are in vain. Empty if it needs none
        any more."""
        with self.thread.talking() as talk:
            return talk.offered

    def snapshot_taken(self, transfer: str, update: int) -> None:
        """Report that this worker has copied its state for ``transfer`` after ``update`` updates, as all other stages
        have to. Return when the scheduler knows."""
        self.thread.ask(f"the scheduler to hear of {transfer}", e.TellSnapshot, transfer, update)

    def publish(self, path: str, update: int) -> None:
        """Return when this worker may put a checkpoint of the state after ``update`` updates at ``path``.

        Raises:
            MustEndError: the run goes on without this process.
            SchedulerError: the scheduler says nothing.
        """
        self.thread.ask(f"the scheduler to let it write {path}", e.Publish, path, update, False)

    def keep(self, key: str, value: bytes) -> None:
        """Keep ``value`` under ``key`` in the key-value store of the scheduler, and of each that follows it in this
        run: one value at most. Do not wait."""
        with self.thread.talking() as talk:
            talk.tell(e.Store, "put", (key,), value)

    def published(self, path: str, update: int) -> None:
        """Report that the checkpoint is in its place."""
        with self.thread.talking() as talk:
            talk.tell(e.Publish, path, update, True)

    # -------------------------------------------------------------- barriers, trying again

    def meet(self, key: str, value: bytes = b"", timeout: float | None = None) -> Met:
        """Wait for all replicas of this worker's stage at the barrier ``key``; one that dies is not waited for.

        Every barrier has a new key, equal on all replicas. ``value`` is small (at most some kilobytes) and goes to all:
        ``Met.values``, in the order of ``Met.pipelines``. ``Met.past``: the others have passed it already, without this
        one.
        """
        reply = self.thread.ask(f"the others at {key}", e.Meet, key, value, timeout=timeout)
        assert isinstance(reply, e.HasMet)
        return reply.met

    def completed(self, sequence: int) -> None:
        """Report that the result of the group ``sequence`` is in the model."""
        with self.thread.talking() as talk:
            talk.completed(sequence)

    def regroup(self, group: Group) -> e.Again:
        """Report that the result of ``group`` did not come, which all members are to have or none; say first which
        process groups are left (:meth:`holds`).

        Waits until each other member is gone, has it, or has said the same. Returns a group of the members that are
        left without the result, to try again in (perhaps only of this worker), or the ``source`` that gives it to them.
        If that breaks, too, ask about the same group again.
        """
        with self.thread.talking() as talk:
            holds = talk.held
        what = f"the other members of group {group.sequence} to try again"
        reply = self.thread.ask(what, e.AskRegroup, group, holds)
        assert isinstance(reply, e.Again)
        return reply

    def _start_or_receive(
        self, what: str, timeout: float | None, kind: Callable[..., e.Request], *fields: object
    ) -> Start | Receive:
        reply = self.thread.ask(what, kind, *fields, timeout=timeout)
        assert isinstance(reply, e.Start | e.Get)
        return reply if isinstance(reply, e.Start) else reply.receive


class StoreClient:
    """Sends requests over ``line``; may be called from any thread."""

    def __init__(self, line: ClientThread) -> None:
        self._line = line

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key`` for all processes."""
        self._ask(f"the scheduler to keep {key}", timeout, "put", (key,), value)

    def fetch(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes | None, ...]:
        """Return the present values of ``keys``, None where there is none."""
        what = f"the scheduler to say what is at {', '.join(keys)}"
        return self._ask(what, timeout, "fetch", tuple(keys)).values

    def wait(
        self, keys: Sequence[str], timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> tuple[bytes, ...]:
        """Return the values of ``keys`` when all are there.

        Raises:
            CancelledError: ``cancelled``, which is called often, has returned true.
        """
        what = f"another worker to set {', '.join(keys)}"
        reply = self._ask(what, timeout, "wait", tuple(keys), cancelled=cancelled)
        return tuple(value for value in reply.values if value is not None)

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        """Add to the number at ``key``, 0 at first; return the sum."""
        return self._ask(f"the scheduler to add to {key}", timeout, "add", (key,), b"", amount).count

    def remove(self, key: str, timeout: float | None = None) -> bool:
        """Remove ``key``; return whether it was there."""
        return self._ask(f"the scheduler to forget {key}", timeout, "remove", (key,)).count > 0

    def _ask(
        self, what: str, timeout: float | None, *fields: object, cancelled: Callable[[], bool] | None = None
    ) -> e.Stored:
        reply = self._line.ask(what, e.Store, *fields, timeout=timeout, cancelled=cancelled)
        assert isinstance(reply, e.Stored)
        return reply
