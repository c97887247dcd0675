"""Where a worker of an elastic job is beside the replicas of its stage; as
:class:`~lightning_sdpipe.sync.rendezvous.Rendezvous`, by meetings instead of collectives."""

from __future__ import annotations

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.sync.rendezvous import Meeting, Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from lightning_sdpipe.worker.elastic.meetings import Meetings


class ElasticRendezvous(Rendezvous):
    """One worker's. Nobody is waited for when it sets out: who comes later finds its groups then."""

    def __init__(self, sync: Synchronizer, meetings: Meetings) -> None:
        super().__init__(sync)
        self._meetings = meetings

    def wait_for_others(self, position: int) -> Meeting:
        """Never happens: data are dealt."""
        raise ConfigurationError("In an elastic job data are dealt, so no pipeline runs out of its own.")

    def _meet_others(self, position: int) -> None:
        self._meetings.meet()

    def _leave(self) -> None:
        self._sync.arrive()  # first: who has left cannot try again what breaks
        super()._leave()

    def _set_out(self) -> None:
        self._meetings.set_out()
        self.rejoin()
