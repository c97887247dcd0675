"""Exchanges among replicas that come and go, as methods of synchronisation see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

from lightning_sdpipe.exchange.moving import Pending
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.outer_state import NewBase, OuterState
from lightning_sdpipe.exchange.present_rounds import PresentRounds, Round
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.topology.groups import Replicas


class RoundsOfPresent(Protocol):
    """Rounds of gradients among replicas that come and go."""

    @property
    def rounds(self) -> PresentRounds:
        """Rounds that take the gradients of this worker."""

    @property
    def on_any_stage(self) -> Callable[[bool], bool]:
        """Returns a function that tells whether something is true on any stage of this pipeline. Every stage asks at
        the same point."""

    def arrange(
        self,
        parameters: Sequence[nn.Parameter],
        cap: int,
        watch: bool,
        exchange: Exchange,
        loss_scale: Callable[[], float],
    ) -> None:
        """Set the parameters whose gradients are averaged from now on, and how these travel; see
        :class:`~lightning_sdpipe.exchange.encoded_rounds.EncodedPresentRounds`."""

    def begin(self, update: int, weight: float) -> None:
        """Take part in the round of ``update``. Do not wait."""

    def finish(self) -> tuple[Round, float]:
        """Wait for the outcome; return it with the seconds until the members were known."""

    def check_equal(self, digest: int) -> None:
        """End the run if the digests of the replicas, which are all together, differ."""


class RoundsOfBases(Protocol):
    """Rounds of an outer optimizer among replicas that come and go."""

    def arrange(self, state: OuterState) -> None:
        """Set the state of this worker."""

    def run(self, tensors: Sequence[Tensor], group: Group) -> NewBase | None:
        """Compute the outcome of the round of ``group`` for the model ``tensors``; None if the round was dropped. Any
        thread may call it."""

    def accept(self, new: NewBase, adopt: Callable[[], None]) -> None:
        """Call ``adopt``, by which this worker takes over the outcome of the last round; the thread that trains calls
        it."""

    def meet(self, tensors: Sequence[Tensor], since: int) -> None:
        """Run a round of all replicas, which are together, unless none has trained since the last one; ``since`` is
        the number of updates that this worker has made."""


class ExchangesOfPairs(Protocol):
    """Exchanges of two replicas, either of which may be lost."""

    def run(self, group: Group, start: Callable[[Replicas], Pending]) -> bool:
        """Exchange between the two members of ``group``, all of it or nothing; return whether it was done. Any thread
        may call it. ``start`` begins the exchange between these replicas."""
