"""Worker's half of PHD-PSGD: gradients are averaged within a group, models between groups, in meetings.

Other workers average with a worker's model itself, or with a copy that it has published. A worker learns of the meeting
that answers it from its training's connection, and of invitations from its heartbeats' connection, so they can arrive
in another order. All members of a group have the same meetings, and keep equal models only if each carries them out,
with its steps, in the same order. So an invitation waits until the worker has gone on from the last boundary that was
decided before it. If the worker was ready for its next boundary by then, the invitation waits for its step to end, so
that the others get a model that contains the step. A worker goes on from a boundary when it has carried out all
invitations that were decided before.

There is no deadlock: a worker that carries a meeting out waits for members that still have meetings of lower numbers,
or end a step for which they need no worker that waits for this one (``policies/phd_psgd.py``,
``policies/following_stages.py``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.buckets import FlatBucket, PublishedCopy, tensors_of
from lightning_sdpipe.exchange.collectives import average_all
from lightning_sdpipe.exchange.gradient_rounds import Averaged, GradientRounds
from lightning_sdpipe.exchange.moving import GroupMean, finish
from lightning_sdpipe.exchange.sectioned import accompany
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.following_stages import mean_of_groups
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.sync.rendezvous import copy_most_advanced
from lightning_sdpipe.sync.synchronizer import GradientSynchronizer, Replica, averaged
from lightning_sdpipe.topology.groups import Replicas

_BUCKET_BYTES = 25 * 2**20
_MARKS = 2**24


class OrderedInvitations:
    """Meetings and invitations of ``worker``, in order.

    Args:
        worker: this worker.
        carry_out: takes part in a meeting, with the newest step if the second argument says so; returns the seconds
            waited for others. It is called by one thread at a time.
        timeout: limit of every wait.
    """

    def __init__(self, worker: Worker, carry_out: Callable[[Group, bool], float], timeout: timedelta) -> None:
        self._worker = worker
        self._carry_out = carry_out
        self._seconds = timeout.total_seconds()
        self._changed = threading.Condition()
        self._invited: deque[tuple[Group, int | None]] = deque()
        self._standing = self._busy = self._closing = False
        self._passed: int | None = None
        """Iteration of the last boundary that this worker has gone on from since it joined."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def invite(self, group: Group, after: int | None) -> None:
        """Queue ``group``, of which this worker is a passive member. The scheduler decided it after it had answered
        iteration ``after``; called in the order of decisions, by any thread."""
        with self._changed:
            self._invited.append((group, after))
            self._changed.notify_all()

    def begin(self) -> None:
        """Start taking part. Invitations that came before are carried out, too."""
        self._closing, self._passed = False, None
        self._thread = threading.Thread(target=self._serve, name="meetings of groups", daemon=True)
        self._thread.start()

    def stand(self) -> None:
        """Mark the step as done: invitations may use its result, until :meth:`go_on`."""
        with self._changed:
            self._standing = True
            self._changed.notify_all()

    def go_on(self, iteration: int, group: Group) -> float:
        """Carry out ``group``, which answers ``iteration``, when all earlier decisions are carried out.

        Returns:
            Seconds waited for others in it.

        Raises:
            WorkerFailedError: another worker failed or does not come, now or in an invitation.
        """
        with self._changed:
            self._wait(lambda: self._done_before(group), "earlier meetings")
        waited = self._carry_out(group, True)
        with self._changed:
            self._standing, self._passed = False, iteration
            self._changed.notify_all()
        return waited

    def end(self) -> None:
        """Stop taking part, when all invitations have arrived: carries out the remaining ones.

        Raises:
            WorkerFailedError: another worker failed or does not come.
        """
        if self._thread is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._wait(lambda: not self._invited and not self._busy, "its last meetings")
        self._thread.join()
        self._thread = None

    def _done_before(self, group: Group) -> bool:
        return not self._busy and not (self._invited and self._invited[0][0].sequence < group.sequence)

    def _may_begin(self) -> bool:
        if not self._invited:
            return self._closing
        group, after = self._invited[0]
        behind = after is not None and (self._passed is None or self._passed < after)
        return not behind and (self._standing or self._worker not in group.standing)

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        """Wait for a condition, with the lock held."""
        arrived = self._changed.wait_for(lambda: self._failure is not None or there(), self._seconds)
        if self._failure is not None:
            raise self._failure
        if not arrived:
            next_one = f", of which group {self._invited[0][0]} comes next" if self._invited else ""
            raise WorkerFailedError(
                f"worker {self._worker} waited {self._seconds:g} s until {what} with other groups were over{next_one}"
            )

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._may_begin)
                if not self._invited:
                    return
                group, _ = self._invited.popleft()
                self._busy = True
            failure: Exception | None = None
            try:
                self._carry_out(group, self._worker in group.standing)
            except Exception as error:  # raised where the training next asks; a thread could only print it
                failure = error
            with self._changed:
                self._busy, self._failure = False, failure
                self._changed.notify_all()
            if failure is not None:
                return


class InPlace:
    """The model itself, for meetings of workers that do not compute meanwhile. Its methods may not run at the same
    time."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = buckets

    def tensors(self, with_step: bool) -> list[Tensor]:
        """Return the tensors that a meeting averages in place; with the optimizer's changes since the last boundary,
        or without them if the worker computes."""
        assert with_step, "the model may not change while a step is computed on it"
        return tensors_of(self._buckets)

    def take(self) -> None:
        """End a boundary: the model becomes the result of the meetings, and the next step begins."""


class PublishedModel(InPlace):
    """A copy of the model without the step that is being computed; the step is added when it is ready."""

    def __init__(self, buckets: Sequence[FlatBucket]) -> None:
        super().__init__(buckets)
        self._copy = PublishedCopy(buckets)
        self._has_step = False

    def tensors(self, with_step: bool) -> list[Tensor]:
        if with_step and not self._has_step:
            self._copy.add_step()
            self._has_step = True
        return self._copy.tensors

    def take(self) -> None:
        self.tensors(with_step=True)
        self._copy.take()
        self._has_step = False


class HybridGroups(GradientSynchronizer[GradientRounds]):
    """Averages gradients over the members of this worker's group, whose models stay equal, and takes part in the
    group's meetings.

    A member whose data ends earlier than that of others takes part in their rounds without gradients, and in no
    meeting; when it comes back it takes over their model. In every round the members compare their last meetings, since
    a member that the scheduler lost may have missed some; if so, the run ends.

    Args:
        replica: this worker.
        policy: says which pipelines form a group, and whether meetings wait for the partner's step.
    """

    def __init__(self, replica: Replica, policy: PHDPSGD) -> None:
        super().__init__(replica)
        self._policy = policy
        self._worker = Worker(replica.stage, replica.pipeline)
        self._groups = policy.groups_of(len(replica.ranks))
        self._mates = replica.groups.part(self._groups, replica.timeout)
        if self._mates is not None:
            self.buckets = GradientRounds(replica.trained, self._mates, _BUCKET_BYTES, replica.watch)
            self.gradients = self
            self.same_gradients = self._mates.group
        self._averaged: Averaged | None = None
        self._trained = 0
        """Rounds since all members took part."""
        self._iteration = 0
        self._met = self._last_meeting = 0
        """Number of the last meeting with others that was carried out, and the same at the last boundary; from 1."""
        self._meets = len(self._groups) > 1
        if self._meets:
            self._mover = GroupMean(replica.beside() if policy.asynchronous else replica.groups.replicas())
            self._model = InPlace([])
            self._meetings = OrderedInvitations(self._worker, self._carry_out, replica.timeout)
            replica.client.on_invitation = self._meetings.invite

    @property
    def models_averaged(self) -> float:
        """Number of groups: gradients are averaged before the optimizer sees them, so a group counts as one model."""
        return len(self._groups)

    @property
    def equal_at_start(self) -> Replicas | None:
        return self._mates

    # ------------------------------------------------------------- gradients

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        self.buckets.complete(gradients, mark=self._last_meeting % _MARKS)

    def finish(self) -> list[Tensor | None]:
        outcome = self._averaged = self.buckets.wait()
        if outcome.nonfinite:
            raise self.not_finite(outcome.nonfinite, self.statistics.groups)
        if len({*outcome.marks.values()}) > 1:
            raise WorkerFailedError(
                f"the pipelines of a group hold different models in stage {self.replica.stage}: the last meeting with "
                f"other groups was, by pipeline, {outcome.marks} (counted modulo {_MARKS}). The scheduler took some of "
                "them to be lost while the others met, and their gradients cannot be averaged. Start the run again "
                "from its last checkpoint."
            )
        self._trained += 1
        if self._mates is not None:
            members, size = len(self._mates.pipelines), sum(parameter.nbytes for parameter in self.replica.trained)
            self.statistics.traffic.add(2 * (members - 1) * size // members)  # torch sends them around a ring
        return outcome.gradients

    # -------------------------------------------------------------- meetings

    def announce(self, iteration: int) -> None:
        """Tell the scheduler that this worker is ready, unless meetings are asynchronous: then workers that serve
        others while they compute would wait for the backward that remains."""
        self._iteration = iteration
        if self._meets and not self._policy.asynchronous:
            self.replica.client.ready(iteration)
            self.announced = True

    @property
    def shares_next(self) -> bool:
        return self._meets

    def synchronise(self) -> None:
        """Learn which groups this worker's group meets after its step, and average models with them.

        Raises:
            WorkerFailedError: another worker failed, now or while this one was invited.
        """
        members, waited, averaging = 1, 0.0, 0.0
        if self._averaged is not None:
            members = self._averaged.members
            waited, averaging = self._averaged.seconds_waiting, self._averaged.seconds_averaging
        if self._meets:
            start = time.perf_counter()
            self._meetings.stand()
            if not self.announced:
                self.replica.client.ready(self._iteration)
            group = self.replica.client.group()
            self.announced = False
            told = time.perf_counter()
            for_others = self._meetings.go_on(self._iteration, group)
            members = len(group.members)
            waited += told - start + for_others
            averaging += time.perf_counter() - told - for_others
        self.statistics.count(members, waited, averaging)

    def _carry_out(self, group: Group, with_step: bool) -> float:
        waited, there = 0.0, {worker.pipeline for worker in group.members}
        if sum(not there.isdisjoint(own) for own in self._groups) > 1:  # members of one group hold equal models
            waited = finish(self._mover.start(self._model.tensors(with_step), group))
            self._met = group.sequence + 1
        if self._worker not in group.passive:  # a boundary
            self._model.take()
            self._last_meeting = self._met
        return waited

    # ---------------------------------------------------------------- pauses

    def start(self) -> None:
        self._trained = self._met = self._last_meeting = 0
        self._averaged = None
        if self._mates is not None:
            self.buckets.arrange()  # the trained parameters may have changed
        if self._meets:
            self._refuse_other_groups()
            trained = self.replica.exchanged
            self._model = PublishedModel(trained) if self._policy.asynchronous else InPlace(trained)
            self._meetings.begin()

    def stop(self) -> None:
        if self._meets:
            self._meetings.end()
            self._model.take()  # of meetings since the last boundary
        if self._mates is not None:
            accompany(self.buckets, len(self.replica.trained))

    def resynchronise(self) -> None:
        """Copy the model of the group's member that has trained longest, and met others last, to all members."""
        if self._mates is not None:
            copy_most_advanced(self.replica, self._mates, self._trained * 2**40 + self._met)

    def make_parameters_equal(self) -> None:
        """Give all replicas the mean of the groups' models."""
        self.resynchronise()
        if self._meets:
            weights = dict(zip((p for group in self._groups for p in group), mean_of_groups(self._groups), strict=True))
            average_all(tensors_of(averaged(self.replica.parameters)), self.replica.groups.replicas(), weights)

    def _refuse_other_groups(self) -> None:
        """Refuse a scheduler with other groups than the run's own, where a standing scheduler decides."""
        theirs = registry.from_json(self.replica.client.policy or "")
        ours, size = self._policy, len(self.replica.ranks)
        if not isinstance(theirs, PHDPSGD) or theirs.groups_of(size) != self._groups:
            raise ConfigurationError(
                f"the scheduler decides by {theirs}, and this run averages gradients within the groups "
                f"{[list(group) for group in self._groups]}. Start it with --policy phd_psgd --set "
                f"groups={[list(group) for group in self._groups]}, or give the run its groups."
            )
        for name in ("asynchronous", "within"):
            decided, own = getattr(theirs, name), getattr(ours, name)
            if decided != own:
                raise ConfigurationError(
                    f"the scheduler decides with {name}={decided!r}, and this run has {name}={own!r}; give both "
                    "the same."
                )
