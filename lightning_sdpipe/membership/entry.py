"""Which processes a run takes: their stage and pipeline exist, and their jobs are alike."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_sdpipe.membership.elastic_config import MOST_PIPELINES, ElasticConfig
from lightning_sdpipe.membership.members import Enrolled, Resumed, RunOver
from lightning_sdpipe.membership.pipelines import Roster
from lightning_sdpipe.policies.events import Worker


class EntryRules:
    """Of a run of pipelines of ``num_stages`` stages with these ``terms``."""

    def __init__(self, num_stages: int, terms: ElasticConfig) -> None:
        self.expected: dict[str, str] | None = None
        """The fingerprint of all jobs, once one has come."""
        self._num_stages = num_stages
        self._fixed = terms.fixed
        self._most = terms.min_pipelines if terms.fixed else MOST_PIPELINES

    def binds(self, event: Enrolled | Resumed, anew: bool = False) -> None:
        """The process of ``event`` is taken; the others must be like the first, or like this one ``anew``."""
        if self.expected is None or anew:
            self.expected = dict(event.fingerprint)

    def forget_alone(self, worker: Worker, roster: Roster) -> None:
        """Nothing has started: a process that was refused, or died, binds no other."""
        here = roster.here.items()
        if not any(i != worker.pipeline or start.processes.keys() - {worker.stage} for i, start in here):
            self.expected = None

    def refusal(self, event: Enrolled | Resumed, over: RunOver | None) -> str:
        """Why the process cannot be taken; empty if it can."""
        worker, stages = event.worker, self._num_stages
        if not 0 <= worker.stage < stages:
            return (
                f"worker {worker} does not exist: this scheduler serves pipelines of {stages} stages, 0 to "
                f"{stages - 1}; start the job with as many processes, or the scheduler with another --num-stages"
            )
        if not 0 <= worker.pipeline < self._most and self._fixed:
            return (
                f"worker {worker} does not exist: this scheduler serves {self._most} pipelines, 0 to {self._most - 1}; "
                "start the job with as many, or the scheduler with another --num-pipelines"
            )
        if not 0 <= worker.pipeline < self._most:
            return f"pipeline {worker.pipeline} is not allowed; give SDPIPE_PIPELINE from 0 to {self._most - 1}"
        if over is not None:
            return f"the run is over: {over.reason}; start a new scheduler for the next one"
        return "" if self.expected is None else differences(event.fingerprint, self.expected)


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """In what a job differs from those of the run, for people; empty if in nothing."""
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if not names:
        return ""
    said = "; ".join(
        f"{name}: found {found.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}" for name in names
    )
    return f"this job differs from those that train ({said}); start it as they were started, or with a new scheduler"
