"""Decides when the members of a run wait for more pipelines, and when the run is over: rules 3, 4 and 7 of
:mod:`lightning_sdpipe.membership.membership`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.membership.members import Epoch, MemberDecision
from lightning_sdpipe.membership.pipelines import PipelineStart
from lightning_sdpipe.policies.events import Worker

REPEATED = 2
"""Pipelines that must fail with one exception for it to be taken for a bug of the script."""
NO_BUG = f"{SchedulerError.__name__}: "
"""Beginning of the reason of a failure that is not the script's."""
_NUMBER = re.compile(r"\d+")


class Ending:
    """The holds and the end of a run with these ``terms``."""

    def __init__(self, terms: ElasticConfig) -> None:
        self.terms = terms
        self.over: w.RunOver | None = None
        self.holds = ""
        """Reason why no pipeline may train now; empty if one may."""
        self.newest: w.Published | None = None
        self.resumed: w.Published | None = None
        """Checkpoint from which a new start was made."""
        self._held_since = math.inf
        self._failures: dict[int, str] = {}
        """Last failure of each pipeline, without its numbers (an index, a rank), until it passes a barrier with others
        again."""

    @property
    def may_resume(self) -> bool:
        """True if a new start can be made when no pipeline is left."""
        return self.terms.resume and self.newest is not None

    @property
    def hold_ends(self) -> float:
        """Time at which waiting for more pipelines ends the run."""
        return self._held_since + self.terms.hold_limit if self.holds else math.inf

    def resume(self) -> str:
        """Begin a new start; return the checkpoint file that it goes on from, empty if there is none."""
        self.resumed = self.newest = self.newest if self.may_resume else None
        return "" if self.resumed is None else self.resumed.path

    def ends(self, reason: str, worker: Worker | None = None, failed: bool = True) -> list[MemberDecision]:
        """End the run, unless it is over already."""
        if self.over is not None:
            return []
        self.over = w.RunOver(reason, failed, worker)
        return [self.over]

    def fails(self, pipeline: int, reason: str) -> list[MemberDecision]:
        """Note that ``pipeline`` has failed with an exception of the script; end the run if others failed with the
        same."""
        if reason.startswith(NO_BUG):
            return []
        self._failures[pipeline] = kind = _NUMBER.sub("#", reason)
        hit = [other for other, failure in self._failures.items() if failure == kind]
        if len(hit) < REPEATED:
            return []
        names = " and ".join(map(str, sorted(hit)))
        return self.ends(
            f"pipelines {names} failed with the same exception, which is taken for an error of the script: {reason}"
        )

    def meet(self, pipelines: Iterable[int]) -> None:
        """Forget the failures of these pipelines, which have come back and passed a barrier."""
        for pipeline in pipelines:
            self._failures.pop(pipeline, None)

    def have_finished(self, epoch: Epoch, here: Mapping[int, PipelineStart]) -> list[MemberDecision]:
        """End the run if all members of ``epoch`` that are left ``here`` have finished."""
        left = [here[i] for i in epoch.pipelines if i in here]
        if left and all(start.state == "done" for start in left):
            return self.ends("all pipelines have finished their training", failed=False)
        return []

    def are_lost(self, epoch: Epoch) -> list[MemberDecision]:
        """End the run if no pipeline is left that could go on."""
        if self.over is not None or not epoch.number or epoch.members or self.may_resume or self.terms.fixed:
            return []
        if self.newest is None:
            advice = "no checkpoint was written; start it again, under a new scheduler"
        else:
            advice = (
                f"the newest checkpoint is {self.newest.path}, after update {self.newest.update}; go on from it with "
                "fit(ckpt_path=...), under a new scheduler. With --resume a run does so by itself"
            )
        return self.ends(f"all pipelines are lost ({epoch.reason}); {advice}")

    def are_enough(self, members: Collection[int], more: int, now: float) -> list[MemberDecision]:
        """Decide whether ``members`` may train, with so many ``more`` that could join them."""
        count, least = len(members), self.terms.min_pipelines
        if count + more >= least or not count:  # without a member there is none to hold
            if not self.holds:
                return []
            self.holds, self._held_since = "", math.inf
            return [w.Held("")]
        there = ", ".join(map(str, sorted(members)))
        before, self.holds = self.holds, f"{count} of at least {least} pipelines are left ({there})"
        if not before:
            self._held_since = now
        return [w.Held(self.holds)] if self.holds != before else []

    def begin_anew(self) -> None:
        """Forget the end of a run, for the next run of a fixed roster."""
        self.over = self.newest = self.resumed = None
        self._failures.clear()
