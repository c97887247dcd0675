"""Detects slow workers in a recording, or tells that the recording says too little.

The functions are pure. A worker's own time contains no wait for another one. So in an all-reduce, where all updates are
equally long, the slow worker's own time is long and that of the others is not. It is compared with that of its replicas
*in the same stretch of time*, since what slows a whole machine slows them alike. Eight blocks of eight updates give
eight ratios of own times; their median must be large, and large against their scatter, in three successive looks.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_sdpipe.errors import counted
from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.bottlenecks import bottlenecks
from lightning_sdpipe.seeing.finding import FOR_CAUSE, Advice, Charge, Finding, bound, costs, recent, severity
from lightning_sdpipe.seeing.recording import Recording, Series

BLOCK, BLOCKS = 8, 8
"""Number of updates in a block, and number of blocks in one look."""
STEP, LOOKS = 16, 3
"""Number of updates from look to look, and number of successive looks that must agree."""
NAMED, CLEARED = 1.15, 1.10
"""Ratio of own times, worker to replicas, from which on a worker is slow, and below which it no longer is."""
CERTAINTY = 4.0
"""Number of standard errors by which the mean of the logarithms must exceed 0."""
NEEDS = BLOCK * BLOCKS + STEP * (LOOKS - 1)
"""Number of updates until a worker can be named."""
_MOST_OF_IT = 0.8
"""Share of the excess from which on a phase counts as its cause."""
_HALF = 0.5
_ENOUGH_SEEN = 0.8
"""Share of the active workers whose state must be known."""
_INTERVALS = 3
_SHORTEST_INTERVAL = 1.0
"""Least seconds between heartbeats."""


@dataclass(frozen=True)
class _Slow:
    """A worker that is slow by ``ratio`` in its updates ``start`` to ``stop``. The first look that found it slow covers
    the time from ``begun`` to ``since``."""

    worker: Worker
    ratio: float
    begun: float
    since: float
    start: int
    stop: int


def findings(recording: Recording) -> list[Finding]:
    """Return all findings, the gravest first."""
    failed = recording.failure
    found = [] if failed is None else [Finding("failed", "critical", (), recording.now, failed)]
    slow = compute_straggler(recording)
    return [*found, *blind(recording), *slow, *bottlenecks(recording, bool(slow))]


def abstains(recording: Recording) -> str | None:
    """Return why slow workers cannot be detected; None if they can."""
    compared = [worker for worker in recording.series if recording.replicas(worker)]
    if not recording.series:
        return f"too short to tell (0 of {NEEDS} updates)"
    if not compared:
        return "one pipeline has no other to be compared with"
    fewest = min(_comparable(recording, worker) for worker in compared)
    return f"too short to tell ({fewest} of {NEEDS} updates)" if fewest < NEEDS else None


def compute_straggler(recording: Recording) -> list[Finding]:
    """Find the workers whose own time is longer than that of their replicas. If a host has at least two workers and all
    are slow, one finding covers the host."""
    slow = {worker: each for worker in sorted(recording.series) if (each := _slow(recording, worker))}
    by_host = defaultdict(list)
    for worker in recording.series:
        if worker in recording.about:
            by_host[recording.about[worker].host].append(worker)
    hosts = {host: workers for host, workers in by_host.items() if len(workers) > 1 and slow.keys() >= {*workers}}
    told = {worker for workers in hosts.values() for worker in workers}
    found = [_of_host(recording, host, [slow[worker] for worker in sorted(workers)]) for host, workers in hosts.items()]
    found += [_of_worker(recording, slow[worker]) for worker in slow if worker not in told]
    return sorted(found, key=lambda finding: -finding.evidence["ratio"])


def blind(recording: Recording) -> list[Finding]:
    """Find whether too little is known of the active workers to call the run healthy."""
    series, active, now = recording.series, recording.active, recording.now
    found = []
    lengths = [sum(us) / 1e6 for worker in active if worker in series for us in series[worker].us[-8:]]
    patience = _INTERVALS * max([_SHORTEST_INTERVAL, *lengths])
    newest = {w: max(joined, series[w].ends[-1] if w in series else -math.inf) for w, joined in active.items()}
    silent = [w for w, at in newest.items() if now - at > patience or (recording.over and w not in series)]
    if active and len(silent) > (1 - _ENOUGH_SEEN) * len(active):
        text = f"{len(silent)} of {len(active)} active workers have reported no update for {patience:.0f} s"
        if recording.over:
            text = f"{len(silent)} of {len(active)} workers have reported no update"
        found.append(Finding("blind", "blind", tuple(sorted(silent)), min(newest[w] for w in silent), text))
    dropped = [worker for worker, told in sorted(series.items()) if told.dropped > len(told)]
    if dropped:
        text = f"more than half of the updates of {counted(len(dropped), 'worker')} are missing"
        found.append(Finding("blind", "blind", tuple(dropped), now, text))
    if recording.lost:
        found.append(Finding("blind", "blind", (), now, f"it is not known what happened in {recording.lost}"))
    return found


def _slow(recording: Recording, worker: Worker) -> _Slow | None:
    """Return the state of ``worker`` at the end of the recording if it is slow, else None."""
    mine, others = recording.series[worker], [recording.series[other] for other in recording.replicas(worker)]
    ratios = _log_ratios(mine, others)
    compared = [place for place, ratio in enumerate(ratios) if ratio is not None]
    found: _Slow | None = None
    in_a_row, begun, since = 0, 0.0, 0.0
    for at in range(BLOCKS, len(compared) + 1, STEP // BLOCK):
        places = compared[at - BLOCKS : at]
        look = [ratio for place in places if (ratio := ratios[place]) is not None]
        median = statistics.median(look)
        error = statistics.stdev(look) / math.sqrt(BLOCKS)
        says_so = median >= math.log(NAMED) and statistics.fmean(look) >= CERTAINTY * error
        start, stop = places[0] * BLOCK, (places[-1] + 1) * BLOCK
        if not in_a_row:
            begun, since = mine.begun(start), mine.ends[stop - 1]
        in_a_row = in_a_row + 1 if says_so else 0
        if in_a_row >= LOOKS or (found is not None and median >= math.log(CLEARED)):
            first = (begun, since) if found is None else (found.begun, found.since)
            found = _Slow(worker, math.exp(median), *first, start, stop)
        else:
            found = None
    return found


def _comparable(recording: Recording, worker: Worker) -> int:
    """Return the number of updates that can be compared. Replicas may have made none in the meantime, for example if
    each pipeline trains a shard and waits for the slowest at the end of an epoch."""
    mine, others = recording.series[worker], [recording.series[other] for other in recording.replicas(worker)]
    return len(mine) - BLOCK * _log_ratios(mine, others).count(None)


def _log_ratios(mine: Series, others: Sequence[Series]) -> list[float | None]:
    """Return, for each block of updates, the logarithm of the ratio of its median own time to that of the other
    workers' updates that ended in the meantime; None if none did."""
    own, theirs = mine.own(), [(other.ends, other.own()) for other in others]
    ratios: list[float | None] = []
    for start in range(0, len(mine) - BLOCK + 1, BLOCK):
        stop = start + BLOCK
        begun, ended = mine.begun(start), mine.ends[stop - 1]
        medians = [
            statistics.median(part)
            for ends, times in theirs
            if (part := times[bisect_right(ends, begun) : bisect_right(ends, ended)])
        ]
        here = statistics.median(own[start:stop])
        there = statistics.median(medians) if medians else 0.0
        ratios.append(math.log(here / there) if here > 0 and there > 0 else None)
    return ratios


def _cost(recording: Recording, slow: Sequence[_Slow]) -> Charge:
    """Return the cost of these workers' pipelines since they became slow."""
    found = costs(recording, min(each.begun for each in slow))
    return sum((found[pipeline] for pipeline in {each.worker.pipeline for each in slow}), Charge())


def _of_host(recording: Recording, host: str, slow: Sequence[_Slow]) -> Finding:
    ratio = statistics.median(each.ratio for each in slow)
    text = f"all {len(slow)} workers of {host} {ratio:.2f} × as slow as their peers"
    cost = _cost(recording, slow)
    return Finding(
        "slow_host",
        severity(cost),
        tuple(each.worker for each in slow),
        min(each.since for each in slow),
        text,
        {"ratio": round(ratio, 3)},
        cost,
        _for_slow_ones(recording, slow),
    )


def _for_slow_ones(recording: Recording, slow: Sequence[_Slow]) -> tuple[Advice, ...]:
    """Return advice for a run with devices of different speed."""
    if any(recording.about[each.worker].follows_speed for each in slow if each.worker in recording.about):
        text = "it already gets fewer batches; if it used to be as fast as its peers, is it hot, shared or broken?"
        if recording.num_stages > 1:
            text += " If not, sdpipe place finds which stage costs least there"
        return (Advice(text),)
    policy = registry.BUILT_IN.get(recording.policy.get("type", ""))
    if policy is not None and policy.in_step:
        return (
            Advice(
                "let the others continue without it",
                'SDPipeStrategy(sync="semi_decentralized")',
                "sync=semi_decentralized",
                bound(recent(recording)),
            ),
            Advice(
                "give it fewer micro-batches",
                'SDPipeStrategy(sync="all_reduce", num_micro_batches=8, batch_by_speed=True)',
                "sync=all_reduce strategy.num_micro_batches=8 strategy.batch_by_speed=true",
            ),
        )
    text = "give it fewer batches, since others wait for it at the end of an epoch"
    return (Advice(text, 'SDPipeStrategy(data="dealt")', "strategy.data=dealt"),)


def _of_worker(recording: Recording, slow: _Slow) -> Finding:
    mine = recording.series[slow.worker]
    begun, ended = mine.begun(slow.start), mine.ends[slow.stop - 1]
    others = [recording.series[other] for other in recording.replicas(slow.worker)]
    here = _means(mine, slow.start, slow.stop)
    there = [_means(other, bisect_right(other.ends, begun), bisect_right(other.ends, ended)) for other in others]
    peers = [statistics.median(values) for values in zip(*filter(None, there), strict=True)]
    excess = [a - b for a, b in zip(here, peers, strict=True)]
    *phases, core = excess
    total = sum(phases)
    cause = next((name for name, us in zip(PHASES, phases, strict=False) if us >= _MOST_OF_IT * total), "mixed")
    if core >= _HALF * total:
        cause = "without a core"
    evidence = {"ratio": round(slow.ratio, 3), "updates": slow.stop, "without_a_core_ms": round(here[-1] / 1e3, 3)}
    for name, us, peer in zip(PHASES[:OWN], here[:OWN], peers[:OWN], strict=True):
        if us or peer:
            evidence |= {f"{name}_ms": round(us / 1e3, 3), f"{name}_ms_of_peers": round(peer / 1e3, 3)}
    text = f"{recording.name(slow.worker)} is {slow.ratio:.2f} × as slow as its peers ({cause})"
    cost = _cost(recording, [slow])
    advice = FOR_CAUSE.get(cause) or _for_slow_ones(recording, [slow])
    return Finding("compute_straggler", severity(cost), (slow.worker,), slow.since, text, evidence, cost, advice)


def _means(series: Series, start: int, stop: int) -> list[float]:
    """Return the mean microseconds of these updates in each own phase and without a core; empty if there are no
    updates."""
    if start >= stop:
        return []
    own = [statistics.fmean(us[phase] for us in series.us[start:stop]) for phase in range(OWN)]
    return [*own, statistics.fmean(series.core[start:stop])]
