"""What holds a run up where no worker is slow. The logs are simulated: of each finding one that shows it, and of all
one that shows none; real ones are in golden/."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.local_sgd import LocalSGD, NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.rows import About, Chunk
from lightning_sdpipe.seeing.bottlenecks import NOT_HELD, bottlenecks, stalling
from lightning_sdpipe.seeing.detectors import findings
from lightning_sdpipe.seeing.finding import Finding, bound, update_time
from lightning_sdpipe.seeing.page import in_one_line
from lightning_sdpipe.seeing.recording import Recording, of_log
from lightning_sdpipe.simulate import Work, jittered, simulate
from tests.scheduler.rows import one_row
from tests.seeing.recordings import Own, chunks, recording, simulated_log

STEADY = jittered(0.06, 0.05)
ALL_REDUCE = AllReduceModels()


def log_of(
    path: Path,
    own: Own = STEADY,
    policy: PolicyConfig = ALL_REDUCE,
    shape: tuple[int, int] = (1, 4),
    updates: int = 140,
    micro_batches: int = 1,
    exchange: Callable[[Group], float] = lambda group: 0.001,
    schedule: str = "1f1b",
) -> Recording:
    """Of a simulated run."""

    def seconds(worker: Worker, number: int) -> float:
        phases = own(worker, number)
        return sum(phases.values()) if isinstance(phases, Mapping) else phases

    work = Work(*shape, updates, seconds, "1f1b", micro_batches, exchange=exchange)
    about = About("here", "cpu", 0, 8, schedule, micro_batches)
    return of_log(simulated_log(path / "log.jsonl", policy, simulate(policy, work), own, about))


def kinds(seen: Recording) -> list[str]:
    return [finding.kind for finding in findings(seen)]


def only(seen: Recording) -> Finding:
    (finding,) = findings(seen)
    return finding


@pytest.mark.parametrize("policy", [ALL_REDUCE, SemiDecentralized(), ADPSGD()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("shape", [(1, 4), (2, 4)], ids=str)
def test_of_a_run_in_which_nothing_is_wrong_nothing_is_said(
    policy: PolicyConfig, shape: tuple[int, int], tmp_path: Path
) -> None:
    assert kinds(log_of(tmp_path, policy=policy, shape=shape, micro_batches=4)) == []


def stalls(*workers: int, phase: str = "injected", seconds: float = 0.12) -> Own:
    draw = random.Random(3)
    late = {(pipeline, number) for pipeline in workers for number in range(200) if draw.random() < 0.1}

    def own(worker: Worker, number: int) -> dict[str, float]:
        more = seconds if (worker.pipeline, number) in late else 0.0
        return {"forward": STEADY(worker, number), phase: more}

    return own


def test_stalls_in_turn_are_told_with_their_cause_and_what_others_stood_still(tmp_path: Path) -> None:
    finding = only(log_of(tmp_path, stalls(0, 1, 2, 3)))
    assert (finding.kind, len(finding.workers)) == ("stalling", 4)
    assert finding.text.startswith("workers stall in turn for 20 % of their own time")
    assert "(injected)" in finding.text
    assert finding.severity == "note", "below 30 % of own time it may be the machine"
    assert finding.cost is not None
    assert finding.cost.stood > 0.2
    assert finding.advice[0].override == "sync=semi_decentralized"


def test_updates_that_compile_are_no_stalls(tmp_path: Path) -> None:
    def own(worker: Worker, number: int) -> dict[str, float]:
        compiles = worker.pipeline == 2 and number in (1, 50)
        return {"forward": STEADY(worker, number) + 5.0 * compiles}

    assert "stalling" not in kinds(log_of(tmp_path, own))


def test_seldom_but_long_stalls_late_in_a_run_are_told(tmp_path: Path) -> None:
    def own(worker: Worker, number: int) -> dict[str, float]:
        return {"forward": STEADY(worker, number) + 5.0 * (worker.pipeline == 2 and number % 100 == 50)}

    assert "stalling" in kinds(log_of(tmp_path, own, updates=400))


def test_many_stalls_are_more_than_a_note(tmp_path: Path) -> None:
    finding = only(log_of(tmp_path, stalls(0, 1, 2, 3, seconds=0.4)))
    assert (finding.kind, finding.severity) == ("stalling", "critical")


def test_stalls_of_one_worker_are_its_own(tmp_path: Path) -> None:
    finding = only(log_of(tmp_path, stalls(2, phase="gc", seconds=0.4)))
    assert (finding.kind, finding.workers) == ("stalling", (Worker(0, 2),))
    assert finding.text.startswith("stage 0 of pipeline 2 (here, cpu) stalls for 45 % of its own time")
    assert "(gc)" in finding.text
    assert "gc.freeze()" in finding.advice[0].text


@pytest.mark.parametrize(
    ("core", "usual", "cause", "severity"),
    [(0.8, 0.0, "without a core", "note"), (0.0, 1.0, "forward", "critical"), (0.0, 0.0, "forward", "note")],
    ids=["for want of cores", "though there were cores", "not known"],
)
def test_threads_that_had_their_cores_stall_by_themselves(core: float, usual: float, cause: str, severity: str) -> None:
    """``core``: of a stall, without a core; ``usual`` ms of any update are so on a system that tells them."""
    draw, rows = random.Random(1), {}
    for pipeline in range(4):
        late = [draw.random() < 0.1 for _ in range(128)]
        own = [60.0 + 120.0 * each for each in late]
        rows[Worker(0, pipeline)] = [
            one_row(
                number,
                core=round(1e3 * (usual + 120 * core * late[number])),
                forward=round(1e3 * ms),
                wait_group=round(1e3 * (180 - ms)),
            )
            for number, ms in enumerate(own)
        ]
    seen = recording({worker: [Chunk(worker, 1, 128 * 0.18, tuple(own))] for worker, own in rows.items()})
    (finding,) = stalling(seen)
    assert f"({cause})" in finding.text
    assert finding.severity == severity


def test_a_slow_link_is_that_of_the_worker_whose_groups_take_long(tmp_path: Path) -> None:
    def exchange(group: Group) -> float:
        return 0.01 if Worker(0, 1) in group.members else 0.003

    finding = only(log_of(tmp_path, policy=ADPSGD(), exchange=exchange))
    assert (finding.kind, finding.workers) == ("slow_link", (Worker(0, 1),))
    assert finding.evidence["exchange_ms"] == pytest.approx(10, rel=0.3)
    assert kinds(log_of(tmp_path / "b", policy=ADPSGD(), exchange=lambda _: 0.003)) == []


def test_a_link_to_a_neighbour_is_slow_where_its_messages_are_waited_for(tmp_path: Path) -> None:
    def own(worker: Worker, number: int) -> dict[str, float]:
        return {"forward": STEADY(worker, number), "send": 0.008 if worker == Worker(0, 1) else 0.0005}

    finding = only(log_of(tmp_path, own, shape=(2, 4), micro_batches=4))
    assert (finding.kind, finding.workers) == ("slow_link", (Worker(0, 1),))
    assert finding.evidence["send_share"] >= 0.05


def test_exchanges_that_take_long(tmp_path: Path) -> None:
    finding = only(log_of(tmp_path, exchange=lambda _: 0.015))
    assert finding.kind == "exchange_bound"
    assert finding.evidence["exchange_ms"] == pytest.approx(15, rel=0.1)
    assert [advice.override for advice in finding.advice] == [
        "exchange=full exchange.overlap=step",
        "exchange=eight_bit",
    ]


def test_long_exchanges_are_told_of_from_the_first_one_on_and_what_would_help(tmp_path: Path) -> None:
    def early(seconds: float) -> Recording:
        def exchange(group: Group) -> float:
            return seconds if len(group.members) > 1 else 0.0

        seen = log_of(tmp_path / str(seconds), policy=LocalSGD(every=8), exchange=exchange)
        return replace(seen, series={worker: series.oldest(10) for worker, series in seen.series.items()})

    (finding,) = bottlenecks(early(4.0), slow=False)
    assert finding.kind == "exchange_bound"
    assert finding.evidence["exchange_ms"] == pytest.approx(4000, rel=0.1)
    assert "on exchanges, of 4" in finding.text
    rarely = next(int(advice.override.rpartition("=")[2]) for advice in finding.advice if "diloco" in advice.override)
    assert 4 / (4 + 0.06 * rarely) == pytest.approx(0.05, rel=0.1)
    assert max(finding.advice, key=lambda advice: advice.gain or 0.0).python.startswith("SDPipeStrategy(sync=DiLoCo(")
    assert bottlenecks(early(0.9), slow=False) == [], "which may have been the only one"


@pytest.mark.parametrize("known", [10**6, 20], ids=["all", "of the last rounds"])
def test_groups_that_were_held_back_are_no_slow_exchanges_whatever_reasons_are_known(
    known: int, tmp_path: Path
) -> None:
    """A scheduler tells those of its last rounds, and a log has all."""
    seen = log_of(
        tmp_path,
        stalls(0, 1, 2, 3, seconds=0.1),
        SemiDecentralized(window=0.05),
        exchange=lambda group: 0.0005 if group.reason in NOT_HELD else 0.05,
    )
    assert set(seen.reasons.values()) - NOT_HELD
    kept = dict([*seen.reasons.items()][-known:])
    assert "exchange_bound" not in kinds(replace(seen, reasons=kept))


def test_the_last_line_words_what_else_held_the_run_up(tmp_path: Path) -> None:
    line = in_one_line(log_of(tmp_path, exchange=lambda _: 0.015))
    assert "; no worker was slower than its replicas; stage 0 spends " in line
    assert ' → exchange while the next batch is computed: SDPipeStrategy(exchange=Exchange(overlap="step")) (' in line
    assert line.endswith(" × as fast)")


def test_loading_that_takes_long(tmp_path: Path) -> None:
    finding = only(log_of(tmp_path, lambda w, n: {"forward": STEADY(w, n), "data": 0.01}))
    assert (finding.kind, len(finding.workers)) == ("data_bound", 4)
    assert finding.evidence["share"] == pytest.approx(10 / 70, abs=0.01)


def test_a_cut_into_unequal_stages(tmp_path: Path) -> None:
    times = (0.010, 0.020, 0.010, 0.020)
    seen = log_of(tmp_path, lambda w, n: times[w.stage], shape=(4, 2), micro_batches=4, exchange=lambda _: 0.0)
    finding = only(seen)
    assert finding.kind == "unbalanced_cut"
    assert finding.evidence == {"update_ms": 30.0, "update_ms_if_equal": 26.25}
    assert finding.workers == (Worker(1, 0), Worker(1, 1))
    looped = log_of(tmp_path / "b", lambda w, n: times[w.stage], shape=(4, 2), schedule="zero_bubble")
    assert kinds(looped) == [], "of other schedules it is not known how long an update takes"


def test_stages_of_pipelines_of_unlike_depths_are_not_compared() -> None:
    """One that runs the whole model is not slow beside one that runs half of it."""
    own = {Worker(0, 0): 120.0, Worker(0, 1): 120.0, Worker(0, 2): 60.0, Worker(1, 2): 60.0}
    told = {worker: chunks(worker, [time] * 128, every=120.0) for worker, time in own.items()}
    about = {worker: About("here", "cpu", 0, 8, "1f1b", 2) for worker in own}
    assert not {"compute_straggler", "unbalanced_cut"} & {*kinds(recording(told, about))}


def test_how_long_an_update_takes_by_the_times_of_the_stages() -> None:
    assert update_time((10, 20, 10, 20), 4, "1f1b") == 30
    assert update_time((15, 15, 15, 15), 4, "1f1b") == 26.25
    assert update_time((10, 20, 10, 20), 1, "pipedream") == 20


@pytest.mark.parametrize(("shape", "factor"), [((1, 4), 2.0), ((1, 4), 1.0), ((2, 2), 2.0)])
def test_the_bound_is_the_speed_of_pipelines_that_do_not_wait_for_each_other(
    shape: tuple[int, int], factor: float, tmp_path: Path
) -> None:
    def own(worker: Worker, number: int) -> float:
        return 0.06 * (factor if worker == Worker(0, 1) else 1)

    seen = log_of(tmp_path, own, shape=shape, micro_batches=4, exchange=lambda _: 0.0)
    work = Work(*shape, 140, own, "1f1b", 4)
    alone, together = (simulate(policy, work).throughput for policy in (NoSync(), ALL_REDUCE))
    assert bound(seen) == pytest.approx(alone / together, rel=0.04)


def test_of_few_updates_nothing_is_said(tmp_path: Path) -> None:
    few: dict[str, Any] = {"own": lambda w, n: {"forward": 0.06, "data": 0.02}, "updates": 60}
    assert bottlenecks(log_of(tmp_path, **few), slow=False) == []
    assert bottlenecks(recording({}), slow=False) == []
