"""Noise for stochastic rounding: uniform in (−½, ½), added before rounding to the nearest.

Drawing it afresh would cost more than everything else of an encoding. So it comes from a table of 2¹⁸ numbers, read
from a random place on: each of 2¹⁶ evenly spaced levels stands in it four times, in random order. Over all places to
begin at, each value meets each level equally often, so rounding is unbiased to 2⁻¹⁷ of a step, which is the precision
of float32 there. Two values of a message share nothing but the place to begin at.
"""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor

LEVELS = 2**16
TABLE = 4 * LEVELS


class Dither:
    """The noise of one message.

    Args:
        draw: where to begin in the table; a seed.
    """

    def __init__(self, draw: int, device: torch.device) -> None:
        self._random = random.Random(draw)
        self._table = table(device)

    def add_to(self, y: Tensor) -> None:
        """Adds noise to a flat tensor, in place."""
        for part in torch.split(y, TABLE):
            begin = self._random.randrange(TABLE)
            part.add_(self._table[begin : begin + part.numel()])


@functools.cache
def table(device: torch.device) -> Tensor:
    """The numbers, twice in a row: 2 MiB on each device that asks for them."""
    generator = torch.Generator().manual_seed(0)
    levels = (torch.arange(LEVELS) + 0.5) / LEVELS - 0.5
    order = torch.cat([torch.randperm(LEVELS, generator=generator) for _ in range(TABLE // LEVELS)])
    return levels[order].repeat(2).to(device)
