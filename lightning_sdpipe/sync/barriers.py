"""Barriers of a stage's replicas in an elastic run, at which they meet through the scheduler, and average.

A barrier takes the place of a collective: a worker that dies is not waited for, and all that pass it get the same
answer: which of them have come and what each said. The barriers of a stage are numbered between two segments of
training, in which all do the same things in the same order. Before its first segment a worker is alone: the first
pipelines have begun together, and a newcomer has not come to where the others are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import GroupMean, finish
from lightning_sdpipe.membership.failure_detection import BARRIERS
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.sync.epoch_process_groups import EpochGroups
from lightning_sdpipe.topology.groups import ProcessGroups, Replicas

MOST_BYTES = 1 << 15
"""Most bytes that a worker says at a barrier."""
_Decision = TypeVar("_Decision")
_Way = TypeVar("_Way")
_AVERAGED, _NOT = b"\x01", b"\x00"


class Barriers:
    """The barriers of one worker.

    Args:
        worker: this worker.
        client: its client of the scheduler.
        epochs: the groups of its replicas.
        point: returns the point of training at which all meet next: equal on all of them.
        met: called after each barrier.
    """

    def __init__(
        self,
        worker: Worker,
        client: SchedulerClient,
        epochs: EpochGroups,
        point: Callable[[], str],
        met: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._client = client
        self._epochs = epochs
        self._point = point
        self._met = met
        self._begun = False
        self._number = 0
        self._last: Met | None = None

    def present(self, members: Collection[int]) -> Collection[int]:
        """Return those of ``members`` that are where this worker is: those that missed the last barrier have gone."""
        return members if self._last is None else self._last.pipelines

    def set_out(self) -> None:
        """Begin a segment of training, after which all meet."""
        self._begun = True
        self._number = 0
        self._last = None

    @contextmanager
    def at(self, point: str) -> Iterator[None]:
        """Place the barriers of the ``with`` block, before the first segment of training, at ``point``."""
        usual = self._point
        self._point, self._begun, self._number = lambda: point, True, 0
        try:
            yield
        finally:
            self._point, self._begun, self._number, self._last = usual, False, 0, None

    def meet(self, says: bytes = b"") -> Met:
        """Wait for the others. Before the first segment, each worker is alone.

        Raises:
            WorkerFailedError: the others have passed the barrier before, and gone on.
        """
        if not self._begun:
            return Met(self._worker.stage, "", (self._worker.pipeline,), (says,), 0)
        key = f"{self._point()}/{self._number}"
        self._number += 1
        met = self._client.meet(key, says)
        if met.past:
            raise WorkerFailedError(
                f"pipeline {self._worker.pipeline} came to a barrier ({key}) when the others had gone on; it has to "
                "join again"
            )
        self._last = met
        self._met()
        return met

    def average(self, tensors: Sequence[Tensor]) -> Met:
        """Make ``tensors`` the same on all that meet: floating-point ones their mean, integers the largest.

        If a worker is lost meanwhile, all that are left average again.

        Returns:
            The barrier at which the last attempt was made.

        Raises:
            ConfigurationError: there are too many integers to be sent.
        """
        floating, integers = divided(tensors)
        met = self.meet(_NOT + pack(integers))
        while True:
            averaged = self.weighted_sum(floating, met, dict.fromkeys(met.pipelines, 1 / len(met.pipelines)))
            done = self.meet((_AVERAGED if averaged else _NOT) + pack(integers))
            if done.pipelines == met.pipelines and all(value.startswith(_AVERAGED) for value in done.values):
                break
            met = done
        unpack_max(integers, [value[1:] for value in met.values])
        return met

    def weighted_sum(self, tensors: Sequence[Tensor], met: Met, weights: Mapping[int, float]) -> bool:
        """Replace ``tensors`` by their sum, weighted by ``weights``, on those pipelines of ``met``; all of them must
        call it.

        Returns:
            True if the whole sum is done; otherwise a worker is lost.
        """

        def exchange(mean: GroupMean, group: Group) -> None:
            finish(mean.start(tensors, group))

        return self._exchanged(met, weights, self._epochs.mean, exchange)

    def agree(self, groups: ProcessGroups, mine: Any, decide: Callable[[Mapping[int, Any]], _Decision]) -> _Decision:
        """Return what ``decide`` makes of the values ``mine`` of the pipelines that meet, by pipeline.

        The first rank of each pipeline meets the others and decides, and its stages take over the decision. Every stage
        must call it; values and decision are JSON.
        """
        decision = None
        if groups.rank == 0:
            met = self.meet(json.dumps(mine).encode())
            decision = decide(dict(zip(met.pipelines, map(json.loads, met.values), strict=True)))
        agreed: _Decision = p2p.broadcast_value(decision, 0, groups.world)
        return agreed

    def gather(self, data: bytes, sizes: Mapping[int, int]) -> list[bytes] | None:
        """Return the ``data`` of all pipelines that have come to the last barrier, in their order; None if a worker is
        lost. Their last stages must call it.

        Args:
            data: that of this pipeline.
            sizes: number of bytes of each pipeline, as it said there.
        """
        if self._last is None:
            return [data]
        own = self._worker.pipeline
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        into = {i: torch.empty(size, dtype=torch.uint8) for i, size in sizes.items() if i != own}

        def exchange(replicas: Replicas, group: Group) -> None:
            transfers.begin(dict.fromkeys(into, mine), into, replicas, Tag.SAID_AT_BARRIER).wait()

        if not self._exchanged(self._last, dict.fromkeys(sizes, 1.0), self._epochs.replicas, exchange):
            return None
        return [data if i == own else into[i].numpy().tobytes() for i in sizes]

    def _exchanged(
        self,
        met: Met,
        weights: Mapping[int, float],
        find: Callable[[Group], _Way],
        exchange: Callable[[_Way, Group], None],
    ) -> bool:
        """Let the pipelines of ``met`` that have ``weights`` exchange, in the way that ``find`` returns for their
        group. Return whether it is done; otherwise a worker is lost."""
        if len(weights) == 1:
            return True
        workers = tuple(Worker(self._worker.stage, pipeline) for pipeline in weights)
        group = Group(workers, tuple(weights.values()), BARRIERS + met.sequence, "pause", epoch=met.epoch)
        self._epochs.use(group)
        begun = False
        try:
            way = find(group)
            begun = True
            exchange(way, group)
        except WorkerFailedError:
            if begun:
                self._epochs.give_up(group)
            self._epochs.wait_for_newest()
            return False
        finally:
            self._epochs.use(None)
        return True


def divided(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the floating-point ones of ``tensors``, and the integers; empty ones are left out."""
    some = [tensor for tensor in tensors if tensor.numel()]
    floating = [tensor for tensor in some if tensor.is_floating_point()]
    return floating, [tensor for tensor in some if not tensor.is_floating_point()]


def pack(integers: Sequence[Tensor]) -> bytes:
    """Pack the values of ``integers``, for the others at a barrier.

    Raises:
        ConfigurationError: there are too many.
    """
    if not integers:
        return b""
    flat = torch.cat([tensor.detach().reshape(-1).to("cpu", torch.int64) for tensor in integers])
    if flat.nbytes > MOST_BYTES:
        raise ConfigurationError(
            f"The module's integer buffers are {flat.nbytes} bytes, and pipelines of an elastic run tell each other at "
            f"most {MOST_BYTES}. Register what is no state with persistent=False outside of the module, or keep it in "
            "floating point."
        )
    return flat.numpy().tobytes()


def unpack_max(integers: Sequence[Tensor], each: Sequence[bytes]) -> None:
    """Set ``integers`` to the largest of the values that :func:`pack` has put into ``each``."""
    if integers:
        values = torch.stack([torch.frombuffer(bytearray(said), dtype=torch.int64) for said in each]).amax(0)
        parts = torch.split_with_sizes(values, [tensor.numel() for tensor in integers])
        for tensor, part in zip(integers, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def of_all_stages(groups: ProcessGroups, mine: Any) -> list[Any]:
    """Return what each stage of this worker's pipeline gives, by stage. Every stage must call it, with JSON values."""
    _, pipeline = groups.mesh.locate(groups.rank)
    ranks = groups.mesh.pipeline_ranks(pipeline)
    return [p2p.broadcast_value(mine, rank, groups.world) for rank in ranks]
