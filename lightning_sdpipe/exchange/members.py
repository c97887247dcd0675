"""The owners of the parts of a piece, and what the members of a group agree on for one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_sdpipe.exchange.payloads.pieces import num_blocks
from lightning_sdpipe.policies.decisions import Group


@dataclass(frozen=True)
class Members:
    """The members: pipelines in increasing order, and how much the model of each counts."""

    members: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, group: Group) -> Members:
        """The members of a group that the policy decided on."""
        return cls(tuple(worker.pipeline for worker in group.members), group.weights)

    def weight(self, pipeline: int) -> float:
        return self.weights[self.members.index(pipeline)]

    def without(self, pipeline: int) -> list[int]:
        """The others, from the next one on, so that each begins with another one."""
        place = self.members.index(pipeline)
        return [*self.members[place + 1 :], *self.members[:place]]


@dataclass(frozen=True)
class Offset:
    """Where a flat tensor lies: in which piece of all that is moved, and how many values come before it there. So what
    is kept for it from one exchange to the next is found again."""

    piece: int
    start: int

    def part(self, span: slice) -> Offset:
        return Offset(self.piece, self.start + span.start)


def parts(n: int, members: int) -> list[slice]:
    """Which of ``n`` elements each member owns: as ``torch.tensor_split`` divides them."""
    size, more = divmod(n, members)
    bounds = [index * size + min(index, more) for index in range(members + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def owned(n: int, members: Sequence[int], block: int) -> dict[int, slice]:
    """Which of ``n`` values each member owns: whole blocks, as evenly as these can be divided."""
    blocks = parts(num_blocks(n, block), len(members))
    return {
        member: slice(min(n, span.start * block), min(n, span.stop * block))
        for member, span in zip(members, blocks, strict=True)
    }
