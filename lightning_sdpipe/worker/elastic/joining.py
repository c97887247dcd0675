"""Entry of a pipeline into an elastic run: with the state of one that trains, or with those that begin together.

Its fingerprint names, in words that a refusal can quote, what must be equal in all pipelines of a run. :class:`Fit`
makes Lightning go on with the state of another pipeline, and gives its own to the next newcomer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils.data import DataLoader

from lightning_sdpipe import lightning_internals
from lightning_sdpipe.checkpoints import agreement
from lightning_sdpipe.checkpoints.whole_module import make_room
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.data.same_samples import difference
from lightning_sdpipe.errors import ConfigurationError, MustEndError, WorkerFailedError
from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.lightning_internals import data_source
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.weight_averaging import averaging_of
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.scheduler.client.client import Receive, SchedulerClient, Start
from lightning_sdpipe.sync.barriers import Barriers, divided, of_all_stages, pack, unpack_max
from lightning_sdpipe.tested import VERSION
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.worker.elastic import leader, state_transfer
from lightning_sdpipe.worker.elastic.elastic_batches import ElasticBatchSource
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.training import Training

log = logging.getLogger(__name__)


def training_loader(trainer: Trainer) -> Any:
    """Return a loader of the training data, made by the user's hook, for a look at the data only."""
    with isolate_rng():
        return data_source(trainer.fit_loop).dataloader()


def fingerprint(trainer: Trainer, options: Options, ownership: Ownership, loader: Any) -> dict[str, str]:
    """Return the fingerprint of a worker that is about to join, and trains the data of ``loader``: the same on all
    stages of a pipeline, and in all pipelines."""
    module = trainer.lightning_module
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.state_dict().items()]
    cut = sorted((name, owners) for name, owners in ownership.stages.items())
    interval = getattr(trainer, "val_check_interval", "at times")  # Lightning sets none if validation goes by the clock
    every = f"{interval} of every {trainer.check_val_every_n_epoch} epochs"
    return {
        "version": f"lightning_sdpipe {VERSION}, torch {torch.__version__}",
        "stages": str(options.num_stages),
        "model": f"{type(module).__name__} {_digest(shapes)}",
        "cut": _digest(cut),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
        "method": repr(options.sync),
        "exchange": repr(options.exchange),
        "schedule": f"{options.schedule}, {options.num_micro_batches} micro-batches",
        "precision": str(trainer.precision),
        "data": _data(loader),
        "seed": os.environ.get("PL_GLOBAL_SEED", "none"),
        "accumulate_grad_batches": str(trainer.accumulate_grad_batches),
        "validation": every,
        "averaging": str(averaging_of(trainer.callbacks)),  # type: ignore[attr-defined]
        "limits": f"max_epochs {trainer.max_epochs}, max_steps {trainer.max_steps}",
        "clocks": ", ".join(f"{type(clock.owner).__name__} every {clock.every:g} s" for clock in loop.clocks(trainer)),
    }


def _data(loader: Any) -> str:
    """Describe how much there is to train."""
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    samples = f"{len(loader.dataset)} samples" if isinstance(loader.dataset, Sized) else "samples without a number"
    return f"{samples}, batch size {loader.batch_size or getattr(loader.batch_sampler, 'batch_size', 'unknown')}"


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


State = dict[str, Any]
Gather = Callable[[Any], list[Any]]
"""Returns what each stage of this worker's pipeline gives, by stage. Every stage must call it, with JSON values."""
_END = b"\0"  # ends what a worker says at the barrier; its integers follow
_DONE, _NOT = b"\x01", b"\x00"


def join(
    client: SchedulerClient, mine: Mapping[str, str], take: Callable[[Receive], State]
) -> tuple[Start, State | None]:
    """Wait until training begins, and take the state that it begins with.

    Returns:
        The start and the state. The state is None where this pipeline begins anew, even if it received that of a donor
        that was lost before all stages had theirs.

    Raises:
        WorkerFailedError: the scheduler has been started again before it could say that this pipeline begins anew, and
            takes it for a member that has its state.
    """
    state: State | None = None
    answer = client.enrol(mine)
    while isinstance(answer, Receive):
        try:
            state = take(answer)
        except WorkerFailedError as error:
            state, answer = None, client.missed(answer.transfer, str(error))
        else:
            answer = client.received(answer.transfer, state["elastic"]["updates"])
    if state is None and not answer.fresh:
        raise WorkerFailedError(
            "The scheduler was started again before it could say what this pipeline begins with, and takes it for a "
            "member that trains. Start the pipeline again, as `sdpipe run` does: it then comes as a new one."
        )
    return answer, None if answer.fresh else state


def begin_together(
    barriers: Barriers, tensors: Sequence[Tensor], says: bytes, gather: Gather
) -> tuple[int, dict[int, bytes]]:
    """Give ``tensors`` on all of the first pipelines the values of one of them, the same one in every stage.

    Each stage meets by itself. When a pipeline is lost meanwhile, one stage may have met with it and another without,
    or one may have its tensors and another not. So the stages of a pipeline tell each other how their barriers went,
    which is the same in all pipelines. The source is the first pipeline that came in every stage. If not all pipelines
    that are left have its tensors in every stage, all begin again with what they had at first.

    Args:
        barriers: those of this worker's stage, at a point of their own.
        tensors: parameters and buffers, changed when the source is agreed on.
        says: what else this pipeline is to tell, without a zero byte.
        gather: gathers among the stages of this worker's pipeline.

    Returns:
        The source, and what each pipeline says.

    Raises:
        ConfigurationError: there are too many integers to be sent.
        WorkerFailedError: another stage of this worker's pipeline is lost.
    """
    floating, integers = divided(tensors)
    while True:
        met = barriers.meet(says + _END + pack(integers))
        members = sorted(set.intersection(*map(set, gather(met.pipelines))))
        source = members[0]
        copies = [tensor.detach().clone() for tensor in floating]
        copied = barriers.weighted_sum(copies, met, {pipeline: float(pipeline == source) for pipeline in members})
        done = barriers.meet(_DONE if copied else _NOT)
        if all(gather(all(value == _DONE for value in done.values))):
            break
    said = {pipeline: value.partition(_END) for pipeline, value in zip(met.pipelines, met.values, strict=True)}
    for tensor, copy in zip(floating, copies, strict=True):
        tensor.copy_(copy)
    unpack_max(integers, [said[source][2]])
    return source, {pipeline: words for pipeline, (words, _, _) in said.items()}


def compare(every: Mapping[int, State]) -> str | None:
    """Compare what the pipelines that begin together say. Return how their data differ; None if they do not.

    Raises:
        ConfigurationError: they would go on from different checkpoints.
    """
    checkpoints = {pipeline: said["checkpoint"] for pipeline, said in every.items()}
    if len({digest for digest, _ in checkpoints.values()}) > 1:
        agreement.refuse_unlike("pipelines", {pipeline: told for pipeline, (_, told) in checkpoints.items()})
    return difference("pipeline", {pipeline: said["samples"] for pipeline, said in every.items()})


@dataclass(frozen=True)
class Fit:
    """A worker's training, and the transfer of its state from another pipeline, or to one.

    Args:
        trainer: Lightning's.
        training: the training that its hooks call.
        source: the source of its batches.
        checkpoints: those of its stage.
        groups: its process groups.
        client: its client of the scheduler.
        store: makes a store, by its name, that both sides of a transfer reach; a second argument, if any, returns true
            when the transfer is in vain.
    """

    trainer: Trainer
    training: Training
    source: ElasticBatchSource
    checkpoints: Checkpoints
    groups: ProcessGroups
    client: SchedulerClient
    store: Callable[..., Store]
    samples: list[int] = field(default_factory=list)
    """Digests of some samples of the training data; stage 0 knows them."""

    def receive(self, what: Receive) -> State:
        """Receive the state of the donor's stage; give up when another donor is found, since others may wait."""

        def is_in_vain() -> bool:
            return self.client.offered != what.transfer

        store = self.store(self._room(what.transfer), is_in_vain)
        state = state_transfer.receive_state(store, self._limit, f"pipeline {what.donor}", is_in_vain)
        state["elastic"]["donor"] = what.donor
        return state

    def give(self, transfer: str, turns: State) -> None:
        """Copy this stage's state, with that of its ``turns``, and send it to the same stage of the newcomer while
        training goes on."""
        with self.checkpoints.of_this_stage():
            state = state_transfer.snapshot(self.trainer)
        own = {"updates": self.training.updates, "names": leader.names(self.trainer), "samples": self.samples}
        state["elastic"] = {"turns": turns, **own}
        state["sync"] = self.training.sync.handover()
        self.client.snapshot_taken(transfer, self.training.updates)
        state_transfer.send_state(state, self.store(self._room(transfer)), self._limit)

    def go_on_from(self, state: State) -> None:
        """Make Lightning resume from ``state``, whatever checkpoint the run began with."""
        own = state.pop("elastic")
        _, pipeline = self.groups.mesh.locate(self.groups.rank)
        if self.samples and (said := difference("pipeline", {own["donor"]: own["samples"], pipeline: self.samples})):
            log.warning(said)
        self.training.sync.take(state.pop("sync"))
        self.source.load(own["turns"])
        self.training.begin_at(own["updates"])
        leader.adopt(self.trainer, own["names"])
        make_room(self.trainer.lightning_module, state["state_dict"])
        lightning_internals.resume_from_state(self.trainer, state)

    def go_on_from_file(self, path: str) -> None:
        """Make Lightning resume from the newest checkpoint of the run, since no pipeline was left."""
        if not Path(path).exists():
            raise ConfigurationError(
                f"All pipelines were lost, and the run continues from {path} (--resume), which does not exist on this "
                "machine. Write checkpoints to a file system that all machines share."
            )
        log.warning("No pipeline of the run was left: it continues from %s.", path)
        lightning_internals.resume_from(self.trainer, lambda _: path)

    def begin_together(self, barriers: Barriers, data_seed: int, path: Any) -> int:
        """Make the first pipelines equal; they go on from the checkpoint at ``path`` if there is one. Return the data
        seed of the one that the others take over from.

        Raises:
            ConfigurationError: pipelines would go on from different checkpoints.
        """
        replica = self.training.sync.replica
        with barriers.at("beginning"):  # at no epoch: if a pipeline is lost, starts may name different ones
            mine = {"turns": self.source.state, "seed": data_seed, "names": leader.names(self.trainer)}
            if self.samples:
                contents = agreement.digest(path)
                checkpoint = contents, agreement.described(path, contents)
                mine |= {"samples": self.samples, "checkpoint": checkpoint}
            tensors = [*tensors_of(replica.parameters), *replica.buffers]
            says, gather = json.dumps(mine).encode(), partial(of_all_stages, self.groups)
            source, said = begin_together(barriers, tensors, says, gather)
        every = {pipeline: json.loads(words) for pipeline, words in said.items()}
        first, (_, own) = every[source], self.groups.mesh.locate(self.groups.rank)
        if self.samples and (unlike := compare(every)) is not None and own == source:
            log.warning(unlike)
        self.source.load(first["turns"])
        leader.adopt(self.trainer, first["names"])
        seed: int = first["seed"]
        return seed

    def leave(self) -> None:
        """Leave the run, with nothing under way that others wait for."""
        with suppress(MustEndError):  # as the scheduler says once another stage has ended
            self.training.sync.settle()  # others may wait for exchanges that are under way
            self.training.client.leave()
        self.training.sync.stop()
        self.checkpoints.wait()

    @property
    def _limit(self) -> timedelta:
        """Longest time that each part of a state may take."""
        return timedelta(seconds=self.client.limit)

    def _room(self, transfer: str) -> str:
        return f"{transfer}-{self.groups.mesh.locate(self.groups.rank)[0]}"
