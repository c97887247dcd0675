"""Synchronisation state of a worker among the replicas of its stage, how they meet when one cannot go on alone, and how
they are made equal, or compared.

place      the scheduler counts on this worker   the others                 it gets elsewhere by
TOGETHER   no                                    are at the same batch      join
TRAINING   yes                                   are anywhere               come_together, wait_for_others, rest
AWAY       no: it is out of data                 train, or are AWAY too     come_together, where it was told to; rejoin,
                                                                            if it rests; or all are out of data,
                                                                            and TRAINING again

Between two sync points no worker knows how far the others are. Most sync points are known in advance, since every
worker counts the same batches: validation after 100 of them, a checkpoint after 500, the end of the epoch. But a worker
that runs out of data earlier does not know which sync point comes next. So each begins with one small all-reduce, in
which the workers that have arrived say where they are, and those that are out of data learn it.

Where training starts or resumes, methods with a common model need equal parameters. Hooks of the user's have run since
the replicas were made equal. Differences by rounding only, as on unlike devices, are overwritten by the first
pipeline's values; larger differences are refused, with the names of the parameters. After uneven training all copy the
most advanced replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import FlatBucket, tensors_of
from lightning_sdpipe.exchange.collectives import take_over
from lightning_sdpipe.p2p import broadcast_bytes, waiting_for
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, TrainingState
from lightning_sdpipe.topology.groups import Replicas

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN = 5  # number of names in a message


def begin_equal(replica: Replica, among: Replicas) -> None:
    """Make sure that all of ``among``, which are together, have the same parameters; where replicas are known by
    section, all replicas of each section. Costs a pass over the parameters, and a message with eight bytes for each.

    Raises:
        ConfigurationError: parameters differ by more than rounding.
        WorkerFailedError: a replica is gone, or the group's timeout passed.
    """
    if replica.shared is None:
        _begin_equal(replica, among, replica.parameters)
        return
    for part in replica.parts:
        _begin_equal(replica, part.among, part.parameters)
    replica.shared.make_equal()


def _begin_equal(replica: Replica, among: Replicas, buckets: Sequence[FlatBucket]) -> None:
    pipelines = among.pipelines
    tensors = tensors_of(buckets)
    if len(pipelines) == 1 or not tensors:
        return
    digests = _gathered(_digests(buckets), among)
    if bool((digests == digests[0]).all()):
        return
    before = [tensor.clone() for tensor in tensors]
    take_over(tensors, among, pipelines[0])
    apart = torch.tensor(
        [
            not _close(old, new)
            for old_flat, bucket in zip(before, buckets, strict=True)
            for old, new in zip(_split(old_flat, bucket), _split(bucket.buffer, bucket), strict=True)
        ],
        device=replica.device,
    )
    by_pipeline = _gathered(apart.long(), among)
    if not by_pipeline.any():
        return
    names = [replica.name_of(p) for bucket in buckets for p in bucket.parameters]
    found = [name for name, differs in zip(names, by_pipeline.any(0).tolist(), strict=True) if differs]
    shown = ", ".join(map(repr, found[:_SHOWN])) + (f" and {len(found) - _SHOWN} more" if found[_SHOWN:] else "")
    others = [pipelines[place] for place in by_pipeline.any(1).nonzero().flatten().tolist()]
    raise ConfigurationError(
        f"Parameters {shown} of stage {replica.stage} differ between pipeline {pipelines[0]} and pipelines {others} "
        "where training begins, and this method needs a model that all pipelines share. Something has "
        "changed them by the rank, its data or its own random numbers: change them in configure_model or __init__, or "
        "alike on every rank (as with a torch.Generator of a fixed seed)."
    )


def _digests(buckets: Sequence[FlatBucket]) -> Tensor:
    """Return the sum of the bits of each parameter, as integers of its width."""
    digests = []
    for bucket in buckets:
        width = min(bucket.buffer.element_size(), 8)
        sizes = [parameter.numel() * parameter.element_size() // width for parameter in bucket.parameters]
        digests += [part.sum(dtype=torch.int64) for part in bucket.buffer.view(_BITS[width]).split_with_sizes(sizes)]
    return torch.stack(digests)


def _gathered(mine: Tensor, among: Replicas) -> Tensor:
    """Return the tensors of all pipelines, in order."""
    by_rank = [torch.empty_like(mine) for _ in among.pipelines]
    with waiting_for(among.group, "comparing parameters before training goes on"):
        dist.all_gather(by_rank, mine, group=among.group)
    return torch.stack([by_rank[among.ranks[pipeline]] for pipeline in among.pipelines])


def _split(flat: Tensor, bucket: FlatBucket) -> Sequence[Tensor]:
    return torch.split_with_sizes(flat, [parameter.numel() for parameter in bucket.parameters])


def _close(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    difference, size = (one - other).abs().float(), other.abs().float()
    return not one.numel() or bool(difference.max() <= 64 * torch.finfo(one.dtype).eps * size.max())


def copy_most_advanced(replica: Replica, among: Replicas, reached: int) -> None:
    """Give all of ``among`` the parameters, and their averages over time, of the first replica with the largest
    ``reached``. Its optimizer's state and its loss scale are copied too where they differ: otherwise equal gradients
    would make unequal steps from then on. (They differ if some replicas had no more data, or drained their pipelines
    earlier and clipped by other norms.)

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    tensors = [*tensors_of(replica.parameters), *replica.averages]
    _copy(replica, among, reached, tensors, replica.progress)


def copy_most_advanced_parts(replica: Replica, reached: int) -> None:
    """Do the same as :func:`copy_most_advanced` among all replicas, for each part that has its own replicas; copies on
    other stages follow.

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    if replica.shared is None:
        copy_most_advanced(replica, replica.groups.replicas(), reached)
        return
    for part in replica.parts:
        own = [parameter for bucket in part.parameters for parameter in bucket.all_parameters]
        progress = None if replica.progress is None else replica.progress.of(own)
        _copy(replica, part.among, reached, tensors_of(part.parameters), progress)
    replica.shared.make_equal()
    if replica.progress is not None:
        for group, first, copied in replica.shared.copies():
            _follow(replica.progress.of(copied), group, first, replica.device)


def _copy(
    replica: Replica, among: Replicas, reached: int, tensors: Sequence[Tensor], progress: TrainingState | None
) -> None:
    pipelines = among.pipelines
    known = torch.zeros(2, len(pipelines), dtype=torch.int64)
    known[0, pipelines.index(replica.pipeline)] = reached
    known[1, pipelines.index(replica.pipeline)] = 0 if progress is None else progress.digest()
    known = known.to(replica.device)
    with waiting_for(among.group, "comparing how far replicas have got"):
        dist.all_reduce(known, group=among.group)
    by_pipeline, digests = known.tolist()
    furthest = pipelines[by_pipeline.index(max(by_pipeline))]
    take_over(tensors, among, furthest)
    if progress is None or len({*digests}) == 1:
        return
    own = furthest == replica.pipeline
    rank = dist.get_global_rank(among.group, among.ranks[furthest])
    state = broadcast_bytes(progress.save() if own else b"", rank, among.group)
    if not own:
        progress.load(state)


def _follow(progress: TrainingState, group: dist.ProcessGroup, first: int, device: torch.device) -> None:
    """Copy the state of rank ``first`` to the members of ``group``, if they differ."""
    digest = progress.digest()
    digests = torch.tensor([digest, ~digest], device=device)
    with waiting_for(group, "comparing the optimizer's state of shared parameters"):
        dist.all_reduce(digests, dist.ReduceOp.MAX, group=group)
    largest, complement = digests.tolist()
    if largest == ~complement:
        return
    own = dist.get_rank() == first
    state = broadcast_bytes(progress.save() if own else b"", first, group)
    if not own:
        progress.load(state)


class SyncState(Enum):
    """State of a worker among the replicas of its stage; see the table above."""

    TOGETHER = auto()
    TRAINING = auto()
    AWAY = auto()


@dataclass(frozen=True)
class SyncPoint:
    """A point where all workers meet. ``position`` is the number of batches of the epoch before it. ``closing`` says
    that it is the end of the epoch, for which each worker still has its last batch to train; ``steps`` is the number of
    optimizer steps that workers with data have made by then."""

    position: int
    closing: bool
    steps: int = 0


class Rendezvous:
    """The rendezvous of one worker with the replicas of its stage. All workers of a stage meet at the same points of
    training, which are known by ``position``, the number of batches begun in this epoch; the numbers of updates in
    between may differ.

    Args:
        sync: this worker's half of the synchronisation method.
    """

    def __init__(self, sync: Synchronizer) -> None:
        self.place = SyncState.TOGETHER
        self._sync = sync
        self._replica = sync.replica
        self._peers = sync.replica.peers
        self._unequal = False  # whether some worker has trained since the last sync point
        self._agreed: int | None = None  # where this worker, which is out of data, will be together with the others

    def join(self) -> None:
        """Join; return when every worker of the stage takes part. Do nothing if this worker takes part already."""
        if self.place is not SyncState.TOGETHER:
            return
        self.tell_freezing(False)
        if self._unequal:  # all came together, but not for a sync point
            self._sync.resynchronise()
        self._set_out()
        self._unequal = True

    def tell_freezing(self, changed: bool) -> None:
        """Compare with the others whether layers were frozen or unfrozen in this pipeline since the workers came
        together.

        Raises:
            ConfigurationError: layers were frozen or unfrozen in some pipelines only.
        """
        groups, group = self._replica.groups, self._replica.groups.meeting
        if group.size() == 1:
            return
        answers = torch.tensor([changed, not changed], dtype=torch.int64, device=self._replica.device)
        with waiting_for(group, "setting out"):
            dist.all_reduce(answers, group=group)
        if answers.all():
            raise ConfigurationError(
                "requires_grad was set on some ranks only: it has changed in some pipelines and not in others before "
                f"the same mini-batch; it has {'' if changed else 'not '}in pipeline {self._replica.pipeline} of stage "
                f"{self._replica.stage} (rank {groups.rank}). Freeze and unfreeze layers in all pipelines at the same "
                "batch, in a hook that does not depend on the rank or the rank's own data."
            )

    def wait_for_others(self, position: int, steps: int = 0) -> SyncPoint:
        """Wait, since this worker is out of data after ``steps`` optimizer steps, until the others meet somewhere or
        are all out of data themselves; hold up no other worker. In the latter case each takes part again for its last
        batch."""
        self.join()
        self._leave()
        meeting = _meet(position, True, steps, self._replica.groups.meeting, self._replica.device)
        if meeting.closing:
            self._sync.resynchronise()
            self._set_out()
        else:
            self._agreed = meeting.position
        return meeting

    def rest(self) -> None:
        """Stop taking part, and wait for no other worker, until :meth:`rejoin`, or until all come together."""
        self.join()
        self._leave()

    def rejoin(self) -> None:
        """Take part again, wherever the others are."""
        self._replica.client.join()
        self._sync.start()
        self.place = SyncState.TRAINING

    def come_together(self, position: int, steps: int = 0) -> None:
        """Wait until all workers of the stage are here, after this one's ``steps`` optimizer steps. No worker waits in
        the scheduler for one that waits here.

        Raises:
            ConfigurationError: this worker has been announced, so that others may count on it; or the others met
                elsewhere.
        """
        if self.place is SyncState.TOGETHER:
            return
        if self._sync.announced:
            raise ConfigurationError(
                "Something communicates with the other pipelines between the backward pass and the optimizer step, "
                "where groups are being formed. Do it in on_train_batch_end, or before the backward pass."
            )
        if self.place is SyncState.TRAINING:
            self._leave()
        if self._agreed != position:
            self._meet_others(position, steps)
        self.place, self._agreed = SyncState.TOGETHER, None

    def pause(self, position: int, steps: int = 0) -> None:
        """Come together with the others, after this worker's ``steps`` optimizer steps, and make all replicas of the
        stage equal: floating-point buffers become their mean over the pipelines, integer buffers (counters) the
        largest, and so do parameters, unless the method replaces this."""
        self.come_together(position, steps)
        if self._unequal:
            self._unequal = False
            self._sync.make_parameters_equal()
            self._sync.average_buffers()

    def abandon(self) -> None:
        """Give up after a failure of training: there is no worker to meet any more."""
        self.place, self._unequal, self._sync.announced = SyncState.TOGETHER, False, False

    def _meet_others(self, position: int, steps: int) -> None:
        if self._peers is not None:
            self._peers.barriers.meet()
        else:
            _meet(position, False, steps, self._replica.groups.meeting, self._replica.device)

    def _set_out(self) -> None:
        if self._peers is not None:  # a worker that comes later finds its groups then
            self._peers.barriers.set_out()
            self.rejoin()
            return
        among = self._sync.equal_at_start
        if among is not None:
            begin_equal(self._replica, among)
        self.rejoin()
        with waiting_for(self._replica.groups.meeting, "setting out"):  # no worker's first group may miss one
            dist.barrier(self._replica.groups.meeting)

    def _leave(self) -> None:
        self._sync.settle()
        self._replica.client.leave()
        self.place = SyncState.AWAY
        self._sync.stop()


def _meet(position: int, out_of_data: bool, steps: int, group: dist.ProcessGroup, device: torch.device) -> SyncPoint:
    """Wait for all members of ``group``, which have begun ``position`` batches each, and made ``steps``.

    A worker is ``out_of_data`` when one batch is left, which it keeps for the end of the epoch.

    Raises:
        ConfigurationError: the workers with data are at different batches, so they are at different sync points.
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    nowhere = -(2**62)
    here = [nowhere, nowhere, position + 1] if out_of_data else [position, -position, nowhere]
    places = torch.tensor([*here, steps], device=device)
    with waiting_for(group, "meeting"):
        dist.all_reduce(places, dist.ReduceOp.MAX, group=group)
    furthest, nearest, last, most = (int(place) for place in places)
    if furthest == nowhere:
        return SyncPoint(last, True, most)
    if furthest != -nearest or last > furthest:
        raise ConfigurationError(
            f"Some workers came together after {-nearest} batches of this epoch and others after "
            f"{max(furthest, last - 1)}: something was decided differently on them. Validation, checkpoints, barriers "
            "and skipped epochs must depend on the number of the batch, not on the rank, its data or its clock; and a "
            "loader must give as many batches as its length says."
        )
    return SyncPoint(furthest, False, most)
