"""Worker's half of DiLoCo: rounds of all replicas, by fragments, whose means may travel while training goes on.

A sync point, such as a validation, is an early round of all fragments, so that replicas are equal there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sdpipe.exchange.background import Background, Job, turn_into_changes
from lightning_sdpipe.exchange.buckets import as_real, tensors_of
from lightning_sdpipe.exchange.collectives import average_all, take_over
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.moving import copied, finish, pieces_of
from lightning_sdpipe.exchange.outer_model import Fragments, Nesterov, OuterModel
from lightning_sdpipe.p2p import waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.sync.mover_choice import hosts_of
from lightning_sdpipe.sync.synchronizer import Replica, Synchronizer, averaged
from lightning_sdpipe.topology.groups import Replicas

MOMENTUM = "outer_momentum"


class _Fragment:
    """A part of a stage's model, and its round under way."""

    def __init__(self, common: OuterModel, mover: EncodedMean, keeps: bool) -> None:
        self.common = common
        self.mover = mover
        self.keeps = keeps  # whether updates that were made meanwhile are kept
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.job: Job | None = None
        self.since = 0  # number of updates since its last round began

    def take_over(self) -> float:
        """Wait for the round that is under way, and take over the base; return the seconds waited."""
        if self.job is None:
            return 0.0
        job, self.job = self.job, None
        waited = job.wait()
        if self.keeps:
            for tensor, change in zip(self.tensors, self.copies, strict=True):
                tensor.add_(change)
        else:
            for number, piece in enumerate(pieces_of(self.tensors)):
                self.common.take_over(piece, number)
            if not self.common.mix:
                self.since = 0  # training since then is lost
        return waited

    def exchange(self, group: Group) -> None:
        """Exchange copies of the fragment, beside training."""
        if self.keeps:
            turn_into_changes(self.mover, self.copies, group)
        else:
            finish(self.mover.start(self.copies, group))


class OuterAveraging(Synchronizer):
    """Averages in rounds over all replicas. Memory: twice the model, once without momentum; and a fragment while its
    mean travels.

    Args:
        replica: this worker.
        nesterov: options of the outer optimizer.
        schedule: schedule of the rounds.
        keeps: whether updates that were made while a mean travelled are kept.
    """

    def __init__(self, replica: Replica, nesterov: Nesterov, schedule: Fragments, keeps: bool) -> None:
        super().__init__(replica)
        self._schedule, self._is_plain = schedule, nesterov == Nesterov(1.0, 0.0)
        self._is_beside = schedule.delay > 0 or replica.exchange.hierarchy == "hosts"
        self._replicas, hosts = replica.beside() if self._is_beside else replica.groups.replicas(), hosts_of(replica)
        commons = [self.codec(replica, nesterov, schedule.mix) for _ in range(schedule.fragments)]
        self._fragments = [_Fragment(common, EncodedMean(self._replicas, common, hosts), keeps) for common in commons]
        self._background = Background("averaging what models have moved by", 2 * replica.timeout.total_seconds())
        self._update = 0
        self._base = 0
        """A number that is larger on a worker that was in later rounds."""
        self._laid_out: list[Sequence[nn.Parameter]] = []  # parameters of each bucket whose momentum the fragments have
        self._kept: dict[nn.Parameter, Tensor] = {}  # momenta that the fragments lack: of frozen layers, or loaded

    @classmethod
    def codec(cls, replica: Replica, nesterov: Nesterov, mix: float) -> OuterModel:
        """Return the codec of a fragment."""
        return OuterModel(replica.exchange.payload, replica.pipeline, nesterov, mix)

    @property
    def models_averaged(self) -> float:
        """Number of models: all where a round is the plain mean, as that of ``LocalSGD`` is."""
        return self.replica.count if self._is_plain else 1

    def announce(self, iteration: int) -> None:
        """Tell the scheduler that this worker is ready if a round begins after this update."""
        self._update = iteration + 1
        if self._schedule.begin(self._update):
            self.replica.client.ready(iteration)
            self.announced = True

    @property
    def equal_at_start(self) -> Replicas | None:
        return self.replica.groups.replicas()

    @property
    def shares_next(self) -> bool:
        return self.announced

    def synchronise(self) -> None:
        """Take over the bases that are due, and begin the rounds that are due."""
        start = time.perf_counter()
        for fragment in self._fragments:
            fragment.since += 1
        ending = self._schedule.end(self._update) if self._schedule.delay else []
        waited = sum(self._fragments[number].take_over() for number in ending)
        members = 1
        if self.announced:
            asked = time.perf_counter()
            group = self.replica.client.group()
            self.announced = False
            waited += time.perf_counter() - asked
            members = len(group.members)
            self._base = group.sequence + 1
            for number in self._schedule.begin(self._update):
                waited += self._begin(self._fragments[number], group)
        self.statistics.count(members, waited, time.perf_counter() - start - waited)

    def start(self) -> None:
        """Set the common model, since all replicas are equal."""
        laid_out = [bucket.parameters for bucket in self.replica.exchanged]
        if _ids(laid_out) != _ids(self._laid_out):  # layers were frozen or unfrozen: the layout changed
            self._kept = self._momenta()
        trained = tensors_of(self.replica.exchanged)
        parts = [torch.tensor_split(tensor, len(self._fragments)) for tensor in trained]
        for number, fragment in enumerate(self._fragments):
            fragment.tensors = [part[number] for part in parts]
            fragment.common.begin(fragment.tensors)
            fragment.since = 0
        self._laid_out = laid_out
        if self._kept:
            self._lay_out_momenta()

    def stop(self) -> None:
        for fragment in self._fragments:
            fragment.take_over()

    def make_parameters_equal(self) -> None:
        """Run an early round of all fragments, unless no pipeline has trained since the last one."""
        size = len(self.replica.ranks)
        counts = torch.tensor([0] * size + [fragment.since for fragment in self._fragments], device=self.replica.device)
        counts[self.replica.pipeline] = self._base
        with waiting_for(self.replica.groups.stage, "averaging what models have moved by"):
            dist.all_reduce(counts, group=self.replica.groups.stage)
        bases, updates = counts[:size].tolist(), counts[size:].tolist()
        furthest, replicas, weights = bases.index(max(bases)), self.replica.groups.replicas(), self._weights()
        for fragment, since in zip(self._fragments, updates, strict=True):
            pieces = list(pieces_of(fragment.tensors))
            moved = [piece - outer.base for piece, outer in zip(pieces, fragment.common.outer, strict=True)]
            average_all(moved, replicas, weights)
            if len(set(bases)) > 1:  # a pipeline that was out of data has missed rounds
                take_over(fragment.common.state(), replicas, furthest)
            for piece, outer, change in zip(pieces, fragment.common.outer, moved, strict=True):
                if since:
                    outer.step(change)
                piece.copy_(outer.base)
        self._base = max(bases)
        self._average_frozen()

    def _weights(self) -> list[float] | None:
        """Return the weight of each pipeline in a round of all, which are together; None if they weigh the same."""
        return None

    def _average_frozen(self) -> None:
        frozen = [bucket for bucket in averaged(self.replica.parameters) if not bucket.trains]
        self.replica.average(tensors_of(frozen))

    def parameter_states(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return the outer momentum."""
        return {parameter: {MOMENTUM: momentum} for parameter, momentum in self._momenta().items()}

    def load_parameter_states(self, states: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> None:
        self._laid_out = []
        self._kept = {parameter: state[MOMENTUM] for parameter, state in states.items() if MOMENTUM in state}

    def _momenta(self) -> dict[nn.Parameter, Tensor]:
        """Return the momentum of each parameter that has one, frozen ones too."""
        zeros = [[torch.zeros_like(p).view(-1) for p in parameters] for parameters in self._laid_out]
        flats = [as_real(torch.cat(each)) for each in zeros]
        for number, fragment in enumerate(self._fragments):
            parts = [torch.tensor_split(flat, len(self._fragments))[number] for flat in flats]
            for piece, momentum in zip(pieces_of(parts), fragment.common.momentum, strict=False):
                piece.copy_(momentum)
        found = dict(self._kept)
        for parameters, flat in zip(self._laid_out, flats, strict=True):
            like_parameters = flat.view(parameters[0].dtype)  # complex ones lie in buckets as real numbers
            sizes = [p.numel() for p in parameters]
            for p, part in zip(parameters, like_parameters.split_with_sizes(sizes), strict=True):
                if part.any():
                    found[p] = part.view(p.shape)
        return found

    def _lay_out_momenta(self) -> None:
        """Give fragments the momenta of their parameters; those of frozen parameters are kept aside."""
        kept = self._kept
        flats = [
            as_real(torch.cat([kept.pop(p, torch.zeros_like(p)).to(p).reshape(-1) for p in parameters]))
            for parameters in self._laid_out
        ]
        for number, fragment in enumerate(self._fragments):
            parts = [torch.tensor_split(flat, len(self._fragments))[number] for flat in flats]
            fragment.common.load_momentum(parts)

    def _begin(self, fragment: _Fragment, group: Group) -> float:
        """Begin or run one round; return the seconds waited for the others."""
        fragment.since = 0
        if not self._schedule.delay:
            return finish(fragment.mover.start(fragment.tensors, group))
        fragment.copies = copied(fragment.tensors, fragment.copies)
        fragment.job = self._background.do(lambda: fragment.exchange(group))
        return 0.0


def _ids(laid_out: Sequence[Sequence[nn.Parameter]]) -> list[list[int]]:
    return [[id(parameter) for parameter in parameters] for parameters in laid_out]
