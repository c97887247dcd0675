"""Which random numbers belong to which batch; see :mod:`lightning_sdpipe.random_streams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage

from lightning_sdpipe.groups import ProcessGroups
from lightning_sdpipe.random_streams import RandomStreams

_BEFORE_THE_STEP = -2  # in the place of a micro-batch's number; AFTER_THE_STEP is another


class Draws:
    """Follows the batches of ``trainer``'s loops until :meth:`undo`.

    Args:
        trainer: about to run.
        streams: of this worker.
        seed: of the run; equal on all workers, and kept in checkpoints.
        groups: this worker's place. Batch k of pipeline i, of N, is number k N + i of the epoch.
        dealt: the number of a training batch, if it was dealt.
    """

    def __init__(
        self,
        trainer: Trainer,
        streams: RandomStreams,
        seed: Callable[[], int],
        groups: ProcessGroups,
        dealt: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._trainer: Any = trainer
        self._streams = streams
        self._seed = seed
        self._dealt = dealt
        _, self._pipeline = groups.mesh.locate(groups.rank)
        self._num_pipelines = groups.mesh.num_pipelines
        self.stream: tuple[int, ...] = ()
        """Names the streams of the batch that is with its step now."""
        self._module = trainer.lightning_module
        self._original = self._module._on_before_batch_transfer
        vars(self._module)["_on_before_batch_transfer"] = self._begin

    def undo(self) -> None:
        """Leaves the module as it was."""
        vars(self._module).pop("_on_before_batch_transfer", None)

    def _begin(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The first that Lightning does with a batch. What user code draws until the step, for example in
        ``on_after_batch_transfer``, comes from a stream of the batch too."""
        trainer = self._trainer
        stage = trainer.state.stage
        if stage == RunningStage.TRAINING:
            loop = trainer.fit_loop.epoch_loop
        else:
            loop = trainer.predict_loop if stage == RunningStage.PREDICTING else trainer._evaluation_loop
        before = loop.batch_progress.current.ready
        dealt = self._dealt() if stage == RunningStage.TRAINING else None
        position = before * self._num_pipelines + self._pipeline if dealt is None else dealt
        kind = list(RunningStage).index(stage)
        self.stream = (self._seed(), trainer.current_epoch, kind, dataloader_idx, position)
        self._streams.begin(*self.stream, _BEFORE_THE_STEP)
        return self._original(batch, dataloader_idx)
