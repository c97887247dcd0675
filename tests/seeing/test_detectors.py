"""Who is slow: the right one, alone, or nobody; and when it cannot be told, that is said."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.scheduler.rows import About, Chunk
from lightning_sdpipe.seeing.detectors import NEEDS, abstains, blind, compute_straggler, findings
from lightning_sdpipe.seeing.recording import Recording
from tests.seeing.recordings import chunks, recording

A, B, C, D = (Worker(0, pipeline) for pipeline in range(4))
ALL = (A, B, C, D)


def steady(length: float, updates: int, seed: int = 0, noise: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [length * math.exp(draw.gauss(0.0, noise)) for _ in range(updates)]


def group(factor: float = 1.5, **options: Any) -> Recording:
    """Four replicas for as long as C, which is slower by ``factor``, takes for 128 updates."""
    others = 128 if options.get("every") else round(130 * factor)
    lengths = {worker: (60 * factor, 128) if worker == C else (60, others) for worker in ALL}
    return recording(
        {worker: chunks(worker, steady(*lengths[worker], seed), **options) for seed, worker in enumerate(ALL)}
    )


def named(seen: Recording) -> list[Worker]:
    return [worker for finding in compute_straggler(seen) for worker in finding.workers]


@pytest.mark.parametrize("factor", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("every", [0.0, 150.0], ids=["at its own pace", "in step"])
def test_a_slow_worker_is_named_alone_and_its_victims_are_not(factor: float, every: float) -> None:
    (finding,) = compute_straggler(group(factor=factor, every=every))
    assert finding.workers == (C,)
    assert finding.cost is not None
    assert finding.severity == ("note" if not every else "warning" if factor == 1.3 else "critical")
    assert (finding.cost.stood == 0) == (not every), "in step the others stand still"
    assert finding.evidence["ratio"] == pytest.approx(factor, rel=0.05)
    assert finding.evidence["forward_ms"] == pytest.approx(60 * factor - 50, rel=0.1)
    assert "(forward)" in finding.text


def test_it_is_named_at_the_first_update_at_which_it_can_be() -> None:
    assert NEEDS == 96
    for updates, names in ((95, []), (96, [C])):
        short = {worker: steady(60 * (1.5 if worker == C else 1), updates, n) for n, worker in enumerate(ALL)}
        seen = recording({worker: chunks(worker, own, every=90.0 * 2) for worker, own in short.items()})
        assert named(seen) == names
        assert (abstains(seen) == "too short to tell (95 of 96 updates)") == (names == [])


@pytest.mark.parametrize(("updates", "names"), [(96, []), (192, [C])])
def test_it_is_named_by_the_updates_that_others_make_meanwhile(updates: int, names: list[Worker]) -> None:
    """Each trains a shard of 32 batches an epoch, and C takes twice as long, so that others rest half of the time."""
    segments = updates // 32
    times = {C: chunks(C, steady(120, updates))}
    for worker in (A, B, D):
        times[worker] = [
            Chunk(worker, 1, chunk.at + number // 2 * 1.92, chunk.rows)
            for number, chunk in enumerate(chunks(worker, steady(60, 32 * segments, worker.pipeline)))
        ]
    seen = recording(times)
    assert named(seen) == names
    assert (abstains(seen) is None) == (names == [C])


def test_what_slows_a_machine_slows_all_of_its_workers_alike() -> None:
    """At update 96 the second half of all is twice as slow, at the same time."""
    own = [*steady(60, 96), *steady(120, 96)]
    assert named(recording({worker: chunks(worker, own) for worker in ALL})) == []


def test_rare_stalls_are_no_slowness() -> None:
    draw = random.Random(1)
    stalls = {worker: [x + (300 if draw.random() < 0.1 else 0) for x in steady(60, 192)] for worker in ALL}
    assert named(recording({worker: chunks(worker, own) for worker, own in stalls.items()})) == []


def test_one_that_recovers_is_cleared() -> None:
    own = [*steady(90, 96), *steady(60, 96)]
    for stop, names in ((112, [C]), (192, [])):
        lengths = {worker: own if worker == C else steady(60, 192, 9) for worker in ALL}
        seen = recording({worker: chunks(worker, times[:stop], every=100) for worker, times in lengths.items()})
        assert named(seen) == names


def test_stages_are_not_compared_with_each_other() -> None:
    """The second stage is three times as slow; within each all are alike."""
    workers = [Worker(stage, pipeline) for stage in range(2) for pipeline in range(2)]
    times = {w: chunks(w, steady(60 * (1 + 2 * w.stage), 128, w.pipeline), every=200) for w in workers}
    assert named(recording(times)) == []
    assert abstains(recording(times)) is None
    alone = recording({w: told for w, told in times.items() if w.pipeline == 0})
    assert named(alone) == []
    assert abstains(alone) == "one pipeline has no other to be compared with"


@pytest.mark.parametrize(
    ("phase", "core", "cause"),
    [("data", 0.0, "data"), ("injected", 0.0, "injected"), ("forward", 0.9, "without a core")],
)
def test_the_cause_is_the_phase_with_most_of_the_excess(phase: str, core: float, cause: str) -> None:
    seen = group(phase=phase, core=core)
    assert f"({cause})" in compute_straggler(seen)[0].text


def test_a_cause_in_several_phases_is_mixed() -> None:
    def half(own: list[float]) -> list[Chunk]:
        return [*chunks(C, own[:96], phase="data"), *chunks(C, own[96:], phase="forward")]

    times = {worker: chunks(worker, steady(60, 200, n)) for n, worker in enumerate(ALL)}
    late = [
        Chunk(chunk.worker, chunk.life, chunk.at + (8.64 if number >= 6 else 0.0), chunk.rows)
        for number, chunk in enumerate(half(steady(90, 128, 5)))
    ]
    seen = recording({**times, C: late})
    assert "(mixed)" in compute_straggler(seen)[0].text


def test_all_workers_of_a_host_are_one_finding() -> None:
    workers = [Worker(stage, pipeline) for stage in range(2) for pipeline in range(4)]
    times = {w: chunks(w, steady(90 if w.pipeline == 2 else 60, 128, n), every=95) for n, w in enumerate(workers)}
    hosts = {w: About(f"node{w.pipeline}", f"cuda:{w.stage}", n) for n, w in enumerate(workers)}
    (finding,) = compute_straggler(recording(times, hosts))
    assert (finding.kind, finding.workers) == ("slow_host", (Worker(0, 2), Worker(1, 2)))
    assert finding.text.startswith("all 2 workers of node2 1.5")
    one = recording({**times, Worker(1, 2): chunks(Worker(1, 2), steady(60, 128), every=95)}, hosts)
    (finding,) = compute_straggler(one)
    assert (finding.kind, finding.workers) == ("compute_straggler", (Worker(0, 2),))
    assert "stage 0 of pipeline 2 (node2, cuda:0)" in finding.text


def test_of_runs_without_a_straggler_none_is_named_one() -> None:
    """Noise of the machine, 20 %, and of each worker, 5 %, both of which last."""
    draw = random.Random(7)

    def lasting(updates: int, keeps: float, deviation: float) -> list[float]:
        value, values = draw.gauss(0.0, deviation), []
        for _ in range(updates):
            value = keeps * value + draw.gauss(0.0, deviation * math.sqrt(1 - keeps**2))
            values.append(value)
        return values

    wrong = 0
    for _ in range(50):
        common = lasting(160, 0.95, 0.2)
        runs = {
            worker: [60 * math.exp(a + b) for a, b in zip(common, lasting(160, 0.9, 0.05), strict=True)]
            for worker in ALL
        }
        wrong += bool(named(recording({worker: chunks(worker, own) for worker, own in runs.items()})))
    assert wrong == 0


# ------------------------------------------------------------------------------------------------------ blindness


def alive(updates: int = 40) -> dict[Worker, list[Chunk]]:
    return {worker: chunks(worker, [60.0] * updates) for worker in ALL}


def test_what_is_seen_well_is_not_blind() -> None:
    assert blind(recording(alive())) == []
    assert blind(recording(alive(), now=4.0)) == [], "less than three heartbeats ago"
    assert blind(recording({}, active=ALL, now=1.0)) == [], "it has just begun"
    assert blind(recording({**alive(), D: []}, active=(A, B, C, D, Worker(0, 4)), now=2.5)) == []


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (lambda: recording(alive(), now=30.0), "4 of 4 active workers have reported no update for 3 s"),
        (lambda: recording({A: alive()[A]}, active=(A, B), now=6.0), "2 of 2 active"),
        (lambda: recording({}, active=ALL, over=True), "4 of 4 workers have reported no update"),
        (lambda: recording(alive(), lost="5 heartbeats"), "not known what happened in 5 heartbeats"),
        (
            lambda: recording({**alive(), A: [Chunk(A, 1, 2.4, alive()[A][0].rows, 99)]}),
            "more than half of the updates of 1 worker are missing",
        ),
    ],
)
def test_the_blind_does_not_look_healthy(seen: Callable[[], Recording], says: str) -> None:
    (finding,) = findings(seen())
    assert finding.severity == "blind"
    assert says in finding.text


def test_slow_updates_and_pauses_are_waited_for() -> None:
    slow = recording({worker: chunks(worker, [20_000.0] * 4) for worker in ALL}, now=130.0)
    assert blind(slow) == [], "the next update is not due"
    after_a_pause = recording(alive(), now=500.0, joined=498.0)
    assert blind(after_a_pause) == []
    assert blind(recording(alive(), active=(), now=500.0)) == [], "all are at validation"


def test_a_worker_that_was_started_again_is_compared_by_its_new_updates_only() -> None:
    """Its first life was slow."""
    again = [*chunks(A, [90.0] * 96), *chunks(A, [50.0] * 96, life=2)]
    run = recording({A: again, B: chunks(B, [50.0] * 192)})
    assert len(run.series[A]) == 96
    assert compute_straggler(run) == []
