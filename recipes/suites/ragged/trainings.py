"""Whole epochs of emulated pipelines: of unlike depths and cuts, and of the best rectangle of the same devices.

Workers sleep instead of computing; processes, sockets, the scheduler, averaging and the optimizer are real.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.heterogeneity import Delays, Slowed
from recipes.suites.calibration import NOMINAL_ITERATION_SECONDS
from recipes.suites.cases import seeded
from recipes.suites.emulated import Validated, passes
from recipes.suites.epochs import epoch_lengths
from recipes.suites.journal import Journal
from recipes.suites.ragged.fleets import Shape
from recipes.suites.ratios import Row
from recipes.suites.trainings import TRANSFER_TIMEOUT, random_features

BY_SPEED = "by_speed"


@dataclass(frozen=True)
class Emulated:
    """An emulated model has blocks that sleep.

    Args:
        blocks: that take equally long; one more, of the index ``free``, takes no time.
        free: None if there is none.
        batch_seconds: of a mini-batch on one device of speed 1, forward and backward.
        num_micro_batches: m, of each pipeline.
        num_parameters: of all blocks.
        batches: of all pipelines in an epoch.
        validation_batches: likewise, after each epoch.
        epochs: after the first, which does not count.
    """

    blocks: int
    batch_seconds: float
    num_micro_batches: int
    num_parameters: int
    batches: int
    validation_batches: int
    epochs: int
    free: int | None = None

    def module(self) -> Validated:
        """Make the model, from torch's global stream of random numbers."""
        seconds = self.batch_seconds / self.blocks / self.num_micro_batches
        count = self.blocks + (self.free is not None)
        module = Validated(count, *passes(seconds), self.num_parameters // count)
        if self.free is not None:
            block: Any = module.blocks[self.free]
            block.forward_seconds = block.backward_seconds = 0.0
        return module


@dataclass(frozen=True)
class Training:
    """A training is of one fleet, mesh, method and condition.

    Args:
        fleet: its name.
        mesh: ``"ragged"`` or ``"rectangle"``.
        method: its name among the suite's methods, with ``"/by_speed"`` for ``batch_by_speed``.
        condition: the name of what slows workers down, besides the speeds of their devices.
        shape: the pipelines.
    """

    fleet: str
    mesh: str
    method: str
    condition: str
    shape: Shape


class Epochs:
    """Times the epochs of trainings, or finds them in a journal.

    Args:
        model: what they train.
        methods: specifications for Hydra, by name.
        heterogeneity: likewise.
        journal: of finished measurements.
    """

    def __init__(
        self, model: Emulated, methods: Mapping[str, Any], heterogeneity: Mapping[str, Any], journal: Journal
    ) -> None:
        self._model, self._methods, self._heterogeneity, self._journal = model, methods, heterogeneity, journal

    def row(self, asked: Training, repeat: int, seed: int) -> Row:
        """Return the mean length of an epoch, and what the placement predicts."""
        model, shape = self._model, asked.shape
        print(f"{asked.fleet} {asked.mesh} {asked.condition} {asked.method}, repeat {repeat}", end=": ", flush=True)
        begun = time.perf_counter()
        specified = [self._methods[asked.method.partition("/")[0]], self._heterogeneity[asked.condition]]
        found = self._journal.measured(
            {**asdict(asked), **asdict(model), "seed": seed, "specification": specified},
            lambda: {"epochs_s": self._epochs(asked, seed)},
        )
        epoch = statistics.mean(found["epochs_s"])
        print(f"{epoch:.2f} s per epoch ({time.perf_counter() - begun:.0f} s)", flush=True)
        return {
            "what": f"{asked.mesh} {asked.method}",
            "fleet": asked.fleet,
            "pipelines": str(shape),
            "left_out": shape.left_out,
            "heterogeneity": asked.condition,
            "repeat": repeat,
            "epoch_s": epoch,
            "batches_per_s": model.batches / epoch,
            "predicted_per_s": shape.rate / model.batch_seconds if shape.rate else None,
            "sum_of_speeds": sum(1 / factor for factor in shape.factors) / model.batch_seconds,
            "emulated": True,
            "seed": seed,
        }

    def _epochs(self, asked: Training, seed: int) -> list[float]:
        model, shape = self._model, asked.shape
        method, _, data = asked.method.partition("/")
        strategy = SDPipeStrategy(
            sync=seeded(self._methods[method], seed),
            num_micro_batches=model.num_micro_batches,
            data="sharded" if method == "all_reduce" else "auto",
            batch_by_speed=data == BY_SPEED,
            delays=self._slowness(asked, seed),
            timeout=TRANSFER_TIMEOUT,
            start_method="fork",
            **shape.options,
        )
        torch.manual_seed(seed)
        module = model.module()
        loaders = [random_features(n, model.num_micro_batches) for n in (model.batches, model.validation_batches)]
        return epoch_lengths(module, loaders, strategy, len(shape.factors), model.epochs)

    def _slowness(self, asked: Training, seed: int) -> Slowed:
        """Delays are as much longer as a mini-batch is than the one that they are meant for."""
        delays: Delays = seeded(self._heterogeneity[asked.condition], seed)
        scale = delays.scale * self._model.batch_seconds / NOMINAL_ITERATION_SECONDS
        return Slowed(replace(delays, scale=scale), asked.shape.factors)
