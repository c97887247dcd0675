"""A worker's base, and the rounds by which it moves on.

A member brings to a round its model's difference from the base, which all members share. The mean of the differences,
by any payload, is computed beside the model. Nothing changes until :meth:`OuterState.adopt`, which makes the step of
the outer optimizer: so a round that breaks off leaves no trace, and all members have the same new base, bit for bit. A
worker that lacks the newest base receives it with its momentum, in full. Memory: the base and its momentum, and the
mean while a round goes on; the newest base and its momentum, too, where they are received.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.codec import Members
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import pieces_of, tag_of
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class OuterRoundsModel(OuterModel):
    """A codec for rounds that may be made again by other members."""

    def meets(self, team: Members) -> None:
        """Drop residuals when members have changed, since others own their parts then."""
        members = set(team.members)
        if members != self._met:
            self.drop()
        self._met = members


@dataclass(frozen=True)
class NewBase:
    """The outcome of a round, beside the model."""

    rounds: int
    """Number of rounds that have made the base."""
    moved: list[Tensor] = field(default_factory=list)
    """Mean change of the members, by piece; empty if ``received`` is the new base itself."""
    received: list[Tensor] = field(default_factory=list)
    """State of another worker's base, from which that change is counted; empty if this worker has it."""
    sequence: int = -1
    """Group that has made the base; -1 for the first one, and for those that all have made together."""


class OuterState:
    """The base of one worker's model; ``rounds`` is the number of rounds that have made it."""

    def __init__(self, codec: OuterModel) -> None:
        self.codec = codec
        self.rounds, self.sequence = 0, -1
        self._brought = set[int]()
        """Groups to which this worker has brought its change from this base."""
        self.samples: float | None = None
        """Number of samples behind the change that this worker brings to its next round, as its weight; None if the
        group gives the weights."""
        self._lock = threading.Lock()

    def copy(self) -> tuple[tuple[int, int], list[Tensor]]:
        """Return the number of rounds and the group of the last one, and copies of the base's tensors. Any thread may
        call it."""
        with self._lock:
            return (self.rounds, self.sequence), [tensor.detach().clone() for tensor in self.codec.state()]

    def load(self, rounds: int, sequence: int, pieces: Sequence[Tensor]) -> None:
        """Take over the number and the pieces of another worker's base, and leave the momentum as it is."""
        with self._lock:
            self.rounds, self.sequence = rounds, sequence
            for outer, piece in zip(self.codec.outer, pieces, strict=True):
                outer.base.copy_(piece)

    def make(self, tensors: Sequence[Tensor], group: Group, mover: EncodedMean, replicas: Replicas) -> NewBase:
        """Compute the outcome of a round.

        Args:
            tensors: the model, or a copy of it; they are not changed.
            group: the members.
            mover: an exchange by this state's codec.
            replicas: how to reach the members.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out; nothing has changed.
        """
        try:
            team, tag = Members.of(self._weighed(group, replicas, tensors)), tag_of(group)
            self._brought.add(group.sequence)
            means = [mover.average(piece, number, team, tag) for number, piece in enumerate(pieces_of(tensors))]
        except BaseException:
            self.codec.drop()
            raise
        return NewBase(self.rounds + 1, means, sequence=group.sequence)

    def adopt(self, new: NewBase, tensors: Sequence[Tensor], sent: Sequence[Tensor] | None = None) -> bool:
        """Make ``new`` the base, and put it into the model ``tensors``. The model keeps what has changed since it was
        ``sent``; if others have made the base without this worker, all changes since its own base. Return whether the
        new base contains this worker's change."""
        handed_over, follows = bool(new.received) and not new.moved, new.rounds == self.rounds + 1
        without = handed_over and (not self._brought or (follows and new.sequence not in self._brought))
        if without:
            sent = [outer.base.clone() for outer in self.codec.outer]
        with self._lock, torch.no_grad():
            for own, given in zip(self.codec.state(), new.received, strict=bool(new.received)):
                own.copy_(given)
            for outer, mean in zip(self.codec.outer, new.moved, strict=bool(new.moved)):
                outer.step(mean)
            self.rounds, self.sequence = new.rounds, new.sequence
        self._brought.clear()
        self.put(tensors, sent)
        return not without

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor], sent: Sequence[Tensor] | None = None) -> None:
        """Put the base into the model, as :meth:`adopt` does."""
        if sent is None:
            for number, piece in enumerate(pieces_of(tensors)):
                self.codec.take_over(piece, number)
        else:
            for piece, before, outer in zip(pieces_of(tensors), pieces_of(sent), self.codec.outer, strict=True):
                piece.add_(outer.base - before)

    def hand_over(self, group: Group, replicas: Replicas) -> None:
        """Send the base to the other members of ``group``. Any thread may call it.

        Raises:
            WorkerFailedError: one of them is gone.
        """
        others = [worker.pipeline for worker in group.members if worker.pipeline != replicas.pipeline]
        made, state = self.copy()
        begun = [
            transfers.begin(dict.fromkeys(others, tensor), {}, replicas, tag_of(group))
            for tensor in (torch.tensor(made), *state)
        ]
        for each in begun:
            each.wait()

    def take_over(self, source: int, group: Group, replicas: Replicas) -> NewBase:
        """Receive a base that ``source`` hands over in ``group``.

        Raises:
            WorkerFailedError: it is gone.
        """
        made = torch.tensor([0, 0])
        state = [torch.empty_like(tensor) for tensor in self.codec.state()]
        for each in [transfers.begin({}, {source: t}, replicas, tag_of(group)) for t in (made, *state)]:
            each.wait()
        rounds, sequence = made.tolist()
        return NewBase(rounds, received=state, sequence=sequence)

    def _weighed(self, group: Group, replicas: Replicas, tensors: Sequence[Tensor]) -> Group:
        """Return ``group`` with weights by the samples of its members, which tell each other."""
        if self.samples is None or len(group.members) == 1:
            return group
        device = tensors[0].device if tensors else None  # as all that travels, since NCCL takes nothing else
        counts = {
            worker.pipeline: torch.tensor([self.samples], dtype=torch.float64, device=device)
            for worker in group.members
        }
        into = {pipeline: count for pipeline, count in counts.items() if pipeline != replicas.pipeline}
        transfers.begin(dict.fromkeys(into, counts[replicas.pipeline]), into, replicas, tag_of(group)).wait()
        weights = [float(count) for count in counts.values()]
        total = sum(weights)
        return msgspec.structs.replace(group, weights=tuple(w / total for w in weights)) if total else group
