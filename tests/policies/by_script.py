"""A policy whose groups are written down in advance; imported by schedulers, so without torch."""

from __future__ import annotations

from lightning_sdpipe.policies import Decision, GroupPolicy, PolicyConfig, Worker


class Scripted(PolicyConfig, frozen=True):
    """In update k the pipelines average in the groups ``groups[k]``, again from the first after the last; a member
    counts by its place among them, the first 1, the second 2."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]

    def make_policy(self, num_stages: int, num_pipelines: int) -> ScriptedPolicy:
        return ScriptedPolicy(num_stages, num_pipelines, self)

    def members(self, update: int, pipeline: int) -> dict[int, float]:
        """Of the group of ``pipeline``, and how much each counts."""
        (together,) = (group for group in self.groups[update % len(self.groups)] if pipeline in group)
        total = len(together) * (len(together) + 1) / 2
        return {member: place / total for place, member in enumerate(sorted(together), 1)}


class ScriptedPolicy(GroupPolicy):
    def __init__(self, num_stages: int, num_pipelines: int, config: Scripted) -> None:
        super().__init__(num_stages, num_pipelines)
        self._config = config

    def worker_ready(self, worker: Worker, iteration: int, now: float) -> list[Decision]:
        waiting, members = self.participants.waiting[worker.stage], self._config.members(iteration, worker.pipeline)
        if any(waiting.get(member) != iteration for member in members):
            return []
        return [self.participants.group(worker.stage, [*members], "scripted", weights=[*members.values()])]
