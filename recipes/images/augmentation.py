"""Random variations of small pictures while training. Random numbers come from torch's global generator."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def shift_and_flip(image: Tensor, padding: int) -> Tensor:
    """``image``, of shape ``(channels, height, width)``, moved by up to ``padding`` pixels over a margin of zeros, and
    mirrored left to right every other time."""
    _, height, width = image.shape
    top, left = torch.randint(2 * padding + 1, (2,)).tolist()
    moved = F.pad(image, (padding,) * 4)[:, top : top + height, left : left + width]
    return moved.flip(-1) if torch.rand(()) < 0.5 else moved
