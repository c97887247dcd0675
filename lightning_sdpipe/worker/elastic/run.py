"""A :class:`~lightning_sdpipe.worker.run.TrainingRun` whose pipelines come and go."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_sdpipe.checkpoints.files import Publisher
from lightning_sdpipe.checkpoints.worker import Checkpoints
from lightning_sdpipe.data.same_samples import digests
from lightning_sdpipe.loop import loop
from lightning_sdpipe.loop.dealt import SourceInputs
from lightning_sdpipe.loop.joint import OwnPart
from lightning_sdpipe.pipeline.data import shared
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler import policy_file
from lightning_sdpipe.scheduler.client.client import Callbacks
from lightning_sdpipe.sync.barriers import Barriers, of_all_stages
from lightning_sdpipe.sync.epoch_process_groups import EpochGroups
from lightning_sdpipe.sync.mover_choice import own_host
from lightning_sdpipe.sync.peers import Peers
from lightning_sdpipe.sync.present_averaging import PresentAveraging
from lightning_sdpipe.topology.groups import ProcessGroups, roll_call
from lightning_sdpipe.topology.mesh import OnePipeline
from lightning_sdpipe.topology.placement_file import Placement, check_shape, order_of_stages
from lightning_sdpipe.worker.elastic import joining, leader, refusals
from lightning_sdpipe.worker.elastic.elastic_batches import Duties, ElasticBatchSource, RoundBatchSource
from lightning_sdpipe.worker.elastic.joint_batches import JointRoundSource
from lightning_sdpipe.worker.elastic.leader import CommandChannel, LeaveNotice
from lightning_sdpipe.worker.elastic.scheduler_connection import ElasticConnection, SchedulerStore
from lightning_sdpipe.worker.elastic.shared_evaluation import SharedEvaluations
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.run import TrainingRun
from lightning_sdpipe.worker.training import Training

log = logging.getLogger(__name__)

_CONNECTING = 20.0  # seconds


@dataclass(frozen=True)
class _OpenRun:
    """The parts of a worker while a run is open."""

    store: Callable[..., SchedulerStore]
    """Makes a store of that name; its waits end when a second argument, if any, returns true."""
    commands: CommandChannel
    leaving: LeaveNotice


class ElasticRun(TrainingRun):
    """The run of one worker, as the base class describes it; its options name the job that this process belongs to."""

    membership: ElasticConnection | None

    def __init__(self, options: Options, strategy: DDPStrategy, give_up: Callable[[], None]) -> None:
        assert options.job is not None
        super().__init__(options, strategy, give_up)
        self._job = job = options.job
        self._mesh = OnePipeline.of(job.world_size, job.pipeline, job.pipeline + 1)  # N comes later
        self._lead = leader.Leadership(job.rank, job.pipeline)
        self._open: _OpenRun | None = None
        self._fit: joining.Fit | None = None

    # ------------------------------------------------------------------ places

    @property
    def mesh(self) -> OnePipeline:
        return self._mesh

    def check(self) -> None:
        if self.options.placement is not None:
            check_shape(self.options.placement, self._job.world_size, None)
        refusals.check_options(self.options)
        own_host(self.options.exchange, self._job.pipeline)  # refused if it has no name

    def check_trainer(self, trainer: Trainer) -> None:
        refusals.check_trainer(trainer, self.options)

    def open(self) -> None:
        options, job = self.options, self._job
        assert options.standing_scheduler is not None
        self._lead.say()  # opening the process group has set it otherwise
        if self._groups is None and options.placement is not None:
            self._mesh = replace(self._mesh, ranks=(self._placed_row(options.placement),))
        worker = Worker(*self._mesh.locate(dist.get_rank()))
        policy: PolicyConfig = getattr(options.method, "elastic_policy", options.method.policy)
        if job.policy_file is not None:
            policy_file.offer(job.policy_file, policy)
        self.membership = connection = ElasticConnection(
            options.standing_scheduler,
            worker,
            shared(1 + secrets.randbits(61)),
            options.run_timeout.total_seconds(),
            Callbacks(
                epoch=lambda epoch: self._there.epochs.enter(epoch),
                broke=lambda sequence: self._there.epochs.broke(sequence),
            ),
            self._give_up,
        )
        served = connection.client.serves
        assert served is not None
        refusals.check_served(options, served, options.standing_scheduler.address)
        refusals.check_scheduler(options, policy, registry.from_json(connection.client.policy or ""))
        self._mesh = replace(self._mesh, counted=served[1])
        if self._groups is None:
            self._groups = ProcessGroups.open(self._mesh, options.run_timeout)
        client = connection.client

        def store(name: str, *cancelled: Callable[[], bool]) -> SchedulerStore:
            return SchedulerStore(client, name, _CONNECTING, *cancelled)

        host = own_host(options.exchange, job.pipeline)
        epochs = EpochGroups(worker, store, options.run_timeout, client, host)
        barriers = Barriers(worker, client, epochs, self._point, self.take_lead)
        commands = CommandChannel(self._groups)
        self.peers = Peers(worker, client, epochs, barriers, commands.on_any_stage, self._groups.traffic)
        leaving = LeaveNotice(client, job.pipeline, commands)
        self._open, self._fit = _OpenRun(store, commands, leaving), None
        self.evaluations = SharedEvaluations(job.pipeline, barriers, self._groups)

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

    @property
    def _opened(self) -> _OpenRun:
        assert self._open is not None, "setup_environment opens the run"
        return self._open

    @property
    def _there(self) -> Peers:
        assert self.peers is not None, "setup_environment opens the run"
        return self.peers

    @property
    def leads(self) -> bool:
        return self._lead.held

    def take_lead(self) -> None:
        """Lead from now on if all pipelines before this one have gone, and else do not. Called between two turns, and
        after barriers."""
        members = [member.pipeline for member in self._there.client.epoch.members]
        here = self._there.barriers.present(members)
        if members:
            self._lead.take([pipeline for pipeline in members if pipeline in here])

    @property
    def publisher(self) -> Publisher | None:
        """Object that is asked before a checkpoint takes its place; None outside of a fit."""
        if self._open is None or self._fit is None:
            return None
        return Publisher(self._there.client, self._fit.trainer.global_step, self._fit.source.run)

    @property
    def sampler(self) -> dict[str, int]:
        n = self._mesh.num_pipelines
        return {"num_replicas": n, "rank": self._job.pipeline % n}

    @property
    def evaluation_sampler(self) -> dict[str, int]:
        """Arguments that give every pipeline all of the data, since it is not known beforehand which pipelines will be
        present."""
        return {"num_replicas": 1, "rank": 0}

    # ------------------------------------------------------------ what they do

    def dealt_batches(self, training: Training, checkpoints: Checkpoints, inputs: SourceInputs) -> ElasticBatchSource:
        place, trainer = self._opened, inputs.trainer
        duties = Duties(
            place.commands, place.leaving, self.take_lead, lambda *what: self.fit.give(*what), lambda: self.fit.leave()
        )
        rounds = training.sync
        source: ElasticBatchSource
        if not isinstance(rounds, PresentAveraging):
            source = ElasticBatchSource(inputs, duties)
        elif self.options.batch_by_speed:
            own = OwnPart(trainer, self.groups, training.parts.delays, self.options.division)
            source = JointRoundSource(inputs, duties, rounds, own)
        else:
            source = RoundBatchSource(inputs, duties, rounds)
        self._there.client.meanwhile = source.serve

        self._fit = joining.Fit(trainer, training, source, checkpoints, self.groups, self._there.client, place.store)
        return source

    @property
    def fit(self) -> joining.Fit:
        """The fit of this worker."""
        assert self._fit is not None, "setup makes it for a fit"
        return self._fit

    def share(self, values: dict[str, float]) -> dict[str, float]:
        """Return the mean of each value over those of the present pipelines that have it."""
        return self._there.barriers.agree(self.groups, values, lambda each: _means([*each.values()]))

    def from_leader(self, numbers: list[float]) -> list[float]:
        """Return the numbers of the pipeline that leads, or if none does, of the first one present."""

        def leaders(each: Mapping[int, tuple[bool, list[float]]]) -> list[float]:
            return min(each.values(), key=lambda said: not said[0])[1]

        return self._there.barriers.agree(self.groups, (self.leads, numbers), leaders)

    def vote(self, decision: bool, all: bool) -> bool:
        met = self._there.barriers.meet(b"1" if decision else b"0")
        votes = [said == b"1" for said in met.values]
        return super().vote(min(votes) if all else max(votes), all)

    # ----------------------------------------------------------- coming, going

    def set_out(self, trainer: Trainer, data_seed: int) -> int:
        """Join the run: with the state of a pipeline that trains, if there is one."""
        if trainer.state.fn != TrainerFn.FITTING:
            return data_seed
        place, fit = self._opened, self.fit
        loader = joining.training_loader(trainer)
        mine = joining.fingerprint(trainer, self.options, fit.training.parts.ownership, loader)
        if self.groups.rank == 0:
            fit.samples[:] = digests(loader)
        answer, state = joining.join(self._there.client, mine, fit.receive)
        self._there.epochs.enter(answer.epoch)
        if state is not None:
            fit.go_on_from(state)
        elif answer.checkpoint:
            fit.go_on_from_file(answer.checkpoint)
        together = of_all_stages(self.groups, len(answer.epoch.members) > 1)  # each has an answer of its own
        if state is None and any(together):
            path = answer.checkpoint or trainer.ckpt_path
            data_seed = fit.begin_together(self._there.barriers, data_seed, path)
        self.take_lead()
        self._lead.begin(trainer)
        place.leaving.listen(trainer)
        return data_seed

    def _point(self) -> str:
        return f"{self.fit.source.run}/{loop.batches(self.fit.trainer)}"

    def close(self) -> None:
        connection, place = self.membership, self._open
        if connection is None:
            return
        if place is not None:
            place.leaving.close()
            self.take_lead()
        connection.depart(finished=True)
        if place is not None:
            self._there.epochs.close()
        connection.close()
        self.membership = self._open = self.peers = None


def _means(each: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in each for name in values)
    return {name: _mean([values[name] for values in each if name in values]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return values[0] if min(values) == max(values) else sum(values) / len(values)
