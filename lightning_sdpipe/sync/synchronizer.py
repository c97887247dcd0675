"""What every worker's half of a synchronisation method has in common, and what the strategy calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_sdpipe.exchange.buckets import FlatBucket, tensors_of
from lightning_sdpipe.exchange.collectives import FullMean, TakeOver
from lightning_sdpipe.exchange.gradients import GradientExchange
from lightning_sdpipe.exchange.moving import Mover, finish
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.present_rounds import PresentRounds, Round
from lightning_sdpipe.exchange.sectioned import OwnSections
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.topology.groups import ProcessGroups, Replicas, Traffic


@dataclass
class SyncStatistics:
    """What this worker's synchronisation amounted to since the start of training.

    ``groups`` counts the updates, ``members`` the workers that took part in each, this one included.
    ``seconds_waiting`` is what this worker stood still until the others of its group were there,
    ``seconds_averaging`` what it stood still while tensors moved; what is hidden behind computation counts in neither.
    ``traffic`` counts the bytes that it sent to other replicas, but for what pauses and parameter servers move.
    """

    groups: int = 0
    members: int = 0
    seconds_waiting: float = 0.0
    seconds_averaging: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def bytes_sent(self) -> int:
        """To other replicas."""
        return self.traffic.bytes

    @property
    def mean_group_size(self) -> float:
        return self.members / self.groups if self.groups else 0.0

    def count(self, members: int, seconds_waiting: float = 0.0, seconds_averaging: float = 0.0) -> None:
        """Counts one update."""
        self.groups += 1
        self.members += members
        self.seconds_waiting += seconds_waiting
        self.seconds_averaging += seconds_averaging


class TrainingState(Protocol):
    """What a worker's training has come to besides its parameters: the state of its optimizer, and its loss scale."""

    def digest(self) -> int:
        """Of 64 bits, the same where everything is; cheaper than :meth:`save`."""

    def save(self) -> bytes:
        """For :meth:`load` of another replica of the stage."""

    def load(self, saved: bytes) -> None:
        """Takes over another one's."""

    def of(self, parameters: Sequence[nn.Parameter]) -> TrainingState:
        """The same of these parameters alone."""


@dataclass(frozen=True)
class ReplicatedPart:
    """What a worker exchanges with the same others: all that it holds, or a section of the chain."""

    among: Replicas
    parameters: Sequence[FlatBucket]
    buffers: Sequence[Tensor]

    @property
    def exchanged(self) -> list[FlatBucket]:
        """Those of ``parameters`` that train, which are sent between two pauses; what is frozen is not."""
        return [bucket for bucket in self.parameters if bucket.trains]


@dataclass(frozen=True)
class Replica:
    """A worker as one of the replicas of its stage: what a :class:`Synchronizer` works with."""

    client: SchedulerClient
    groups: ProcessGroups
    parameters: Sequence[FlatBucket]  # like `trained`, it may change while no worker takes part
    buffers: Sequence[Tensor]  # that only a full average makes equal, such as BatchNorm statistics
    trained: Sequence[nn.Parameter]  # in the order by which the pipeline numbers their gradients
    timeout: timedelta  # of every wait
    watch: bool = True  # end the run when gradients of one replica are not finite, rather than average them
    exchange: Exchange = field(default_factory=Exchange)  # how tensors move
    loss_scale: Callable[[], float] = lambda: 1.0  # what gradients are multiplied by at the moment
    progress: TrainingState | None = None  # None where there is nothing but parameters
    name_of: Callable[[nn.Parameter], str] = lambda parameter: f"of shape {tuple(parameter.shape)}"  # for messages
    averages: list[Tensor] = field(default_factory=list)  # of the weights over time, made equal where those are
    sections: OwnSections | None = None  # of the chain; None where the replicas of the stage hold what it holds
    shared: SharedParameters | None = None  # with other stages, whose copies follow after each exchange; with sections

    @property
    def stage(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[0]

    @property
    def pipeline(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[1]

    @property
    def exchanged(self) -> list[FlatBucket]:
        """Those of ``parameters`` that are sent between two pauses, part by part."""
        if self.sections is None:
            return [bucket for bucket in self.parameters if bucket.trains]
        return [bucket for part in self.parts for bucket in part.exchanged]

    @property
    def device(self) -> torch.device:
        """Of the stage's tensors."""
        return self.parameters[0].buffer.device if self.parameters else torch.device("cpu")

    @property
    def ranks(self) -> Sequence[int]:
        """Global rank of the stage's replica in each pipeline."""
        return self.groups.mesh.stage_ranks(self.stage)

    @property
    def count(self) -> int:
        """How many replicas there are now."""
        return len(self.ranks) if self.sections is None else self.groups.mesh.num_pipelines

    @property
    def parts(self) -> list[ReplicatedPart]:
        """What is exchanged with the same others, in the order in which all workers go through them."""
        if self.sections is None:
            return [ReplicatedPart(self.groups.replicas(), self.parameters, self.buffers)]
        return [
            ReplicatedPart(
                among, [b for b in self.parameters if b.section == number], self.sections.buffers.get(number, ())
            )
            for number, among in sorted(self.sections.replicas.items())
        ]

    def rounds(self) -> RoundsOfPresent | None:
        """What averages gradients among the replicas that are there, where these come and go."""
        return None

    def mover(self) -> Mover | None:
        """What averages models in groups, where that is not for the exchange to say."""
        return None

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Makes ``tensors`` the mean over all replicas, which are together; of integers (counters) the largest."""
        finish(FullMean(self.groups.replicas()).start(tensors, self.everybody()))

    def average_parameters(self) -> None:
        """The same of parameters, but for frozen ones that are integers."""
        if self.shared is None:
            self.average(tensors_of(_averaged(self.parameters)))
            return
        for part in self.parts:
            finish(FullMean(part.among).start(tensors_of(_averaged(part.parameters)), self.everybody()))
        self.shared.make_equal()

    def average_buffers(self) -> None:
        """The same of buffers."""
        for part in self.parts:
            finish(FullMean(part.among).start(part.buffers, self.everybody()))
        if self.shared is not None:
            self.shared.make_buffers_equal(self.device)

    def everybody(self, weights: Sequence[float] | None = None, sequence: int = 0) -> Group:
        """All replicas of the stage as a group, by equal weights if none are given."""
        size = self.count
        members = tuple(Worker(self.stage, pipeline) for pipeline in range(size))
        return Group(members, tuple(weights or [1 / size] * size), sequence, "everybody")


def _averaged(buckets: Sequence[FlatBucket]) -> list[FlatBucket]:
    return [bucket for bucket in buckets if bucket.trains or torch.is_floating_point(bucket.buffer)]


class RoundsOfPresent(Protocol):
    """Rounds of gradients among replicas that come and go."""

    @property
    def rounds(self) -> PresentRounds:
        """Takes the gradients of this worker."""

    @property
    def on_any_stage(self) -> Callable[[bool], bool]:
        """Is it so on any stage of this pipeline? Every stage asks at the same point."""

    def arrange(self, parameters: Sequence[nn.Parameter], cap: int, watch: bool) -> None:
        """Gradients are those of ``parameters`` from now on."""

    def begin(self, update: int, weight: float) -> None:
        """This worker takes part in the round of ``update``. Does not wait."""

    def finish(self) -> tuple[Round, float]:
        """Waits for the outcome; the seconds until the members were known."""

    def check_equal(self, digest: int) -> None:
        """All are together: ends the run if their digests differ."""


class Synchronizer:
    """A worker's half of a synchronisation method. This one never synchronises, except at a pause.

    For every update of the parameters the strategy calls :meth:`announce`, when it waits for no other stage any more,
    and :meth:`synchronise`, when the optimizer has stepped. A method that averages gradients offers ``gradients`` to
    the pipeline, which tells it of every gradient that the backward completes, and waits for the means before it ends.

    What :class:`~lightning_sdpipe.sync.rendezvous.Rendezvous` calls when a worker joins and leaves are the last five.
    """

    gradients: GradientExchange | None = None
    """Averages gradients while the backward runs; None if the method leaves them alone."""

    rounds: int | None = None
    """Of this stage; what messages are like depends on it, so that a checkpoint has it. None if it does not."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.statistics = SyncStatistics(traffic=replica.groups.traffic)
        self.announced = False
        """Has this worker been announced and not fetched its group yet?"""

    @property
    def models_averaged(self) -> float:
        """The mean of how many models, each trained on gradients of its own, is what this method trains.

        All of the stage's when groups are averaged, however small they are: averaging in a group leaves the mean of all
        where it is, and every update moves it. With unequal weights they are fewer, and it may change.
        """
        return 1

    by_samples = False
    """Is :meth:`weigh` to be told of each mini-batch before its backward?"""

    def weigh(self, samples: float) -> None:
        """So much the gradients of the next mini-batch count."""

    def begin(self, update: int) -> None:
        """The turn of ``update`` begins, before anything of it is computed. Does not wait."""

    def begin_without_batch(self, update: int) -> bool:
        """As :meth:`begin`, in a turn without a batch, in which others may have some: is there an update to make?"""
        return False

    def announce(self, iteration: int) -> None:
        """Nothing but this worker's own computing can hold up update ``iteration`` any more. Does not wait."""

    @property
    def equal_at_start(self) -> Replicas | None:
        """Those replicas that must have the same parameters when they :meth:`start` together; None if it is no
        matter."""
        return None

    @property
    def shares_next(self) -> bool:
        """Will :meth:`synchronise` give this worker's model to others?"""
        return False

    def synchronise(self) -> None:
        """The optimizer has stepped. Returns when the next iteration may start."""
        self.statistics.count(members=1)

    def start(self) -> None:
        """This worker takes part from now on; the others will, too."""

    def stop(self) -> None:
        """This worker stops taking part, while others may train on."""

    def resynchronise(self) -> None:
        """What all workers, which are together, do before they take part again without a pause in between."""

    def make_parameters_equal(self) -> None:
        """All replicas, which are together, get the same parameters."""
        self.replica.average_parameters()

    def parameter_states(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What belongs into a checkpoint beside the optimizer's state, by parameter and in its shape. Called at a
        pause."""
        return {}

    def load_parameter_states(self, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """What :meth:`parameter_states` gave, perhaps on another mesh; called before training."""

    def _average(self, buckets: Sequence[FlatBucket]) -> None:
        self.replica.average(tensors_of(buckets))

    def average_buffers(self) -> None:
        """As :meth:`make_parameters_equal`, of what is no parameter."""
        if self.replica.sections is None:
            self.replica.average([*self.replica.buffers, *self.replica.averages])
        else:
            self.replica.average_buffers()

    def _take_over(self, pipeline: int) -> None:
        """All get the parameters of that pipeline's replica."""
        group = self.replica.everybody([float(number == pipeline) for number in range(len(self.replica.ranks))])
        finish(TakeOver(self.replica.groups.replicas()).start(tensors_of(self.replica.parameters), group))


@runtime_checkable
class SyncMethod(Protocol):
    """What ``SDPipeStrategy(sync=...)`` takes: the values of a method, which build each worker's half of it."""

    @property
    def policy(self) -> PolicyConfig:
        """What the scheduler decides for it."""

    def build(self, replica: Replica) -> Synchronizer:
        """This worker's half. Every worker of the run must call it at the same point."""
