"""Parameters of several shapes, and gradients of several sizes for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, NAdam, Optimizer, RAdam

ADAMS: dict[str, Callable[..., Any]] = {
    "adam": partial(Adam, foreach=False, weight_decay=0.1),
    "adam-foreach": partial(Adam, foreach=True),
    "adam-fused": partial(Adam, fused=True, weight_decay=0.1),
    "adam-amsgrad": partial(Adam, amsgrad=True),
    "adam-maximize": partial(Adam, maximize=True, weight_decay=0.1),
    "adamw": partial(AdamW, foreach=False, weight_decay=0.1),
    "adamw-fused": partial(AdamW, fused=True, weight_decay=0.1),
}
FAMILY: dict[str, Callable[..., Any]] = {
    **ADAMS,
    "adamw-foreach": partial(AdamW, foreach=True, weight_decay=0.1),
    "nadam": partial(NAdam, foreach=True),
    "nadam-decoupled": partial(NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": partial(RAdam, foreach=True, weight_decay=0.1),
}
"""Whose variance can be corrected."""
FREEZABLE: dict[str, Callable[..., Any]] = {
    **ADAMS,
    "adamw-tensor-lr": lambda params, lr: AdamW(params, lr=torch.tensor(lr), foreach=False),
}
"""Whose variance can be frozen."""


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (5,), (), (2, 3, 2, 2)]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(params: list[nn.Parameter], step: int, skips: bool = True) -> None:
    """The second parameter has none in every third step, if one ``skips``."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, param in enumerate(params):
        noise = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        none = skips and index == 1 and step % 3 == 2
        param.grad = None if none else 0.3 + noise * 10.0 ** (index - 2)


def run(optimizer: Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
