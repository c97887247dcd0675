"""A run whose pipelines come and go, as one worker of one of them sees it: what takes the place of
:class:`~lightning_sdpipe.worker.fixed_run.FixedRun` in an elastic job."""

from __future__ import annotations

import json
import logging
import secrets
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._C._distributed_c10d import Store

from lightning_sdpipe import lightning_internals, p2p
from lightning_sdpipe.checkpoints.files import Publisher
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.errors import ConfigurationError, SchedulerError, WorkerFailedError
from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.clock import ClockChecks
from lightning_sdpipe.loop.dealt import Dealing
from lightning_sdpipe.membership.turn_order import Command, CommandKind, turn_order
from lightning_sdpipe.pipeline.data import shared
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler import policy_file
from lightning_sdpipe.scheduler.client.membership_client import Callbacks, CancelledError, Receive
from lightning_sdpipe.sync.mover_choice import among_groups
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, TrainingState
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.hosts import roll_call
from lightning_sdpipe.topology.mesh import OnePipeline
from lightning_sdpipe.topology.placement_file import Placement, check_shape, order_of_stages
from lightning_sdpipe.worker.assembly import Assembled
from lightning_sdpipe.worker.elastic import joining, leader, refusals, state_transfer
from lightning_sdpipe.worker.elastic.barriers import Barriers, ElasticRendezvous, ElasticReplica
from lightning_sdpipe.worker.elastic.elastic_batches import ElasticBatchSource
from lightning_sdpipe.worker.elastic.epoch_process_groups import EpochGroups, SchedulerStore
from lightning_sdpipe.worker.elastic.fault_tolerant_mean import FaultTolerantMean
from lightning_sdpipe.worker.elastic.joining import fingerprint
from lightning_sdpipe.worker.elastic.scheduler_connection import ElasticConnection
from lightning_sdpipe.worker.elastic.stage_commands import CommandChannel
from lightning_sdpipe.worker.fixed_run import FixedRun
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.training import Training

log = logging.getLogger(__name__)

_CONNECTING = 20.0  # seconds
_WHOLE_RUN = 1e9  # seconds


class ElasticRun(FixedRun):
    """One worker's; its options name the job that this process belongs to."""

    def __init__(self, options: Options, strategy: DDPStrategy, give_up: Callable[[], None]) -> None:
        super().__init__(options, strategy, give_up)
        assert options.job is not None
        self._job = job = options.job
        self._mesh = OnePipeline.of(job.world_size, job.pipeline, job.pipeline + 1)  # N is not known yet
        self._leads = False
        self._leaving = False
        self._closed = False
        self._here: Callable[[Collection[int]], Collection[int]] = lambda members: members
        self._others_led = False
        leader.take_place(job.rank, False)

    # ------------------------------------------------------------------ places

    @property
    def mesh(self) -> OnePipeline:
        return self._mesh

    def check(self) -> None:
        if self.options.placement is not None:
            check_shape(self.options.placement, self._job.world_size, None)
        refusals.check_options(self.options)

    def check_trainer(self, trainer: Trainer) -> None:
        refusals.check_trainer(trainer)

    def open(self) -> None:
        options, job = self.options, self._job
        assert options.standing_scheduler is not None
        leader.take_place(job.rank, self._leads)  # the process group was opened since, which says otherwise
        if self._groups is None and options.placement is not None:
            self._mesh = replace(self._mesh, ranks=(self._placed_row(options.placement),))
        self._worker = Worker(*self._mesh.locate(dist.get_rank()))
        if job.policy_file is not None:
            policy_file.offer(job.policy_file, options.method.policy)
        self._membership = self._line = ElasticConnection(
            options.standing_scheduler,
            self._worker,
            shared(1 + secrets.randbits(61)),
            options.run_timeout.total_seconds(),
            Callbacks(
                epoch=lambda epoch: self._epochs.enter(epoch), broke=lambda sequence: self._epochs.broke(sequence)
            ),
            self._give_up,
        )
        served = self._line.client.serves
        assert served is not None
        if served[0] != job.world_size:
            raise ConfigurationError(
                f"The scheduler at {options.standing_scheduler.address} serves pipelines of {served[0]} stages, and "
                f"pipeline {job.pipeline} was started with {job.world_size} processes, one for each stage. Start as "
                "many."
            )
        self._mesh = replace(self._mesh, counted=served[1])
        if self._groups is None:
            self._groups = ProcessGroups.open(self._mesh, options.run_timeout)
        self._epochs = EpochGroups(
            self._worker, self._make_store, options.run_timeout, self._line.line, among_groups(options.exchange)
        )
        self._words = CommandChannel(self._groups)

    def _placed_row(self, placement: Placement) -> tuple[int, ...]:
        device = self._strategy.root_device
        index = self._job.local_rank if device.index is None else device.index
        order = order_of_stages(placement, roll_call(index, device))
        if order.reason is not None and self._job.rank == 0:
            log.warning(
                f"Pipeline {self._job.pipeline} runs its stages in the default order, not in that of the placement: "
                f"{order.reason}."
            )
        return order.members

    def _make_store(self, name: str, cancelled: Callable[[], bool] = lambda: False) -> SchedulerStore:
        return SchedulerStore(self._line.line.store, name, _CONNECTING, cancelled)

    @property
    def leads(self) -> bool:
        if self._membership is not None:
            members = [member.pipeline for member in self._line.line.epoch.members]
            leads = [i for i in members if i in self._here(members)][:1] == [self._job.pipeline]
            if members and leads != self._leads:
                self._leads = leads
                leader.take_place(self._job.rank, leads)
                if leads and self._others_led:
                    leader.go_on(self._trainer)
                    leader.show_progress(self._trainer, underway=True)
        return self._leads

    @property
    def publisher(self) -> Publisher | None:
        return self if self._membership is not None else None  # else the run is over

    @property
    def mark(self) -> str:
        """See :class:`~lightning_sdpipe.checkpoints.files.Publisher`."""
        return f"{self._turns.state['run']:x}-"

    def publish(self, path: Path) -> None:
        """See :class:`~lightning_sdpipe.checkpoints.files.Publisher`."""
        self._line.line.publish(str(path.absolute()), self._trainer.global_step)

    def published(self, path: Path) -> None:
        """See :class:`~lightning_sdpipe.checkpoints.files.Publisher`."""
        self._line.line.published(str(path.absolute()), self._trainer.global_step)

    @property
    def sampler(self) -> dict[str, int]:
        n = self._mesh.num_pipelines
        return {"num_replicas": n, "rank": self._job.pipeline % n}

    @property
    def evaluation_sampler(self) -> dict[str, int]:
        """Every pipeline evaluates all of the data, since nobody knows beforehand who will be there."""
        return {"num_replicas": 1, "rank": 0}

    # ------------------------------------------------------------ what they do

    def replica(
        self, parts: Assembled, watch: bool, loss_scale: Callable[[], float], progress: TrainingState
    ) -> Replica:
        line = self._line.line
        self._meetings = Barriers(self._worker, line, self._epochs, self._point)
        self._here = self._meetings.present
        self._parts = parts
        return ElasticReplica(
            self._line.client,
            self.groups,
            parts.freezing.buckets,
            parts.buffers,
            parts.freezing.trained,
            self.options.run_timeout,
            watch,
            self.options.exchange,
            loss_scale,
            progress,
            meetings=self._meetings,
            means=FaultTolerantMean(self._epochs, line),
            present=lambda: max(1, len(line.epoch.members)),
        )

    def rendezvous(self, sync: Synchronizer) -> Rendezvous:
        return ElasticRendezvous(sync, self._meetings)

    def dealt_turns(
        self, trainer: Trainer, training: Training, checks: ClockChecks, dealing: Dealing
    ) -> ElasticBatchSource:
        run, client = shared(secrets.randbits(62)), self._line.client
        turns = ElasticBatchSource(trainer, training, client, self.groups, checks, run, dealing)
        turns.words, turns.order, turns.act, turns.between = self._words, self._order, self._act, self._between
        self._line.client.meanwhile = turns.serve
        self._turns, self._training, self._trainer = turns, training, trainer
        return turns

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """The mean over the pipelines that are there, of each value over those that have it."""
        if self.groups.rank == 0:
            met = self._meetings.meet(json.dumps(values).encode())
            values = _means([json.loads(said) for said in met.values])
        shared_values: dict[str, float] = json.loads(
            p2p.broadcast_bytes(json.dumps(values).encode(), 0, self.groups.everybody)
        )
        return shared_values

    def vote(self, decision: bool, all: bool) -> bool:
        votes = [said == b"1" for said in self._meetings.meet(b"1" if decision else b"0").values]
        return super().vote(min(votes) if all else max(votes), all)

    # ----------------------------------------------------------- coming, going

    def set_out(self, trainer: Trainer, checkpoints: Checkpoints, data_seed: int) -> int:
        """Joins the run: with the state of a pipeline that trains, if there is one."""
        if trainer.state.fn != TrainerFn.FITTING:
            return data_seed
        self._checkpoints = checkpoints
        mine = fingerprint(trainer, self.options, self._parts.ownership)
        answer, state = joining.join(self._line.line, mine, self._receive)
        self._epochs.enter(answer.epoch)
        if state is not None:
            self._go_on_from(state, trainer)
        elif answer.checkpoint:
            self._go_on_from_file(answer.checkpoint, trainer)
        if state is None and len(answer.epoch.members) > 1:
            data_seed = self._begin_together(trainer, data_seed)
        if self.leads:
            leader.show_progress(trainer, underway=False)
        self._others_led = not self._leads
        lightning_internals.on_sigterm(trainer, self._note_sigterm)
        if self._mesh.num_stages > 1 and self._words.speaks:
            threading.Thread(target=self._hear_of_leaving, name="sdpipe leaving", daemon=True).start()
        return data_seed

    def _receive(self, what: Receive) -> dict[str, Any]:
        store = self._transfer_store(what.transfer)
        return state_transfer.receive_state(store, self._transfers_last, f"pipeline {what.donor}")

    @property
    def _transfers_last(self) -> timedelta:
        """Of each part of a state, at most."""
        return timedelta(seconds=self._line.line.limit)

    def _go_on_from(self, state: dict[str, Any], trainer: Trainer) -> None:
        """Has Lightning resume from ``state``, whatever checkpoint the run began with."""
        own = state.pop("elastic")
        self._turns.load(own["turns"])
        self._training.first_update = own["updates"]
        leader.adopt(trainer, own["names"])
        lightning_internals.resume_from_state(trainer, state)

    def _go_on_from_file(self, path: str, trainer: Trainer) -> None:
        """Has Lightning resume from the newest checkpoint of the run, since nobody was left."""
        if not Path(path).exists():
            raise ConfigurationError(
                f"All pipelines were lost, and the run goes on from {path} (--resume), which is not there on this "
                "machine. Write checkpoints to a file system that all machines share."
            )
        log.warning("Nobody was left of the run: it goes on from %s.", path)
        lightning_internals.resume_from_file(trainer, path)

    def _begin_together(self, trainer: Trainer, data_seed: int) -> int:
        """The first pipelines begin equal, with the data's seed of the first of them."""
        with self._meetings.at("beginning"):  # not of an epoch: if a pipeline is lost, starts may name different ones
            mine = {"turns": self._turns.state, "seed": data_seed, "names": leader.names(trainer)}
            tensors = [*tensors_of(self._parts.freezing.buckets), *self._parts.buffers]
            says = json.dumps(mine).encode()
            first = json.loads(joining.begin_together(self._meetings, tensors, says, self._of_all_stages))
        self._turns.load(first["turns"])
        leader.adopt(trainer, first["names"])
        seed: int = first["seed"]
        return seed

    def _of_all_stages(self, mine: Any) -> list[Any]:
        said, everybody = json.dumps(mine).encode(), self.groups.everybody
        ranks = [self._mesh.rank(stage, self._job.pipeline) for stage in range(self._mesh.num_stages)]
        return [json.loads(p2p.broadcast_bytes(said, rank, everybody)) for rank in ranks]

    def _order(self) -> Command | None:
        line, leaving = self._line.line, self._leaving
        return turn_order(leaving, line.donations, "" if leaving else line.held_up)

    def _act(self, word: Command) -> None:
        if word.kind is CommandKind.LEAVE:
            self._training.sync.stop()  # others may wait for what is under way
            raise SIGTERMException
        with self._checkpoints.of_this_stage():
            state = state_transfer.snapshot(self._trainer)
        state["elastic"] = {
            "turns": self._turns.state,
            "updates": self._training.updates,
            "names": leader.names(self._trainer),
        }
        self._line.line.snapshot_taken(word.text, self._training.updates)
        state_transfer.send_state(state, self._transfer_store(word.text), self._transfers_last)
        self._words.done()  # nobody comes to the next meeting before all have said so

    def _between(self) -> None:
        _ = self.leads
        self._line.line.has_made(self._trainer.global_step)

    def _transfer_store(self, name: str) -> Store:
        return self._make_store(f"{name}-{self._worker.stage}")

    def _point(self) -> str:
        return f"{self._turns.state['run']}/{loop.batches(self._trainer)}"

    def _note_sigterm(self, signum: int | signal.Signals, _: FrameType) -> None:
        if not self._leaving:
            self._leaving = True
            if self._mesh.num_stages > 1 and not self._words.speaks:
                threading.Thread(target=self._tell_stage_zero, daemon=True).start()

    @property
    def _leaving_key(self) -> str:
        """In the scheduler's store, which only the run's own processes reach; the pipeline's TCPStore has no keys."""
        return f"leaving-{self._job.pipeline}-{self._line.line.incarnation:x}/now"

    def _tell_stage_zero(self) -> None:
        self._line.line.store.put(self._leaving_key, b"1")

    def _hear_of_leaving(self) -> None:
        """On stage 0, in a thread of its own: another stage was told to end."""
        try:
            self._line.line.store.wait([self._leaving_key], _WHOLE_RUN, cancelled=lambda: self._closed)
        except (CancelledError, SchedulerError, WorkerFailedError) as error:
            log.debug("no word of leaving came: %s", error)
        else:
            self._leaving = True

    def close(self) -> None:
        self._closed = True
        if self._membership is not None:
            _ = self.leads
            self._line.depart(finished=True)
            self._epochs.close()
        super().close()


def _means(each: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in each for name in values)
    return {name: _mean([values[name] for values in each if name in values]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return values[0] if min(values) == max(values) else sum(values) / len(values)
