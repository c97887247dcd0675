"""Assigns random numbers to batches; see :mod:`lightning_sdpipe.random_streams`.

What steps draw belongs to the batch, and differs between pipelines. What is drawn between steps, by hooks and by
anything that they call, comes from streams that are equal on all workers, so that what is equal in all pipelines stays
so. An optimizer draws from one for each stage, which updates other parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any
from zlib import crc32

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.lightning_internals import Method, current, evaluation_loop, replace, restore
from lightning_sdpipe.partition.ownership import Ownership
from lightning_sdpipe.random_streams import RandomStreams, mixed
from lightning_sdpipe.topology.groups import ProcessGroups

_BEFORE_THE_STEP = -2  # in the place of a micro-batch's number
_BETWEEN_STEPS = -1
_KINDS = {stage.value: number for number, stage in enumerate(RunningStage)}


class Point(IntEnum):
    """Points at which a stream begins that is equal on all workers."""

    BATCH_START = 0
    STEP_ENDED = 1
    UPDATE = 2
    UPDATED = 3
    BATCH_END = 4


class StreamSwitches:
    """Follows the batches of ``trainer``'s loops until :meth:`undo`.

    Args:
        trainer: about to run.
        streams: of this worker.
        seed: of the run; equal on all workers, and kept in checkpoints.
        groups: this worker's place. Batch k of pipeline i, of N, is number k N + i of the epoch.
        ownership: which stage holds what.
        dealt: the number of a training batch, if it was dealt.
    """

    def __init__(
        self,
        trainer: Trainer,
        streams: RandomStreams,
        seed: Callable[[], int],
        groups: ProcessGroups,
        ownership: Ownership,
        dealt: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._trainer: Any = trainer
        self._streams = streams
        self._seed = seed
        self._dealt = dealt
        self._stage, self._pipeline = groups.mesh.locate(groups.rank)
        self._num_pipelines = groups.mesh.num_pipelines
        self._alike = groups.mesh.alike
        self.stream: tuple[int, ...] = ()
        """Names of the streams of the batch that is with its step now."""
        self._common = mixed(_BETWEEN_STEPS)  # state of the seeds of those between steps, around that batch
        self._updates = 0  # since that batch came
        self._module = trainer.lightning_module
        self._shared = [name for owners, name in ownership.shared_parameters(self._module) if self._stage in owners]
        self._original = current(self._module, Method.BEFORE_TRANSFER)
        replace(self._module, Method.BEFORE_TRANSFER, self._begin)
        self._precision = trainer.precision_plugin
        self._after_closure = current(self._precision, Method.AFTER_CLOSURE)
        replace(self._precision, Method.AFTER_CLOSURE, self._end_closure)

    def undo(self) -> None:
        """Leave the module and the precision plugin as they were."""
        restore(self._module, Method.BEFORE_TRANSFER)
        restore(self._precision, Method.AFTER_CLOSURE)

    def between_steps(self, point: Point) -> None:
        """Begin a stream that is the same on all workers that are at this batch."""
        updates = self._updates if point is Point.UPDATED else 0  # stages may have made other ones
        self._streams.begin(point, updates, state=self._common)

    def between_batches(self, hook: str) -> None:
        """Begin the stream of ``hook``, which runs on all workers, at the same number of batches."""
        batches = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self._streams.begin(self._seed(), self._trainer.current_epoch, batches, crc32(hook.encode()))

    def end_update(self, optimizer: object) -> None:
        """The optimizer has stepped.

        Raises:
            ConfigurationError: it has drawn random numbers for parameters that several stages hold, or where stages
                have no replicas that draw alike.
        """
        if (self._shared or not self._alike) and self._streams.drawn_from():
            if not self._alike:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} draws random numbers in its step, and pipelines of unlike cuts would "
                    "draw others for the same parameter and come apart. Use an optimizer that draws none, or pipelines "
                    "of one depth and cut."
                )
            trained = [name for name in self._shared if self._module.get_parameter(name).requires_grad]
            if trained:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} draws random numbers in its step, and {trained[0]!r} is held by "
                    "several stages, whose copies would come apart. Use an optimizer that draws none, or num_stages=1."
                )
        self._updates += 1
        self.between_steps(Point.UPDATED)

    def _end_closure(self, model: Any, optimizer: Any) -> None:
        """Begin the stream of the optimizer's step: gradients are there, and hooks and clipping have had them."""
        self._after_closure(model, optimizer)
        self._streams.begin(Point.UPDATE, self._updates, self._stage, state=self._common)

    def _begin(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Begin the stream of a batch, before Lightning does anything else with it. What user code draws until the
        step, for example in ``on_after_batch_transfer``, comes from a stream of the batch too."""
        trainer = self._trainer
        stage = trainer.state.stage
        training = stage is RunningStage.TRAINING
        if training:
            loop = trainer.fit_loop.epoch_loop
        else:
            loop = trainer.predict_loop if stage is RunningStage.PREDICTING else evaluation_loop(trainer)
        before = loop.batch_progress.current.ready
        dealt = self._dealt() if training else None
        position = before * self._num_pipelines + self._pipeline if dealt is None else dealt
        self.stream = (self._seed(), trainer.current_epoch, _KINDS[stage.value], dataloader_idx, position)
        self._common = mixed(*self.stream[:-1], before if dealt is None else dealt, _BETWEEN_STEPS)
        self._updates = 0
        self._streams.begin(*self.stream, _BEFORE_THE_STEP)
        return self._original(batch, dataloader_idx)
