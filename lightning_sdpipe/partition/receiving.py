"""The effects of earlier stages' blocks, made again from a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sdpipe.partition.effects import Effect
from lightning_sdpipe.partition.message import LeafKey, Message
from lightning_sdpipe.partition.placeholder import Absent, Placeholder
from lightning_sdpipe.partition.structure import Constant, Number, Opaque, Part, TensorMeta, Travels


class Receiving:
    """What a stage was told about one micro-batch.

    Args:
        message: from the stage before.
        chain: names of all blocks.
        device: where this stage computes.
        changed: leaves that something writes to later, and which may have to be passed on as they are.
    """

    def __init__(
        self, message: Message, chain: Sequence[str], device: torch.device, changed: frozenset[LeafKey]
    ) -> None:
        self.message = message
        self._chain = chain
        self._device = device
        places = message.layout.places if changed else {}
        self._changed = {places[key] for key in changed if key in places}
        self._tensors: dict[int, Tensor] = {}

    def effects(self, block: int) -> list[Effect] | None:
        """What the call of ``block`` did, with a :class:`Placeholder` for each tensor that is not here; None if the
        block has not run."""
        layout = self.message.layout.blocks[block]
        if layout is None:
            return None
        numbers = iter(self.message.numbers[self.message.layout.first_numbers[block] :])
        return [
            Effect(
                effect.kind,
                effect.place,
                effect.structure.rebuild([self._leaf(part, block, numbers) for part in effect.structure.parts]),
            )
            for effect in layout
        ]

    def _leaf(self, part: Part, block: int, numbers: Iterator[float]) -> Any:
        match part:
            case Travels(value):
                if value not in self._tensors:
                    self._tensors[value] = self._own(value)
                return self._tensors[value]
            case TensorMeta():
                return Placeholder(part.empty("meta"), self._device, self._chain[block])
            case Number():
                return part.restore(next(numbers))
            case Opaque(kind):
                return Absent(kind, self._chain[block])
            case Constant(value):
                return value

    def _own(self, value: int) -> Tensor:
        """The tensor as user code may have it, which may write to it."""
        tensor = self.message.tensors[value]
        if value in self._changed:
            return tensor.clone()
        return _Identity.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]


class _Identity(torch.autograd.Function):
    """The same values and memory, but no leaf, which may not be written to in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()  # autograd does not see a view here, and a view of a leaf may not be written to either

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
