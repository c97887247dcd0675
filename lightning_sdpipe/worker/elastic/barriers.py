"""Barriers of a stage's replicas in an elastic job, at which they meet through the scheduler, and average.

A barrier takes the place of a collective: a worker that dies is not waited for, and all that pass it get the same
answer, which of them have come and what each said. The barriers of a stage are numbered between two segments of
training, in which all do the same things in the same order. Before its first segment a worker is alone: the first
pipelines have begun together, and a newcomer has not come to where the others are.

Where pipelines are cut unlike and their stages are no replicas, all workers of a pipeline meet together: stage 0 asks
the scheduler, with what every stage has to say, and the others take over the answer. So all stages know the same
pipelines to be there, and each averages its sections among these.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.moving import Mover, finish
from lightning_sdpipe.membership.failure_detection import BARRIERS
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.client.membership_client import MembershipClient
from lightning_sdpipe.topology.groups import ProcessGroups, Replicas
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups

MOST_BYTES = 1 << 15
"""Most bytes that a worker says at a barrier."""
_RESULTS = 2**30 + 1  # a tag of messages that no other exchange of a barrier's group uses
_Decision = TypeVar("_Decision")
_Way = TypeVar("_Way")
_AVERAGED, _NOT = b"\x01", b"\x00"


class Barriers:
    """The barriers of one worker.

    Args:
        worker: this worker.
        line: its client of the scheduler.
        epochs: the groups of its replicas.
        point: returns the point of training at which all meet next: equal on all of them.
        met: called after each barrier.
    """

    def __init__(
        self,
        worker: Worker,
        line: MembershipClient,
        epochs: EpochGroups,
        point: Callable[[], str],
        met: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._line = line
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
        """Let the barriers of the block, before the first segment of training, be at ``point``."""
        usual = self._point
        self._point, self._begun, self._number = lambda: point, True, 0
        try:
            yield
        finally:
            self._point, self._begun, self._number, self._last = usual, False, 0, None

    def meet(self, says: bytes = b"") -> Met:
        """Wait for the others; :meth:`said` reads the answer. A worker that came too late is alone, and so is each
        before the first segment.

        Raises:
            WorkerFailedError: the others have passed the barrier before, and gone on.
        """
        if not self._begun:
            return Met(self._worker.stage, "", (self._worker.pipeline,), (says,), 0)
        key = f"{self._point()}/{self._number}"
        self._number += 1
        met = self._ask(key, says)
        if met.past:
            raise WorkerFailedError(
                f"pipeline {self._worker.pipeline} came to a barrier ({key}) when the others had gone on; it has to "
                "join again"
            )
        self._last = met
        self._met()
        return met

    def _ask(self, key: str, says: bytes) -> Met:
        return self._line.meet(key, says)

    def said(self, met: Met) -> dict[int, list[bytes]]:
        """Return what each pipeline has said that came to ``met``: one value for each worker that meets there."""
        return {pipeline: [value] for pipeline, value in zip(met.pipelines, met.values, strict=True)}

    def pack(self, integers: Sequence[Sequence[Tensor]]) -> bytes:
        """Pack the ``integers`` of each part for the others; raises as :func:`pack` does."""
        (own,) = integers
        return pack(own)

    def unpack_max(self, integers: Sequence[Sequence[Tensor]], each: Sequence[Sequence[bytes]]) -> None:
        """Set ``integers`` to the largest of the values that :meth:`pack` has put into ``each``, by pipeline and
        worker."""
        (own,) = integers
        unpack_max(own, [value for (value,) in each])

    def average(self, *parts: Sequence[Tensor]) -> Met:
        """Make the tensors of each of the ``parts`` the same on all that meet: floating-point ones their mean, integers
        the largest. There is one part, or as many as this worker exchanges by themselves.

        If a worker is lost meanwhile, all that are left average again.

        Returns:
            The barrier at which the last attempt was made.

        Raises:
            ConfigurationError: there are too many integers to be sent.
        """
        floating, integers = divided(parts)
        met = self.meet(_NOT + self.pack(integers))
        while True:
            averaged = self.weighted_sum(floating, met, dict.fromkeys(met.pipelines, 1 / len(met.pipelines)))
            done = self.meet((_AVERAGED if averaged else _NOT) + self.pack(integers))
            if done.pipelines == met.pipelines and self.all_said(done, _AVERAGED):
                break
            met = done
        self.unpack_max(integers, [[value[1:] for value in values] for values in self.said(met).values()])
        return met

    def all_said(self, met: Met, word: bytes) -> bool:
        """Return whether all that came to ``met`` have said something that begins with ``word``."""
        return all(value.startswith(word) for values in self.said(met).values() for value in values)

    def weighted_sum(self, parts: Sequence[Sequence[Tensor]], met: Met, weights: Mapping[int, float]) -> bool:
        """Replace the tensors of ``parts`` by their sum, weighted by ``weights``, on those pipelines of ``met``; all of
        them must call it.

        Returns:
            True if the whole sum is done; otherwise a worker is lost.
        """

        def exchange(movers: Sequence[Mover], group: Group) -> None:
            for mover, tensors in zip(movers, parts, strict=True):
                finish(mover.start(tensors, group), self._epochs.moved)

        return self._exchanged(met, weights, self._epochs.movers, exchange)

    def agree(self, groups: ProcessGroups, mine: Any, decide: Callable[[Mapping[int, Any]], _Decision]) -> _Decision:
        """Return what ``decide`` makes of the values ``mine`` of the pipelines that meet, by pipeline.

        The first rank of each pipeline meets the others and decides, and its stages take over the decision. Every stage
        must call it; values and decision are JSON.
        """
        decision = None
        if groups.rank == 0:
            said = self.said(self.meet(json.dumps(mine).encode()))
            decision = decide({pipeline: json.loads(value) for pipeline, (value,) in said.items()})
        agreed: _Decision = p2p.broadcast_value(decision, 0, groups.world)
        return agreed

    def gather(self, data: bytes, sizes: Mapping[int, int]) -> list[bytes] | None:
        """Return the ``data`` of all pipelines that have come to the last barrier, in their order; None if a worker is
        lost. Their last stages must call it, and the others :meth:`pass_by`.

        Args:
            data: that of this pipeline.
            sizes: the bytes of each pipeline, which it has said there.
        """
        if self._last is None:
            return [data]
        own = self._worker.pipeline
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        into = {i: torch.empty(size, dtype=torch.uint8) for i, size in sizes.items() if i != own}

        def exchange(replicas: Replicas, group: Group) -> None:
            transfers.begin(dict.fromkeys(into, mine), into, replicas, _RESULTS).wait()
            self._epochs.moved()

        if not self._exchanged(self._last, dict.fromkeys(sizes, 1.0), self._epochs.replicas, exchange):
            return None
        return [data if i == own else into[i].numpy().tobytes() for i in sizes]

    def pass_by(self) -> None:
        """Take no part in what the last stages gather."""

    def _exchanged(
        self,
        met: Met,
        weights: Mapping[int, float],
        find: Callable[[Group], _Way],
        exchange: Callable[[_Way, Group], None],
    ) -> bool:
        """Let those pipelines of ``met`` exchange, by the way that ``find`` returns for their group. Return whether it
        is done; otherwise a worker is lost."""
        if len(weights) == 1:
            return True
        group = self._group(met, weights)
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

    def _group(self, met: Met, weights: Mapping[int, float]) -> Group:
        """Return those pipelines of ``met`` as a group."""
        workers = tuple(Worker(self._worker.stage, pipeline) for pipeline in weights)
        return Group(workers, tuple(weights.values()), BARRIERS + met.sequence, "pause", epoch=met.epoch)


def divided(parts: Sequence[Sequence[Tensor]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return the floating-point tensors of each of ``parts``, and the integers; empty ones are left out."""
    some = [[tensor for tensor in tensors if tensor.numel()] for tensors in parts]
    floating = [[tensor for tensor in part if tensor.is_floating_point()] for part in some]
    return floating, [[tensor for tensor in part if not tensor.is_floating_point()] for part in some]


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
            f"The module's integer buffers are {flat.nbytes} bytes, and pipelines of an elastic job tell each other at "
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


class PipelineBarriers(Barriers):
    """The barriers of one worker; every stage of its pipeline must call each method at the same point.

    Args:
        worker: this worker.
        line: its client of the scheduler.
        epochs: the process groups of its run.
        point: see :class:`~lightning_sdpipe.worker.elastic.barriers.Barriers`, as for ``met``.
        met: called after each barrier.
        groups: this worker's process groups.
        sections: numbers of the sections that it exchanges, in order.
    """

    def __init__(
        self,
        worker: Worker,
        line: MembershipClient,
        epochs: EpochGroups,
        point: Callable[[], str],
        met: Callable[[], None],
        groups: ProcessGroups,
        sections: Sequence[int],
    ) -> None:
        super().__init__(Worker(0, worker.pipeline), line, epochs, point, met)
        self._speaks = worker.stage == 0
        self._groups, self._sections = groups, sections

    def meet(self, says: bytes = b"") -> Met:
        """See the base class; the pipeline says what all of its stages do."""
        of_stages = of_all_stages(self._groups, b64encode(says).decode())
        return super().meet(msgspec.msgpack.encode([b64decode(each) for each in of_stages]))

    def said(self, met: Met) -> dict[int, list[bytes]]:
        """Return what each pipeline has said that came to ``met``, by stage."""
        return {
            pipeline: msgspec.msgpack.decode(value, type=list[bytes])
            for pipeline, value in zip(met.pipelines, met.values, strict=True)
        }

    def pack(self, integers: Sequence[Sequence[Tensor]]) -> bytes:
        """See the base class; the integers of a section are said by the stage that exchanges it."""
        return msgspec.msgpack.encode(dict(zip(self._sections, map(pack, integers), strict=True)))

    def unpack_max(self, integers: Sequence[Sequence[Tensor]], each: Sequence[Sequence[bytes]]) -> None:
        """See the base class."""
        of_pipelines: list[dict[int, bytes]] = [{} for _ in each]
        for sections, values in zip(of_pipelines, each, strict=True):
            for value in values:
                sections |= msgspec.msgpack.decode(value, type=dict[int, bytes])
        for number, own in zip(self._sections, integers, strict=True):
            unpack_max(own, [sections[number] for sections in of_pipelines])

    def agree(self, groups: ProcessGroups, mine: Any, decide: Callable[[Mapping[int, Any]], _Decision]) -> _Decision:
        """Return what ``decide`` makes of what the first ranks of the pipelines say, which run their last stages."""
        said = self.said(self.meet(json.dumps(mine).encode()))
        return decide({pipeline: json.loads(values[-1]) for pipeline, values in said.items()})

    def pass_by(self) -> None:
        """Tell the scheduler that this worker is past what the last stages gather, which may then be stuck."""
        if self._last is not None:
            self._epochs.use(self._group(self._last, dict.fromkeys(self._last.pipelines, 1.0)))
            self._epochs.use(None)

    def _ask(self, key: str, says: bytes) -> Met:
        said = "" if not self._speaks else msgspec.json.encode(super()._ask(key, says)).decode()
        pipeline = self._worker.pipeline
        heard = p2p.broadcast_value(said, self._groups.mesh.rank(0, pipeline), self._groups.world)
        return msgspec.json.decode(heard, type=Met)
