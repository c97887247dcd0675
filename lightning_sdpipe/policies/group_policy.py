"""Base of all policies that answer ready workers with groups."""

from __future__ import annotations

from lightning_sdpipe.policies import events
from lightning_sdpipe.policies.decisions import Decision
from lightning_sdpipe.policies.participants import Participants


class GroupPolicy:
    """Keeps the rules of :mod:`lightning_sdpipe.policies.policy`: refuses events that break them, and knows which
    workers wait.

    A policy overrides the methods below :meth:`deadline`. Each is called when its event has been checked and
    ``participants`` knows of it; it returns the decisions that follow. Groups are made by ``participants.group``.
    """

    def __init__(self, num_stages: int, num_pipelines: int) -> None:
        self.participants = Participants(num_stages, num_pipelines)

    def on(self, event: events.Event, now: float) -> list[Decision]:
        """Handle ``event``; time passes before anything else happens."""
        participants = self.participants
        if type(event) is events.Ready:  # most events are
            worker, iteration = event.worker, event.iteration
            participants.check_waits(worker, iteration)
            decisions = self.time_passed(now)
            participants.waiting[worker.stage][worker.pipeline] = iteration
            participants.again[worker.stage][worker.pipeline] = event.again
            if event.contains is not None:
                decisions = decisions + self.worker_contains(worker, event.contains)
            return decisions + self.worker_ready(worker, iteration, now)
        match event:
            case events.Tick():
                return self.time_passed(now)
            case events.Joined(worker, answered):
                participants.check_joins(worker)
                decisions = self.time_passed(now)
                participants.joins(worker, answered)
                return decisions + self.worker_joined(worker, now)
            case events.Left(worker) | events.Lost(worker):
                participants.check_takes_part(worker, "left")
                decisions = self.time_passed(now)
                met = participants.last_answered(worker.stage, worker.pipeline) is not None
                if type(event) is events.Lost and met and worker.pipeline not in participants.waiting[worker.stage]:
                    self.last_group_doubted(worker)
                participants.leaves(worker)
                gone = self.worker_lost if type(event) is events.Lost else self.worker_left
                return decisions + gone(worker, now)
            case events.Progress(worker):
                participants.check_takes_part(worker, "went on")
                return self.time_passed(now) + self.worker_progressed(event, now)
            case events.Contains(worker, rounds):
                participants.check_exists(worker)
                return self.time_passed(now) + self.worker_contains(worker, rounds)
            case events.Vanished(worker):
                return self.time_passed(now) + self.worker_vanished(worker)
            case events.Restarted(next_sequence):
                participants.next_sequence = max(participants.next_sequence, next_sequence)
                return self.scheduler_restarted(now)
            case events.Widened(num_pipelines):
                if num_pipelines > participants.num_pipelines:
                    self.widened(num_pipelines)
                    participants.widen(num_pipelines)
        return []

    def deadline(self) -> float | None:
        return None

    def worker_ready(self, worker: events.Worker, iteration: int, now: float) -> list[Decision]:
        """Answer ``worker``, which waits for a group."""
        raise NotImplementedError(f"{type(self).__name__} must say in worker_ready how a ready worker is answered")

    def worker_left(self, worker: events.Worker, now: float) -> list[Decision]:
        """Handle ``worker`` having left (or been lost, unless :meth:`worker_lost` is overridden); workers that wait for
        it must not wait for ever."""
        return []

    def worker_lost(self, worker: events.Worker, now: float) -> list[Decision]:
        """Handle the loss of ``worker``, which may come back with another model."""
        return self.worker_left(worker, now)

    def last_group_doubted(self, worker: events.Worker) -> None:
        """Note that the last group of ``worker`` may have broken off: it is about to be lost, and has not been ready
        since."""

    def worker_contains(self, worker: events.Worker, rounds: int) -> list[Decision]:
        """Note that the model of ``worker`` contains the outcomes of ``rounds`` rounds. If a ready says so,
        :meth:`worker_ready` follows."""
        return []

    def worker_vanished(self, worker: events.Worker) -> list[Decision]:
        """Handle the end of the process of ``worker``, which had left before."""
        return []

    def worker_joined(self, worker: events.Worker, now: float) -> list[Decision]:
        """Handle ``worker`` having joined."""
        return []

    def worker_progressed(self, progress: events.Progress, now: float) -> list[Decision]:
        """Handle a worker's report of its speed."""
        return []

    def scheduler_restarted(self, now: float) -> list[Decision]:
        """Handle a restart of the scheduler, which does not know what the earlier one decided."""
        return []

    def widened(self, num_pipelines: int) -> None:
        """Allow ``num_pipelines`` pipelines from now on.

        Raises:
            RefusedEvent: this policy is for the planned number only.
        """

    def time_passed(self, now: float) -> list[Decision]:
        """Handle the passage of time to ``now``; called at :meth:`deadline`, and before each other event."""
        return []
