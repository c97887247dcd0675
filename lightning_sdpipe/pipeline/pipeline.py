"""What a pipeline is to the training loop, whatever the order of its forwards and backwards."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lightning_sdpipe.exchange.gradients import GradientExchange
from lightning_sdpipe.pipeline.ready_signal import ReadySignal
from lightning_sdpipe.pipeline.stage_runner import Step


class Pipeline(Protocol):
    """This worker's part of one."""

    flushes: bool
    """Does it end a mini-batch with all of its gradients, on all stages at once?"""

    @property
    def filling(self) -> bool:
        """The next :meth:`train` runs forwards only, so no optimizer step may follow it."""

    @property
    def draining(self) -> bool:
        """Backwards are left that only :meth:`drain` will run."""

    @property
    def unfinished(self) -> int:
        """Mini-batches whose backward has not run yet."""

    @property
    def late_only(self) -> bool:
        """Was the newest update one that other stages do not make: of weights that they share, which were late?"""

    def train(
        self,
        batch: Any,
        step: Step,
        iteration: int,
        exchange: GradientExchange | None = None,
        accumulated: bool = False,
        ready: ReadySignal | None = None,
    ) -> Tensor:
        """Trains on a mini-batch, as far as its order goes.

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
        """Runs the oldest backward that is left; returns a zero whose ``backward`` puts its gradient in place."""

    def finish(self) -> None:
        """After the last :meth:`drain`: runs the backwards of mini-batches whose update has not come yet."""

    def rest(self, loss: Tensor) -> Tensor:
        """``loss``, as a tensor whose ``backward`` puts the gradients of an update in place that has no mini-batch of
        its own any more; after :meth:`finish`."""

    def settle(self) -> None:
        """Waits until the neighbours have taken everything that was sent."""
