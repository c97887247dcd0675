"""PHD-PSGD in one process: what the models must be, given what a scheduler has decided. It shares no code with the
workers' half: it knows groups, weights and orders from the log, and the optimizer's rule from its definition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_sdpipe.policies import Group, Joined, Left, Ready
from lightning_sdpipe.scheduler.log.event_log import read_log

Flat = Tensor  # all parameters of a stage


@dataclass(frozen=True)
class Job:
    """What was trained. ``rows[i]`` are the mini-batches of pipeline i; ``uneven``: everybody's last one comes at the
    end, after all have come together. ``accumulate`` of them make an update."""

    stages: Sequence[Sequence[str]]  # the names of each stage's parameters
    groups: Sequence[Sequence[int]]
    rows: Sequence[int]
    loss: Callable[[nn.Module, int, int], Tensor]  # of a pipeline's mini-batch of that number
    lr: float
    momentum: float
    clip: float | None = None
    uneven: bool = False
    asynchronous: bool = False
    accumulate: int = 1

    def number(self, pipeline: int, turn: int) -> int | None:
        """Which mini-batch ``pipeline`` trains in that turn of the loop."""
        last, rows = max(self.rows) - 1, self.rows[pipeline]
        if not self.uneven:
            return turn
        if turn == last:
            return rows - 1
        return turn if turn < rows - 1 else None

    @property
    def updates(self) -> int:
        return max(self.rows) // self.accumulate

    def following(self, pipeline: int, update: int) -> int | None:
        """The next update that it takes part in."""
        later = range(update + 1, self.updates)
        return next((u for u in later if self.number(pipeline, self.accumulate * u) is not None), None)


@dataclass
class _Worker:
    model: Flat  # where the step begins
    published: Flat
    momentum: Flat
    begun: dict[int, Flat] = field(default_factory=dict)  # by the update that begins there
    stepped: bool = False  # does what is published contain it?
    waits: int | None = None
    next: int | None = 0
    joins: int = 0
    updates: int = 0


class Emulation:
    """Plays the log of ``path`` for ``module``."""

    def __init__(self, module: nn.Module, job: Job, path: Path) -> None:
        self._module, self._job = module, job
        self._values = {name: p.detach().clone() for name, p in module.named_parameters()}
        size = len(job.rows)
        self.workers = [[self._worker(names) for _ in range(size)] for names in job.stages]
        self._of = {pipeline: group for group in job.groups for pipeline in group}
        (record,) = read_log(path)
        self.groups: list[Group] = []
        todo: list[list[object]] = [[] for _ in job.stages]
        for entry in record.entries:
            if isinstance(entry.event, Ready | Joined | Left):
                todo[entry.event.worker.stage].append(entry.event)
            for group in entry.decisions:
                self.groups.append(group)
                todo[group.stage].append(group)
        self._gradients: dict[tuple[int, int], list[Flat]] = {}
        self._away: dict[int, set[int]] = defaultdict(set)
        left = sum(map(len, todo))
        while left:
            for stage, events in enumerate(todo):
                while events and self._plays(stage, events[0]):
                    events.pop(0)
            now = sum(map(len, todo))
            assert now < left, [events[:2] for events in todo]
            left = now

    def outcome(self) -> dict[str, Tensor]:
        """The mean of the groups' models."""
        found: dict[str, Tensor] = {}
        for names, workers in zip(self._job.stages, self.workers, strict=True):
            mean = sum(workers[group[0]].model for group in self._job.groups) / len(self._job.groups)
            shapes = [self._values[name].shape for name in names]
            parts = torch.split(mean, [shape.numel() for shape in shapes])  # type: ignore[arg-type]
            found |= {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return found

    def _worker(self, names: Sequence[str]) -> _Worker:
        flat = torch.cat([torch.zeros(0), *(self._values[name].flatten() for name in names)])
        return _Worker(flat, flat.clone(), torch.zeros_like(flat))

    def _plays(self, stage: int, event: object) -> bool:
        match event:
            case Ready(worker, iteration):
                self.workers[stage][worker.pipeline].waits = iteration
            case Joined(worker):
                own = self.workers[stage][worker.pipeline]
                own.joins += 1
                own.published = own.model.clone()
                if own.next is not None:
                    own.begun[own.next] = own.model
            case Left(worker):
                self._away[stage].add(worker.pipeline)
                own = self.workers[stage][worker.pipeline]
                own.model = own.published.clone()
                if len(self._away[stage]) == len(self._job.rows):
                    self._away[stage].clear()
                    self._catch_up(stage)
            case Group():
                return self._meets(stage, event)
        return True

    def _catch_up(self, stage: int) -> None:
        workers = self.workers[stage]
        for group in self._job.groups:
            furthest = max(group, key=lambda i: workers[i].updates)
            for i in group:
                workers[i].model = workers[furthest].model.clone()
                workers[i].momentum = workers[furthest].momentum
                workers[i].updates = 0

    def _meets(self, stage: int, group: Group) -> bool:
        workers = self.workers[stage]
        passive = {worker.pipeline for worker in group.passive}
        standing = {worker.pipeline for worker in group.standing}
        members = [worker.pipeline for worker in group.members]
        stepping = [i for i in members if i not in passive or i in standing]
        if not all(self._may_step(i, workers[i].waits) for i in stepping if not workers[i].stepped):
            return False
        for i in stepping:
            if not workers[i].stepped:
                self._step(stage, i)
        mean = sum(w * workers[i].published for w, i in zip(group.weights, members, strict=True))
        alone = len({tuple(self._of[i]) for i in members}) == 1
        for i in members:
            own = workers[i]
            if not alone:
                own.published = mean.clone()  # type: ignore[union-attr]
            if i not in passive:
                assert own.waits is not None
                own.next = self._job.following(i, own.waits)
                own.model, own.stepped, own.waits = own.published.clone(), False, None
                if own.next is not None:
                    own.begun[own.next] = own.model
        return True

    def _mates(self, pipeline: int, update: int) -> list[int]:
        return [i for i in self._of[pipeline] if self._job.number(i, self._job.accumulate * update) is not None]

    def _may_step(self, pipeline: int, update: int | None) -> bool:
        """Is it known in all stages where the members of its group begin?"""
        if update is None:
            return False
        joins = 2 if self._job.uneven and update == self._job.updates - 1 else 1
        return all(
            update in stage[i].begun and stage[i].joins >= joins
            for i in self._mates(pipeline, update)
            for stage in self.workers
        )

    def _step(self, stage: int, pipeline: int) -> None:
        job, own = self._job, self.workers[stage][pipeline]
        update = own.waits
        assert update is not None
        mates = self._mates(pipeline, update)
        by_stage = [sum(parts) / len(mates) for parts in zip(*(self._gradient(i, update) for i in mates), strict=True)]
        gradient = by_stage[stage]
        if job.clip is not None:
            norm = torch.cat(by_stage).norm()  # type: ignore[arg-type]
            gradient = gradient * min(1.0, float(job.clip / (norm + 1e-6)))
        own.momentum = job.momentum * own.momentum + gradient
        own.published = own.published - job.lr * own.momentum
        own.stepped, own.updates = True, own.updates + 1

    def _gradient(self, pipeline: int, update: int) -> list[Flat]:
        """Of all stages, on the models on which they began that update."""
        if (pipeline, update) not in self._gradients:
            parameters = dict(self._module.named_parameters())
            for names, workers in zip(self._job.stages, self.workers, strict=True):
                start, offset = workers[pipeline].begun[update], 0
                for name in names:
                    p = parameters[name]
                    p.data.copy_(start[offset : offset + p.numel()].view(p.shape))
                    offset += p.numel()
            self._module.zero_grad()
            for turn in range(self._job.accumulate * update, self._job.accumulate * (update + 1)):
                number = self._job.number(pipeline, turn)
                assert number is not None
                (self._job.loss(self._module, pipeline, number) / self._job.accumulate).backward()
            self._gradients[pipeline, update] = [
                torch.cat([torch.zeros(0), *(parameters[n].grad.flatten() for n in names)])  # type: ignore[union-attr]
                for names in self._job.stages
            ]
        return self._gradients[pipeline, update]
