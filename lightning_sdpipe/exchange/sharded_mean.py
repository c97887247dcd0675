"""Mean over groups whose members hold equal models: each member moves its share of the model between the groups.

Of two groups with n members each, member r of one group averages the r-th part of the model with member r of the other,
and then the members of a group exchange their parts. So the slow links between groups carry the model once in each
direction, instead of n times. Groups must have one size; others average as one group, by the weights that the policy
gave them, which is the same mean.

Messages between groups may be of lower precision. Then groups end a little different, with an unchanged mean. The
members of a group stay equal, since the result of a part is sent to them in full precision. Where meetings are not
sharded, each member would get a different result, so nothing is encoded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import GroupMean, Mover, Pending, Scratch, finish, pieces_of, tag_of
from lightning_sdpipe.exchange.payloads import Full, Payload
from lightning_sdpipe.exchange.references import OwnReference
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.topology.groups import Replicas


class ShardedMean:
    """Gives all members of several groups the mean of the groups' models: the same on all, bit for bit, except for what
    messages of lower precision leave out.

    Args:
        replicas: replicas of which this worker is one.
        groups: the pipelines of each group, some of which may be absent from a meeting.
        sharded: False to let all members average as one group.
        payload: payload of messages between groups, as :class:`~lightning_sdpipe.exchange.references.OwnReference`
            takes it.
    """

    def __init__(
        self, replicas: Replicas, groups: Sequence[Sequence[int]], sharded: bool = True, payload: Payload | None = None
    ) -> None:
        self._replicas = replicas
        self._groups = groups
        self._sharded = sharded
        self._whole = GroupMean(replicas)
        self._payload = payload or Full()
        self._between: dict[int | None, Mover] = {}
        self._scratch = Scratch()

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """See :class:`~lightning_sdpipe.exchange.moving.Mover`; ``group`` has the members of all groups that meet."""
        parts = self.parts(group)
        if len(parts) == 1:  # they hold equal models
            return self._whole.start([], group)
        sizes = {len(part) for part in parts}
        if sizes == {1}:
            return self.between(None).start(tensors, group)
        if not self._sharded or len(sizes) > 1:
            return self._whole.start(tensors, group)
        return _Sharded(tensors, group, parts, self._replicas, self.between, self._scratch)

    def between(self, piece: int | None) -> Mover:
        """Return the mover for a piece, which averages among groups that each send one member's values; a piece has
        its own mover, since the distance of models is remembered by offset. None stands for whole models."""
        if isinstance(self._payload, Full):
            return self._whole
        if piece not in self._between:
            self._between[piece] = EncodedMean(self._replicas, OwnReference(self._payload))
        return self._between[piece]

    def parts(self, group: Group) -> list[list[int]]:
        """Return the members of ``group`` by the groups that they belong to."""
        there = {worker.pipeline for worker in group.members}
        parts = [[pipeline for pipeline in own if pipeline in there] for own in self._groups]
        return [part for part in parts if part]


class _Sharded:
    def __init__(
        self,
        tensors: Sequence[Tensor],
        group: Group,
        parts: Sequence[Sequence[int]],
        replicas: Replicas,
        between: Callable[[int], Mover],
        scratch: Scratch,
    ) -> None:
        own = next(part for part in parts if replicas.pipeline in part)
        self.seconds_waiting = 0.0
        self._own = own
        self._place = own.index(replicas.pipeline)
        share = {worker.pipeline: weight for worker, weight in zip(group.members, group.weights, strict=True)}
        weight_of = {part[self._place]: sum(share[pipeline] for pipeline in part) for part in parts}
        members = tuple(Worker(replicas.stage, pipeline) for pipeline in sorted(weight_of))
        weights = tuple(weight_of[pipeline] for pipeline in sorted(weight_of))
        self._counterparts = Group(members, weights, group.sequence, group.reason)
        self._replicas = replicas
        self._between = between
        self._tag = tag_of(group)
        self._lender = scratch
        self._to_come = deque(enumerate(pieces_of(tensors)))
        self._first = True

    def wait(self) -> bool:
        if not self._to_come:
            return False
        number, piece = self._to_come[0]
        self._scratch = self._lender.lend(len(piece), piece)
        self._beside = self._scratch[: len(piece)]
        shards = dict(zip(self._own, torch.tensor_split(self._beside, len(self._own)), strict=True))
        shard = shards.pop(self._replicas.pipeline)
        shard.copy_(torch.tensor_split(piece, len(self._own))[self._place])
        waited = finish(self._between(number).start([shard], self._counterparts))
        start = time.perf_counter()
        transfers.begin(dict.fromkeys(shards, shard), shards, self._replicas, self._tag).wait()
        if self._first:
            self.seconds_waiting, self._first = waited + time.perf_counter() - start, False
        return True

    def commit(self) -> None:
        self._to_come.popleft()[1].copy_(self._beside)
        self._lender.give_back(self._scratch)

    def abort(self) -> None:
        self._to_come.clear()
