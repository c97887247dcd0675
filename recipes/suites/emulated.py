"""Models of emulated blocks: to the network, the scheduler and the optimizer they are a real training, without its
arithmetic."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock

FEATURES = 64
LEARNING_RATE = 1e-3
BACKWARD_SHARE = 2 / 3
"""Share of a micro-batch's time: a backward takes about twice as long as its forward."""


def passes(seconds: float) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward that take ``seconds`` together."""
    return (1 - BACKWARD_SHARE) * seconds, BACKWARD_SHARE * seconds


class EmulatedChain(L.LightningModule):
    """A chain of emulated blocks.

    Args:
        num_blocks: number of blocks.
        forward_seconds: seconds of a block's forward, whatever the batch.
        backward_seconds: seconds of a block's backward, whatever the batch.
        num_parameters: parameters of each block.
    """

    def __init__(
        self, num_blocks: int, forward_seconds: float, backward_seconds: float, num_parameters: int = 1024
    ) -> None:
        super().__init__()
        blocks = [
            EmulatedBlock(forward_seconds, backward_seconds, num_parameters=num_parameters) for _ in range(num_blocks)
        ]
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self.blocks(batch)
        return output.mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_output", self.blocks(batch).mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), LEARNING_RATE)


class EmulatedRivals(EmulatedChain):
    """Two halves of an emulated chain, with an optimizer each, stepped manually one after the other, like the two
    networks of a GAN. A mini-batch takes as long as the chain's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    @property
    def halves(self) -> tuple[nn.Module, nn.Module]:
        half = len(self.blocks) // 2
        return self.blocks[:half], self.blocks[half:]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        for half, optimizer in zip(self.halves, optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(half(batch).mean())
            optimizer.step()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return [torch.optim.SGD(half.parameters(), LEARNING_RATE) for half in self.halves]
