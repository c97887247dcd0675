"""What a slow pipeline costs: what others stood still for it, and what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.ad_psgd import ADPSGD
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.rows import Chunk, UpdateRow
from lightning_sdpipe.seeing.finding import Charge, costs, severity
from lightning_sdpipe.seeing.recording import Recording
from lightning_sdpipe.simulate import Work, jittered, simulate
from tests.seeing.recordings import recording, row_of, simulated

A, B, C, D = (Worker(0, pipeline) for pipeline in range(4))


def told(rows: Mapping[Worker, Sequence[UpdateRow]]) -> Recording:
    """One chunk of each."""
    lengths = {worker: sum(sum(row.us) for row in own) / 1e6 for worker, own in rows.items()}
    return recording({worker: [Chunk(worker, 1, lengths[worker], tuple(own))] for worker, own in rows.items()})


def charged(seen: Recording) -> dict[int, float]:
    """Milliseconds that others stood still for each pipeline."""
    total = sum(series.seconds() for series in seen.series.values())
    return {pipeline: round(cost.stood * total * 1e3, 6) for pipeline, cost in costs(seen).items()}


def test_the_last_one_of_a_group_is_charged_what_the_others_stood_still() -> None:
    still = {A: 0, B: 40, C: 70}
    assert charged(told({w: [row_of(0, 100 - ms, ms, group=5)] for w, ms in still.items()})) == {0: 110, 1: 0, 2: 0}
    moving = {w: [row_of(0, 100 - ms, ms + 20, group=5)] for w, ms in still.items()}
    assert charged(told(moving)) == {0: 110, 1: 0, 2: 0}, "what all need for the exchange is no one's"


def test_a_charge_is_passed_on_to_the_one_that_held_the_last_one_up() -> None:
    """b waits 30 for a, and then c waits 50 for b."""
    seen = told(
        {
            A: [row_of(0, 100, 0, group=0)],
            B: [row_of(0, 70, 30, group=0), row_of(1, 100, 0, group=1)],
            C: [row_of(0, 150, 50, group=1)],
        }
    )
    assert charged(seen) == {0: 30 + 30, 1: 20, 2: 0}


def shares(cost: Charge) -> tuple[float, float]:
    return round(100 * cost.stood, 1), round(100 * cost.lacks, 1)


def test_all_reduce_charges_the_slow_one_update_by_update() -> None:
    own = {A: 60, B: 60, C: 60, D: 120}
    seen = told({w: [row_of(number, ms, 120 - ms) for number in range(8)] for w, ms in own.items()})
    assert shares(costs(seen)[3]) == (37.5, 12.5)
    assert costs(seen)[3].gain == pytest.approx(2.0)
    assert [costs(seen)[i] for i in range(3)] == [Charge()] * 3


def test_of_dealt_data_only_what_it_lacks_is_lost() -> None:
    own = {A: 60, B: 60, C: 60, D: 120}
    seen = told({w: [row_of(number, ms, 0) for number in range(8 * 60 // ms)] for w, ms in own.items()})
    assert shares(costs(seen)[3]) == (0.0, 12.5)
    assert costs(seen)[3].gain == pytest.approx(8 / 7)


def test_what_a_pipeline_waits_for_its_slow_stage_is_charged_to_it() -> None:
    """Own (60, 60) and (60, 120), four micro-batches: 75 and 135 of an update."""
    lengths = {0: (75, 9), 1: (135, 5)}
    rows = {}
    for stage in range(2):
        for pipeline, (length, updates) in lengths.items():
            own = 120 if (stage, pipeline) == (1, 1) else 60
            rows[Worker(stage, pipeline)] = [row_of(n, own, 0, stages=length - own) for n in range(updates)]
    found = costs(told(rows))
    assert shares(found[1]) == (11.1, 11.1)
    assert found[1].gain == pytest.approx(9 / 7)
    assert found[0] == Charge()


def test_only_what_ends_after_the_moment_counts() -> None:
    rows = {w: [row_of(n, 120 - ms * (n > 4), ms * (n > 4)) for n in range(10)] for w, ms in {A: 60, B: 0}.items()}
    seen = told(rows)
    assert shares(costs(seen)[1]) == (12.5, 12.5)
    assert shares(costs(seen, begun=0.6)[1]) == (25.0, 25.0)
    assert costs(seen, begun=9.0) == {}


@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 8, 1), (2, 4, 4), (4, 4, 4)], ids=str)
@pytest.mark.parametrize("factor", [1.5, 2.0])
@pytest.mark.parametrize("policy", [SemiDecentralized(), AllReduceModels(), ADPSGD()], ids=lambda p: type(p).__name__)
def test_in_simulations_it_is_what_a_run_without_the_slow_one_gains(
    shape: tuple[int, int, int], factor: float, policy: PolicyConfig
) -> None:
    num_stages, num_pipelines, micro_batches = shape
    steady, slow = jittered(0.06, 0.05), Worker(num_stages - 1, num_pipelines - 1)

    def slowed(worker: Worker, number: int) -> float:
        return steady(worker, number) * (factor if worker == slow else 1.0)

    def rate(own: Callable[[Worker, int], float]) -> float:
        return sum(simulate(policy, Work(num_stages, num_pipelines, 220, own, "1f1b", micro_batches)).rates(20))

    run = simulate(policy, Work(num_stages, num_pipelines, 220, slowed, "1f1b", micro_batches))
    found = costs(simulated(run, slowed, first=20))
    gain = rate(steady) / sum(run.rates(20))
    assert 0.92 <= found[num_pipelines - 1].gain / gain <= 1.04
    assert max(found[i].stood for i in range(num_pipelines - 1)) < 0.02, "others are hardly blamed"


def test_nothing_is_charged_where_none_waits() -> None:
    run = simulate(NoSync(), Work(1, 4, 50, 0.06))
    assert costs(simulated(run, lambda *_: 0.06)) == {i: Charge() for i in range(4)}
    assert costs(recording({})) == {}


def test_the_severity_is_by_what_others_stood_still() -> None:
    assert [severity(Charge(stood, 0.5)) for stood in (0.0, 0.029, 0.03, 0.099, 0.10)] == [
        *("note", "note", "warning", "warning", "critical")
    ]
    assert severity(None) == "warning"
