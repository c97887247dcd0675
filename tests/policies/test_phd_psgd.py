"""PHD-PSGD's rules in stories, and its promises under every order of events that pipelines can produce."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.policies import (
    Event,
    Joined,
    Left,
    Lost,
    Progress,
    Ready,
    Reason,
    Restarted,
)
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.decisions import check_group
from lightning_sdpipe.policies.events import Worker as W
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.phd_psgd import PHDPSGD
from lightning_sdpipe.simulate import Run, Work, jittered, simulate
from tests.policies.scripted import brief, join_all, joined, ready, straggling

TIMES = (0.10, 0.11, 0.19, 0.21)
MATCHED, STALENESS, LOST, LOCAL = Reason.MATCHED, Reason.STALENESS, Reason.WORKER_LOST, Reason.LOCAL_STEP
HISTORIES = 2 * settings.default.max_examples  # 20,000 with --hypothesis-profile=long
"""`pytest --hypothesis-profile=long` plays ten thousand."""


make = partial(joined, PHDPSGD)


# ------------------------------------------------------------------ stories


def test_a_group_is_ready_when_all_its_members_are_and_meets_whom_it_draws() -> None:
    policy = make(1, 4, group_size=2)
    assert ready(policy, 0) == []
    assert ready(policy, 1) == [], "group 1 computes"
    assert ready(policy, 2) == []
    (meeting,) = ready(policy, 3)
    assert brief([meeting]) == [(0, (0, 1, 2, 3), MATCHED)]
    assert meeting.weights == (0.25,) * 4


def test_unlike_groups_count_alike() -> None:
    policy = make(1, 3, groups=[[0, 2], [1]])
    (meeting,) = ready(policy, 0, 1, 2)
    assert (meeting.members, meeting.weights) == ((W(0, 0), W(0, 1), W(0, 2)), (0.25, 0.5, 0.25))


def test_a_resumed_run_meets_where_the_other_would_have() -> None:
    policy = make(1, 2, every=3)
    assert brief(ready(policy, 0, iteration=4)) == [(0, (0,), LOCAL)]
    assert ready(policy, 0, iteration=5) == [], "it waits for its partner after the sixth step"


def test_between_two_meetings_a_group_goes_on_alone() -> None:
    policy = make(1, 2, every=3)
    for k in range(2):
        assert brief(ready(policy, 0, iteration=k)) == [(0, (0,), LOCAL)]
    assert ready(policy, 0, iteration=2) == []
    assert brief(ready(policy, 1)) == [(0, (0, 1), MATCHED)], (
        "0 waits for it, so it meets it although its turn is later"
    )


def test_a_group_waits_for_exactly_those_that_are_behind_it_and_nobody_with_it() -> None:
    policy = make(1, 3, staleness=2, every=100)
    assert brief(ready(policy, 0, iteration=0)) == [(0, (0,), LOCAL)]
    assert ready(policy, 0, iteration=1) == [], "models of 1 and 2 lack two steps"
    (meeting,) = ready(policy, 1)
    assert brief([meeting]) == [(0, (0, 1), MATCHED)]
    assert meeting.passive == (W(0, 0),), "0 takes part, and waits on for 2"
    (meeting,) = ready(policy, 2)
    assert brief([meeting]) == [(0, (0, 2), STALENESS)]
    assert meeting.passive == ()


def test_an_asynchronous_meeting_waits_for_nobody_but_the_bound_does() -> None:
    policy = make(1, 2, asynchronous=True, staleness=2)
    (meeting,) = ready(policy, 0)
    assert (brief([meeting]), meeting.passive) == ([(0, (0, 1), MATCHED)], (W(0, 1),))
    assert ready(policy, 0, iteration=1) == [], "1 contains the first step only at the end of its own"
    assert brief(ready(policy, 1)) == [(0, (0, 1), STALENESS)]


def test_groups_that_average_models_wait_together_for_those_that_are_behind_one_of_them() -> None:
    policy = make(1, 3, staleness=2, every=100, within="models")
    assert brief(ready(policy, 0, iteration=0)) == [(0, (0,), LOCAL)]
    assert ready(policy, 0, iteration=1) == []
    assert ready(policy, 1) == [], "0 would have to wait on for 2"
    (meeting,) = ready(policy, 2)
    assert (brief([meeting]), meeting.passive) == ([(0, (0, 1, 2), STALENESS)], ())


def test_members_that_average_models_may_count_their_steps_differently() -> None:
    policy = make(1, 3, groups=[[0, 1], [2]], every=100, within="models")
    assert ready(policy, 0, iteration=7) == []
    (mean,) = ready(policy, 1, iteration=3)
    assert (brief([mean]), mean.weights) == ([(0, (0, 1), LOCAL)], (0.5, 0.5))
    assert ready(policy, 1, iteration=4) == [], "nobody of the group is told to go on alone"
    policy.on(Lost(W(0, 1)), 0.0)
    policy.on(Joined(W(0, 1)), 0.0)
    assert ready(policy, 0, iteration=8) == []
    assert brief(ready(policy, 1, iteration=0)) == [(0, (0, 1), LOCAL)]


def test_times_come_from_a_profile_or_from_what_workers_report() -> None:
    assert make(1, 4, group_size=2, times=[1, 3, 2, 2]).times() == [3, 2]
    policy = make(2, 2)
    assert policy.times() == [1, 1]
    for pipeline, seconds in ((0, 2.0), (1, 5.0)):
        policy.on(Progress(W(1, pipeline), 0, 1, seconds + 4, 4), 0.0)
        policy.on(Progress(W(0, pipeline), 0, 1, 100.0, 0), 0.0)  # stages before the last report the same steps
    assert policy.times() == [2, 5]
    policy.on(Progress(W(1, 0), 1, 1, 4.0, 0.0), 1.0)
    assert policy.times() == [3, 5]


@pytest.mark.parametrize("gone", [Left, Lost])
def test_nobody_waits_for_a_member_or_a_group_that_is_gone(gone: type[Left] | type[Lost]) -> None:
    policy = make(1, 4, group_size=2)
    assert ready(policy, 0) == []
    assert policy.on(gone(W(0, 1)), 0.0) == [], "what is left of the group is ready, and waits for the other group"
    assert policy.on(gone(W(0, 2)), 0.0) == []
    (alone,) = policy.on(gone(W(0, 3)), 0.0)
    assert brief([alone]) == [(0, (0,), LOST)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_member_that_was_lost_while_its_group_met_others_goes_on_alone(stages: int) -> None:
    """The others of its group need it for their next step, so it must not wait for that."""
    policy, last = make(stages, 3, groups=[[0, 1], [2]]), stages - 1
    for stage in range(stages):
        assert ready(policy, 2, stage=stage) == []
    assert ready(policy, 0, stage=last) == []
    assert brief(policy.on(Lost(W(last, 1)), 0.0)) == [(last, (0, 2), MATCHED)]
    policy.on(Joined(W(last, 1)), 0.0)
    decided = ready(policy, 1, stage=last)
    assert brief(decided) == [(last, (1,), LOST)]
    if stages == 2:  # the first stage was not lost: it does the same
        assert brief(ready(policy, 0, stage=0)) == [(0, (0, 2), MATCHED)]
        assert brief(ready(policy, 1, stage=0)) == [(0, (1,), LOST)]
    assert ready(policy, 0, iteration=1, stage=last) == []
    assert ready(policy, 1, iteration=1, stage=last) == [], "together again, and waiting for 2"


def test_the_last_meeting_of_one_that_was_lost_may_have_made_nobodys_model_newer() -> None:
    policy = make(1, 2, staleness=2)
    ready(policy, 0)
    ready(policy, 1)
    policy.on(Lost(W(0, 1)), 0.0)
    policy.on(Joined(W(0, 1)), 0.0)
    assert policy.versions[0].lag == 2
    assert ready(policy, 0, iteration=1) == []
    assert brief(ready(policy, 1, iteration=1)) == [(0, (0, 1), STALENESS)]


def test_after_a_restart_all_meet_once() -> None:
    policy = PHDPSGD(staleness=4).make_policy(1, 3)
    policy.on(Restarted(70), 0.0)
    join_all(policy, 1, 3)
    assert ready(policy, 0, 1, iteration=9) == []
    (meeting,) = ready(policy, 2, iteration=3)
    assert (brief([meeting]), meeting.sequence) == ([(0, (0, 1, 2), STALENESS)], 70)


# ------------------------------------------------------------------ several stages


def test_other_stages_do_what_the_last_one_decided() -> None:
    policy = make(2, 2)
    assert ready(policy, 0, stage=1) == []
    assert ready(policy, 0, stage=0) == [], "nothing is decided yet"
    assert brief(ready(policy, 1, stage=1)) == [(1, (0, 1), MATCHED)]
    assert brief(ready(policy, 1, stage=0)) == [(0, (0, 1), MATCHED)]


def test_a_stage_whose_pipeline_has_lost_its_last_one_goes_on_alone() -> None:
    policy = make(2, 2)
    assert ready(policy, 0, stage=0) == []
    assert brief(policy.on(Lost(W(1, 0)), 0.0)) == [(0, (0,), LOST)]


def test_a_stage_that_a_new_scheduler_cannot_know_about_goes_on_alone() -> None:
    """Its last stage was answered by the scheduler before, and computes."""
    policy = make(2, 2)
    policy.on(Restarted(10), 0.0)
    assert brief(ready(policy, 0, stage=0, iteration=4)) == [(0, (0,), LOST)]
    ready(policy, 0, stage=1, iteration=5)
    assert ready(policy, 0, stage=0, iteration=5) == []


# ------------------------------------------------------------------ promises


class Oracle:
    """The promises of versions.py for one stage, kept with vectors of its own over pipelines."""

    def __init__(self, pipelines: int) -> None:
        self.vectors = [[0] * pipelines for _ in range(pipelines)]
        self.arriving: dict[int, list[list[int]]] = {}

    def stepped(self, p: int) -> None:
        for vector in self.arriving.pop(p, []):
            self.vectors[p] = list(map(max, self.vectors[p], vector))
        self.vectors[p][p] += 1

    def met(self, members: list[int], waiting: set[int]) -> None:
        newest = [max(self.vectors[p][i] for p in members) for i in range(len(self.vectors))]
        for p in members:
            if p in waiting:
                self.vectors[p] = list(newest)
            else:
                self.arriving.setdefault(p, []).append(newest)

    def lag(self, active: set[int]) -> int:
        return max((self.vectors[i][i] - self.vectors[k][i] for i in active for k in active), default=0)


options = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.0, 1.0, 4.0]),
        "every": st.sampled_from([1, 2, 5]),
        "staleness": st.sampled_from([1, 2, 3, 5, 8]),
        "asynchronous": st.booleans(),
        "seed": st.integers(0, 1000),
        "within": st.sampled_from(["gradients", "gradients", "models"]),
    }
).map(lambda drawn: drawn | {"asynchronous": drawn["asynchronous"] and drawn["within"] == "gradients"})


@pytest.mark.timeout(3600)  # of the long profile
@settings(max_examples=HISTORIES, deadline=None)
@given(
    options=options,
    stages=st.sampled_from([1, 1, 2, 4]),
    groups=st.integers(1, 5),
    size=st.integers(1, 2),
    flush=st.booleans(),
    dies=st.booleans(),
    data=st.data(),
)
def test_the_bound_holds_nobody_is_stuck_and_a_group_waits_for_current_steps_only(
    options: dict[str, object], stages: int, groups: int, size: int, flush: bool, dies: bool, data: st.DataObject
) -> None:
    """Hypothesis chooses who finishes its step next. A stage finishes it after the next stage has; the last stage goes
    on to the next one when all stages have been answered (flush), or as far ahead of them as they are away."""
    bound = options["staleness"]
    assert isinstance(bound, int)
    pipelines, last = groups * size, stages - 1
    policy = make(stages, pipelines, group_size=size, **options)
    oracles = [Oracle(pipelines) for _ in range(stages)]
    done = [[0] * pipelines for _ in range(stages)]  # iterations that were answered
    waiting: list[set[int]] = [set() for _ in range(stages)]
    alive = set(range(pipelines))
    awaited: dict[int, dict[int, int]] = {}  # groups that are blocked, and the step in which each behind them was
    sequence = 0

    def tell(event: Event) -> None:
        nonlocal sequence
        decided = policy.on(event, 0.0)
        assert oracles[last].lag(alive) <= bound
        for oracle in oracles:  # what the dead passed on in the last stage, it may not have in the others
            assert oracle.lag(alive) <= bound + (0 if len(alive) == pipelines else stages)
        for group in decided:
            check_group(group, sequence)
            assert options["within"] == "gradients" or not group.passive
            sequence = group.sequence + 1
            j, members = group.stage, [w.pipeline for w in group.members]
            oracles[j].met(members, waiting[j])
            for w in set(group.members) - set(group.passive):
                waiting[j].remove(w.pipeline)
                done[j][w.pipeline] += 1

    def free() -> list[W]:
        found = []
        for p in sorted(alive):
            for j in range(stages):
                k = done[j][p]
                after = j == last or done[j + 1][p] > k or (done[j + 1][p] == k and p in waiting[j + 1])
                slowest = min(done[i][p] + (0 if flush else last - i) for i in range(stages))
                if p not in waiting[j] and after and k <= slowest:
                    found.append(W(j, p))
        return found

    def steps(group: int) -> int:
        return policy.versions[last].steps(group)

    for turn in range(data.draw(st.integers(1, 40), label="turns")):
        able = free()
        assert able, f"stuck: {waiting}"
        worker = data.draw(st.sampled_from(able), label="next")
        waiting[worker.stage].add(worker.pipeline)
        oracles[worker.stage].stepped(worker.pipeline)
        before = set(policy._held)
        tell(Ready(worker, done[worker.stage][worker.pipeline]))
        for g in policy._held - before:
            awaited[g] = {k: steps(k) + (k not in policy._wanted) for k in policy._wanted[g]}
        awaited = {g: behind for g, behind in awaited.items() if g in policy._held}
        for g, behind in awaited.items() if options["within"] == "gradients" else ():
            assert any(steps(k) < step for k, step in behind.items()), f"group {g} waits for more than current steps"
        if dies and turn == 10 and len(alive) > 1:
            pipeline = data.draw(st.sampled_from(sorted(alive)), label="dies")
            alive.discard(pipeline)
            for j in data.draw(st.permutations(range(stages)), label="in this order"):
                waiting[j].discard(pipeline)
                tell(Lost(W(j, pipeline)))
            awaited.clear()  # what it had passed on is doubted, so they may wait for others
    unanswered = [(W(j, p), done[j][p]) for j in range(stages) for p in waiting[j]]
    while any(done[w.stage][w.pipeline] == k and w.pipeline in alive for w, k in unanswered):
        able = free()
        assert able, f"stuck: {waiting}"
        worker = min(able, key=lambda w: (done[w.stage][w.pipeline], w))
        waiting[worker.stage].add(worker.pipeline)
        oracles[worker.stage].stepped(worker.pipeline)
        tell(Ready(worker, done[worker.stage][worker.pipeline]))


LEAVES_BEFORE_A_MEETING = {"gamma": 0.0, "every": 1, "staleness": 3, "asynchronous": True, "seed": 1}


@example(options=LEAVES_BEFORE_A_MEETING, stages=2, groups=5, size=1, schedule="pipedream", announce="early", seed=1)
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
@given(
    options=options,
    stages=st.sampled_from([1, 2, 4]),
    groups=st.integers(2, 5),
    size=st.integers(1, 2),
    schedule=st.sampled_from(["1f1b", "gpipe", "pipedream"]),
    announce=st.sampled_from(["early", "late"]),
    seed=st.integers(0, 1 << 30),
)
def test_in_simulated_pipelines_too(
    options: dict[str, object], stages: int, groups: int, size: int, schedule: str, announce: str, seed: int
) -> None:
    work = straggling(stages, groups * size, 12, seed)
    work = Work(
        stages,
        groups * size,
        12,
        work.seconds,
        schedule,  # type: ignore[arg-type]
        heterogeneity=work.heterogeneity,
        exchange=lambda group: 0.1,
        announce=announce,  # type: ignore[arg-type]
    )
    run = simulate(PHDPSGD(group_size=size, **options), work)  # type: ignore[arg-type]
    assert run.stuck == []
    for stage in range(stages):
        leaves = min(at for at, event, _ in run.entries if isinstance(event, Left) and event.worker.stage == stage)
        until = math.inf if stage == stages - 1 else leaves  # an earlier stage then misses what it was to get
        assert max(lag for at, lag in run.lags(stage) if at < until) <= options["staleness"]  # type: ignore[operator]


def unlike_groups(seed: int = 0, stages: int = 1, iterations: int = 500) -> Work:
    """The specification's four groups."""
    jitter = jittered(1.0, 0.05, seed)
    return Work(stages, 4, iterations, lambda w, k: TIMES[w.pipeline] * jitter(w, k), num_micro_batches=1)


def steady(run: Run) -> tuple[float, int]:
    """Steps per second, and the largest lag, until the first has finished."""
    end = min(run.finished.values())
    steps = sum(1 for at, event, _ in run.entries if isinstance(event, Progress) and at <= end)
    return steps / end, max(lag for at, lag in run.lags() if at <= end)


def test_the_monitor_cuts_the_tail_and_costs_little() -> None:
    work = unlike_groups()
    rates = {name: steady(simulate(config, work))[0] for name, config in (("all", AllReduceModels()), ("no", NoSync()))}
    assert rates == {"all": pytest.approx(19.05, rel=0.01), "no": pytest.approx(29.12, rel=0.01)}
    free, lag = steady(simulate(PHDPSGD(staleness=None, times=TIMES), work))
    assert (free, lag > 8) == (pytest.approx(23.48, rel=0.03), True)
    bounded, lag = steady(simulate(PHDPSGD(staleness=8, times=TIMES), work))
    assert (bounded, lag) == (pytest.approx(free, rel=0.03), 8)
    strongly, lag = steady(simulate(PHDPSGD(staleness=None, gamma=4.0, times=TIMES), work))
    assert (strongly, lag > 30) == (pytest.approx(26.88, rel=0.04), True)


def test_a_bound_of_one_step_is_all_reduce() -> None:
    work = unlike_groups(iterations=30)
    ours, theirs = simulate(PHDPSGD(staleness=1), work), simulate(AllReduceModels(), work)
    assert [(at, group.members, group.weights) for at, group in ours.groups] == [
        (at, group.members, group.weights) for at, group in theirs.groups
    ]


# ------------------------------------------------------------------ values


def test_groups_are_those_of_the_values() -> None:
    assert PHDPSGD(group_size=3).groups_of(6) == ((0, 1, 2), (3, 4, 5))
    assert PHDPSGD().groups_of(2) == ((0,), (1,))
    assert PHDPSGD(groups=[[0, 2], [1, 3]]).groups_of(4) == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups": [[0, 1], [1, 2]]}, r"groups that do not overlap; \[1\] are"),
        ({"groups": [[0], []]}, "a list with the pipelines of each group"),
        ({"groups": "host"}, "groups='host' is not allowed"),
        ({"groups": [0, 1]}, "a list with the pipelines of each group"),
        ({"groups": [[0], [-1]]}, "a list with the pipelines of each group"),
        ({"groups": [[0], [1]], "group_size": 1}, "group_size=1 has no effect"),
        ({"group_size": 0}, "group_size=0"),
        ({"gamma": -1.0}, "gamma=-1.0 is not allowed; give a number from 0"),
        ({"gamma": math.nan}, "gamma=nan"),
        ({"every": 0}, "every=0"),
        ({"staleness": 0}, "staleness=0 is not allowed; give an integer from 1"),
        ({"seed": -1}, "seed=-1"),
        ({"times": [1.0, 0.0]}, "times="),
        ({"within": "model"}, "within='model' is not allowed"),
        ({"within": "models", "asynchronous": True}, "Leave one of the two out"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PHDPSGD(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups": [[0], [2]]}, "leave out [1, 3]; list each of the pipelines 0 to 3"),
        ({"groups": [[0, 1, 2], [3, 4, 5]]}, "name [4, 5]; list each"),
        ({"group_size": 3}, "group_size=3 does not divide the 4 pipelines"),
        ({"times": [1.0, 2.0]}, "times has 2 values for 4 pipelines"),
    ],
)
def test_values_that_do_not_fit_the_mesh_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        PHDPSGD(**values).make_policy(2, 4)  # type: ignore[arg-type]
