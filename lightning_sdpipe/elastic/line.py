"""What the worker's half of an elastic job asks of its line to the scheduler.

:class:`~lightning_sdpipe.scheduler.client.SchedulerClient` offers it, or something beside it does. It is written down
here so that the worker's half can be read, and tested, without the scheduler's.

A turn of a pipeline is agreed on within the pipeline: stage 0 tells the other stages before each turn whether they
donate, or leave. So the scheduler only has to tell stage 0 of the donor, and no number of an update is agreed on with
it.

A newcomer must not miss a meeting. Its donor's state is of the middle of a segment, so the donor has not come to the
meeting at the segment's end yet. From the moment in which stage 0 of the donor said :meth:`ElasticLine.donating`, all
meetings of all stages wait for the newcomer, too, until it is gone, or is given another donor.

Below ``min_pipelines`` nobody may be kept waiting *within* a turn, for a group or for a lease: who waits there cannot
donate, and there may be no other donor. So readies are answered as always, with groups of those that are there, and
asks for leases with an empty one; the worker waits between turns, where it donates, until it hears that there are
enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from lightning_sdpipe.policies.decisions import Group


class Epoch(Protocol):
    """Who is in the run from some moment on."""

    number: int
    pipelines: tuple[int, ...]
    """The oldest one first: the leader."""


class Start(Protocol):
    """This pipeline is a member from now on, and trains the state that it has: the run's first, or a donor's."""

    epoch: Epoch


class Receive(Protocol):
    """This pipeline gets its state by ``transfer``, from the same stage of ``donor``."""

    donor: int
    transfer: int


class Donation(Protocol):
    """This pipeline gives its state to ``newcomer`` by ``transfer``."""

    newcomer: int
    transfer: int


class Met(Protocol):
    """All workers of the stage have come to the same meeting. The answer is the same for all of them."""

    epoch: int
    """The newest whose group they all have made, and which holds them all."""
    members: tuple[int, ...]
    """Pipelines, in order."""
    sequence: int
    """For tags; one of its own among those of groups."""
    said: Mapping[int, bytes]
    """By each of the members."""


class Store(Protocol):
    """Values for all, kept by the scheduler while they are needed; the base of process groups' addresses."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes | None:
        """Waits for it; None when it does not come in time."""


class ElasticLine(Protocol):
    """One worker's."""

    num_pipelines: int
    """N, by which an epoch is counted; known after ``greet``."""

    def enrol(self, fingerprint: Mapping[str, str]) -> Start | Receive:
        """Asks to be a member. ``fingerprint`` must be that of the others; a refusal names what differs."""

    def received(self, transfer: int) -> Start | Receive:
        """The state has come; or another donor has to give it."""

    def lost_donor(self, transfer: int) -> Start | Receive:
        """The state has not come."""

    def donation(self) -> Donation | None:
        """What is asked of this pipeline, if it has not said ``donating`` to it yet. Only stage 0 is asked."""

    def donating(self, transfer: int) -> bool:
        """The snapshot is about to be taken: meetings wait for the newcomer, too. False if it is gone by now."""

    @property
    def epoch(self) -> Epoch:
        """The newest that was heard of."""

    def made(self, number: int) -> None:
        """This worker has the group of that epoch."""

    def dropped(self, number: int) -> None:
        """This worker does not use the group of that epoch any more: somebody in it is gone."""

    def broken(self, sequence: int) -> Group | None:
        """The exchange of that group failed. A new one among those that are left and have not finished it, or none."""

    def meet(self, key: str, says: bytes = b"") -> Met:
        """Waits until all workers of this stage have come to ``key``: those of all members, and of newcomers whose
        donor has given its state. Who dies is not waited for. ``says`` are some kilobytes at most."""

    def enough(self) -> bool:
        """Are there as many pipelines as ``min_pipelines``?"""

    def depart(self, reason: str) -> None:
        """This pipeline ends as it was told to. The others go on in the same epoch's groups, without it."""

    def finished(self) -> None:
        """The fit is over; who enrols now came too late."""
