"""Joint rounds in histories of deaths and newcomers that Hypothesis draws: every micro-batch is trained once by those
who were in its round, and all pipelines know the same."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_sdpipe.dealing.joint_rounds import JointRounds, PartKey, members_of, there

N, P = 3, 4


class History:
    """A run of ``stages``: each pipeline has as many copies of the rounds as stages."""

    def __init__(self, rng: Random, stages: int, unit: int) -> None:
        self.rng, self.stages, self.unit = rng, stages, unit
        self.speeds = {i: rng.choice([0.5, 1.0, 2.0]) for i in range(6)}
        self.alive = {i: [self.made() for _ in range(stages)] for i in range(rng.randint(1, N))}
        self.trained: list[Counter[PartKey]] = [Counter() for _ in range(stages)]
        self.epoch = 1

    def made(self) -> JointRounds:
        return JointRounds(N, P, self.unit, lambda pipeline: 1)

    def segment(self, start: int, stop: int) -> None:
        for copies in self.alive.values():
            for rounds in copies:
                rounds.begin(start, stop)
        while not self.first[0].over:
            self.turn()
        assert all(rounds.over for copies in self.alive.values() for rounds in copies)

    @property
    def first(self) -> list[JointRounds]:
        return next(iter(self.alive.values()))

    def turn(self) -> None:
        dies = self.rng.choice([*self.alive]) if self.rng.random() < 0.1 and len(self.alive) > 1 else None
        here = [sorted(self.alive) for _ in range(self.stages)]
        held = self.rng.random()  # in a while, some or all
        idle = {i for i in self.alive if held < 0.05 or (held < 0.1 and self.rng.random() < 0.5)}
        for members in here:  # on some stages it is still in the round
            if dies is not None and self.rng.random() < 0.5:
                members.remove(dies)
        for stage, members in enumerate(here):
            shares = [rounds.turn() for copies in self.alive.values() for rounds in copies]
            assert all(share == shares[0] for share in shares), "pipelines and stages train the same"
            for pipeline in {*members} - idle:
                self.trained[stage].update(shares[0].get(pipeline, ()))
        if dies is not None:
            del self.alive[dies]
        for copies in self.alive.values():
            for rounds, members in zip(copies, here, strict=True):
                trained, speeds = [i for i in members if i not in idle], {i: self.speeds[i] for i in members}
                rounds.ended(members, trained, speeds, self.epoch)
        if self.rng.random() < 0.1 and len(self.alive) < 6:
            coming = self.rng.choice([i for i in range(6) if i not in self.alive])
            self.epoch += 1
            self.alive[coming] = [self.made() for _ in range(self.stages)]
            for rounds, donor in zip(self.alive[coming], self.first, strict=True):
                rounds.load(json.loads(json.dumps(donor.state())))
        self.between()

    def between(self) -> None:
        assert len({(copies[0].doubts, copies[0].looks) for copies in self.alive.values()}) == 1
        looks, counts = self.first[0].looks, self.first[0].counts
        for copies in self.alive.values():
            assert copies[0].counts == counts
            for rounds in copies:
                rounds.settle(counts)
        members = self.first[0].members
        for copies in self.alive.values():
            if copies[0].doubts:
                flags = [min(each) for each in zip(*(rounds.flags() for rounds in copies), strict=True)]
                for rounds in copies:
                    rounds.agree(flags)
            if looks:
                speeds = {i: max(rounds.heard.get(i, 0.0) for rounds in copies) for i in members}
                for rounds in copies:
                    rounds.divide_by(speeds)


@example(seed=82, stages=2, unit=1)  # pipeline 2 is lost on one stage only, and is in the next round again
@given(seed=st.integers(0, 2**32), stages=st.integers(1, 2), unit=st.sampled_from([1, 2]))
def test_each_is_trained_once_and_again_only_if_not_on_all_stages(seed: int, stages: int, unit: int) -> None:
    history = History(Random(seed), stages, unit)
    whole = {(home, number, part) for home in range(N) for number in range(8) for part in range(P)}
    for start, stop in ((0, 5), (5, 8)):
        history.segment(start, stop)
    for trained in history.trained:
        assert set(trained) == whole
        if stages == 1:
            assert set(trained.values()) == {1}
    for copies in history.alive.values():
        assert all(rounds.seconds == history.first[0].seconds for rounds in copies)


def test_shares_follow_the_speeds_and_a_small_gain_changes_nothing() -> None:
    rounds = JointRounds(2, 4)
    rounds.begin(0, 9)
    assert {i: len(mine) for i, mine in rounds.turn().items()} == {0: 4, 1: 4}
    rounds.ended([0, 1], [0, 1], {}, 1)
    assert rounds.looks
    rounds.divide_by({0: 1.0, 1: 3.0})
    assert {i: len(mine) for i, mine in rounds.turn().items()} == {0: 6, 1: 2}
    rounds.divide_by({0: 0.01, 1: 3.0})
    assert {i: len(mine) for i, mine in rounds.turn().items()} == {0: 7, 1: 1}, "one at least, to measure it by"
    rounds.divide_by({0: 1.0, 1: 3.0})
    before = rounds.seconds
    rounds.divide_by({0: 1.0, 1: 2.9})
    assert rounds.seconds is before


def test_of_one_that_is_gone_the_share_is_missed_and_trained_after_the_rounds() -> None:
    rounds = JointRounds(2, 2)
    rounds.begin(3, 5)
    rounds.ended([0], [0], {}, 1)
    assert rounds.missed == [(1, 3, 0), (1, 3, 1)]
    assert rounds.looks
    rounds.divide_by({0: 1.0})
    assert rounds.turn() == {0: [(0, 4, 0), (0, 4, 1), (1, 4, 0), (1, 4, 1)]}
    rounds.ended([0], [0], {}, 1)
    assert not rounds.over
    assert rounds.turn() == {0: [(1, 3, 0), (1, 3, 1)]}
    rounds.ended([0], [0], {}, 1)
    assert rounds.over


@pytest.mark.parametrize("members", [[], [0], [1, 5, 64]])
def test_members_as_bits(members: list[int]) -> None:
    assert members_of(there(members)) == members


@pytest.mark.parametrize(
    ("seconds", "parts", "bubbles", "shares"),
    [
        ([0.3] * 4, 8, [0] * 4, [8] * 4),
        ([1, 1, 1, 2], 7, [0] * 4, [8, 8, 8, 4]),
        ([1, 3], 8, [1, 1], [13, 3]),  # with two stages: 14 and 12 micro-batches' time, not 13 and 15
        ([1, 1], 4, [0, 2], [5, 3]),  # a deeper pipeline idles longer
    ],
)
def test_shares_follow_the_speeds(seconds: list[float], parts: int, bubbles: list[int], shares: list[int]) -> None:
    rounds = JointRounds(len(seconds), parts, bubble=bubbles.__getitem__)
    rounds.begin(0, 1)
    rounds.divide_by(dict(enumerate(seconds)))
    assert [len(places) for _, places in sorted(rounds.turn().items())] == shares
