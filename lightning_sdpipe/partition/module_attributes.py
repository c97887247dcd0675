"""Tensors that modules keep in attributes, buffers and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_sdpipe.lightning_results import is_metric

CONTAINERS = (list, dict, set, deque)


def tensors_in_attributes(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors in attributes of ``modules``, and in containers there, without parameters and buffers, and
    without metrics, which belong to the last stage."""
    for module in modules:
        if is_metric(module):
            continue
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*CONTAINERS, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def kept_over_steps(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of ``module`` and the states of its metrics, each with a description."""
    for name, buffer in module.named_buffers():
        yield f"the buffer {name!r}", buffer
    for path, metric in module.named_modules():
        if is_metric(metric):
            for name in metric._defaults:
                for tensor in tree_leaves(getattr(metric, name)):
                    if isinstance(tensor, Tensor):
                        yield f"the metric {path!r}", tensor
