"""Real modules and data that follow a course in virtual time, taking turns in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import hydra
import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_sdpipe.exchange.outer_model import AVERAGE, Nesterov, OuterOptimizer
from lightning_sdpipe.optim import VarianceCorrection
from lightning_sdpipe.partition.effects import logging_to
from recipes.suites.courses import Mean, Step

HELD_OUT_BATCH = 500


class Replicas:
    """A replica of a module for each pipeline, each with its own optimizer and learning-rate schedule.

    Args:
        workload: specifications of the ``model`` and the ``data``, for Hydra.
        num_pipelines: N.
        epochs: number of epochs.
        seed: seed of the weights and of the order of samples.
        jointly: whether replicas share parameters and optimizer, but not buffers, as with all-reduce.
        variance_correction: whether to correct Adam's variance, unless ``jointly``.
        outer: options of DiLoCo's outer optimizer, for :meth:`move_base`.
    """

    def __init__(
        self,
        workload: Mapping[str, Any],
        num_pipelines: int,
        epochs: int,
        seed: int,
        jointly: bool,
        variance_correction: bool,
        outer: Nesterov = AVERAGE,
    ) -> None:
        L.seed_everything(seed, verbose=False)
        module, data = (hydra.utils.instantiate(workload[name]) for name in ("model", "data"))
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
        self._dataset, self._collate, self.batch_size = loader.dataset, loader.collate_fn, loader.batch_size
        held_out = data.val_dataloader()
        self._held_out = DataLoader(held_out.dataset, HELD_OUT_BATCH, collate_fn=held_out.collate_fn)
        self._num_pipelines, self._seed, self._epoch = num_pipelines, seed, -1
        self.iterations = len(self._dataset) // (num_pipelines * self.batch_size)
        shared = {id(parameter): parameter for parameter in module.parameters()} if jointly else {}
        self._modules = [deepcopy(module, dict(shared)) for _ in range(num_pipelines)]
        self._outer = [OuterOptimizer(outer, parameter.detach()) for parameter in module.parameters()]
        trainer = SimpleNamespace(estimated_stepping_batches=epochs * self.iterations)
        self._optimizers: list[tuple[Any, Any]] = []
        for each in self._modules[: 1 if jointly else num_pipelines]:
            each._trainer = trainer
            made: Any = each.configure_optimizers()
            each._trainer = None
            scheduled = isinstance(made, Mapping)
            optimizer, schedule = (made["optimizer"], made["lr_scheduler"]["scheduler"]) if scheduled else (made, None)
            if variance_correction and not jointly:
                optimizer = VarianceCorrection(optimizer, num_pipelines)
            self._optimizers.append((optimizer, schedule))

    def step(self, step: Step) -> None:
        """Let one pipeline train a mini-batch."""
        self._learn(step.pipeline, step.epoch, {step.pipeline: step.position}, step.update)

    def step_jointly(self, epoch: int, update: int) -> None:
        """Update the parameters that all replicas share with the mean of their gradients."""
        first = update * self._num_pipelines
        self._learn(0, epoch, {pipeline: first + pipeline for pipeline in range(self._num_pipelines)}, update)

    def mean(self, mean: Mean) -> None:
        """Average the models that ``mean`` names, by its weights."""
        modules = [self._modules[pipeline] for pipeline in mean.pipelines]
        with torch.no_grad():
            for alike in zip(*(module.parameters() for module in modules), strict=True):
                together = sum(weight * each for weight, each in zip(mean.weights, alike, strict=True))
                for each in alike:
                    each.copy_(together)
        if mean.meeting:
            state = mean_state([module.state_dict() for module in modules])
            for module in modules:
                module.load_state_dict(state)

    def move_base(self) -> None:
        """Make a round of DiLoCo, after which all replicas have the new base."""
        with torch.no_grad():
            for outer, *alike in zip(self._outer, *(module.parameters() for module in self._modules), strict=True):
                outer.step(torch.stack(alike).mean(0) - outer.base)
                for each in alike:
                    each.copy_(outer.base)

    def value(self, metric: str) -> float:
        """Return the metric of the mean of all replicas on the held-out data."""
        module = deepcopy(self._modules[0])
        module.load_state_dict(mean_state([each.state_dict() for each in self._modules]))
        return validate(module, self._held_out, metric)

    def _learn(self, number: int, epoch: int, positions: Mapping[int, int], update: int) -> None:
        optimizer, schedule = self._optimizers[number]
        while schedule is not None and schedule.last_epoch < epoch * self.iterations + update:
            schedule.step()
        for pipeline, position in positions.items():
            module = self._modules[pipeline]
            module.train()
            with logging_to(module, lambda *_, **__: None):
                (module.training_step(self._batch(epoch, position), 0) / len(positions)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def _batch(self, epoch: int, position: int) -> Any:
        """Return the batch that is dealt at a position; home shards are those of a DistributedSampler."""
        if epoch != self._epoch:
            self._epoch = epoch
            draws = torch.Generator().manual_seed((self._seed << 16) + epoch)
            self._order = torch.randperm(len(self._dataset), generator=draws).tolist()
        number, home = divmod(position, self._num_pipelines)
        first, stop = (home + self._num_pipelines * self.batch_size * at for at in (number, number + 1))
        chosen = self._order[first : stop : self._num_pipelines]
        several = getattr(self._dataset, "__getitems__", None)
        return self._collate(several(chosen) if several else [self._dataset[index] for index in chosen])


def mean_state(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of floating-point tensors, and the maximum of others (counters)."""
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return {name: each.mean(0) if each.is_floating_point() else each.amax(0) for name, each in stacked.items()}


def validate(module: L.LightningModule, batches: Iterable[Any], metric: str) -> float:
    """Return the mean of ``metric`` as ``validation_step`` logs it, weighted by the samples of each batch. Random
    numbers are the same in each call."""
    total, weight = 0.0, 0
    module.eval()
    logged: dict[str, float] = {}
    with (
        torch.random.fork_rng(devices=[]),  # so that validation does not change training's draws
        torch.inference_mode(),
        logging_to(module, lambda name, value, *_, **__: logged.update({name: float(value)})),
    ):
        torch.manual_seed(0)
        for index, batch in enumerate(batches):
            module.validation_step(batch, index)
            size = len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0])
            total, weight = total + size * logged[metric], weight + size
    return total / weight
