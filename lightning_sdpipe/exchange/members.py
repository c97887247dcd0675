"""Members of a group in one exchange, and the parts of a piece that each owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_sdpipe.exchange.payloads.pieces import num_blocks
from lightning_sdpipe.policies.decisions import Group


@dataclass(frozen=True)
class Members:
    """The members of a group: pipelines in increasing order, and the weight of each model."""

    members: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, group: Group) -> Members:
        """Make the members of a group that the policy decided on."""
        return cls(tuple(worker.pipeline for worker in group.members), group.weights)

    def weight(self, pipeline: int) -> float:
        return self.weights[self.members.index(pipeline)]

    def without(self, pipeline: int) -> list[int]:
        """Return the other members, from the next one on, so that members begin with different ones."""
        place = self.members.index(pipeline)
        return [*self.members[place + 1 :], *self.members[:place]]


@dataclass(frozen=True)
class Offset:
    """The offset of a flat tensor: the piece in which it lies, and the number of values before it there. It identifies
    what is kept for the tensor from one exchange to the next."""

    piece: int
    start: int

    def part(self, span: slice) -> Offset:
        return Offset(self.piece, self.start + span.start)


def parts(n: int, members: int) -> list[slice]:
    """Return the part of ``n`` elements that each member owns, divided as by ``torch.tensor_split``."""
    size, more = divmod(n, members)
    bounds = [index * size + min(index, more) for index in range(members + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def owned(n: int, members: Sequence[int], block: int) -> dict[int, slice]:
    """Return the part of ``n`` values that each member owns: whole blocks, divided as evenly as possible."""
    blocks = parts(num_blocks(n, block), len(members))
    return {
        member: slice(min(n, span.start * block), min(n, span.stop * block))
        for member, span in zip(members, blocks, strict=True)
    }
