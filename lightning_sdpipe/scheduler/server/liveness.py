"""Which processes of a run are there, by what connections, and when each was heard of last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from lightning_sdpipe.membership.silence import Silence
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.server.lifelines import Lines

logger = logging.getLogger(__name__)


class Liveness:
    """``limit`` is in seconds; what silence for so long means is decided by
    :class:`~lightning_sdpipe.membership.silence.Silence`, to which ``unit`` names what falls silent together."""

    def __init__(self, limit: float, lines: Lines, now: float, unit: Callable[[Worker], object]) -> None:
        self.lines = lines
        self.incarnations: dict[Worker, int] = {}
        """Of those that are there."""
        self._silence = Silence(limit, now, unit)

    @property
    def next_look(self) -> float:
        """When somebody may have been silent for too long."""
        return self._silence.due

    @property
    def lost(self) -> Mapping[Worker, float]:
        """Those of which nothing has come since they were lost, and when something came last."""
        return self._silence.lost

    def comes(self, worker: Worker, incarnation: int, now: float) -> None:
        """That process is there."""
        self.incarnations[worker] = incarnation
        self.hear(worker, now)

    def hear(self, worker: Worker, now: float) -> None:
        """Something of ``worker`` came."""
        self._silence.hear(worker, now)

    def goes(self, pipeline: int, incarnation: int) -> list[Worker]:
        """That start of ``pipeline`` is over; its workers."""
        gone = [
            worker for worker, own in self.incarnations.items() if worker.pipeline == pipeline and own == incarnation
        ]
        for worker in gone:
            self.leaves(worker)
        self.lines.forget(pipeline, incarnation)
        return gone

    def leaves(self, worker: Worker) -> None:
        """Its process is not there any more."""
        self.incarnations.pop(worker, None)
        self._silence.forget(worker)

    def of(self, pipelines: Collection[int]) -> list[Worker]:
        """Those of ``pipelines`` that are there."""
        among = set(pipelines)
        return [worker for worker in self.incarnations if worker.pipeline in among]

    def silent(
        self, now: float, members: Collection[object], replaced: Collection[int]
    ) -> list[tuple[Worker, int, float]]:
        """Who is lost because of silence, and for how many seconds that has lasted; see
        :meth:`~lightning_sdpipe.membership.silence.Silence.look`. Call it when :attr:`next_look` has come."""
        silence = self._silence
        before, lost = silence.of_all_since, silence.look(now, members, replaced)
        if before is None and silence.of_all_since is not None:
            logger.warning(
                "nothing was heard of any worker for %.1f s: this scheduler seems to be cut off from them; none is "
                "called lost for that",
                now - silence.of_all_since,
            )
        return [(worker, self.incarnations[worker], seconds) for worker, seconds in lost]

    def waits(self, now: float) -> str:
        """Since when nothing has come of anybody, for people, if that is for long."""
        since = self._silence.of_all_since
        return "" if since is None else f"nothing was heard of any worker for {now - since:.0f} s"
