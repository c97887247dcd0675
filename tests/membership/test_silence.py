"""Whose silence means death: scripted times at which processes are heard of."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sdpipe.membership.failure_detection import Silence
from lightning_sdpipe.policies import Worker

LIMIT = 5.0


class Heard:
    """Processes that beat every half second, but for times in which they are cut off."""

    def __init__(self, pipelines: int, stages: int = 1) -> None:
        self.silence = Silence(LIMIT, 0.0, lambda worker: worker.pipeline)
        self.workers = [Worker(j, i) for i in range(pipelines) for j in range(stages)]
        self.members = list(range(pipelines))
        self.lost: dict[int, float] = {}
        self.now = 0.0

    def until(self, end: float, silent: tuple[int, ...] = (), stage: int | None = None, replaced: int = -1) -> Heard:
        """Pipelines that are not ``silent``, or not in ``stage``, are heard of."""
        while self.now < end:
            self.now = round(self.now + 0.1, 3)
            for number, worker in enumerate(self.workers):
                beats = (round(10 * self.now) + number) % 5 == 0
                speaks = worker.pipeline not in silent or stage not in (None, worker.stage)
                if beats and speaks and worker.pipeline not in self.lost:
                    self.silence.hear(worker, self.now)
            if self.silence.due <= self.now:
                for worker, _ in self.silence.look(self.now, self.members, [replaced]):
                    self.lost[worker.pipeline] = self.now
                    self.members.remove(worker.pipeline)
        return self


def test_one_that_is_silent_for_the_limit_is_lost_on_the_word_of_another() -> None:
    heard = Heard(3).until(10.0)
    heard.until(16.0, silent=(1,))
    assert list(heard.lost) == [1]
    assert 14.5 <= heard.lost[1] <= 15.6


def test_being_told_again_when_one_was_heard_last_does_not_look_like_a_late_scheduler() -> None:
    silence, silent, other = Silence(LIMIT, 0.0), Worker(0, 0), Worker(0, 1)
    silence.hear(silent, 1.0)
    silence.hear(other, 1.2)
    while silence.due < 6.0:
        assert silence.look(silence.due) == []
    assert silence.look(6.0) == []  # the other could still have fallen silent with it
    silence.hear(silent, 1.0)
    silence.hear(other, 6.1)
    assert silence.due == 6.1
    assert [worker for worker, _ in silence.look(6.1)] == [silent]


def test_a_silent_stage_takes_its_pipeline_with_it() -> None:
    heard = Heard(2, stages=2).until(10.0)
    heard.until(17.0, silent=(1,), stage=0)
    assert list(heard.lost) == [1]


def test_who_does_not_come_back_after_a_silence_of_all_is_lost_when_that_has_lasted_as_long_again() -> None:
    heard = Heard(3).until(10.0)
    heard.until(22.0, silent=(0, 1, 2))
    heard.until(33.0, silent=(2,))
    assert not heard.lost
    heard.until(37.0, silent=(2,))
    assert list(heard.lost) == [2]


def test_the_last_member_is_never_lost_whoever_else_is_heard_of() -> None:
    heard = Heard(3).until(10.0)
    heard.members = [0]  # the others wait for its state
    heard.until(100.0, silent=(0,))
    assert not heard.lost


def test_newcomers_that_are_silent_are_lost_on_the_word_of_a_member() -> None:
    heard = Heard(2).until(10.0)
    heard.members = [0]
    heard.until(100.0, silent=(0, 1))
    assert not heard.lost, "the member is as silent"
    heard.members.append(1)  # for the helper, which takes the lost out
    heard.until(195.0, silent=(1,))
    assert list(heard.lost) == [1]


def test_a_new_start_shows_that_the_silent_one_is_over() -> None:
    heard = Heard(1).until(10.0)
    heard.until(17.0, silent=(0,))
    heard.until(19.0, silent=(0,), replaced=0)
    assert list(heard.lost) == [0], "also when that comes after the limit"


@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 30.0)), max_size=4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_scheduler_that_stops_now_and_then_loses_none_but_who_is_silent(
    stops: list[tuple[int, float]], count: int, by_pipeline: bool, seed: int
) -> None:
    """All beat every half second but one, which ends in the last stretch; what came during a stop is heard one by one
    after it, and a look that is due comes in between."""
    rng, workers = random.Random(seed), [Worker(j, i) for i in range(count) for j in range(2)]
    silence = Silence(LIMIT, 0.0, (lambda worker: worker.pipeline) if by_pipeline else (lambda worker: worker))
    now, lost = 0.0, set[Worker]()

    def stretch(seconds: float, silent: Worker | None = None) -> None:
        nonlocal now
        end = now + seconds
        while now < end:
            now += 0.5
            for worker in rng.sample(workers, len(workers)):
                if worker != silent:
                    silence.hear(worker, now)
                if silence.due <= now:
                    lost.update(worker for worker, _ in silence.look(now))

    for works, stops_for in [*stops, (1, 0.0)]:
        stretch(works)
        now += stops_for
    stretch(2 * LIMIT)
    assert not lost
    stretch(4 * LIMIT, silent=workers[0])
    assert lost == (set() if by_pipeline and count == 1 else {workers[0]}), "a last pipeline has no witness"


@pytest.mark.parametrize("seed", range(50))
def test_a_scheduler_that_is_cut_off_for_longer_than_the_limit_loses_nobody(seed: int) -> None:
    """Links go down one after another within the limit, and TCP comes back when it likes, as long again at most."""
    rng = random.Random(seed)
    count, lasts = rng.randint(1, 5), rng.uniform(LIMIT + 0.6, 60.0)
    down = [10.0 + rng.uniform(0.0, LIMIT - 1.0) for _ in range(count)]
    restored = max(down) + lasts
    up = [restored + rng.uniform(0.0, 0.9 * lasts) for _ in range(count)]
    heard = Heard(count)
    while heard.now < max(up) + 20.0:
        silent = tuple(i for i in range(count) if down[i] <= heard.now < up[i])
        heard.until(heard.now + 0.1, silent)
    assert not heard.lost
