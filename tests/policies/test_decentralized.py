"""Rings and pairs of the pipelines that are there, in histories of deaths and newcomers that Hypothesis draws."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.policies import Event, Group, Joined, Left, Lost, Ready, Worker
from lightning_sdpipe.policies.decentralized import Decentralized, as_ring
from lightning_sdpipe.policies.decisions import check_group

PIPELINES = 6


class History:
    """A run of ``stages``; each worker reports its next iteration when the last one has been answered, which may be the
    one that a member took over from its donor."""

    def __init__(self, config: Decentralized, stages: int, rng: Random) -> None:
        self.policy = config.make_policy(stages, PIPELINES)
        self.stages, self.rng, self.now = stages, rng, 0.0
        self.done: dict[Worker, int] = {}
        """Iterations that were answered, of each worker that takes part."""
        self.waiting: dict[Worker, int] = {}
        self.groups: list[tuple[dict[Worker, int], Group]] = []
        """Each group, with the iterations of its members."""
        for pipeline in range(rng.randint(1, PIPELINES)):
            self.join(pipeline, 0)

    @property
    def there(self) -> list[int]:
        return sorted({worker.pipeline for worker in self.done})

    def tell(self, event: Event) -> None:
        self.now += 0.1
        for group in self.policy.on(event, self.now):
            check_group(group, len(self.groups))
            self.groups.append(({w: self.waiting.get(w, -1) for w in group.members}, group))
            for worker in group.members:
                self.done[worker] = self.waiting.pop(worker) + 1

    def join(self, pipeline: int, iteration: int) -> None:
        for stage in range(self.stages):
            self.done[Worker(stage, pipeline)] = iteration
            self.tell(Joined(Worker(stage, pipeline)))

    def go(self, pipeline: int, how: type[Lost] | type[Left]) -> None:
        for stage in range(self.stages):
            worker = Worker(stage, pipeline)
            self.waiting.pop(worker, None)
            del self.done[worker]
            self.tell(how(worker))

    def report(self) -> bool:
        """One worker that computes has finished; returns False if all wait."""
        least = {p: min(self.done[Worker(j, p)] for j in range(self.stages)) for p in self.there}
        computing = [
            worker for worker in self.done if worker not in self.waiting and self.done[worker] <= least[worker.pipeline]
        ]
        if not computing:
            return False
        worker = self.rng.choice(computing)
        self.waiting[worker] = self.done[worker]
        self.tell(Ready(worker, self.done[worker]))
        return True

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.05 and len(self.there) > 1:
            gone = self.rng.choice(self.there)
            self.go(gone, self.rng.choice([Lost, Left]))
        elif chance < 0.1 and len(self.there) < PIPELINES:
            donor = self.rng.choice(self.there)
            coming = self.rng.choice(sorted({*range(PIPELINES)} - {*self.there}))
            self.join(coming, max(self.done[Worker(stage, donor)] for stage in range(self.stages)))
        else:
            assert self.report(), "all wait for each other"

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


@given(seed=st.integers(0, 2**32), stages=st.integers(1, 2))
def test_a_ring_closes_over_those_that_are_there(seed: int, stages: int) -> None:
    history = History(Decentralized(), stages, Random(seed))
    history.run(150)
    for _, group in history.groups:
        size = len(group.members)
        assert len(group.neighbours) == (size if size > 1 else 0)
        of = dict(zip(group.members, group.neighbours, strict=False))
        assert all(worker in of[other] for worker, others in of.items() for other in others)
        assert all(len(others) == min(2, size - 1) and worker not in others for worker, others in of.items())
        reached = {group.members[0]}
        for _ in group.members:
            reached |= {other for worker in reached for other in of.get(worker, ())}
        assert reached == {*group.members}


@pytest.mark.parametrize("peers", ["shift_one", "random"])
@given(seed=st.integers(0, 2**32), stages=st.integers(1, 2), every=st.integers(1, 3))
def test_pairs_are_of_those_that_were_there_and_alike_on_all_stages(
    peers: str, seed: int, stages: int, every: int
) -> None:
    history = History(Decentralized(peers, every), stages, Random(seed))
    history.run(200)
    met: dict[tuple[int, int], set[int]] = {}
    """The partners of a pipeline in an iteration, on all stages."""
    for iterations, group in history.groups:
        assert len(group.members) <= 2
        assert not group.neighbours
        if len(group.members) == 2 and -1 not in iterations.values():
            a, b = group.members
            assert iterations[a] == iterations[b]
            met.setdefault((a.pipeline, iterations[a]), set()).add(b.pipeline)
            met.setdefault((b.pipeline, iterations[b]), set()).add(a.pipeline)
    assert all(len(partners) == 1 for partners in met.values()), met


@pytest.mark.parametrize("peers", ["shift_one", "random"])
def test_of_those_left_all_have_partners_again(peers: str) -> None:
    """Where pairs of a fixed number would leave those alone whose partners are gone."""
    history = History(Decentralized(peers), 1, Random(1))
    for gone in [i for i in history.there if i not in (0, 3)]:
        history.go(gone, Lost)
    for pipeline in {0, 1, 3, 5} - {*history.there}:
        history.join(pipeline, 0)
    del history.groups[:]
    while min(history.done.values()) < 6:
        assert history.report()
    by_iteration = Counter(max(iterations.values()) for iterations, group in history.groups if len(group.members) == 2)
    assert all(by_iteration[iteration] == 2 for iteration in range(1, 6)), by_iteration


def test_one_that_is_alone_has_no_neighbours_and_two_have_each_other() -> None:
    a, b = Worker(0, 2), Worker(0, 7)
    assert as_ring(Group((a,), (1.0,), 0, "tested")).neighbours == ()
    assert as_ring(Group((a, b), (0.5, 0.5), 0, "tested")).neighbours == ((b,), (a,))
