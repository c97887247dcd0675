"""A worker's base, and rounds whose members may have different ones.

What a member brings is the difference from its own base. The mean of these, by any payload, is computed beside; a
member whose base is not the newest receives that base, with its momentum, from one that has it, in full. Nothing
changes until :meth:`OuterState.adopt`, which makes the step of the outer optimizer: so a round that breaks leaves no
trace, and all members have the same new base, bit for bit. Memory: the base, its momentum, and the mean while a round
goes on; the newest base and its momentum, too, where they are received.

:mod:`lightning_sdpipe.policies.outer_rounds` has the rules by which bases stay in one line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.members import Members
from lightning_sdpipe.exchange.moving import pieces_of, tag_of
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class OwnBase(OuterModel):
    """A codec for members that may have different bases: what they send are differences, each from its own."""

    def meets(self, team: Members) -> None:
        """Drops residuals when members have changed, since others own their parts then."""
        members = set(team.members)
        if members != self._met:
            self.drop()
        self._met = members


@dataclass(frozen=True)
class NewBase:
    """The outcome of a round, beside the model."""

    base: int
    """Sequence of the group that has made the base."""
    moved: list[Tensor] = field(default_factory=list)
    """Mean change of the members, by piece; empty if ``received`` is the new base itself."""
    received: list[Tensor] = field(default_factory=list)
    """State of the base that the round began with; empty if this worker had it."""


class OuterState:
    """The base of one worker's model; ``base`` is the sequence of the group that has made it, -1 for the first one."""

    def __init__(self, codec: OuterModel) -> None:
        self.codec = codec
        self.base = -1
        self._lock = threading.Lock()

    def tensors(self) -> list[Tensor]:
        """Returns the base and its momentum, piece by piece, by reference."""
        return [tensor for outer in self.codec.outer for tensor in outer.state_dict().values()]

    def copy(self) -> tuple[int, list[Tensor]]:
        """Returns the number of the base, and copies of its tensors. Any thread may call it."""
        with self._lock:
            return self.base, [tensor.detach().clone() for tensor in self.tensors()]

    def load(self, base: int, state: Sequence[Tensor]) -> None:
        """Takes over what :meth:`copy` has returned on another worker."""
        with self._lock:
            self._load(base, state)

    def _load(self, base: int, state: Sequence[Tensor]) -> None:
        self.base = base
        for own, given in zip(self.tensors(), state, strict=True):
            own.copy_(given)

    def make(
        self,
        tensors: Sequence[Tensor],
        group: Group,
        mover: EncodedMean,
        replicas: Replicas,
        moved: Callable[[], None] = lambda: None,
    ) -> NewBase:
        """Computes the outcome of a round, and calls ``moved`` after each piece.

        Args:
            tensors: the model, or a copy of it; they are not changed.
            group: the members, and their lineage.
            mover: an exchange by this state's codec.
            replicas: how to reach the members.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out; nothing has changed.
        """
        team, tag, means = Members.of(group), tag_of(group), []
        try:
            for number, piece in enumerate(pieces_of(tensors)):
                means.append(mover.average(piece, number, team, tag))
                moved()
            return NewBase(group.sequence, means, self._share(group, replicas, moved))
        except BaseException:
            self.codec.drop()
            raise

    def adopt(self, new: NewBase, tensors: Sequence[Tensor], sent: Sequence[Tensor] | None = None) -> None:
        """Makes ``new`` the base, and puts it into the model ``tensors``. If that has changed since it was ``sent``,
        it keeps these changes."""
        with self._lock, torch.no_grad():
            if new.received:
                self._load(new.base, new.received)
            for outer, mean in zip(self.codec.outer, new.moved, strict=bool(new.moved)):
                outer.step(mean)
            self.base = new.base
        self.put(tensors, sent)

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor], sent: Sequence[Tensor] | None = None) -> None:
        """Puts the base into the model, as :meth:`adopt` does."""
        if sent is None:
            for number, piece in enumerate(pieces_of(tensors)):
                self.codec.take_over(piece, number)
        else:
            for piece, before, outer in zip(pieces_of(tensors), pieces_of(sent), self.codec.outer, strict=True):
                piece.add_(outer.base - before)

    def hand_over(self, group: Group, replicas: Replicas) -> None:
        """Sends the base to the other members of ``group``. Any thread may call it.

        Raises:
            WorkerFailedError: one of them is gone.
        """
        others = [worker.pipeline for worker in group.members if worker.pipeline != replicas.pipeline]
        base, state = self.copy()
        for tensor in (torch.tensor([base]), *state):
            transfers.begin(dict.fromkeys(others, tensor), {}, replicas, tag_of(group)).wait()

    def take_over(self, source: int, group: Group, replicas: Replicas) -> NewBase:
        """Receives a base that ``source`` hands over in ``group``.

        Raises:
            WorkerFailedError: it is gone.
        """
        base = torch.tensor([0])
        state = [torch.empty_like(tensor) for tensor in self.tensors()]
        for tensor in (base, *state):
            transfers.begin({}, {source: tensor}, replicas, tag_of(group)).wait()
        return NewBase(int(base), received=state)

    def _share(self, group: Group, replicas: Replicas, moved: Callable[[], None]) -> list[Tensor]:
        """Sends the newest base to members that lack it; returns it on these."""
        assert group.lineage is not None, "a policy of rounds by quorum gives groups a lineage"
        newest: list[int] = []
        behind: list[int] = []
        for worker, base in zip(group.members, group.lineage.bases, strict=True):
            (newest if base == group.lineage.newest else behind).append(worker.pipeline)
        sources = {member: newest[place % len(newest)] for place, member in enumerate(behind)}
        received: list[Tensor] = []
        outgoing = [member for member in behind if sources[member] == replicas.pipeline]
        for tensor in self.tensors() if sources else ():
            if replicas.pipeline in sources:
                received.append(torch.empty_like(tensor))
                transfers.begin({}, {sources[replicas.pipeline]: received[-1]}, replicas, tag_of(group)).wait()
            elif outgoing:
                transfers.begin(dict.fromkeys(outgoing, tensor), {}, replicas, tag_of(group)).wait()
            moved()
        return received
