"""A worker's client of the scheduler.

In short, for one worker (stage j of pipeline i, ``incarnation`` drawn by its pipeline's first stage, equal on all)::

    client = SchedulerClient(address, Worker(j, i), incarnation, credentials=keys, told=Callbacks(epoch=...))
    answer = client.enrol({"version": ..., "model": ..., "seed": ...})      # waits: Start, or Receive
    while isinstance(answer, Receive):                     # get the state from pipeline answer.donor, and then
        answer = client.received(answer.transfer, n)       # that after n updates; waits: Start, or another Receive;
        # or client.missed(answer.transfer, why), likewise, if it did not come
    answer.epoch, answer.fresh                             # training may begin; fresh: there was nothing to receive

    client.join()                                          # takes part in groups
    client.ready(iteration); client.group()                # waits for its group, whose ``epoch`` names a process group
    client.lease(segment, ordinal)                         # waits for batches
    client.leave()

    client.epoch                                           # the newest: .number, .pipelines (sorted: ranks), .leader
    client.holds([3, 4])                                   # epochs whose process groups this worker holds
    client.donations, client.held_up                       # what stage 0 goes by before a turn (turn_order)
    client.snapshot_taken(transfer, n)                     # the state after n updates is copied for that transfer
    client.meet(key, value)                                # waits for all replicas of the stage: Met
    client.contains(rounds)                                # the model contains the outcomes of these rounds; cheap
    client.put(key, value)                                 # the key-value store of the run
    client.depart(finished=True); client.failed(reason); client.close()

Its state and its messages are those of a :class:`~lightning_sdpipe.scheduler.client.conversation.Conversation`, which a
:class:`~lightning_sdpipe.scheduler.client.wire.Wire` carries. Methods under "training" below belong to the thread that
trains; any thread may call the others. Every wait ends at its timeout with a SchedulerError that says what the
scheduler was waiting for, with :class:`MustEndError` when this process was declared lost, or with
:class:`RunOverError`.

An unanswered request is repeated, so a scheduler that restarts at the same address finds the workers of an elastic run
again, and learns of the run from them. An ordinary run ends with its scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from lightning_sdpipe import meter
from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import MustEndError, SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import Epoch, Exchanging, Met, Receive
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m
from lightning_sdpipe.scheduler.client.conversation import Conversation, Kind
from lightning_sdpipe.scheduler.client.wire import Callbacks, CancelledError, RunOverError, Wire
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.membership_protocol import Start
from lightning_sdpipe.scheduler.rows import About, Doing

__all__ = [
    "Callbacks",
    "CancelledError",
    "MustEndError",
    "Receive",
    "RunOverError",
    "SchedulerClient",
    "Start",
]

_logger = logging.getLogger(__name__)

CONNECT_TIMEOUT, CONNECT_SOON = 60.0, 5.0
"""Seconds within which a scheduler must answer for the first time, and after which the wait for it is logged: on a busy
machine its process needs half a minute to start."""
LAST_WORDS = 1.0
"""Most seconds that a failing process spends on reporting its failure."""


class SchedulerClient:
    """The client of one process; see the module's text.

    Args:
        address: of the scheduler.
        worker: this process's worker.
        incarnation: number of this start of its pipeline's job, above 0.
        mesh: the shape of the run, which the scheduler must serve; None checks nothing.
        timeout: longest wait in seconds, unless a method is given another.
        credentials: the worker's keys; None on loopback.
        told: functions to call when something happens.
        host: the worker whose process has started the scheduler, which ends with it; None if another program has.
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
        self.policy: str | None = None
        """Values of the scheduler's policy, as JSON, once it has answered."""
        self.serves: m.Shape | None = None
        """The stages and pipelines that the scheduler serves, once it has been greeted."""
        self.about: About | None = None
        """Description of this worker for people. It must be set before :meth:`join`."""
        self.meanwhile: Callable[[], object] | None = None
        """Called often during a wait for a lease."""
        self.on_invitation: Callable[[Group, int | None], None] | None = None
        """Called in another thread, in order, with each group that the worker is a passive member of, and the last
        iteration that was answered before (None if none since the worker joined). Set it before :meth:`join`."""
        self.invitations_are_lost_after: float | None = None
        """Seconds after which an invitation that was sent but has not come is given up; None if that is an error. It
        never comes if the connection has broken, or the scheduler was killed."""
        self._invited = 0
        self.named_by = -1
        """Life of the scheduler that named the last fetched group."""
        self._iteration: int | None = None
        """Iteration of the ready whose group has not been fetched."""
        self._group = -1
        """Sequence of the group that was fetched since the last step, -1 for none."""
        self._leasing: tuple[Segment, int] | None = None
        """The lease that was asked for, and has not come in time."""
        talk = Conversation(worker, incarnation, mesh, host)
        talk.spans.meter = meter.current()
        self.wire = Wire(address, talk, told or Callbacks(), timeout, credentials)
        self.wire.on_invitation = self._follow

    # ------------------------------------------------------------ coming and going

    def enrol(self, fingerprint: Mapping[str, str]) -> Start | Receive:
        """Wait until the run has begun with this worker's pipeline (:class:`Start`), or a member is about to give it
        its state (:class:`Receive`). ``fingerprint`` must be equal on all workers of a run.

        Raises:
            SchedulerError: the worker was refused (with what was found and expected), or waited in vain (with what is
            missing).
        """
        return self._start_or_receive("training to begin with its pipeline", e.Enrol, dict(fingerprint))

    def received(self, transfer: str, update: int) -> Start | Receive:
        """Report that the state of ``transfer`` after ``update`` updates has arrived; wait until all stages have it, or
        for another transfer if one does not get it."""
        what = f"the other stages to have the state of {transfer}"
        return self._start_or_receive(what, e.TellReceived, transfer, update)

    def missed(self, transfer: str, reason: str) -> Start | Receive:
        """Report that the state of ``transfer`` did not come; wait for another member to give its own."""
        what = f"another state than that of {transfer}"
        return self._start_or_receive(what, e.TellReceived, transfer, -1, reason or "it did not come")

    def depart(self, *, finished: bool, timeout: float | None = None) -> None:
        """Report that this process ends: its training has ``finished``, or it was told to. Return when the scheduler
        knows."""
        talk = self.wire.talk
        ended = None if self._host is None else lambda: talk.away
        what = "the scheduler to hear that it departs"
        self.wire.ask_for(what, e.Depart, finished, timeout=timeout, cancelled=ended)

    def failed(self, reason: str) -> None:
        """Report that this process ends through an exception: ``reason`` is its type and text. Never raises."""
        try:
            what = "the scheduler to hear of its failure"
            self.wire.ask_for(what, e.Depart, False, reason[: m.MAX_REASON_CHARACTERS], timeout=LAST_WORDS)
        except (SchedulerError, WorkerFailedError):  # the failure that is being reported matters more
            return

    def close(self) -> None:
        """End the thread and free the sockets; safe to call twice. To the scheduler, the process has then ended."""
        self.wire.close()

    # ------------------------------------------------------------------ membership

    @property
    def epoch(self) -> Epoch:
        """Newest epoch of membership that this process heard of."""
        with self.wire.talking() as talk:
            return talk.epoch

    @property
    def held_up(self) -> str:
        """Reason why no turn may begin now; empty if one may.

        Raises:
            WorkerFailedError: the process must end, or the run is over.
        """
        self.wire.check()
        with self.wire.talking() as talk:
            return talk.held_up

    @property
    def limit(self) -> float:
        """Seconds after which a transfer that does not move is given up: the scheduler's limit, at most the timeout."""
        return min(self.wire.timeout, self.wire.talk.limit)

    def holds(self, epochs: Collection[int]) -> None:
        """Set the epochs whose process groups this worker holds."""
        with self.wire.talking() as talk:
            talk.holds(epochs)

    def exchanges(self, exchange: Exchanging | None, moved: Callable[[], int]) -> None:
        """Set the exchange that this worker is in, if any, and a function that returns the bytes it has ``moved``."""
        with self.wire.talking() as talk:
            talk.exchanges(exchange, moved)

    def misses(self, epoch: int, pipelines: Collection[int]) -> None:
        """Set the pipelines whose worker of this stage cannot be reached from here in ``epoch``, which tries
        (:attr:`~lightning_sdpipe.membership.members.Epoch.tries`)."""
        with self.wire.talking() as talk:
            talk.misses(epoch, pipelines)

    def stalls(self, awaits: tuple[str, ...]) -> None:
        """Set what this worker waits for in vain, as in a
        :class:`~lightning_sdpipe.scheduler.membership_protocol.Beat`; empty if nothing."""
        self.wire.talk.awaits = awaits

    def has_made(self, updates: int) -> None:
        """Set the number of updates that this worker has made, for people; cheap."""
        self.wire.talk.updates = updates

    def does(self, doing: Callable[[], Doing | None]) -> None:
        """Set the function that returns what this worker does, for people; another thread calls it."""
        self.wire.talk.doing = doing

    # ---------------------------------------------------------------------- states

    @property
    def donations(self) -> tuple[str, ...]:
        """On stage 0: the transfers for which this pipeline still has to copy its state, between two turns."""
        with self.wire.talking() as talk:
            return talk.donations

    @property
    def offered(self) -> str:
        """Newest transfer that is to bring this pipeline its state; earlier ones are void. Empty once it needs none."""
        with self.wire.talking() as talk:
            return talk.offered

    def snapshot_taken(self, transfer: str, update: int) -> None:
        """Report that this worker has copied its state for ``transfer`` after ``update`` updates, as all other stages
        have to. Return when the scheduler knows."""
        self.wire.ask_for(f"the scheduler to hear of {transfer}", e.TellSnapshot, transfer, update)

    def publish(self, path: str, update: int) -> None:
        """Return when this worker may put a checkpoint of the state after ``update`` updates at ``path``.

        Raises:
            MustEndError: the run goes on without this process.
            SchedulerError: the scheduler says nothing.
        """
        self.wire.ask_for(f"the scheduler to let it write {path}", e.Publish, path, update, False)

    def keep(self, key: str, value: bytes) -> None:
        """Keep ``value`` under ``key`` in the key-value store of the scheduler, and of each that follows it in this
        run: only the last value lasts. Do not wait."""
        with self.wire.talking() as talk:
            talk.tell(e.Store, "put", (key,), value)

    def published(self, path: str, update: int) -> None:
        """Report that the checkpoint is in its place."""
        with self.wire.talking() as talk:
            talk.tell(e.Publish, path, update, True)

    # -------------------------------------------------------------- barriers, rounds

    def meet(self, key: str, value: bytes = b"") -> Met:
        """Wait for all replicas of this worker's stage at the barrier ``key``; one that dies is not waited for.

        Every barrier has a new key, equal on all replicas. ``value`` is small (at most some kilobytes) and goes to all:
        ``Met.values``, in the order of ``Met.pipelines``. ``Met.past``: the others have passed it already, without this
        one.
        """
        reply: e.HasMet = self.wire.ask_for(f"the others at {key}", e.Meet, key, value)
        return reply.met

    def contains(self, rounds: int) -> None:
        """Set the number of rounds whose outcome this worker's model contains, and which it can hand over."""
        with self.wire.talking() as talk:
            talk.contains = rounds

    def _start_or_receive(self, what: str, kind: Kind, *fields: object) -> Start | Receive:
        reply: Start | e.Get = self.wire.ask_for(what, kind, *fields)
        return reply.receive if isinstance(reply, e.Get) else reply

    # ------------------------------------------------------------- key-value store

    def put(self, key: str, value: bytes, timeout: float | None = None) -> None:
        """Set ``key`` for all processes."""
        self._store(f"the scheduler to keep {key}", timeout, "put", (key,), value)

    def fetch(self, keys: Sequence[str], timeout: float | None = None) -> tuple[bytes | None, ...]:
        """Return the present values of ``keys``, None where there is none."""
        what = f"the scheduler to say what is at {', '.join(keys)}"
        return self._store(what, timeout, "fetch", tuple(keys)).values

    def wait(
        self, keys: Sequence[str], timeout: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> tuple[bytes, ...]:
        """Return the values of ``keys`` when all are there.

        Raises:
            CancelledError: ``cancelled``, which is called often, has returned true.
        """
        what = f"another worker to set {', '.join(keys)}"
        reply = self._store(what, timeout, "wait", tuple(keys), cancelled=cancelled)
        return tuple(value for value in reply.values if value is not None)

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        """Add to the number at ``key``, 0 at first; return the sum."""
        return self._store(f"the scheduler to add to {key}", timeout, "add", (key,), b"", amount).count

    def remove(self, key: str, timeout: float | None = None) -> bool:
        """Remove ``key``; return whether it was there."""
        return self._store(f"the scheduler to forget {key}", timeout, "remove", (key,)).count > 0

    def _store(
        self, what: str, timeout: float | None, *fields: object, cancelled: Callable[[], bool] | None = None
    ) -> e.Stored:
        stored: e.Stored = self.wire.ask_for(what, e.Store, *fields, timeout=timeout, cancelled=cancelled)
        return stored

    # -------------------------------------------------------------------- training

    def greet(self) -> None:
        """Make sure that the scheduler runs, and serves this run.

        Raises:
            SchedulerError: it does not answer, the keys do not fit, it speaks another version, or serves another mesh.
        """
        if self.policy is None:
            seconds, what = min(self.wire.timeout, CONNECT_TIMEOUT), f"the scheduler at {self.address} to answer"
            hello = self.wire.ask(m.Hello)
            if seconds > CONNECT_SOON and not self.wire.comes(hello, CONNECT_SOON):
                _logger.warning("waiting up to %g s for %s", seconds, what)
            welcome = self.wire.wait(hello, what, seconds)
            self.serves, self.policy = welcome.mesh, welcome.policy

    def join(self) -> None:
        """Take part from now on; return when the scheduler has acknowledged it."""
        self.greet()
        self.wire.talk.about = self.about
        self.wire.ask_for("the scheduler to let it join", m.Join)
        meter.current().start()

    def leave(self) -> None:
        """Pause or end the epoch; return when the scheduler has acknowledged it."""
        self._iteration = None
        noted: e.Noted = self.wire.ask_for("the scheduler to let it leave", m.Leave)
        self._wait_for_invitations(noted.invitations)

    def withdraw(self) -> Group | None:
        """Leave, so that the last :meth:`ready` is void; return its group if it was decided before, since its members
        count on this worker."""
        self.leave()
        answer = self.wire.take(m.Ready)
        return answer.group if isinstance(answer, m.Answer) else None

    def ready(self, iteration: int, contains: int | None = None, again: bool = False) -> None:
        """Report the local step of ``iteration`` as done, without waiting; :meth:`group` fetches the answer. What the
        model ``contains``, and ``again``, are as in :class:`~lightning_sdpipe.policies.events.Ready`."""
        assert self.wire.talk.joined, "join() comes before ready()"
        assert self._iteration is None, f"group() comes after ready(): that of iteration {self._iteration} is missing"
        self._iteration = iteration
        self.wire.ask(m.Ready, iteration, contains, again)

    def group(self) -> Group:
        """Wait for the answer to the last :meth:`ready`, and for the invitations that were sent before it."""
        assert self._iteration is not None, "ready() comes before group()"
        answer: m.Answer = self.wire.wait(m.Ready, f"the group of its iteration {self._iteration}")
        self._iteration = None
        self._wait_for_invitations(m.invitations_of(self.worker, answer))
        self._group, self.named_by = answer.group.sequence, answer.life
        return answer.group

    def group_if_known(self) -> Group | None:
        """Return the group as :meth:`group` does, if the answer has come, else None. Called again and again, it repeats
        the ready as a wait would."""
        return self.group() if self._iteration is not None and self.wire.comes(m.Ready, 0.0) else None

    def group_unless_restarted(self, life: int) -> Group | None:
        """Return the group as :meth:`group` does; None if the scheduler of that ``life``, which was to name it, has
        restarted before the answer came."""
        try:
            self.wire.comes(m.Ready, self.wire.timeout, lambda: self.wire.talk.is_over(life))
        except CancelledError:
            return None
        return self.group()

    def is_of_an_earlier_scheduler(self, group: Group) -> bool:
        """Return whether the scheduler has restarted since it named ``group``: some members may then not have heard of
        it."""
        return group.sequence <= self.wire.talk.earlier

    def lease(self, segment: Segment, ordinal: int, seconds: float | None = None) -> Lease | None:
        """Wait for lease ``ordinal`` of this worker's pipeline in ``segment``; all its stages get the same.

        After a lease that is not empty, the answer comes at once: batches, or an empty lease. An empty lease tells the
        pipeline to train whatever it holds; the answer after it comes when there are batches again, or the segment is
        over. Returns None if that takes longer than ``seconds``. Then ask for the lease again; an answer to the earlier
        request counts.
        """
        if self._leasing != (segment, ordinal):
            self._leasing = segment, ordinal
            self.wire.ask(m.AskLease, segment, ordinal)
        with meter.phase(meter.WAIT_GROUP):
            if seconds is not None and not self.wire.comes(m.AskLease, seconds, meanwhile=self.meanwhile):
                return None
            self._leasing = None
            dealt: m.Dealt = self.wire.wait(m.AskLease, f"lease {ordinal} of {segment}", meanwhile=self.meanwhile)
            return dealt.lease

    def trained(self, batches: int, loose: int = 0) -> None:
        """Note that this worker has trained ``batches`` of the segment, and that no other model has the last ``loose``;
        heartbeats report it."""
        with self.wire.changed:
            self.wire.talk.leases.trained(batches, loose)

    def stop_dealing(self) -> None:
        """Ask for the end of the segment: nothing more of it is dealt to any pipeline."""
        with self.wire.changed:
            leases = self.wire.talk.leases
            asked, leases.stops = leases.stops, True
        if not asked:
            self.beat_soon()

    def step_ended(self, iteration: int, waited: float) -> None:
        """Note that the step of ``iteration`` has ended; ``waited`` are all seconds so far that this worker waited for
        replicas.

        Heartbeats report the phases of the steps to the scheduler.
        """
        measured, group = meter.current(), self._group
        self._group = -1
        row = measured.update_ended(waited)
        measured.mark(meter.UPDATE, iteration)
        if row is None:
            return
        with self.wire.changed:
            much = self.wire.talk.rows.add(iteration, row, group)
        if much:
            self.beat_soon()

    def beat_soon(self) -> None:
        """Bring the next heartbeat forward, to an eighth of a second after the last one at the soonest."""
        with self.wire.talking() as talk:
            talk.beat_soon()

    # ------------------------------------------------------------------- failures

    @property
    def stop(self) -> e.End | None:
        """The reason why this process must end, or the run is over."""
        return self.wire.talk.stop

    @property
    def aborted(self) -> e.End | None:
        """The first failure of the run, once this process has heard of it."""
        stop = self.stop
        return stop if stop is not None and stop.run and stop.failed else None

    def first_failure(self, timeout: float) -> e.End | None:
        """Return the run's first failure, if this process hears of one within ``timeout`` seconds."""
        with self.wire.changed:
            self.wire.changed.wait_for(lambda: self.stop is not None, timeout)
        return self.aborted

    # ----------------------------------------------------------------- invitations

    def _wait_for_invitations(self, sent: int) -> None:
        lost_after = self.invitations_are_lost_after
        seconds = self.wire.timeout if lost_after is None else lost_after
        with self.wire.changed:
            if not self.wire.changed.wait_for(lambda: self._invited >= sent or bool(self.stop), seconds):
                if lost_after is not None:
                    self._invited = sent
                    return
                raise SchedulerError(
                    f"worker {self.worker} waited {seconds:g} s for {sent - self._invited} invitations that it was "
                    f"sent; its beats may not reach the scheduler at {self.address}"
                )
            if self._invited < sent:
                self.wire.check()

    def _follow(self, group: Group, after: int | None) -> None:
        if self.on_invitation is None:
            reason = (
                f"the policy made it a passive member of group {group.sequence}, and it cannot average while it "
                "computes; set SchedulerClient.on_invitation, or use another policy"
            )
            with self.wire.talking() as talk:
                talk.tell(e.Depart, False, reason)
            return
        self.on_invitation(group, after)
        with self.wire.changed:
            self._invited += 1
            self.wire.changed.notify_all()
