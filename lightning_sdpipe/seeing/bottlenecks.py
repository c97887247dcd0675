"""Finds bottlenecks other than slow workers: stalls, links, exchanges, loading, and a bad cut.

The functions are pure. All examine the newest updates of each worker (:func:`~lightning_sdpipe.seeing.finding.recent`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_sdpipe.meter import DATA, GC, OWN, PHASES, SEND
from lightning_sdpipe.policies.decisions import Reason
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.finding import (
    FOR_CAUSE,
    RECENT,
    SCHEDULES,
    Advice,
    Charge,
    Finding,
    Meeting,
    bound,
    costs,
    meetings,
    recent,
    severity,
    stood_still,
    update_time,
)
from lightning_sdpipe.seeing.recording import Recording, Series

STALLS, MANY_STALLS = 0.10, 0.30
"""Shares of own time: stalls are reported from the first on; from the second on, a shared machine does not explain
them."""
SELDOM = 2
"""Early in a run, stalls must remain without this many of a worker's longest updates, in which it may have compiled."""
MEETINGS = 16
"""Least number of meetings by which a link is judged."""
SLOW_LINK, OF_ITS_UPDATE = 1.5, 0.05
EXCHANGE_BOUND, DATA_BOUND, UNBALANCED = 0.10, 0.05, 1.03
LONG, LONG_BOUND, LEFT = 1.0, 0.20, 0.05
"""Seconds from which on a single exchange suffices for a finding, the least share of time for that finding, and the
share to which the advice would reduce it."""
NOT_HELD = {"", Reason.EVERYBODY_CAME, Reason.MATCHED}
"""Reasons of groups that the scheduler did not hold back: their last member waits only for the exchange."""
OF_GRADIENTS = ("no_sync", "all_present")
"""Policies of methods that average gradients, or nothing."""


def bottlenecks(recording: Recording, slow: bool) -> list[Finding]:
    """Return all bottlenecks. If ``slow``, a worker is known to be slow, which may explain stalls."""
    seen, early = recent(recording), recent(recording, least=1)
    met = meetings(seen)
    exchanges = exchange_bound(seen, met) or exchange_bound(early, meetings(early), LONG_BOUND, LONG)
    if not seen.series:
        return exchanges
    found = [] if slow else stalling(seen)
    found += slow_link(seen, met) + exchanges + data_bound(seen)
    return found + unbalanced_cut(seen)


def stalling(seen: Recording) -> list[Finding]:
    """Find workers whose updates are sometimes much longer than usual, which medians hide. On a shared machine all
    workers stall; below 30 % of own time that is a note, unless the threads are known to have had a core."""
    stalls = {worker: _Stalls(series) for worker, series in seen.series.items()}
    excess = {worker: each.excess for worker, each in stalls.items()}
    total, own = sum(excess.values()), sum(each.own for each in stalls.values())
    if not own or sum(each.again for each in stalls.values()) < STALLS * own:
        return []
    share = total / own
    worst = max(excess, key=excess.__getitem__)
    alone = excess[worst] >= max(0.5, min(0.8, 2 / len(excess))) * total
    late = [worst] if alone else sorted(excess)
    phases = [sum(stalls[worker].phases[phase] for worker in late) for phase in range(OWN)]
    core = sum(stalls[worker].core for worker in late) / sum(excess[worker] for worker in late)
    cause = "mixed"
    if core >= 0.5:
        cause = "without a core"
    elif phases[GC] >= 0.5 * sum(phases):
        cause = "gc"
    elif max(phases) >= 0.8 * sum(phases):
        cause = PHASES[phases.index(max(phases))]
    charged = costs(seen)
    cost = charged[worst.pipeline] if alone else Charge(sum(each.stood for each in charged.values()))
    known = any(any(series.core) for series in seen.series.values())
    text = f"{seen.name(worst)} stalls" if alone else "workers stall in turn"
    of_own = excess[worst] / stalls[worst].own if alone else share
    small = of_own < MANY_STALLS and not (known and core < 0.1)
    return [
        Finding(
            "stalling",
            "note" if small else severity(cost),
            tuple(late),
            _since(seen, late),
            f"{text} for {100 * of_own:.0f} % of {'its' if alone else 'their'} own time ({cause})",
            {"share": round(share, 3), "without_a_core": round(core, 3)},
            cost,
            FOR_CAUSE.get(cause) or _wait_less(seen),
        )
    ]


def _wait_less(seen: Recording) -> tuple[Advice, ...]:
    if seen.policy.get("type") == "semi_decentralized":
        if seen.policy.get("window") == "auto":
            return ()
        python = 'SDPipeStrategy(sync=SemiDecentralized(window="auto"))'
        return (Advice("wait for workers that stall only as long as it pays", python, "sync.window=auto", bound(seen)),)
    python = 'SDPipeStrategy(sync="semi_decentralized")'
    return (
        Advice("let the others continue without workers that stall", python, "sync=semi_decentralized", bound(seen)),
    )


class _Stalls:
    """Stalls of one worker in microseconds: its own time beyond the median, in all and by phase, and the time without a
    core beyond its median."""

    def __init__(self, series: Series) -> None:
        own = series.own()
        usual, core = statistics.median(own), statistics.median(series.core)
        late = [at for at, us in enumerate(own) if us > usual]
        self.own = sum(own)
        self.excess = sum(own[at] - usual for at in late)
        longest = sorted(own[at] - usual for at in late)
        self.again = self.excess if len(own) >= RECENT else sum(longest[:-SELDOM])
        self.core = sum(max(0.0, series.core[at] - core) for at in late)
        self.phases = []
        for phase in range(OWN):
            middle = statistics.median(us[phase] for us in series.us)
            self.phases.append(sum(max(0.0, series.us[at][phase] - middle) for at in late))


def slow_link(seen: Recording, met: Sequence[Meeting]) -> list[Finding]:
    """Find a worker whose groups take longer to exchange than groups without it, or one that waits for its neighbours
    to take what it sends."""
    of_stage = defaultdict(list)
    for meeting in met:
        of_stage[meeting[0][0].stage].append(meeting)
    total, found = _total(seen.series.values()), list[Finding]()
    for stage in of_stage.values():
        slower = dict[Worker, tuple[float, float]]()
        times = [_transfer(seen, meeting) for meeting in stage]
        for worker in {worker for meeting in stage for worker, _ in meeting}:
            there = [any(worker == member for member, _ in meeting) for meeting in stage]
            ours = [time for time, is_there in zip(times, there, strict=True) if is_there]
            others = [time for time, is_there in zip(times, there, strict=True) if not is_there]
            if min(len(ours), len(others)) >= MEETINGS:
                median, usual = statistics.median(ours), statistics.median(others)
                length = statistics.median(map(sum, seen.series[worker].us))
                if median >= SLOW_LINK * usual and median - usual >= OF_ITS_UPDATE * length:
                    slower[worker] = median, usual
        if slower:
            worker = max(slower, key=lambda each: slower[each][0] - slower[each][1])
            median, usual = slower[worker]
            longer = [
                (time - usual) * len(meeting)
                for meeting, time in zip(stage, times, strict=True)
                if any(worker == member for member, _ in meeting)
            ]
            evidence = {"exchange_ms": round(median / 1e3, 3), "exchange_ms_of_others": round(usual / 1e3, 3)}
            text = f"exchanges of {seen.name(worker)} take {median / max(1.0, usual):.1f} × as long as those of others"
            found.append(_link(seen, worker, text, evidence, Charge(max(0.0, sum(longer)) / total)))
    for worker, series in sorted(seen.series.items()):
        send = sum(us[SEND] for us in series.us)
        if send >= OF_ITS_UPDATE * _total([series]):
            text = f"{seen.name(worker)} waits until its neighbours have taken what it sends"
            evidence = {"send_share": round(send / _total([series]), 3)}
            found.append(_link(seen, worker, text, evidence, Charge(send / total)))
    return found


def _link(seen: Recording, worker: Worker, text: str, evidence: dict[str, float], cost: Charge) -> Finding:
    advice = (Advice("measure the links between the machines: sdpipe measure"),)
    return Finding("slow_link", severity(cost), (worker,), _since(seen, [worker]), text, evidence, cost, advice)


def exchange_bound(
    seen: Recording, met: Sequence[Meeting], most: float = EXCHANGE_BOUND, long: float = 0.0
) -> list[Finding]:
    """Find stages that spend at least the share ``most`` of their time on moving tensors between replicas, apart from
    waits for late members. There must be enough exchanges or, if ``long`` is given, their mean must be at least that
    many seconds."""
    found = []
    for stage, (spent, members, updates, total) in sorted(transfers(seen, met).items()):
        each, alone = spent / members / 1e6, (total - spent) / updates / 1e6
        if spent < most * total or (members < 2 * MEETINGS and not each >= long > 0):
            continue
        share, every = spent / total, max(1, round(updates / members))
        often = "in every update" if every == 1 else f"every {every} updates"
        text = f"stage {stage} spends {100 * share:.0f} % of its time on exchanges, of {each:.3g} s {often}"
        cost = Charge(spent / _total(seen.series.values()))
        overlap = Advice(
            "exchange while the next batch is computed",
            'SDPipeStrategy(exchange=Exchange(overlap="step"))',
            "exchange=full exchange.overlap=step",
            Charge(cost.stood * min(1.0, alone / each)).gain,
        )
        eight_bit = Advice(
            "send 8 bits per value",
            'SDPipeStrategy(exchange="eight_bit")',
            "exchange=eight_bit",
            Charge(0.75 * cost.stood).gain,
        )
        rarely = math.ceil((1 - LEFT) / LEFT * each / max(alone, 1e-3))
        seldom = Advice(
            f"exchange every {rarely} updates, so that it takes {100 * LEFT:.0f} % of the time",
            f"SDPipeStrategy(sync=DiLoCo(every={rarely}))",
            f"sync=diloco sync.every={rarely}",
            Charge(max(0.0, cost.stood - LEFT)).gain,
        )
        advice = () if seen.policy.get("type") in OF_GRADIENTS else (overlap,)
        advice = (*advice, eight_bit, *((seldom,) if each >= LONG else ()))
        workers = tuple(worker for worker in sorted(seen.series) if worker.stage == stage)
        evidence = {"exchange_ms": round(1e3 * each, 3), "share": round(share, 3), "every": float(every)}
        since = _since(seen, workers)
        found.append(Finding("exchange_bound", severity(cost), workers, since, text, evidence, cost, advice))
    return found


def transfers(seen: Recording, met: Sequence[Meeting]) -> dict[int, tuple[float, int, int, float]]:
    """Return, for each stage, the microseconds that members of groups spent on exchanges, the number of members in
    these groups, the number of updates, and their microseconds. Members of groups that the scheduler held back wait for
    it, too, so those groups' updates are left out."""
    unknown = None if seen.reasons else ""  # a scheduler tells the reasons of its last rounds only
    updates, totals, found = Counter[int](), Counter[int](), dict[int, tuple[float, int]]()
    for worker, series in seen.series.items():
        updates[worker.stage] += len(series)
        totals[worker.stage] += round(_total([series]))
    for meeting in met:
        worker, at = meeting[0]
        if seen.reasons.get(seen.series[worker].groups[at], unknown) in NOT_HELD:
            spent, members = found.get(worker.stage, (0.0, 0))
            found[worker.stage] = spent + len(meeting) * _transfer(seen, meeting), members + len(meeting)
        else:
            updates[worker.stage] -= len(meeting)
            totals[worker.stage] -= round(sum(sum(seen.series[member].us[place]) for member, place in meeting))
    return {stage: (*of_stage, updates[stage], totals[stage]) for stage, of_stage in found.items()}


def data_bound(seen: Recording) -> list[Finding]:
    """Find workers that wait for their batches."""
    loading = {worker: sum(us[DATA] for us in series.us) for worker, series in sorted(seen.series.items())}
    shares = {worker: us / _total([seen.series[worker]]) for worker, us in loading.items()}
    late = [worker for worker, share in shares.items() if share >= DATA_BOUND]
    if not late:
        return []
    cost = Charge(sum(loading[worker] for worker in late) / _total(seen.series.values()))
    share = statistics.median(shares[worker] for worker in late)
    text = f"{len(late)} of {len(shares)} workers wait for batches for {100 * share:.0f} % of their time"
    (advice,) = FOR_CAUSE["data"]
    evidence = {"share": round(share, 3)}
    advice = replace(advice, gain=cost.gain)
    return [Finding("data_bound", severity(cost), tuple(late), _since(seen, late), text, evidence, cost, (advice,))]


def unbalanced_cut(seen: Recording) -> list[Finding]:
    """Find stages that take different times, and how much shorter an update would be if they were equal."""
    schedules = {(about.schedule, about.micro_batches) for about in seen.about.values()}
    stages = stage_times(seen)
    if len(schedules) != 1 or len(stages) != seen.num_stages or len(stages) < 2 or not seen.of_one_depth:
        return []
    ((schedule, micro_batches),) = schedules
    if schedule not in SCHEDULES:
        return []
    mean = statistics.fmean(stages)
    now, equal = (update_time(times, micro_batches, schedule) for times in (stages, [mean] * len(stages)))
    if now < UNBALANCED * equal:
        return []
    cost = Charge(1 - equal / now)
    longest = stages.index(max(stages))
    text = f"stage {longest} computes {stages[longest] / mean:.2f} × as long as the mean stage"
    evidence = {"update_ms": round(now / 1e3, 3), "update_ms_if_equal": round(equal / 1e3, 3)}
    workers = tuple(worker for worker in sorted(seen.series) if worker.stage == longest)
    python = 'SDPipeStrategy(partition="balanced")'
    advice = (Advice("cut the model where measured times are equal", python, "partition=balanced", cost.gain),)
    return [Finding("unbalanced_cut", severity(cost), workers, _since(seen, workers), text, evidence, cost, advice)]


def stage_times(seen: Recording) -> list[float]:
    """Return the microseconds of own time that a typical replica of each stage needs for an update."""
    own = defaultdict(list)
    for worker, series in seen.series.items():
        own[worker.stage].append(statistics.median(series.own()))
    return [statistics.median_low(own[stage]) for stage in sorted(own)]


def _transfer(seen: Recording, meeting: Meeting) -> float:
    """Return the microseconds that the last member to come spent on the meeting."""
    return min(stood_still(seen, worker, at) for worker, at in meeting)


def _total(series: Iterable[Series]) -> float:
    """Return the microseconds of all updates in ``series``."""
    return 1e6 * sum(each.seconds() for each in series)


def _since(seen: Recording, workers: Iterable[Worker]) -> float:
    return min(seen.series[worker].ends[0] for worker in workers)
