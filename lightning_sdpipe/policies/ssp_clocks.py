"""The clocks of stale synchronous parallel training: who may go on, without sockets, threads or time.

A pipeline that works in clock c has finished the clocks 0 to c − 1. It may begin clock c when every active pipeline has
finished clock c − s − 1, that is when nobody is more than s clocks behind it (SSP, Ho et al. 2013; the global bound of
HetPipe, Park et al. 2020). With s = 0 all pipelines work in the same clock (bulk synchronous parallel).
"""

from __future__ import annotations

from lightning_sdpipe.errors import ConfigurationError


class SSPClocks:
    """The clocks of pipelines, by number; each is active from its :meth:`join` to its :meth:`leave`.

    Args:
        staleness: s, the largest lead of one active pipeline over another, in clocks.
    """

    def __init__(self, staleness: int) -> None:
        if staleness < 0:
            raise ConfigurationError(f"staleness={staleness} is not allowed; give a number of clocks from 0.")
        self._staleness = staleness
        self._finished: dict[int, int] = {}

    def join(self, pipeline: int) -> None:
        """``pipeline`` takes part from now on, level with the one that is furthest behind."""
        if pipeline in self._finished:
            raise ValueError(f"pipeline {pipeline} joined twice")
        self._finished[pipeline] = min(self._finished.values(), default=0)

    def leave(self, pipeline: int) -> None:
        """``pipeline`` has ended its epoch: nobody waits for it any more."""
        del self._finished[pipeline]

    def finish(self, pipeline: int) -> None:
        """``pipeline`` has finished the clock that it worked in; it was allowed to work in it."""
        if not self.may_go_on(pipeline):
            raise ValueError(f"pipeline {pipeline} finished a clock that it was not allowed to begin")
        self._finished[pipeline] += 1

    def may_go_on(self, pipeline: int) -> bool:
        """Whether ``pipeline`` may begin its next clock."""
        return not self.awaited_by(pipeline)

    def awaited_by(self, pipeline: int) -> list[int]:
        """The pipelines that must finish a clock before ``pipeline`` may begin its next one."""
        least = self._finished[pipeline] - self._staleness
        return sorted(other for other, finished in self._finished.items() if finished < least)

    def finished(self, pipeline: int) -> int:
        """How many clocks ``pipeline`` has finished."""
        return self._finished[pipeline]

    @property
    def active(self) -> frozenset[int]:
        return frozenset(self._finished)
