"""The word that a worker is ready, said within its last backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lightning_sdpipe.heterogeneity.injector import DelayInjector


class Announcement:
    """Calls ``announce`` once, when about ``share`` of the last backward is over, as far as the number of gradients
    tells; at the latest when all of it is.

    Args:
        announce: says it.
        share: of the backward, from 0 to 1; with 0 it is said before.
        parameters: whose gradients it computes, from the first layer to the last.
        delays: make this worker slow, if it was asked to.
    """

    def __init__(
        self, announce: Callable[[], None], share: float, parameters: Sequence[Tensor], delays: DelayInjector
    ) -> None:
        self._announce, self._share, self._delays = announce, share, delays
        self._parameter = parameters[int(len(parameters) * (1.0 - share))] if share and parameters else None
        self._begun = self._made = False

    def begin(self) -> None:
        """The next backward is the last."""
        self._begun = True
        if not self._share:
            self.make()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """To be held around every backward."""
        if not self._begun or self._made:
            with self._delays.computing():
                yield
            return
        hook = None
        if self._parameter is not None and self._parameter.requires_grad and not self._delays.slows:
            hook = self._parameter.register_hook(lambda _: self.make())  # type: ignore[no-untyped-call]
        try:
            with self._delays.computing(self._share, self.make):
                yield
        finally:
            if hook is not None:
                hook.remove()

    def make(self) -> None:
        """Says it, if it has not been said."""
        if not self._made:
            self._made = True
            self._announce()
