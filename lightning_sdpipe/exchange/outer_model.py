"""State that all workers of DiLoCo share: the common base, and the momentum of its outer optimizer.

DiLoCo is LocalSGD with a separate optimizer for the rounds (Douillard et al. 2023); it may run by fragments (Streaming
DiLoCo, Douillard et al. 2025).

Workers train alone for ``every`` updates from a common base. The mean movement of their models is the negative of an
*outer gradient* Δ, to which Nesterov's momentum is applied:

m ← μ m + Δ, base ← base − lr (Δ + μ m)

With lr = 1 and μ = 0 the base becomes the mean: LocalSGD. The base and m are the same on all workers and belong in
checkpoints. A sync point is an early round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError, check_integer, check_number
from lightning_sdpipe.exchange.moving import pieces_of
from lightning_sdpipe.exchange.payloads import Payload
from lightning_sdpipe.exchange.references import BROKEN_OFF, CommonReference


@dataclass(frozen=True)
class Nesterov:
    """Options of the outer optimizer: torch's SGD with ``nesterov=True``."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        allowed = "a finite number above 0; 1 with momentum=0 is plain averaging"
        check_number("lr", self.lr, allowed, above=0, below=math.inf)
        check_number("momentum", self.momentum, "a number from 0 and below 1", least=0, below=1)


AVERAGE = Nesterov(lr=1.0, momentum=0.0)


class OuterOptimizer:
    """The base of one flat buffer, and its momentum: twice the buffer's memory, once without momentum.

    Args:
        nesterov: its options.
        buffer: the model that all workers start from.
    """

    def __init__(self, nesterov: Nesterov, buffer: Tensor) -> None:
        self._nesterov = nesterov
        self.base = buffer.clone()
        self.momentum = torch.zeros_like(buffer) if nesterov.momentum else None  # −m

    @torch.no_grad()
    def step(self, moved: Tensor) -> None:
        """Do the step of one round.

        Args:
            moved: −Δ, the mean movement of the workers' models since the base.
        """
        self.base.add_(moved, alpha=self._nesterov.lr)
        if self.momentum is not None:
            self.momentum.mul_(self._nesterov.momentum).add_(moved)
            self.base.add_(self.momentum, alpha=self._nesterov.lr * self._nesterov.momentum)

    @property
    def tensors(self) -> list[Tensor]:
        """The base and, with momentum, −m, by reference."""
        return [self.base] if self.momentum is None else [self.base, self.momentum]


@dataclass(frozen=True)
class Fragments:
    """The schedule of a model's fragments in rounds, which spreads traffic over time.

    Args:
        every: updates between two rounds of the same fragment.
        fragments: number of parts, whose rounds begin at even distances; 1 is DiLoCo.
        delay: updates during which the mean may travel while workers train on.
        mix: the share that a worker keeps of its own fragment when the base arrives; 0 adopts the base, and loses the
            effect of ``delay`` updates.
    """

    every: int
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0

    def __post_init__(self) -> None:
        every = self.every
        check_integer("every", every, 1, "updates")
        check_number("fragments", self.fragments, f"from 1 to {every=}", least=1, most=every)
        check_number("delay", self.delay, f"updates from 0, below {every=}", least=0, below=every)
        check_number("mix", self.mix, "a share from 0 and below 1, such as 0.5", least=0, below=1)

    def begin(self, updates: int) -> list[int]:
        """Return the fragments whose rounds begin after this number of updates, which count from 1."""
        due = [self.every * (fragment + 1) // self.fragments for fragment in range(self.fragments)]
        return [k for k, first in enumerate(due) if updates >= first and (updates - first) % self.every == 0]

    def end(self, updates: int) -> list[int]:
        """Return the fragments whose bases are adopted after this number of updates."""
        return self.begin(updates - self.delay)


class OuterModel(CommonReference):
    """A codec for models. It exchanges how they have moved from the base, where they were last equal, and which an
    outer optimizer updates.

    Memory: the base, and the momentum if there is one.

    Args:
        payload: any payload.
        seed: seed of stochastic rounding.
        nesterov: options of the outer optimizer; by default models become their mean.
        mix: the share that a worker keeps of its own model.
    """

    def __init__(self, payload: Payload, seed: int, nesterov: Nesterov = AVERAGE, mix: float = 0.0) -> None:
        super().__init__(payload, seed)
        self._nesterov = nesterov
        self.mix = mix
        self.outer: list[OuterOptimizer] = []
        self._is_common = False

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Set the base: all workers have the same ``tensors`` now. A momentum stays, unless the tensors have other
        shapes than before."""
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
        """Mark the base as not common until :meth:`begin`, since some members may have taken over what others have
        not."""
        self.drop()
        self._is_common = False

    def prepared(self, piece: Tensor, number: int) -> Tensor:
        if not self._is_common:
            raise WorkerFailedError(BROKEN_OFF)
        super().prepared(piece, number)
        return piece - self.outer[number].base

    def apply(self, piece: Tensor, number: int, outcome: Tensor) -> None:
        self.outer[number].step(outcome)
        self.take_over(piece, number)

    def state(self) -> list[Tensor]:
        """Return the base and its momentum, piece by piece, by reference."""
        return [tensor for outer in self.outer for tensor in outer.tensors]

    def take_over(self, piece: Tensor, number: int) -> None:
        """Replace a piece of the model by the base, but for the share that is kept."""
        base = self.outer[number].base
        piece.lerp_(base, 1 - self.mix) if self.mix else piece.copy_(base)

    def copied_base(self) -> list[Tensor]:
        """Return copies of the base on the CPU, by piece; none before :meth:`begin`."""
        return [outer.base.detach().cpu().clone() for outer in self.outer]

    @property
    def momentum(self) -> list[Tensor]:
        """Momentum of the outer optimizer, by piece; none without one."""
        return [outer.momentum for outer in self.outer if outer.momentum is not None]

    def load_momentum(self, momenta: Sequence[Tensor]) -> None:
        """Copy the momenta of the tensors that :meth:`begin` was given."""
        for outer, piece in zip(self.outer, pieces_of(momenta), strict=True):
            if outer.momentum is not None:
                outer.momentum.copy_(piece)
