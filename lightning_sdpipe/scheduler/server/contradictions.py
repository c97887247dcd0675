"""What a well-typed request can say that no client of this run would: it is refused before anything hears of it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_sdpipe.dealing.leases import Lease, Segment
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.policies.decisions import BrokenRule, Group, check_group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import RefusedEvent
from lightning_sdpipe.scheduler import membership_protocol as e
from lightning_sdpipe.scheduler import protocol as m

MOST_ENTRIES = 64
"""Of a fingerprint."""
MOST_CHARACTERS = 1 << 14
"""Of all names and values of a fingerprint."""


class Extent:
    """How many stages and pipelines the run has; more pipelines may come to an elastic one than were planned."""

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        self.planned = num_stages, num_pipelines
        self.num_stages = num_stages
        self.num_pipelines = num_pipelines

    def check_mesh(self, request: m.Hello | m.Join) -> None:
        """Raise RefusedEvent if ``request`` comes from a run of another size."""
        if request.mesh is not None and request.mesh != self.planned:
            (stages, pipelines), (theirs, its) = self.planned, request.mesh
            raise RefusedEvent(
                f"it serves a run of {stages} stages × {pipelines} pipelines, and worker {request.worker} belongs to "
                f"one of {theirs} × {its}; give the address of its own scheduler, or start this one with "
                f"--num-stages {theirs} --num-pipelines {its}"
            )

    def check_exists(self, worker: Worker) -> None:
        """Raise RefusedEvent if there is no such ``worker``."""
        stages, pipelines = self.num_stages, self.num_pipelines
        if not (0 <= worker.stage < stages and 0 <= worker.pipeline < pipelines):
            raise RefusedEvent(f"worker {worker} does not exist in {stages} stages × {pipelines} pipelines")


def contradiction(request: m.Request | e.Request, num_stages: int, most_pipelines: int) -> str | None:
    """Why ``request`` cannot be meant in a run of ``num_stages`` stages and so many pipelines; None if it can."""
    worker = request.worker
    exists = worker.stage < num_stages and worker.pipeline < most_pipelines
    if not exists and not (isinstance(request, e.Enrol) and request.resumes is None):  # whose refusal says what to set
        return f"worker {worker} does not exist in {num_stages} stages × at most {most_pipelines} pipelines"
    match request:
        case m.AskLease(segment=segment) | e.Beat(dealt=(segment, _)):
            return _of_leases(segment, ())
        case e.AskRegroup(group=group):
            return _of_group(group, worker, most_pipelines)
        case e.Enrol(fingerprint=fingerprint, resumes=resumes):
            wrong = _of_fingerprint(fingerprint)
            return wrong if wrong or resumes is None else _of_resumes(resumes, worker, most_pipelines)
        case e.TellSnapshot(transfer=""):
            return "it gives its state to no transfer"
        case e.Meet(key=""):
            return "it meets at no key"
    return None


def _of_resumes(resumes: e.Resumes, worker: Worker, most_pipelines: int) -> str | None:
    epoch = resumes.epoch
    if len({member.pipeline for member in epoch.members}) < len(epoch.members):
        return f"a pipeline is twice among the members {epoch.members}"
    if any(pipeline >= most_pipelines for pipeline in epoch.pipelines):
        return f"the members {epoch.members} are not among {most_pipelines} pipelines"
    wrong = [_of_met(each, worker) for each in resumes.met]
    wrong += [_of_group(group, worker, most_pipelines) for _, group in resumes.regrouped]
    wrong += [_of_answer(answer, worker, most_pipelines) for answer in resumes.answers]
    wrong += [_of_leases(book.segment, book.leases) for book in (resumes.book,) if book is not None]
    return next(filter(None, wrong), None)


def _of_group(group: Group, worker: Worker, most_pipelines: int) -> str | None:
    try:
        check_group(group, 0)
    except BrokenRule as error:
        return str(error)
    named = {*group.members, *group.passive, *(other for others in group.neighbours for other in others)}
    if any(other.stage != worker.stage or other.pipeline >= most_pipelines for other in named):
        return f"{group} has members that are not of stage {worker.stage}"
    return None


def _of_answer(answer: m.Answer, worker: Worker, most_pipelines: int) -> str | None:
    counts = len(answer.iterations), len(answer.invitations)
    if counts not in ((members := len(answer.group.members), 0), (members, members)):
        return f"{answer} has not as many iterations, or invitations, as members"
    return _of_group(answer.group, worker, most_pipelines)


def _of_leases(segment: Segment, leases: Sequence[Lease]) -> str | None:
    for start, stop in ((segment.start, segment.stop), *((lease.start, lease.stop) for lease in leases)):
        if start > stop:
            return f"batches {start} to {stop} are none"
    if any(lease.segment != segment for lease in leases):
        return f"it tells of leases in other batches than {segment}"
    return None


def _of_met(met: Met, worker: Worker) -> str | None:
    if len(met.values) != len(met.pipelines) or list(met.pipelines) != sorted(set(met.pipelines)):
        return f"{len(met.pipelines)} pipelines met with {len(met.values)} values, or are not in order"
    if met.stage != worker.stage or not met.key:
        return f"a meeting of stage {met.stage} at {met.key!r} is none of stage {worker.stage}"
    return None


def _of_fingerprint(fingerprint: dict[str, str]) -> str | None:
    if len(fingerprint) > MOST_ENTRIES or "" in fingerprint:
        return f"a fingerprint has 1 to {MOST_ENTRIES} named values"
    if sum(len(name) + len(value) for name, value in fingerprint.items()) > MOST_CHARACTERS:
        return f"a fingerprint has at most {MOST_CHARACTERS} characters"
    return None
