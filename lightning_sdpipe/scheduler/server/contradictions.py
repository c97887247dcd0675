"""Checks for well-typed requests that no client of this run would send: they are refused before any desk hears of
them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.errors import shape
from lightning_sdpipe.membership.members import Epoch, Met, is_fixed
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import RefusedEvent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m

MOST_ENTRIES = 64
"""Most entries of a fingerprint."""
MOST_CHARACTERS = 1 << 14
"""Most characters of all names and values of a fingerprint."""


class Extent:
    """The numbers of stages and pipelines of the run.

    More pipelines may come to an elastic run than were planned. ``depths`` gives the stages of each pipeline where
    groups are of whole pipelines; the workers of a pipeline are then answered together.
    """

    def __init__(self, num_stages: int, num_pipelines: int, depths: Sequence[int] = ()) -> None:
        self.planned = num_stages, num_pipelines, *depths
        self.num_stages = num_stages
        self.num_pipelines = num_pipelines
        self.depths = tuple(depths)

    @property
    def num_workers(self) -> int:
        """Number of the workers of a run whose pipelines do not come and go."""
        return sum(self.depths) or self.num_stages * self.num_pipelines

    def check_mesh(self, request: m.Hello | m.Join) -> None:
        """Raise RefusedEvent if ``request`` comes from a run of another size."""
        theirs = request.mesh
        if theirs is not None and theirs != self.planned:
            raise RefusedEvent(
                f"it serves a run of {_said(self.planned)}, and worker {request.worker} belongs to one of "
                f"{_said(theirs)}; give the address of its own scheduler, or start this one with {_started(theirs)}"
            )

    def represented_by(self, members: Sequence[Worker]) -> Sequence[Worker]:
        """Return the workers that ``members`` of a group represent: all of their pipelines, where groups are of whole
        pipelines, and else themselves."""
        if not self.depths:
            return members
        return [Worker(j, member.pipeline) for member in members for j in range(self.depths[member.pipeline])]

    def stands_for(self, worker: Worker) -> Worker:
        """Return the group member that represents ``worker``."""
        return Worker(0, worker.pipeline) if self.depths else worker


def _said(mesh: m.Shape) -> str:
    """Describe the mesh for people."""
    stages, pipelines, *depths = mesh
    if depths:
        return f"{pipelines} pipelines of {', '.join(map(str, depths))} stages"
    return shape(stages, pipelines)


def _started(mesh: m.Shape) -> str:
    """Return the options with which a scheduler serves the mesh."""
    stages, pipelines, *depths = mesh
    return f"--stages {','.join(map(str, depths))}" if depths else f"--stages {stages} --pipelines {pipelines}"


def contradiction(request: m.Request | e.Request, extent: Extent, most_pipelines: int) -> str | None:
    """Return why no client of a run of that ``extent``, with at most ``most_pipelines``, would send ``request``; None
    if one would."""
    worker = request.worker
    exists = worker.pipeline < most_pipelines and worker.stage < (
        extent.depths[worker.pipeline] if extent.depths else extent.num_stages
    )
    if not exists and not (isinstance(request, e.Enrol) and request.resumes is None):  # its refusal names the remedy
        return f"worker {worker} does not exist in {_said(extent.planned)}"
    match request:
        case m.Ready():  # most requests are
            return None
        case m.AskLease(segment=segment) | e.Beat(dealt=(segment, _)):
            return _of_leases(segment, ()) or ("it has no batches" if segment.start == segment.stop else None)
        case e.Enrol(fingerprint=fingerprint, resumes=resumes, heard_of=heard_of):
            wrong = _of_fingerprint(fingerprint)
            if not wrong and resumes is not None and is_fixed(fingerprint):
                wrong = "it was in an ordinary run, which has ended with its scheduler"
            if not wrong and heard_of is not None:
                wrong = _of_epoch(heard_of, most_pipelines)
            return wrong if wrong or resumes is None else _of_resumes(resumes, worker, most_pipelines)
        case e.TellSnapshot(transfer=""):
            return "it gives its state to no transfer"
        case e.Meet(key=""):
            return "it waits at no barrier"
    return None


def _of_resumes(resumes: e.Resumes, worker: Worker, most_pipelines: int) -> str | None:
    wrong = [_of_epoch(resumes.epoch, most_pipelines), *(_of_met(each, worker) for each in resumes.met)]
    wrong += [_of_leases(book.segment, book.leases) for book in (resumes.book,) if book is not None]
    return next(filter(None, wrong), None)


def _of_epoch(epoch: Epoch, most_pipelines: int) -> str | None:
    if not epoch.number:
        return "it was in a run that has not begun"
    if len({member.pipeline for member in epoch.members}) < len(epoch.members):
        return f"a pipeline is twice among the members {epoch.members}"
    if any(pipeline >= most_pipelines for pipeline in epoch.pipelines):
        return f"the members {epoch.members} are not among {most_pipelines} pipelines"
    return None


def _of_leases(segment: Segment, leases: Sequence[Lease]) -> str | None:
    for start, stop in ((segment.start, segment.stop), *((lease.start, lease.stop) for lease in leases)):
        if start > stop:
            return f"batches {start} to {stop} are none"
    if any(lease.segment != segment for lease in leases):
        return f"it tells of leases in other batches than {segment}"
    return None


def _of_met(met: Met, worker: Worker) -> str | None:
    if len(met.values) != len(met.pipelines) or list(met.pipelines) != sorted(set(met.pipelines)):
        return f"{len(met.pipelines)} pipelines passed a barrier with {len(met.values)} values, or are not in order"
    if met.stage != worker.stage or not met.key:
        return f"a barrier of stage {met.stage} at {met.key!r} is none of stage {worker.stage}"
    return None


def _of_fingerprint(fingerprint: dict[str, str]) -> str | None:
    if len(fingerprint) > MOST_ENTRIES or "" in fingerprint:
        return f"a fingerprint has 1 to {MOST_ENTRIES} named values"
    if sum(len(name) + len(value) for name, value in fingerprint.items()) > MOST_CHARACTERS:
        return f"a fingerprint has at most {MOST_CHARACTERS} characters"
    return None
