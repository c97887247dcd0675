"""Base of every worker's half of a synchronisation method, as the strategy calls it, and the replica that it is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError, NonFiniteError
from lightning_sdpipe.exchange.buckets import FlatBucket, tensors_of
from lightning_sdpipe.exchange.collectives import average_all, take_over
from lightning_sdpipe.exchange.gradient_rounds import GradientRounds
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.sectioned import OwnSections, SectionedRounds
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.pipeline.gradients import GradientExchange
from lightning_sdpipe.pipeline.shared_parameters import SharedParameters
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.sync.peers import Peers
from lightning_sdpipe.topology.groups import ProcessGroups, Replicas


@dataclass
class SyncStatistics:
    """Statistics of this worker's synchronisation since the start of training.

    ``groups`` counts the updates, ``members`` the workers that took part in each, this one included.
    ``seconds_waiting`` is the time for which this worker waited until the others of its group were there,
    ``seconds_averaging`` the time for which it waited while tensors moved; time hidden behind computation counts in
    neither. ``traffic`` counts the bytes that it sent to other replicas, except those of sync points.
    """

    groups: int = 0
    members: int = 0
    seconds_waiting: float = 0.0
    seconds_averaging: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other replicas."""
        return self.traffic.bytes

    @property
    def mean_group_size(self) -> float:
        return self.members / self.groups if self.groups else 0.0

    def count(self, members: int, seconds_waiting: float = 0.0, seconds_averaging: float = 0.0) -> None:
        """Count one update."""
        self.groups += 1
        self.members += members
        self.seconds_waiting += seconds_waiting
        self.seconds_averaging += seconds_averaging


class TrainingState(Protocol):
    """The state of a worker's training besides its parameters: the state of its optimizer, and its loss scale."""

    def digest(self) -> int:
        """Return a digest of 64 bits, equal where all states are equal; cheaper than :meth:`save`."""

    def save(self) -> bytes:
        """Return the state for :meth:`load` on another replica of the stage."""

    def load(self, saved: bytes) -> None:
        """Take over the state of another replica."""

    def of(self, parameters: Sequence[nn.Parameter]) -> TrainingState:
        """Return the part of this state that belongs to ``parameters``."""


@dataclass(frozen=True)
class HeldPart:
    """The tensors that a worker exchanges with the same replicas: all that it holds, or a section of the chain."""

    parameters: Sequence[FlatBucket]
    buffers: Sequence[Tensor]

    @property
    def exchanged(self) -> list[FlatBucket]:
        """Buckets of ``parameters`` that train, which are sent between two sync points; frozen ones are not."""
        return [bucket for bucket in self.parameters if bucket.trains]


@dataclass(frozen=True)
class ReplicatedPart(HeldPart):
    """A part, and its replicas."""

    among: Replicas


@dataclass(frozen=True)
class Replica:
    """A worker as one of the replicas of its stage: the data that a :class:`Synchronizer` works with."""

    client: SchedulerClient
    groups: ProcessGroups
    parameters: Sequence[FlatBucket]  # like `trained`, may change while no worker takes part
    buffers: Sequence[Tensor]  # that only a full average makes equal, such as BatchNorm statistics
    trained: Sequence[nn.Parameter]  # in the order of their gradients' numbers in the pipeline
    timeout: timedelta  # of every wait
    watch: bool = True  # end the run when gradients of one replica are not finite, rather than average them
    exchange: Exchange = field(default_factory=Exchange)  # how tensors move
    loss_scale: Callable[[], float] = lambda: 1.0  # the current factor of gradients
    progress: TrainingState | None = None  # None where parameters are the whole state
    name_of: Callable[[nn.Parameter], str] = lambda parameter: f"of shape {tuple(parameter.shape)}"  # for messages
    averages: list[Tensor] = field(default_factory=list)  # of the weights over time; made equal with them
    sections: OwnSections | None = None  # of the chain; None where the replicas of the stage hold what it holds
    shared: SharedParameters | None = None  # with other stages, whose copies follow after each exchange; with sections
    peers: Peers | None = None  # the present ones, where replicas come and go

    @property
    def stage(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[0]

    @property
    def pipeline(self) -> int:
        return self.groups.mesh.locate(self.groups.rank)[1]

    @property
    def num_stages(self) -> int:
        return self.groups.mesh.num_stages

    @property
    def among(self) -> Replicas:
        """The stage's replicas, with their process group."""
        return self.groups.replicas()

    def side_channel(self) -> dist.ProcessGroup:
        """Return a second process group of the stage's replicas, on gloo, for threads beside the training. Every worker
        of the run must ask for it at the same point."""
        return self.groups.side_channel(self.timeout)

    def beside(self) -> Replicas:
        """Return the stage's replicas over their :meth:`side_channel`."""
        return self.groups.replicas(self.side_channel())

    def take_over(self, pipeline: int) -> None:
        """Give all replicas, which are together, the parameters of ``pipeline``."""
        take_over(tensors_of(self.parameters), self.among, pipeline)

    @property
    def exchanged(self) -> list[FlatBucket]:
        """Buckets of ``parameters`` that are sent between two sync points, part by part."""
        return [bucket for part in self.divided for bucket in part.exchanged]

    @property
    def device(self) -> torch.device:
        """Device of the stage's tensors."""
        return self.parameters[0].buffer.device if self.parameters else torch.device("cpu")

    @property
    def ranks(self) -> Sequence[int]:
        """Global rank of the stage's replica in each pipeline."""
        return self.groups.mesh.stage_ranks(self.stage)

    @property
    def count(self) -> int:
        """Number of replicas now."""
        if self.peers is not None:
            return self.peers.count
        return len(self.ranks) if self.sections is None else self.groups.mesh.num_pipelines

    @property
    def divided(self) -> list[HeldPart]:
        """Parts in the order in which all workers go through them."""
        if self.sections is None:
            return [HeldPart(self.parameters, self.buffers)]
        return [
            HeldPart([b for b in self.parameters if b.section == number], self.sections.buffers[number])
            for number in self.sections.numbers
        ]

    @property
    def parts(self) -> list[ReplicatedPart]:
        """Parts with their replicas."""
        among = [self.groups.replicas()] if self.sections is None else self.sections.in_order
        pairs = zip(self.divided, among, strict=True)
        return [ReplicatedPart(part.parameters, part.buffers, replicas) for part, replicas in pairs]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Make ``tensors`` the mean over all replicas, which are together; integers (counters) become the largest."""
        if self.peers is not None:
            self.peers.average(tensors)
        else:
            average_all(tensors, self.groups.replicas())

    def average_parameters(self) -> None:
        """Average the parameters in the same way, except frozen ones that are integers."""
        if self.shared is None:
            self.average(tensors_of(averaged(self.parameters)))
            return
        for part in self.parts:
            average_all(tensors_of(averaged(part.parameters)), part.among)
        self.shared.make_equal()

    def average_buffers(self) -> None:
        """Average the buffers in the same way."""
        for part in self.parts:
            refuse_unlike(part.buffers, partial(average_all, replicas=part.among))
            average_all(part.buffers, part.among)
        if self.shared is not None:
            self.shared.make_buffers_equal(self.device)


def averaged(buckets: Sequence[FlatBucket]) -> list[FlatBucket]:
    """Return the ``buckets`` that a full average makes equal: all but frozen integers."""
    return [bucket for bucket in buckets if bucket.trains or torch.is_floating_point(bucket.buffer)]


def refuse_unlike(buffers: Sequence[Tensor], average: Callable[[Sequence[Tensor]], None]) -> None:
    """Raise ConfigurationError unless all replicas have buffers of the same shapes: a forward may assign others.
    ``average`` makes integers the largest among the replicas."""
    if not buffers:
        return
    described = str(buffers)
    mine = crc32(described.encode())
    least_and_most = torch.tensor([-mine, mine], device=buffers[0].device)
    average([least_and_most])
    if least_and_most.tolist() != [-mine, mine]:
        raise ConfigurationError(
            "The buffers of the module do not have the same shapes on all pipelines, so they cannot be averaged. Here "
            f"{described}. Give a buffer a shape in the forward that does not depend on the batch."
        )


class Synchronizer:
    """A worker's half of a synchronisation method. The base class never synchronises, except at a sync point.

    For every update of the parameters the strategy calls :meth:`announce`, when the worker waits for no other stage any
    more, and :meth:`synchronise`, when the optimizer has stepped. A method that averages gradients offers ``gradients``
    to the pipeline, which reports every gradient that the backward completes, and waits for the means before it ends.

    :class:`~lightning_sdpipe.sync.rendezvous.Rendezvous` calls :meth:`start`, :meth:`settle`, :meth:`stop` and what
    makes replicas equal when workers join and leave.
    """

    gradients: GradientExchange | None = None
    """Averages gradients while the backward runs; None if the method leaves them alone."""

    same_gradients: dist.ProcessGroup | None = None
    """Workers that step by the same gradients as this one; None if it steps by its own."""

    rounds: int | None = None
    """Number of rounds of this stage, which checkpoints keep if the form of messages depends on it; else None."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.statistics = SyncStatistics(traffic=replica.groups.traffic)
        self.announced = False
        """Whether this worker has been announced and has not fetched its group yet."""

    @property
    def models_averaged(self) -> float:
        """Number of models, each trained on its own gradients, whose mean this method trains.

        These are all models of the stage when groups are averaged, however small the groups are: averaging in a group
        leaves the mean of all models unchanged, and every update moves it. With unequal weights the number is smaller,
        and may change.
        """
        return 1

    loose = 0
    """Number of this worker's latest updates that no other worker's model has, if the method counts them."""

    by_samples = False
    """Whether :meth:`weigh` is called for each mini-batch before its backward."""

    def weigh(self, samples: float) -> None:
        """Set the weight of the next mini-batch's gradients."""

    def begin(self, update: int) -> None:
        """Begin the turn of ``update``, before anything of it is computed. Do not wait."""

    def begin_without_batch(self, update: int) -> bool:
        """Begin a turn without a batch, in which other pipelines may have one; return whether there is an update to
        make."""
        return False

    def begin_backward(self, update: int, number: int) -> None:
        """Begin backward ``number``, from 1, of ``update``; the user's code may run several. All replicas must run as
        many."""
        raise ConfigurationError(
            f"{type(self).__name__} averages the gradients of one backward in each update, and manual optimization, or "
            "an optimizer that evaluates its closure several times, may run more. Average models instead, as "
            "sync='semi_decentralized' does, or use sync='all_reduce' outside of elastic runs."
        )

    @property
    def takes_several_backwards(self) -> bool:
        """True unless :meth:`begin_backward` refuses several backwards."""
        return self.gradients is None or type(self).begin_backward is not Synchronizer.begin_backward

    @property
    def called(self) -> int | None:
        """Life of the scheduler that has named the members of an exchange for which this worker is ready while it
        trains on; None if there is none. Every stage of its pipeline must then :meth:`take_part` before the same
        turn."""
        return None

    def take_part(self, called: int) -> None:
        """Take part after this turn in the exchange for which this pipeline was :attr:`called`."""

    def announce(self, iteration: int) -> None:
        """Announce that nothing but this worker's own computing can hold up update ``iteration`` any more. Do not
        wait."""

    @property
    def equal_at_start(self) -> Replicas | None:
        """Replicas that must have the same parameters when they :meth:`start` together; None if equality is not
        needed."""
        return None

    @property
    def shares_next(self) -> bool:
        """True if :meth:`synchronise` will give this worker's model to others."""
        return False

    def synchronise(self) -> None:
        """Synchronise after the optimizer's step. Return when the next iteration may start."""
        self.statistics.count(members=1)

    def start(self) -> None:
        """Start taking part; the others will, too."""

    def settle(self) -> None:
        """Finish what others still need from this worker, which is about to leave the scheduler's groups."""

    def stop(self) -> None:
        """Stop taking part, while others may train on."""

    def resynchronise(self) -> None:
        """Prepare all workers, which are together, to take part again without a sync point in between: methods that
        go on from a common model make parameters equal."""
        if self.equal_at_start is not None:
            self.make_parameters_equal()

    def make_parameters_equal(self) -> None:
        """Give all replicas, which are together, the same parameters."""
        self.replica.average_parameters()

    def parameter_states(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return state for a checkpoint besides the optimizer's, by parameter and in its shape. Called at a sync
        point."""
        return {}

    def load_parameter_states(self, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        """Load the state of :meth:`parameter_states`, perhaps of another mesh; called before training."""

    def handover(self) -> dict[str, Any]:
        """Return state that a newcomer needs besides the parameters and :meth:`parameter_states`: copies of tensors,
        on the CPU, and numbers. Called between two turns."""
        return {}

    def take(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another pipeline's :meth:`handover`; called before training."""

    def average_buffers(self) -> None:
        """Make buffers and averages of the weights equal, as :meth:`make_parameters_equal` does parameters."""
        if self.replica.sections is None:
            refuse_unlike(self.replica.buffers, self.replica.average)
            self.replica.average([*self.replica.buffers, *self.replica.averages])
        else:
            self.replica.average_buffers()


Buckets = TypeVar("Buckets", bound=GradientRounds | SectionedRounds)


class GradientSynchronizer(Synchronizer, Generic[Buckets]):
    """Base of the halves that average gradients while the backward runs, in ``buckets``."""

    buckets: Buckets

    def weigh(self, samples: float) -> None:
        self.buckets.weight = samples

    @property
    def early(self) -> Collection[int]:
        return self.buckets.early

    def gradient_ready(self, number: int, gradient: Tensor) -> None:
        self.buckets.gradient_ready(number, gradient)

    def not_finite(self, pipelines: Sequence[int], update: int) -> NonFiniteError:
        """Return the error for gradients of ``pipelines``."""
        where = f"pipelines {[*pipelines]}, stage {self.replica.stage}"
        return NonFiniteError(f"the gradients of {where}, for update {update}, counted from 0 since training started")


@runtime_checkable
class SyncMethod(Protocol):
    """A value of ``SDPipeStrategy(sync=...)``: a method, which builds each worker's half of it."""

    @property
    def policy(self) -> PolicyConfig:
        """Policy by which the scheduler decides for the method."""

    def build(self, replica: Replica) -> Synchronizer:
        """Build this worker's half. Every worker of the run must call it at the same point."""
