"""``self.log`` inside a cut step: the values of the micro-batches of one mini-batch become one value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_sdpipe.lightning_internals import type_of_logged_values

Log = Callable[..., None]


class StepLog:
    """Collects what each micro-batch logs and logs it once: means weighted as the losses are, or the sum, minimum or
    maximum that ``reduce_fx`` asks for. A torchmetrics object accumulates by itself and is logged as it is. What a step
    logs several times under one name is logged as often, first values with first ones."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], list[tuple[Any, float]]] = {}
        self._batch_sizes: dict[tuple[str, int], int] = {}
        self._options: dict[tuple[str, int], dict[str, Any]] = {}

    def record(self, weight: float) -> Log:
        """A replacement for ``LightningModule.log`` while a micro-batch of this weight runs. A ``batch_size`` that the
        user gives is its weight instead."""
        calls: dict[str, int] = {}

        def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **options: Any) -> None:
            if args:  # prog_bar, logger, on_step and on_epoch may be given by position
                options |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
            if isinstance(value, Tensor):
                value = value.detach()
            calls[name] = calls.get(name, 0) + 1
            key = name, calls[name]
            self._values.setdefault(key, []).append((value, batch_size or weight))
            if batch_size:
                self._batch_sizes[key] = self._batch_sizes.get(key, 0) + batch_size
            self._options[key] = options

        return log

    def replay(self, log: Log) -> None:
        """Calls ``log`` as often as a micro-batch has. Values are reduced over the pipelines when the epoch ends, and
        never in a step."""
        for key, entries in self._values.items():
            options = {**self._options[key], "sync_dist": True}
            value = _combine(entries, options.get("reduce_fx", "mean"))
            log(key[0], value, batch_size=self._batch_sizes.get(key), **options)  # else Lightning counts the mini-batch


def _combine(entries: list[tuple[Any, float]], reduce_fx: Any) -> Any:
    value = entries[-1][0]
    if isinstance(value, Metric) or not isinstance(value, (Tensor, float, int)) or len(entries) == 1:
        return value
    name = reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__
    values = torch.stack([_as_logged(v) for v, _ in entries])
    if name in ("sum", "min", "max"):
        return getattr(torch, name)(values)
    weights = torch.tensor([weight for _, weight in entries], dtype=values.dtype, device=values.device)
    return (values * weights).sum() / weights.sum()


def _as_logged(value: Tensor | float) -> Tensor:
    """In the type in which Lightning accumulates it. It must not depend on the number of micro-batches: that is a
    rank's own where batches are divided by speed, and ranks reduce what they have logged."""
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64):
        return value
    return torch.as_tensor(value, dtype=type_of_logged_values())


@contextmanager
def logging_through(module: LightningModule, log: Log) -> Iterator[None]:
    """``module.log`` (and ``log_dict``, which calls it) is ``log`` within the context."""
    module.__dict__["log"] = log
    try:
        yield
    finally:
        del module.__dict__["log"]
