"""Make replicas equal, or check that they are.

Where training starts or resumes, methods with a common model need equal parameters. Hooks of the user's have run since
the replicas were made equal. Differences by rounding only, as on unlike devices, are overwritten by the first
pipeline's values; larger differences are refused, with the names of the parameters. After uneven training all copy the
most advanced replica.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.buckets import FlatBucket, tensors_of
from lightning_sdpipe.exchange.collectives import take_over
from lightning_sdpipe.p2p import broadcast_bytes, waiting_for
from lightning_sdpipe.sync.synchronizer import Replica, TrainingState
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
        "where training begins, and this method goes on from a model that all pipelines have. Something has changed "
        "them by the rank, its data or its own random numbers: change them in configure_model or __init__, or alike on "
        "every rank (as with a torch.Generator of a fixed seed)."
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
    """Give all of ``among`` the parameters, and their averages over time, of the first replica that has ``reached``
    furthest. Its optimizer's state and its loss scale are copied too where they differ: otherwise equal gradients would
    make unequal steps from then on. (They differ if some replicas had no more data, or drained their pipelines earlier
    and clipped by other norms.)

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    tensors = [*tensors_of(replica.parameters), *replica.averages]
    _copy(replica, among, reached, tensors, replica.progress)


def copy_most_advanced_parts(replica: Replica, reached: int) -> None:
    """Do the same as :func:`copy_most_advanced` among all replicas, for each part that has its own replicas; copy
    on other stages follow.

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
