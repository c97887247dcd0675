"""Predictions of all pipelines as one process would return them: whole batches are dealt out in turn, and collected."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler

from lightning_sdpipe import p2p
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import IndexBatchSampler, batches_of, set_batches
from lightning_sdpipe.p2p import Tag
from lightning_sdpipe.partition.effects import Effect
from lightning_sdpipe.partition.message import Layout, Message, Opaque, Receiving, whole_message
from lightning_sdpipe.topology.groups import ProcessGroups


class _Dealt:
    """Every N-th batch, beginning with number ``pipeline``. With fewer batches than pipelines, a pipeline without one
    of its own repeats one, since Lightning wants every rank to have work; :func:`collect` leaves it out."""

    def __init__(self, batches: Collection[list[int]], pipeline: int, num_pipelines: int) -> None:
        self._batches = batches
        self._first = pipeline if pipeline < len(batches) else pipeline % max(1, len(batches))
        self._num_pipelines = num_pipelines

    def __len__(self) -> int:
        return len(range(self._first, len(self._batches), self._num_pipelines))

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._batches, self._first, None, self._num_pipelines)


def deal_batches(loader: Any, groups: ProcessGroups) -> None:
    """Give this pipeline its share of a loader for prediction that Lightning has given a distributed sampler.

    Others stay as they are: those of an iterable data set, and those with the user's own sampler.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if isinstance(batches, IndexBatchSampler) and isinstance(sampler, UnrepeatedDistributedSampler):
        _, pipeline = groups.mesh.locate(groups.rank)
        set_batches(batches, _Dealt(batches_of(batches), pipeline, groups.mesh.num_pipelines))


def collect(predictions: list[list[Any]], loaders: Iterable[Any], groups: ProcessGroups) -> None:
    """Merge the predictions of all pipelines into rank 0's, in the order of the batches.

    Every rank must call it.

    Args:
        predictions: for each loader, what ``predict_step`` returned for each batch.
        loaders: those that :func:`deal_batches` was given; of others rank 0 keeps its own predictions.

    Raises:
        ConfigurationError: the predictions hold something that cannot be sent.
    """
    mesh = groups.mesh
    if not mesh.is_last(groups.rank):
        return
    for mine, loader in zip(predictions, loaders, strict=True):
        sampler = getattr(loader, "batch_sampler", None)
        dealt = batches_of(sampler) if isinstance(sampler, IndexBatchSampler) else None
        if not isinstance(dealt, _Dealt):
            continue
        sources = mesh.last_ranks[: len(dealt._batches)]  # the others have repeated a batch
        if groups.rank != 0:
            if groups.rank in sources:
                _send(mine, groups)
            continue
        parts = [mine, *(_receive(source, groups) for source in sources if source != 0)]
        mine[:] = [parts[b % len(parts)][b // len(parts)] for b in range(sum(map(len, parts)))]


def _send(predictions: Sequence[Any], groups: ProcessGroups) -> None:
    message = whole_message([Effect("output", (), list(predictions))])
    (effect,) = message.layout.blocks[0] or ()
    opaque = next((part.kind for part in effect.structure.parts if isinstance(part, Opaque)), None)
    if opaque is not None:
        raise ConfigurationError(
            f"predict_step returned a {opaque}, and only tensors, numbers, strings and None in tuples, lists and dicts "
            "are brought to rank 0. Return these, or call predict(return_predictions=False) and write them with a "
            "BasePredictionWriter."
        )
    described = pickle.dumps((message.layout.encode(), message.numbers))
    p2p.send_bytes(described, 0, groups.stage, Tag.PREDICTIONS, "rank 0").wait()
    p2p.send(message.tensors, 0, groups.stage, Tag.PREDICTIONS, "rank 0").wait()


def _receive(source: int, groups: ProcessGroups) -> list[Any]:
    peer, device = f"rank {source}", torch.device("cpu")
    encoded, numbers = pickle.loads(p2p.receive_bytes(source, groups.stage, Tag.PREDICTIONS, peer))
    layout = Layout.decode(encoded)
    tensors = [meta.empty(device) for meta in layout.values]
    p2p.receive(tensors, source, groups.stage, Tag.PREDICTIONS, peer).wait()
    effects = Receiving(Message(tensors, numbers, layout), [""], device, frozenset()).effects(0)
    predictions: list[Any] = (effects or [])[0].value
    return predictions
