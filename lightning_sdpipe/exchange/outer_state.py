"""A worker's base, and rounds whose members may have different ones.

What a member brings is the difference from its own base. The mean of these, by any payload, is computed beside. A
member whose base is not the newest receives, from one that has it, the means of the rounds that it has missed, while
this round goes on; or, if these are not kept any more, the newest base with its momentum, in full. Nothing changes
until :meth:`OuterState.adopt`, which makes the steps of the outer optimizer: so a round that breaks leaves no trace,
and all members have the same new base, bit for bit. Memory: the base, its momentum, messages of the last rounds (half
of that at most), and the mean while a round goes on; the newest base and its momentum, too, where they are received.

A round makes its base by one step of the outer optimizer, of a mean that all members read from the same messages. So a
worker that has the base before it, and gets these messages, makes the same base, bit for bit. With eight bits a round
takes one byte of each value, where the base and its momentum take eight.

:mod:`lightning_sdpipe.policies.outer_rounds` has the rules by which bases stay in one line.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.background import Background
from lightning_sdpipe.exchange.codec import Codec, Members, Offset
from lightning_sdpipe.exchange.encoded_mean import EncodedMean, SentMean
from lightning_sdpipe.exchange.moving import pieces_of, tag_of
from lightning_sdpipe.exchange.outer_model import OuterModel
from lightning_sdpipe.exchange.transfers import Transfers
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas

_BESIDE = 2**29
"""Added to the tag of a round, whose own messages travel at the same time."""
_TYPES = (torch.uint8, torch.float32, torch.float64)
"""Types of messages: encoded ones, and values in full."""


@dataclass(frozen=True)
class MadeBase:
    """A base, named by the ``sequence`` of the group that has made it of the base ``before``; and by piece the messages
    with the mean of that round."""

    before: int
    sequence: int
    means: Sequence[Sequence[SentMean]]

    @property
    def nbytes(self) -> int:
        return sum(part.message.nbytes for means in self.means for part in means)

    def mean(self, piece: int, base: Tensor, coding: Codec) -> Tensor:
        """Return the mean change of a piece, as members of the round have read it; ``base`` is the piece before it."""
        taken, start = [], 0
        for part in self.means[piece]:
            values, message = base[start : start + part.count], part.message.to(base.device)
            if message.dtype == torch.uint8 and part.count:
                message = coding.decode_mean(values, Offset(piece, start), message, message)
            taken.append(message)
            start += part.count
        return torch.cat(taken)


class History:
    """The last rounds of one worker, each made of the base before it; the oldest are let go of.

    Args:
        limit: bytes that it may keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: dict[int, MadeBase] = {}
        """Rounds by the base before them, the oldest first."""

    def add(self, made: MadeBase) -> None:
        """Note a round."""
        self._made[made.before] = made
        while sum(each.nbytes for each in self._made.values()) > self._limit:
            del self._made[next(iter(self._made))]

    def since(self, base: int, newest: int) -> list[MadeBase] | None:
        """Return the rounds that lead from ``base`` to ``newest``, or None if one of them is not kept."""
        found: list[MadeBase] = []
        while base != newest:
            made = self._made.get(base)
            if made is None:
                return None
            found.append(made)
            base = made.sequence
        return found


def send(missed: Mapping[int, Sequence[MadeBase] | None], replicas: Replicas, tag: int) -> list[Transfers]:
    """Begin to send each of these pipelines the rounds that it has missed; None tells it that they are not kept."""
    begun = []
    for pipeline, rounds in missed.items():
        packed = torch.empty(0, dtype=torch.uint8) if rounds is None else _packed(rounds)
        for message in (torch.tensor([packed.numel()]), packed):
            begun.append(transfers.begin({pipeline: message}, {}, replicas, tag + _BESIDE))
    return begun


class Arriving:
    """Missed rounds on their way from ``source``, taken in by a thread while the round itself goes on."""

    def __init__(self, source: int, replicas: Replicas, tag: int) -> None:
        self._rounds: list[MadeBase] | None = None
        self._job = Background("taking in missed rounds", None).do(lambda: self._take(source, replicas, tag))

    def wait(self) -> list[MadeBase] | None:
        """Return the rounds; None if the source does not keep them.

        Raises:
            WorkerFailedError: the source is gone, or a transfer has timed out.
        """
        self._job.wait()
        return self._rounds

    def _take(self, source: int, replicas: Replicas, tag: int) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        transfers.begin({}, {source: size}, replicas, tag + _BESIDE).wait()
        packed = torch.empty(int(size), dtype=torch.uint8)
        transfers.begin({}, {source: packed}, replicas, tag + _BESIDE).wait()
        self._rounds = _unpacked(packed) if packed.numel() else None


def _packed(rounds: Sequence[MadeBase]) -> Tensor:
    """Return rounds as bytes: the number of their messages, what each of these is, and their contents."""
    said, contents = [0], []
    for made in rounds:
        for piece, means in enumerate(made.means):
            for part in means:
                said += [
                    made.before,
                    made.sequence,
                    piece,
                    part.count,
                    part.message.numel(),
                    _TYPES.index(part.message.dtype),
                ]
                contents.append(part.message.cpu().view(torch.uint8))
    said[0] = len(contents)
    return torch.cat([torch.tensor(said).view(torch.uint8), *contents])


def _unpacked(packed: Tensor) -> list[MadeBase]:
    """Return the rounds of :func:`_packed`; their messages stay on the CPU."""
    count = int(packed[:8].view(torch.int64))
    at = 8 + 48 * count
    found: dict[tuple[int, int], dict[int, list[SentMean]]] = {}
    for before, sequence, piece, values, length, kind in packed[8:at].view(torch.int64).view(count, 6).tolist():
        dtype = _TYPES[kind]
        content = packed[at : at + length * dtype.itemsize]
        at += content.numel()
        found.setdefault((before, sequence), {}).setdefault(piece, []).append(
            SentMean(values, content.clone().view(dtype))
        )
    return [MadeBase(*names, [means[piece] for piece in sorted(means)]) for names, means in found.items()]


class OwnBase(OuterModel):
    """A codec for members that may have different bases: what they send are differences, each from its own."""

    def meets(self, team: Members) -> None:
        """Drop residuals when members have changed, since others own their parts then."""
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
    """State of the base that the round began with; empty if this worker had it, or has ``missed`` rounds."""
    missed: list[MadeBase] = field(default_factory=list)
    """The rounds before this one that this worker was not in."""
    made: MadeBase | None = None
    """The round itself, to be kept for others that miss it; None if its members have not read the same messages."""


class OuterState:
    """The base of one worker's model; ``base`` is the sequence of the group that has made it, -1 for the first one."""

    def __init__(self, codec: OuterModel) -> None:
        self.codec = codec
        self.base = -1
        self.samples: float | None = None
        """Samples of which this worker brings the change to its next round, by which its members weigh; None if they
        weigh as their group says."""
        self._history = History(0)
        self._lock = threading.Lock()

    def copy(self) -> tuple[int, list[Tensor]]:
        """Return the number of the base, and copies of its tensors. Any thread may call it."""
        with self._lock:
            return self.base, [tensor.detach().clone() for tensor in self.codec.state()]

    def load(self, base: int, pieces: Sequence[Tensor]) -> None:
        """Take over the number and the pieces of another worker's base, and leave the momentum as it is."""
        with self._lock:
            self.base = base
            self.forget()
            for outer, piece in zip(self.codec.outer, pieces, strict=True):
                outer.base.copy_(piece)

    def forget(self) -> None:
        """Let the last rounds go, since the base has come to be in another way."""
        self._history = History(sum(tensor.nbytes for tensor in self.codec.state()) // 2)

    def make(
        self,
        tensors: Sequence[Tensor],
        group: Group,
        mover: EncodedMean,
        replicas: Replicas,
    ) -> NewBase:
        """Compute the outcome of a round.

        Args:
            tensors: the model, or a copy of it; they are not changed.
            group: the members, and their lineage.
            mover: an exchange by this state's codec.
            replicas: how to reach the members.

        Raises:
            WorkerFailedError: a member is gone, or a transfer has timed out; nothing has changed.
        """
        tag = tag_of(group)
        means: list[Tensor] = []
        sent: list[list[SentMean]] = []
        try:
            team = Members.of(self._weighed(group, replicas, tensors))
            sharing = self._begin_to_share(group, replicas)
            for number, piece in enumerate(pieces_of(tensors)):
                sent.append([])
                means.append(mover.average(piece, number, team, tag, sent[-1]))
            missed, received = self._share(sharing, group, replicas)
            flat = mover.hosts is None  # else members of one host have read the mean from different messages
            made = MadeBase(sharing.newest, group.sequence, sent) if flat else None
            return NewBase(group.sequence, means, received, missed, made)
        except BaseException:
            self.codec.drop()
            raise

    def adopt(self, new: NewBase, tensors: Sequence[Tensor], sent: Sequence[Tensor] | None = None) -> None:
        """Make ``new`` the base, and put it into the model ``tensors``. If that has changed since it was ``sent``,
        it keeps these changes."""
        with self._lock, torch.no_grad():
            if new.received:
                self.forget()
                for own, given in zip(self.codec.state(), new.received, strict=True):
                    own.copy_(given)
            for missed in new.missed:
                for piece, outer in enumerate(self.codec.outer):
                    outer.step(missed.mean(piece, outer.base, self.codec))
                self._history.add(missed)
            for outer, mean in zip(self.codec.outer, new.moved, strict=bool(new.moved)):
                outer.step(mean)
            if new.made is not None:
                self._history.add(new.made)
            elif new.moved:  # by all that are together, which got it in another way
                self.forget()
            self.base = new.base
        self.put(tensors, sent)

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
        base, state = self.copy()
        begun = [
            transfers.begin(dict.fromkeys(others, tensor), {}, replicas, tag_of(group))
            for tensor in (torch.tensor([base]), *state)
        ]
        for each in begun:
            each.wait()

    def take_over(self, source: int, group: Group, replicas: Replicas) -> NewBase:
        """Receive a base that ``source`` hands over in ``group``.

        Raises:
            WorkerFailedError: it is gone.
        """
        base = torch.tensor([0])
        state = [torch.empty_like(tensor) for tensor in self.codec.state()]
        for each in [transfers.begin({}, {source: t}, replicas, tag_of(group)) for t in (base, *state)]:
            each.wait()
        return NewBase(int(base), received=state)

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

    def _begin_to_share(self, group: Group, replicas: Replicas) -> _Sharing:
        """Begin to send members that lack the newest base what makes them have it, or to receive that."""
        assert group.lineage is not None, "the policy of outer rounds gives groups a lineage"
        newest, tag = group.lineage.newest, tag_of(group)
        bases = {worker.pipeline: base for worker, base in zip(group.members, group.lineage.bases, strict=True)}
        having = [member for member, base in bases.items() if base == newest]
        behind = [member for member in bases if member not in having]
        sources = {member: having[place % len(having)] for place, member in enumerate(behind)}
        source = sources.get(replicas.pipeline)
        if source is not None:
            return _Sharing(newest, source, Arriving(source, replicas, tag))
        missed = {
            member: self._history.since(bases[member], newest)
            for member in behind
            if sources[member] == replicas.pipeline
        }
        in_full = [member for member, rounds in missed.items() if rounds is None]
        return _Sharing(newest, sends=send(missed, replicas, tag), in_full=in_full)

    def _share(self, sharing: _Sharing, group: Group, replicas: Replicas) -> tuple[list[MadeBase], list[Tensor]]:
        """End what :meth:`_begin_to_share` has begun; return the rounds that this worker has missed, or the newest
        base."""
        missed: list[MadeBase] | None = []
        state: list[Tensor] = []
        begun = sharing.sends
        if sharing.arriving is not None:
            missed = sharing.arriving.wait()
        if missed is None:
            state = [torch.empty_like(tensor) for tensor in self.codec.state()]
            begun = [transfers.begin({}, {sharing.source: each}, replicas, tag_of(group)) for each in state]
        elif sharing.in_full:
            begun += [
                transfers.begin(dict.fromkeys(sharing.in_full, each), {}, replicas, tag_of(group))
                for each in self.codec.state()
            ]
        for each in begun:
            each.wait()
        return missed or [], state


@dataclass
class _Sharing:
    """Transfers by which members of a round that lack the newest base get it, as one of them sees them."""

    newest: int
    source: int = -1
    """Member from which this worker gets it; -1 if it has it."""
    arriving: Arriving | None = None
    sends: list[Transfers] = field(default_factory=list)
    in_full: list[int] = field(default_factory=list)
    """Members that this worker sends the base itself."""
