"""Convergence of more pipelines than there are cores for: one process trains all replicas in turn, along the groups
that the method's real policy decides in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import cycle
from typing import Any

import hydra
import lightning as L
import torch
from torch.optim import Optimizer

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.optim import VarianceCorrection
from lightning_sdpipe.pipeline.stage_runner import logging_through
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Ready
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.simulate import Work, jittered, simulate
from lightning_sdpipe.sync import AllReduce
from recipes.suites import trainings
from recipes.suites.cases import RealCase
from recipes.suites.convergence.snapshots import mean_state, validate

JITTER = 0.05
"""Share by which the length of a mini-batch varies in virtual time."""

_Updates = Iterator[tuple[float, int]]
"""Virtual seconds, and mini-batches that all pipelines have trained."""


class _Replica:
    """A pipeline of one stage."""

    def __init__(self, module: L.LightningModule, corrected: float) -> None:
        self.module = module
        configured: Any = module.configure_optimizers()
        self._schedule = None
        if isinstance(configured, Mapping):
            self._schedule = configured["lr_scheduler"]["scheduler"]
            configured = configured["optimizer"]
        assert isinstance(configured, Optimizer)
        self._optimizer = VarianceCorrection(configured, corrected) if corrected > 1 else configured

    def backward(self, batch: Any) -> None:
        """Gradients of ``batch``."""
        self.module.train()
        self._optimizer.zero_grad()
        with logging_through(self.module, lambda *_, **__: None):
            self.module.training_step(batch, 0).backward()  # type: ignore[union-attr]

    def step(self) -> None:
        """One update, and one of the learning rate."""
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def parameters(self) -> list[torch.Tensor]:
        return list(self.module.parameters())


def learning_curve(case: RealCase, metric: str, points: int) -> list[list[float]]:
    """The learning curve: virtual seconds, samples seen by all pipelines, and the metric of their mean.

    Args:
        case: of one stage, under ``AllReduce`` or a policy whose groups wait for all their members.
        metric: that ``validation_step`` logs.
        points: of the curve.

    Raises:
        ConfigurationError: more stages.
    """
    if case.num_stages != 1:
        raise ConfigurationError(f"suite.one_process trains pipelines of one stage, not of {case.num_stages}.")
    module, loader = trainings.real_training(case)
    assert case.workload.specification is not None
    data = hydra.utils.instantiate(case.workload.specification["data"])
    method = case.seeded(case.method)
    averages_models = not isinstance(method, AllReduce)
    corrected = case.num_pipelines if case.variance_correction and averages_models else 1.0
    replicas = [_Replica(deepcopy(module), corrected) for _ in range(case.num_pipelines)]
    batches = cycle(loader)
    updates = _along_groups(replicas, method, case, batches) if averages_models else _in_step(replicas, case, batches)
    data.prepare_data()
    data.setup("fit")
    total = case.iterations * case.num_pipelines
    due = [total * (index + 1) // points for index in range(points)]
    found = []
    for seconds, trained in updates:
        if trained >= due[0]:
            due = [moment for moment in due if moment > trained]
            module.load_state_dict(mean_state([replica.module.state_dict() for replica in replicas]))
            value = validate(module, data.val_dataloader(), metric)
            found.append([seconds, float(trained * (loader.batch_size or 1)), value])
            if not due:
                break
    return found


def _along_groups(
    replicas: Sequence[_Replica], policy: PolicyConfig, case: RealCase, batches: Iterator[Any]
) -> _Updates:
    work = Work(
        1,
        case.num_pipelines,
        case.iterations,
        jittered(1.0, JITTER, case.seed),
        heterogeneity=case.seeded(case.condition),
    )
    trained = 0
    for at, event, decisions in simulate(policy, work).entries:
        if isinstance(event, Ready):
            replica = replicas[event.worker.pipeline]
            replica.backward(next(batches))
            replica.step()
            trained += 1
        for group in (decision for decision in decisions if isinstance(decision, Group)):
            _average([replicas[worker.pipeline].parameters() for worker in group.members])
        if isinstance(event, Ready):
            yield at, trained


def _in_step(replicas: Sequence[_Replica], case: RealCase, batches: Iterator[Any]) -> _Updates:
    for iteration in range(case.iterations):
        for replica in replicas:
            replica.backward(next(batches))
        _average([[p.grad for p in replica.parameters() if p.grad is not None] for replica in replicas])
        for replica in replicas:
            replica.step()
        yield float(iteration + 1), (iteration + 1) * len(replicas)


@torch.no_grad()
def _average(members: Sequence[Sequence[torch.Tensor]]) -> None:
    for alike in zip(*members, strict=True):
        mean = torch.stack(list(alike)).mean(0)
        for tensor in alike:
            tensor.copy_(mean)
