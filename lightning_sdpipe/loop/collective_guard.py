"""Tracks which of the user's methods runs, of those that other stages do not run, or not to their end.

In such a method no collective call is allowed: the other ranks would be waited for in vain, or be met at another call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_sdpipe.errors import ConfigurationError


class CollectiveGuard:
    """The guard of one worker's strategy. As a context, which :meth:`running` returns, it ends what runs.

    Args:
        num_stages: M. A stage that is the only one runs everything.
        metrics: of the user's module.
    """

    def __init__(self, num_stages: int, metrics: Callable[[], Sequence[Metric]] = tuple) -> None:
        self._num_stages = num_stages
        self._metrics = metrics
        self._now = ""
        self.rehearsing = False
        self.communicates = False
        """True if a step that was rehearsed here communicates with the other pipelines."""

    @property
    def in_step(self) -> bool:
        """True while a step runs."""
        return self._now.endswith("_step")

    def running(self, name: str) -> Self:
        """Note that a step, or a hook that runs on last stages only, runs in the block of this ``with``."""
        self._now = name
        return self

    def __enter__(self) -> None:
        """Enter the block of what runs."""

    def __exit__(self, *_: object) -> None:
        self._now = ""

    @contextmanager
    def rehearsal(self, name: str) -> Iterator[None]:
        """Note that one process tries a step in the block, before training, while others wait for what it finds out."""
        self.rehearsing = True
        before = [(metric, metric.distributed_available_fn) for metric in self._metrics()]
        for metric, _ in before:
            metric.distributed_available_fn = self._has_no_replicas
        try:
            with self.running(name):
                yield
        finally:
            self.rehearsing = False
            for metric, available in before:
                metric.distributed_available_fn = available

    def _has_no_replicas(self) -> bool:
        """Answer a metric that would be gathered from all pipelines."""
        self.communicates = True
        return False

    def check(self, what: str) -> None:
        """Raise ConfigurationError if ``what``, which all ranks must call, is called where some do not come."""
        if not self._now or self._num_stages == 1:
            return
        stage = self._now.removeprefix("on_").partition("_")[0]
        instead = "on_train_batch_end" if stage == "training" else f"on_{stage}_end"
        reason = "ends where its stage ends" if self.in_step else "runs on last stages only, where results are"
        raise ConfigurationError(
            f"{what} was called in {self._now}, which {reason}, so other ranks would be waited for in vain. Call it in "
            f"{instead}, which runs on every rank."
        )

    @contextmanager
    def result_hook(self, name: str, parameters: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
        """Guard a hook, in the block, that runs on last stages only.

        Raises:
            ConfigurationError: the hook was the end of an epoch, and changed ``parameters``.
        """
        looks = self._num_stages > 1 and name.endswith("_epoch_end")
        before = _sums(parameters()) if looks else []
        with self.running(name):
            yield
        if looks and _sums(parameters()) != before:
            raise ConfigurationError(
                f"{name} changed parameters, and it runs on last stages only. Change them in "
                f"{name.replace('_epoch', '')}, which runs on every rank."
            )


def _sums(tensors: Sequence[Tensor]) -> list[str]:
    return [str(tensor.sum(dtype=torch.float64).item()) for tensor in tensors]  # as text, for nan is no other nan
