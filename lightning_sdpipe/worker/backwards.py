"""Averaging of gradients after each backward of manual optimization, where DistributedDataParallel averages them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from lightning_sdpipe import meter
from lightning_sdpipe.pipeline.gradients import put_back
from lightning_sdpipe.sync.synchronizer import Synchronizer


class Backwards:
    """The backwards that a training step runs itself. After each one that adds to a gradient, all gradients are
    replaced by their means over all pipelines, which leaves what was averaged before as it was. So clipping and norms
    see means, and what several backwards accumulate is averaged, too.

    Args:
        sync: a method that averages gradients, or leaves them alone.
        spans: counts the time of an exchange.
        first_failure: context for waits for other workers.
    """

    def __init__(self, sync: Synchronizer, spans: meter.Meter, first_failure: AbstractContextManager[None]) -> None:
        self._sync, self._meter, self._first_failure = sync, spans, first_failure
        self.blocked = False
        """True while gradients only accumulate, as within DistributedDataParallel's ``no_sync()``."""
        self.place = -1, 0
        """Numbers of the update and of the last backward in it."""
        self._ends = False  # the present backward will call _end

    @contextmanager
    def of_update(self, update: int, computing: AbstractContextManager[None]) -> Iterator[None]:
        """Average gradients within the context, a training step on the way to update number ``update``; ``computing``
        is held except while others are waited for."""
        parameters = self._sync.replica.trained if self._sync.gradients is not None else ()
        hooks = [p.register_post_accumulate_grad_hook(self._added) for p in parameters]  # type: ignore[no-untyped-call]
        if update != self.place[0]:
            self.place = update, 0
        self._computing = computing
        try:
            with computing:
                yield
        finally:
            self._ends = False
            for hook in hooks:
                hook.remove()

    def _added(self, _: Tensor) -> None:
        if not self._ends and not self.blocked:
            self._ends = True
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._end)

    def _end(self) -> None:
        self._ends = False
        update, number = self.place
        self.place = update, number + 1
        exchange, parameters = self._sync.gradients, self._sync.replica.trained
        assert exchange is not None
        self._computing.__exit__(None, None, None)
        try:
            with self._first_failure, self._meter.spans[meter.EXCHANGE]:
                self._sync.begin_backward(*self.place)
                exchange.complete([parameter.grad for parameter in parameters])
                put_back(parameters, exchange.finish())
        finally:
            self._computing.__enter__()
