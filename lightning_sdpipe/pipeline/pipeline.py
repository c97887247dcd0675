"""Interface of a pipeline for the training loop, whatever the order of its forwards and backwards."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lightning_sdpipe.pipeline.gradients import GradientExchange
from lightning_sdpipe.pipeline.ready_signal import ReadySignal
from lightning_sdpipe.pipeline.stage_runner import Step


class Pipeline(Protocol):
    """This worker's part of a pipeline."""

    flushes: bool
    """Whether every mini-batch ends with all of its gradients, on all stages at once."""

    @property
    def filling(self) -> bool:
        """True if the next :meth:`train` runs forwards only, so that no optimizer step may follow it."""

    @property
    def draining(self) -> bool:
        """True if backwards are left that only :meth:`drain` will run."""

    @property
    def unfinished(self) -> int:
        """Number of mini-batches whose backward has not run yet."""

    @property
    def late_only(self) -> bool:
        """True if only gradients of shared weights, which came late, made the newest update: other stages make no such
        one."""

    def train(
        self,
        batch: Any,
        step: Step,
        iteration: int,
        exchange: GradientExchange | None = None,
        accumulated: bool = False,
        ready: ReadySignal | None = None,
    ) -> Tensor:
        """Train on a mini-batch, as far as its order goes.

        Args:
            batch: the whole mini-batch.
            step: the user's method.
            iteration: counts mini-batches.
            exchange: what an update that follows replaces gradients by.
            accumulated: earlier mini-batches have left gradients for the same update.
            ready: is told when the backward is passed, so that the update which follows needs nothing more of others.

        Returns:
            The loss, a scalar whose ``backward`` puts the gradients in place.
        """

    def drain(self, exchange: GradientExchange | None = None, ready: ReadySignal | None = None) -> Tensor:
        """Run the oldest backward that is left; return a zero whose ``backward`` puts its gradient in place."""

    def finish(self) -> None:
        """Run the backwards of mini-batches whose update has not come yet; called after the last :meth:`drain`."""

    def rest(self, loss: Tensor) -> Tensor:
        """Return ``loss`` as a tensor whose ``backward`` puts the gradients in place of an update without a mini-batch
        of its own; called after :meth:`finish`."""

    def settle(self) -> None:
        """Wait until the neighbours have taken everything that was sent."""
