"""Weighted mean over the members of a group by encoded messages: scatter, reduce, gather (BAGUA §3.4).

A :class:`~lightning_sdpipe.exchange.codec.Codec` encodes and decodes the messages; on request the members of each host
average first. A part that its owner refuses is exchanged in full precision afterwards: all members see the refusal in
the owner's answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.codec import Codec, Members, Offset, is_refusal, owned, refusal
from lightning_sdpipe.exchange.moving import Pending, PieceByPiece, refuse_neighbours, tag_of
from lightning_sdpipe.exchange.payloads.payload import residual_dtype
from lightning_sdpipe.exchange.transfers import Transfers
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

WORTH_HALVING = 2**18
"""Number of values from which a message is divided, so that one half is encoded while the other travels. More parts
would cost more time than they hide."""


class EncodedMean:
    """Gives the members of a group their weighted mean, as precisely as the coding allows.

    Args:
        replicas: replicas of which this worker is one.
        coding: the codec, equal on all replicas except for its memory.
        hosts: the machine of each pipeline's replica: messages are encoded between machines only. None treats all
            replicas alike.
        lock: held while a piece is copied and while it is committed, where other code changes the tensors meanwhile.
            Only for codings whose outcome is a change.
    """

    def __init__(
        self,
        replicas: Replicas,
        coding: Codec,
        hosts: Sequence[str] | Mapping[int, str] | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._replicas = replicas
        self.coding = coding
        self.hosts = hosts
        self.lock = lock

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        """Start the exchange.

        Raises:
            ConfigurationError: the group has members that average with some of the others only.
        """
        refuse_neighbours(group)
        return _Encoded(self, tensors, group)

    def average(self, piece: Tensor, number: int, team: Members, tag: int) -> Tensor:
        """Return the outcome for a flat ``piece``, which is not changed; every member calls this method.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out.
        """
        self.coding.meets(team)
        x, at = self.coding.prepared(piece, number), Offset(number, 0)
        return self._by_hosts(x, at, team, tag) if self.hosts is not None else self._flat(x, at, team, tag)

    def _flat(self, x: Tensor, at: Offset, team: Members, tag: int) -> Tensor:
        coding, wide = self.coding, residual_dtype(x.dtype)
        if len(team.members) == 1:
            return coding.exact(x, x.to(wide) * team.weights[0])  # of a single host, which need not be 1
        outcome = x.new_empty(len(x), dtype=wide)
        unit = 2 * len(team.members) * coding.block  # so that parts are equally long
        half = -(-len(x) // unit) * unit // 2 if len(x) >= WORTH_HALVING else len(x)
        spans = [slice(0, half), slice(half, len(x))] if half < len(x) else [slice(0, len(x))]
        chunks = [_Chunk(x[span], at.part(span), outcome[span], team, coding.block) for span in spans]
        for turn in range(len(chunks) + 2):
            for behind, act in enumerate((self._offer, self._combine, self._accept)):
                if 0 <= turn - behind < len(chunks):
                    act(chunks[turn - behind], team, tag)
        for chunk in chunks:
            for owner in chunk.refused:
                part = chunk.part(owner)
                chunk.outcome[chunk.spans[owner]] = coding.exact(part, self._in_full(part, owner, team, tag))
        return outcome

    def _offer(self, chunk: _Chunk, team: Members, tag: int) -> None:
        """Begin to send the other members the parts that they own."""
        me, others = self._replicas.pipeline, team.without(self._replicas.pipeline)
        for owner in others:
            if len(part := chunk.part(owner)):
                chunk.mine[owner] = self.coding.encode_part(part, chunk.place(owner))
        chunk.arriving = {member: self._message(chunk.part(me)) for member in others}
        chunk.under_way = transfers.begin(chunk.mine, chunk.arriving, self._replicas, tag)

    def _combine(self, chunk: _Chunk, team: Members, tag: int) -> None:
        """Average this worker's own part when it has come from the others, and begin to send them the mean."""
        coding, me, others = self.coding, self._replicas.pipeline, team.without(self._replicas.pipeline)
        part, combined = chunk.part(me), None
        chunk.under_way.wait()
        if len(part):
            messages = [(chunk.arriving[member], team.weight(member)) for member in sorted(others)]
            combined = coding.reduce_part(part, chunk.place(me), team.weight(me), messages, len(team.members))
        if combined is not None:
            chunk.outcome[chunk.spans[me]] = combined[1]
        answer = refusal(coding.nbytes(len(part), part.dtype), part.device) if combined is None else combined[0]
        chunk.refused = [me] if is_refusal(answer) else []
        chunk.arriving = {owner: self._message(chunk.part(owner)) for owner in others}
        chunk.under_way = transfers.begin(dict.fromkeys(others, answer), chunk.arriving, self._replicas, tag)

    def _accept(self, chunk: _Chunk, team: Members, tag: int) -> None:
        """Take the means of the others' parts when they have come."""
        chunk.under_way.wait()
        for owner, mean in chunk.arriving.items():
            if is_refusal(mean):
                chunk.refused = sorted([*chunk.refused, owner])
            elif len(part := chunk.part(owner)):
                taken = self.coding.decode_mean(part, chunk.place(owner), chunk.mine[owner], mean)
                chunk.outcome[chunk.spans[owner]] = taken

    def _in_full(self, x: Tensor, owner: int, team: Members, tag: int) -> Tensor:
        """Return the mean of a part, exchanged in full precision."""
        me, others = self._replicas.pipeline, team.without(self._replicas.pipeline)
        wide = residual_dtype(x.dtype)
        if owner != me:
            self._swap({owner: x}, {}, tag)
            return self._swap({}, {owner: x.new_empty(len(x), dtype=wide)}, tag)[owner]
        arrived = self._swap({}, {member: torch.empty_like(x) for member in others}, tag)
        mean = x.to(wide) * team.weight(me)
        for member in sorted(others):
            mean.add_(arrived[member], alpha=team.weight(member))
        self._swap(dict.fromkeys(others, mean), {}, tag)
        return mean

    def _by_hosts(self, x: Tensor, at: Offset, team: Members, tag: int) -> Tensor:
        """Average by hosts: each worker of a host averages its own part of the host's mean with its counterparts on
        other hosts. Where hosts have unequally many members, a worker of a small host has several parts."""
        assert self.hosts is not None
        coding, me = self.coding, self._replicas.pipeline
        hosts = _by_host(team.members, self.hosts)
        (local,) = [members for members in hosts if me in members]
        spans = owned(len(x), range(max(map(len, hosts))), coding.block)
        owners = {number: [members[number % len(members)] for members in hosts] for number in spans}
        own = {number: local[number % len(local)] for number in spans}
        outcome = x.new_empty(len(x), dtype=residual_dtype(x.dtype))
        means = {number: self._of_host(x[span], own[number], local, team, tag) for number, span in spans.items()}
        told = {
            number: means[number].new_empty(span.stop - span.start)
            for number, span in spans.items()
            if own[number] != me
        }  # awaited before this worker waits for other hosts: a sender sends until it is taken
        arriving = [transfers.begin({}, {own[number]: to}, self._replicas, tag) for number, to in told.items()]
        for number, span in spans.items():
            if own[number] == me:
                between = Members(*_shares(owners[number], hosts, team))
                outcome_of_host = self._flat(means[number], at.part(span), between, tag)
                told[number] = coding.share(means[number], outcome_of_host)
                self._swap({member: told[number] for member in local if member != me}, {}, tag)
        for transfer in arriving:
            transfer.wait()
        for number, span in spans.items():
            outcome[span] = coding.apply_shared(x[span], told[number])
        return outcome

    def _of_host(self, x: Tensor, owner: int, local: Sequence[int], team: Members, tag: int) -> Tensor:
        """Return the mean over the members of this host, for the owner; an empty tensor for others."""
        me, wide = self._replicas.pipeline, residual_dtype(x.dtype)
        if owner != me:
            self._swap({owner: x}, {}, tag)
            return x.new_empty(0, dtype=wide)
        arrived = self._swap({}, {member: torch.empty_like(x) for member in local if member != me}, tag)
        total = sum(team.weight(member) for member in local)
        mean = torch.zeros_like(x, dtype=wide)
        for member in local:
            share = team.weight(member) / total if total else 1 / len(local)
            mean.add_(x if member == me else arrived[member], alpha=share)
        return mean

    def _message(self, values: Tensor) -> Tensor:
        """Return a buffer for a message with as many values as ``values``."""
        return values.new_empty(0, dtype=torch.uint8).new_empty(self.coding.nbytes(len(values), values.dtype))

    def _swap(self, outgoing: Mapping[int, Tensor], like: Mapping[int, Tensor], tag: int) -> dict[int, Tensor]:
        into = {pipeline: torch.empty_like(tensor) for pipeline, tensor in like.items()}
        transfers.begin(outgoing, into, self._replicas, tag).wait()
        return into


class _Chunk:
    """Consecutive values on their way to the mean; ``outcome`` is the tensor that receives it."""

    def __init__(self, x: Tensor, at: Offset, outcome: Tensor, team: Members, block: int) -> None:
        self.outcome = outcome
        self.spans = owned(len(x), team.members, block)
        self.mine: dict[int, Tensor] = {}
        """Messages, by the owner of the part in them."""
        self.arriving: dict[int, Tensor] = {}
        self.under_way: Transfers
        self.refused: list[int] = []
        """Owners whose part has to be exchanged in full precision."""
        self._x, self._at = x, at

    def part(self, owner: int) -> Tensor:
        return self._x[self.spans[owner]]

    def place(self, owner: int) -> Offset:
        return self._at.part(self.spans[owner])


class _Encoded(PieceByPiece):
    def __init__(self, mover: EncodedMean, tensors: Sequence[Tensor], group: Group) -> None:
        super().__init__(tensors)
        self._mover, self._team, self._tag = mover, Members.of(group), tag_of(group)

    def _compute(self, number: int, piece: Tensor) -> Tensor:
        now = piece
        if self._mover.lock is not None:
            with self._mover.lock:
                now = piece.clone()
        return self._mover.average(now, number, self._team, self._tag)

    def _put(self, number: int, piece: Tensor, outcome: Tensor) -> None:
        with self._mover.lock or nullcontext():
            self._mover.coding.apply(piece, number, outcome)

    def abort(self) -> None:
        if self._to_come or self._arrived:
            self._mover.coding.aborted()
        super().abort()


def _by_host(members: Sequence[int], hosts: Sequence[str] | Mapping[int, str]) -> list[list[int]]:
    """Return members by their machines, which are in the order of their first members."""
    found: dict[str, list[int]] = {}
    for member in members:
        found.setdefault(hosts[member], []).append(member)
    return list(found.values())


def _shares(
    owners: Sequence[int], hosts: Sequence[Sequence[int]], team: Members
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return one owner of each host, in increasing order, and the weight of its host."""
    shares = {
        owner: sum(team.weight(member) for member in members) for owner, members in zip(owners, hosts, strict=True)
    }
    return tuple(sorted(shares)), tuple(shares[owner] for owner in sorted(shares))
