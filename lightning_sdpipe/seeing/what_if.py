"""Gains of advice: the recorded own times run through the real policy under a virtual clock, edited over unedited.

Where the unedited simulation does not reproduce the measured rate, it would not predict a gain either, and none is
given.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import cast, get_args

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.meter import DATA
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.decisions import BrokenRule
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.seeing.bottlenecks import recent, transfers
from lightning_sdpipe.seeing.finding import Advice, Charge, Finding, meetings, severity
from lightning_sdpipe.seeing.recording import Recording
from lightning_sdpipe.simulate import Run, Schedule, Work, simulate

OFF = 0.10
"""Largest relative error of the unedited simulation's rate."""
UPDATES = 128
"""Largest number of updates of each worker that are simulated."""
SKIPPED = 8
"""Number of first updates of a simulation that do not count."""
MOST_WORKERS = 64
"""Largest number of workers of a simulated run: more would take longer than people wait."""
WORTH_SAYING = 1.03
SHARES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Windows that are tried, over the length of an update, beside "auto"."""

OwnTimes = Mapping[Worker, Sequence[float]]
"""Seconds of each update."""


@dataclass(frozen=True)
class WhatIf:
    """A recorded run that can be simulated; see :func:`what_if`."""

    own: OwnTimes
    policy: PolicyConfig
    work: Work
    unedited: Run

    def gain(self, own: OwnTimes | None = None, policy: PolicyConfig | None = None, exchange: bool = True) -> float:
        """Return how many times as fast the run would have been with these own times, or that policy, or where
        exchanges take no time."""
        run = self.run(own, policy, exchange)
        return _rate(run) / _rate(self.unedited)

    def run(self, own: OwnTimes | None = None, policy: PolicyConfig | None = None, exchange: bool = True) -> Run:
        """Simulate the run."""
        work = replace(self.work, seconds=_times(self.own if own is None else own))
        if not exchange:
            work = replace(work, exchange=lambda group: 0.0)
        return simulate(policy or self.policy, work)


def what_if(recording: Recording) -> WhatIf | None:
    """Return the run's model; None where the run cannot be simulated, or not within 10 % of what was measured."""
    seen = recent(recording)
    policy, about = _policy(seen), list(seen.about.values())
    stages, pipelines = seen.num_stages, {worker.pipeline for worker in seen.series}
    whole = len(seen.series) == stages * len(pipelines) and sorted(pipelines) == [*range(len(pipelines))]
    if policy is None or not whole or not about or about[0].schedule not in get_args(Schedule):
        return None
    if len(seen.series) > MOST_WORKERS or len(pipelines) < 2:
        return None
    updates = min(UPDATES, *map(len, seen.series.values()))
    own = {worker: [us / 1e6 for us in series.own()[-updates:]] for worker, series in seen.series.items()}
    times = {stage: each[0] / each[1] / 1e6 for stage, each in transfers(seen, meetings(seen)).items()}
    work = Work(
        stages,
        len(pipelines),
        updates,
        _times(own),
        cast(Schedule, about[0].schedule),
        1 if about[0].schedule == "pipedream" else about[0].micro_batches,
        exchange=lambda group: times.get(group.stage, 0.0) if len(group.members) > 1 else 0.0,
    )
    try:
        unedited = simulate(policy, work)
    except (ConfigurationError, BrokenRule):
        return None
    series = [series.newest(updates) for worker, series in seen.series.items() if worker.stage == stages - 1]
    measured = sum(updates / each.seconds() for each in series)
    off = abs(_rate(unedited) / measured - 1)
    return WhatIf(own, policy, work, unedited) if off <= OFF else None


def advised(recording: Recording, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings with the gain of each advice, and windows that would have been better."""
    model = what_if(recording)
    if model is None:
        return list(found)
    return [*(_with_gains(recording, model, finding) for finding in found), *windows(recording, model)]


def with_gains(recording: Recording, finding: Finding) -> Finding:
    """Return the finding with the gain of each advice, as far as it can be told."""
    model = what_if(recording)
    return finding if model is None else _with_gains(recording, model, finding)


def _with_gains(recording: Recording, model: WhatIf, finding: Finding) -> Finding:
    advice = [replace(each, gain=_gain(recording, model, finding, each.override)) for each in finding.advice]
    return replace(finding, advice=tuple(advice))


def windows(recording: Recording, model: WhatIf) -> list[Finding]:
    """Find another window of SDPipe's that is faster, and still mixes models within the rounds that it looks back.
    Without numpy that is unknown."""
    policy = model.policy
    if not isinstance(policy, SemiDecentralized) or find_spec("numpy") is None:
        return []
    length = statistics.median(sum(us) / 1e6 for series in recent(recording).series.values() for us in series.us)
    rounds = policy.connectivity or 10
    tried: list[tuple[float, float | str, Run]] = []
    candidates: list[float | str] = ["auto", *(round(share * length, 6) for share in SHARES)]
    for window in candidates:
        with_window = _with(policy, window=window)
        if with_window is not None and window != policy.window:
            run = model.run(policy=with_window)
            if _mixes_within(run) <= rounds:
                tried.append((_rate(run) / _rate(model.unedited), window, run))
    gain, window, run = max(tried, key=lambda each: each[0], default=(0.0, "", model.unedited))
    if gain < WORTH_SAYING:
        return []
    short = run.mean_group_size > model.unedited.mean_group_size
    cost = Charge(1 - 1 / gain)
    python = f"SDPipeStrategy(sync=SemiDecentralized(window={window!r}))".replace("'", '"')
    return [
        Finding(
            "window_short" if short else "window_long",
            severity(cost),
            (),
            recording.now,
            f"with a {'longer' if short else 'shorter'} window the run would be {gain:.2f} × as fast",
            {"gain": round(gain, 3), "group": round(run.mean_group_size, 2)},
            cost,
            (Advice("wait so long for others", python, f"sync.window={window}", gain),),
        )
    ]


def _mixes_within(run: Run) -> float:
    """Return the rounds in which models come closer by a factor of e, in the slowest stage."""
    found = []
    for stage in range(run.work.num_stages):
        rho = run.rho(stage)
        if rho <= 0:
            continue
        if rho >= 1:
            return math.inf
        groups = sum(group.stage == stage for _, group in run.groups)
        found.append(-1 / math.log(rho) * run.work.iterations / max(1, groups))
    return max(found, default=0.0)


def _gain(recording: Recording, model: WhatIf, finding: Finding, override: str) -> float | None:
    """Return the gain of an advice, where it can be simulated."""
    name, _, value = override.rpartition(" ")[2].partition("=")
    own: OwnTimes | None = None
    policy: PolicyConfig | None = None
    match name:
        case "sync" if override == "sync=semi_decentralized":
            policy = SemiDecentralized()
        case "sync.window" | "sync.connectivity":
            policy = _with(model.policy, **{name.removeprefix("sync."): value if value == "auto" else int(value)})
        case "partition":
            own = dict(_balanced(model))
        case "data.num_workers":
            own = dict(_without_data(recording, model, finding.workers))
        case "exchange.overlap":
            return _rounded(model.gain(exchange=False))
    return None if own is None and policy is None else _rounded(model.gain(own, policy))


def _balanced(model: WhatIf) -> Iterator[tuple[Worker, list[float]]]:
    """Yield own times of pipelines whose stages take equally long."""
    for pipeline in range(model.work.num_pipelines):
        stages = [model.own[Worker(stage, pipeline)] for stage in range(model.work.num_stages)]
        means = [statistics.fmean(together) for together in zip(*stages, strict=True)]
        yield from ((Worker(stage, pipeline), means) for stage in range(len(stages)))


def _without_data(
    recording: Recording, model: WhatIf, workers: Sequence[Worker]
) -> Iterator[tuple[Worker, Sequence[float]]]:
    """Yield own times of workers that do not wait for their batches, as far as that concerns ``workers``."""
    for worker, own in model.own.items():
        if worker in workers:
            loading = [us[DATA] / 1e6 for us in recording.series[worker].us[-len(own) :]]
            own = [time - data for time, data in zip(own, loading, strict=True)]
        yield worker, own


def _policy(recording: Recording) -> PolicyConfig | None:
    """Return the run's policy, if it is a built-in one, since a log must not choose what is imported."""
    name = recording.policy.get("type")
    if name == "no_sync":
        sync = {about.sync for about in recording.about.values()}
        return AllReduceModels() if sync in ({"AllReduce"}, {"all_reduce"}) else None
    return registry.from_plain(recording.policy) if name in registry.BUILT_IN else None


def _with(policy: PolicyConfig, **values: object) -> PolicyConfig | None:
    """Return the policy with other values; None where these do not go together."""
    try:
        return registry.from_plain(registry.to_plain(policy) | values)
    except ConfigurationError:
        return None


def _times(own: OwnTimes) -> Callable[[Worker, int], float]:
    return lambda worker, iteration: own[worker][iteration]


def _rate(run: Run) -> float:
    """Return the mini-batches per second of all pipelines."""
    return max(sum(run.rates(min(SKIPPED, run.work.iterations - 1))), 1e-9)


def _rounded(gain: float) -> float:
    return round(gain, 3)
