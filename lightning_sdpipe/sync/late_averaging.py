"""A worker's half of policies that hear of a worker when it has stepped: P-Reduce, Algorithm 2."""

from __future__ import annotations

from lightning_sdpipe.sync.model_averaging import ModelAveraging
from lightning_sdpipe.sync.synchronizer import Replica


class LateAveraging(ModelAveraging):
    """Says that it is ready after the optimizer's step, when its model can be averaged at once."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._due: int | None = None

    def announce(self, iteration: int) -> None:
        """Does not ask the scheduler yet: the others of the group would wait for the backward that remains."""
        self._due = iteration

    @property
    def shares_next(self) -> bool:
        """See the base class."""
        return self._due is not None

    def synchronise(self) -> None:
        """Tells the scheduler that this worker is ready, and averages with the group that it is told."""
        if self._due is not None:
            super().announce(self._due)
            self._due = None
        super().synchronise()
