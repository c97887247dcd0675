"""What all workers of DiLoCo know: the common base, and the momentum of its outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.algorithms.outer import Nesterov, OuterOptimizer
from lightning_sdpipe.exchange.common_reference import BROKEN_OFF, CommonReference
from lightning_sdpipe.exchange.moving import pieces_of
from lightning_sdpipe.exchange.payloads import Payload


class OuterModel(CommonReference):
    """Models are exchanged as what they have moved by since the base, to which an optimizer of its own is applied.

    Memory: the base, and the momentum if there is one.

    Args:
        payload: any.
        seed: of stochastic rounding.
        nesterov: the outer optimizer's values.
        mix: the share that a worker keeps of its own model.
    """

    def __init__(self, payload: Payload, seed: int, nesterov: Nesterov, mix: float) -> None:
        super().__init__(payload, seed)
        self._nesterov = nesterov
        self.mix = mix
        self.outer: list[OuterOptimizer] = []
        self._is_common = False

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """All workers have the same ``tensors``, which are the base from now on. A momentum stays, unless the tensors
        have other shapes than before."""
        self.drop()
        self._met = None
        self._is_common = True
        pieces = list(pieces_of(tensors))
        if [(p.shape, p.dtype) for p in pieces] == [(o.base.shape, o.base.dtype) for o in self.outer]:
            for outer, piece in zip(self.outer, pieces, strict=True):
                outer.base.copy_(piece)
        else:
            self.outer = [OuterOptimizer(self._nesterov, piece) for piece in pieces]

    def aborted(self) -> None:
        """Some members may have taken over what others have not: nothing is common until :meth:`begin`."""
        self.drop()
        self._is_common = False

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        if not self._is_common:
            raise WorkerFailedError(BROKEN_OFF)
        super().prepared(piece, number)
        return piece - self.outer[number].base

    def absorbed(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        self.outer[number].step(outcome)
        self.take_over(piece, number)

    def take_over(self, piece: Tensor, number: int) -> None:
        """Replaces a piece of the model by the base, but for the share that is kept."""
        piece.lerp_(self.outer[number].base, 1 - self.mix)

    @property
    def momentum(self) -> list[Tensor]:
        """Of the outer optimizer, by piece; none without one."""
        return [state["momentum"] for outer in self.outer if "momentum" in (state := outer.state_dict())]

    def load_momentum(self, momenta: Sequence[Tensor]) -> None:
        """Copies the momenta of the tensors that :meth:`begin` was given."""
        for outer, piece in zip(self.outer, pieces_of(momenta), strict=True):
            outer.load_state_dict({"base": outer.base, "momentum": piece})
