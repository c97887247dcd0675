"""Signal of a worker that it is ready: nothing but its own computing can hold up its update any more.

On this signal the scheduler lets others wait for this worker (SDPipe §4, "Worker Communication"). Most workers send it
before their last backward, or with few micro-batches within it. But clipping by the norm of all stages, and the vote on
an overflow in 16-bit mixed precision, come after the backward and wait for the other stages of the pipeline, which may
be late. So does the sum over the owners of a shared parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from torch import Tensor

from lightning_sdpipe import meter
from lightning_sdpipe.heterogeneity.injector import DelayInjector

LastWait = Literal["backward", "vote", "norm", "step"]
"""The points that an update passes, in order. After one of them it waits for no other stage."""


class ReadySignal:
    """Fires once in each update, when the last point is passed that waits for another stage, and at the latest after
    the optimizer's step. The pipeline, clipping and the loss scale report the points that they have passed.

    Args:
        last: the last point that waits for another stage.
        fire: announces that this worker is ready.
    """

    def __init__(self, last: LastWait = "backward", fire: Callable[[], None] = lambda: None) -> None:
        self._last = last
        self._fire = fire
        self._expected = False
        self._share = 0.0
        self._parameter: Tensor | None = None
        self._in_last_backward = False

    def expect(self) -> None:
        """Begin an update, in which the signal is to fire."""
        self._expected = True

    def drop(self) -> None:
        """The update ends, whether the signal has fired or not."""
        self._expected = False

    def passed(self, point: LastWait) -> None:
        """Fire if ``point`` is the last that waits for another stage."""
        if self._expected and point in (self._last, "step"):
            self._expected = False
            self._fire()

    # ---------------------------------------------------------- within backwards

    def begin(self, share: float, parameters: Sequence[Tensor]) -> None:
        """Begin the backwards of a mini-batch.

        Args:
            share: the part of the last backward that is over when it counts as passed, from 0 to 1, measured by the
                number of gradients; 0 if it counts as passed before it begins.
            parameters: parameters whose gradients are computed, from the first layer to the last.
        """
        self._share, self._in_last_backward = share, False
        self._parameter = parameters[int(len(parameters) * (1.0 - share))] if share and parameters else None

    def last_backward(self) -> None:
        """Mark the next backward as the last of its mini-batch."""
        self._in_last_backward = True
        if not self._share:
            self.passed("backward")

    def computing(self, delays: DelayInjector) -> AbstractContextManager[None]:
        """Return the context to hold around every backward; ``delays`` make this worker slow, if it was asked to."""
        last = self._expected and self._in_last_backward and self._last == "backward"
        parameter = self._parameter
        if not (delays.injects or delays.measures):
            computing: AbstractContextManager[None] = meter.phase(meter.BACKWARD)
        elif last:
            computing = delays.computing(self._share, self._pass_backward)
            parameter = None if delays.slows else parameter
        else:
            computing = delays.computing()
        return self._hearing(parameter, computing) if last else computing

    @contextmanager
    def _hearing(self, parameter: Tensor | None, computing: AbstractContextManager[None]) -> Iterator[None]:
        """Pass when the gradient of ``parameter`` is there, and at the latest when all are."""
        hook = None
        if parameter is not None and parameter.requires_grad:
            hook = parameter.register_hook(self._pass_backward)  # type: ignore[no-untyped-call]
        try:
            with computing:
                yield
        finally:
            if hook is not None:
                hook.remove()
        self._pass_backward()

    def _pass_backward(self, *_: Tensor) -> None:
        self.passed("backward")
