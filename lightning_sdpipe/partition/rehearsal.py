"""Running a user's step before training without leaving a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torchmetrics import Metric


@contextmanager
def rehearsal(module: nn.Module) -> Iterator[None]:
    """What a step changes within this context is undone: gradients, buffers (BatchNorm's statistics),
    torchmetrics and the states of the random generators of torch, NumPy and Python. ``self.log`` does nothing
    meanwhile."""
    gradients = [(p, p.grad) for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for b in module.buffers() if b.device.type != "meta"]
    for parameter, _ in gradients:
        parameter.grad = None
    if hasattr(module, "log"):
        module.__dict__["log"] = lambda *_, **__: None
    try:
        with isolate_rng():
            yield
    finally:
        module.__dict__.pop("log", None)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.reset()
