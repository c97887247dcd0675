"""The present starts of pipelines, and two tables: the states of a start and of its processes.

A start that is gone leaves a tombstone, and does not come back. A job that claims the number of a present start is its
*rival*: it is let in when that start is gone, and refused when that start is heard of. All jobs of a run are alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_sdpipe.membership import members as w
from lightning_sdpipe.membership.elastic_config import MOST_PIPELINES, ElasticConfig
from lightning_sdpipe.membership.members import Member
from lightning_sdpipe.membership.state_transfers import StateTransfers
from lightning_sdpipe.policies.events import Worker

TOMBSTONES = 4096
"""Most tombstones that are remembered."""


def _read(text: str) -> Mapping[str, Mapping[str, str]]:
    """Read a table of states: for each state, the next state by input. An input whose cell in ``text`` is empty cannot
    occur."""
    (_, *happens), *rows = ([cell.strip() for cell in line.split("|")] for line in text.strip().splitlines())
    return {state: {what: after for what, after in zip(happens, cells, strict=True) if after} for state, *cells in rows}


# "returns": to a restarted scheduler.
PROCESSES = _read("""
    a process | enrols | finishes | ends
    unknown   | here   |          |
    here      | here   | done     | gone
    done      | done   | done     | done
    gone      |        |          |
""")
PIPELINES = _read("""
    a start  | a stage enrols | the last enrols | returns | begins | finds a donor | has it | loses it | finishes | ends
    absent   | arriving       | complete        | member  |        |               |        |          |          |
    arriving | arriving       | complete        |         |        |               |        |          |          | gone
    complete |                |                 |         | member | receiving     |        |          |          | gone
    receiving|                |                 |         |        |               | member | complete |          | gone
    member   |                |                 |         |        |               |        |          | done     | gone
    done     |                |                 |         |        |               |        |          | done     | gone
    gone     |                |                 |         |        |               |        |          |          |
""")


class PipelineStart:
    """One start of a pipeline's job."""

    __slots__ = ("arrived", "fresh", "incarnation", "processes", "since", "state")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.state = "absent"
        self.processes: dict[int, str] = {}
        """State of each stage's process."""
        self.arrived = 0.0
        """Time at which all stages were there."""
        self.fresh = False
        self.since = 0
        """Number of the epoch in which it became a member, at the latest."""

    def move(self, happens: str) -> None:
        """Change the state as :data:`PIPELINES` says; raise KeyError where that has no entry."""
        self.state = PIPELINES[self.state][happens]

    def move_process(self, stage: int, happens: str) -> None:
        """Change the state of the process of ``stage`` as :data:`PROCESSES` says."""
        self.processes[stage] = PROCESSES[self.processes.get(stage, "unknown")][happens]

    @property
    def member(self) -> bool:
        """True if the pipeline takes part."""
        return self.state in ("member", "done")

    @property
    def complete(self) -> bool:
        """True if all stages are there, and the pipeline could take part."""
        return self.state in ("complete", "receiving")

    @property
    def finishes(self) -> bool:
        """True if one of the stages has finished."""
        return "done" in self.processes.values()


class Roster:
    """The starts that are there, their rivals, and the tombstones of those that are gone. Each pipeline has
    ``num_stages`` stages, unless ``depths`` gives each its own number."""

    def __init__(self, num_stages: int, depths: Sequence[int] = ()) -> None:
        self.here: dict[int, PipelineStart] = {}
        self._num_stages, self._depths = num_stages, depths
        self._rivals: dict[int, dict[Worker, w.Enrolled]] = {}
        self._tombs: dict[Member, str] = {}

    # ------------------------------------------------------------------- looks

    def is_member(self, pipeline: int, incarnation: int) -> bool:
        """Return whether that start of ``pipeline`` is in the run."""
        here = self.here.get(pipeline)
        return here is not None and here.member and here.incarnation == incarnation

    def was_member(self, pipeline: int, epoch: int) -> bool:
        """Return whether ``pipeline`` is a member and was one, by the same start, in the epoch of that number."""
        here = self.here.get(pipeline)
        return here is not None and here.member and here.since <= epoch

    def has(self, worker: Worker, incarnation: int) -> bool:
        """Return whether that process has enrolled, in a start of its pipeline that is not gone."""
        here = self.here.get(worker.pipeline)
        return here is not None and here.incarnation == incarnation and worker.stage in here.processes

    def depth(self, pipeline: int) -> int:
        """Return the number of stages of ``pipeline``."""
        return self._depths[pipeline] if self._depths else self._num_stages

    def absent(self, pipeline: int) -> list[int]:
        """Return the missing stages of ``pipeline``, which is there."""
        return sorted(set(range(self.depth(pipeline))) - self.here[pipeline].processes.keys())

    def processes(self) -> dict[Worker, int]:
        """Return all processes that are there, or have finished, and their incarnations."""
        return {Worker(stage, i): here.incarnation for i, here in self.here.items() for stage in here.processes}

    def complete(self) -> Mapping[int, PipelineStart]:
        """Return the pipelines that could start."""
        return {i: here for i, here in self.here.items() if here.complete}

    def tombstone(self, pipeline: int, incarnation: int) -> str | None:
        """Return why that start of ``pipeline`` must not come back, None if it may."""
        return self._tombs.get(Member(pipeline, incarnation))

    def buried(self, most: int) -> list[Member]:
        """Return the last ``most`` starts that must not come back."""
        return [*self._tombs][-most:]

    @property
    def claimed(self) -> Collection[int]:
        """Pipelines that are there, and whose number another start has claimed."""
        return self._rivals.keys()

    def state(self, pipeline: int, transfers: StateTransfers, leads: bool, out: bool) -> str:
        """Describe the state of ``pipeline``, which is there, for people; ``out`` says that others cannot reach it."""
        here, donation = self.here[pipeline], transfers.of(pipeline)
        if here.finishes:
            return "finished"
        if here.member:
            return "leader" if leads else "member"
        if donation is not None:
            return f"receives from {donation.donor}"
        if absent := self.absent(pipeline):
            return f"waits for its stages {absent}"
        return "waits, since others could not reach it" if out else "waits"

    # ----------------------------------------------------------- coming and going

    def enrols(self, worker: Worker, incarnation: int, now: float) -> None:
        """Enrol a process of a start that is there, or of a new one."""
        here = self.here.setdefault(worker.pipeline, PipelineStart(incarnation))
        last = len(here.processes.keys() | {worker.stage}) == self.depth(worker.pipeline)
        here.move("the last enrols" if last else "a stage enrols")
        here.move_process(worker.stage, "enrols")
        if last:
            here.arrived = now

    def returns(self, member: Member, now: float, since: int) -> None:
        """Bring back a member, all of whose processes have returned to a restarted scheduler; it was one by epoch
        ``since``."""
        here = self.here[member.pipeline] = PipelineStart(member.incarnation)
        here.move("returns")
        for stage in range(self.depth(member.pipeline)):
            here.move_process(stage, "enrols")
        here.arrived, here.since = now, since

    def goes(self, pipeline: int, reason: str) -> None:
        """Remove that start of ``pipeline``, which is over; its rivals ask again."""
        here = self.here.pop(pipeline)
        here.move("ends")
        self.bury(Member(pipeline, here.incarnation), reason)
        self._rivals.pop(pipeline, None)

    def bury(self, member: Member, reason: str) -> None:
        """Leave a tombstone, so that the start ``member`` cannot come back."""
        self._tombs[member] = reason
        while len(self._tombs) > TOMBSTONES:
            del self._tombs[next(iter(self._tombs))]

    def claims(self, event: w.Enrolled) -> bool:
        """Return whether the job of ``event`` claims the number of a present start. If so, it waits."""
        here = self.here.get(event.worker.pipeline)
        if here is None or here.incarnation == event.incarnation:
            return False
        self._rivals.setdefault(event.worker.pipeline, {})[event.worker] = event
        return True

    def rival_ends(self, worker: Worker, incarnation: int) -> None:
        """Forget a process, if it is a rival's."""
        rivals = self._rivals.get(worker.pipeline, {})
        if worker in rivals and rivals[worker].incarnation == incarnation:
            del rivals[worker]
        if not rivals:
            self._rivals.pop(worker.pipeline, None)

    def take_rivals(self, pipeline: int) -> Collection[w.Enrolled]:
        """Take the enrolments that have claimed the number of ``pipeline``; they wait no longer."""
        return self._rivals.pop(pipeline, {}).values()

    def validate(self) -> None:
        """Raise AssertionError if the roster contradicts itself."""
        for member in self._tombs:
            here = self.here.get(member.pipeline)
            assert here is None or here.incarnation != member.incarnation, member
        for pipeline, here in self.here.items():
            assert here.state not in ("absent", "gone"), pipeline
            assert (here.state == "arriving") == bool(self.absent(pipeline)), pipeline
            done = all(state == "done" for state in here.processes.values())
            assert done == (here.state == "done"), pipeline


class EntryRules:
    """Decides which processes may enter a run of pipelines of ``num_stages`` stages, with these ``terms``."""

    def __init__(self, num_stages: int, terms: ElasticConfig) -> None:
        self.expected: dict[str, str] | None = None
        """Fingerprint of all jobs, once one has come."""
        self._num_stages, self._depths = num_stages, terms.depths
        self._fixed = terms.fixed
        self._most = terms.min_pipelines if terms.fixed else MOST_PIPELINES

    def binds(self, event: w.Enrolled | w.Resumed, anew: bool = False) -> None:
        """Bind all jobs to the fingerprint of ``event`` if it is the first, or if ``anew``."""
        if self.expected is None or anew:
            self.expected = dict(event.fingerprint)

    def forget_alone(self, worker: Worker, roster: Roster) -> None:
        """Release the fingerprint if nothing else has come: a process that was refused, or died, binds no other."""
        here = roster.here.items()
        if not any(i != worker.pipeline or start.processes.keys() - {worker.stage} for i, start in here):
            self.expected = None

    def refusal(self, event: w.Enrolled | w.Resumed, over: w.RunOver | None) -> str:
        """Return why the process cannot be taken; empty if it can."""
        worker, stages = event.worker, self._num_stages
        if 0 <= worker.pipeline < len(self._depths):
            stages = self._depths[worker.pipeline]
        if not 0 <= worker.stage < stages:
            return (
                f"worker {worker} does not exist: this scheduler serves pipelines of {stages} stages, 0 to "
                f"{stages - 1}; start the job with as many processes, or the scheduler with another --stages"
            )
        if not 0 <= worker.pipeline < self._most and self._fixed:
            return (
                f"worker {worker} does not exist: this scheduler serves {self._most} pipelines, 0 to {self._most - 1}; "
                "start the job with as many, or the scheduler with another --pipelines"
            )
        if not 0 <= worker.pipeline < self._most:
            return f"pipeline {worker.pipeline} is not allowed; give SDPIPE_PIPELINE from 0 to {self._most - 1}"
        if over is not None:
            return f"the run is over: {over.reason}; start a new scheduler for the next one"
        if self._fixed and not w.is_fixed(event.fingerprint):
            return (
                "this scheduler belongs to a run whose pipelines do not come and go; start `sdpipe scheduler` for this "
                "job, whose pipeline is one of an elastic run"
            )
        if not self._fixed and w.is_fixed(event.fingerprint):
            return (
                "it serves an elastic run, and this job's pipelines do not come and go; set SDPIPE_PIPELINE, or give "
                "it a scheduler of its own"
            )
        return "" if self.expected is None else _differences(event.fingerprint, self.expected)


def _differences(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Describe how a job differs from those of the run, for people; empty if it does not."""
    names = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if not names:
        return ""
    said = "; ".join(
        f"{name}: found {found.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}" for name in names
    )
    return f"this job differs from those that train ({said}); start it as they were started, or with a new scheduler"
