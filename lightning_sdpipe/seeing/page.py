"""The view of a run, :func:`to_plain`, from which all forms are made: JSON, text here, and the page of ``html.py``; and
the last line of a run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.log import status_page
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.seeing.detectors import abstains, findings
from lightning_sdpipe.seeing.finding import Advice, Finding
from lightning_sdpipe.seeing.following import NEWEST, Follower
from lightning_sdpipe.seeing.recording import Recording, Series

SCHEMA = 3
"""Version of the result of :func:`to_plain`; it grows when a key goes or changes its meaning."""
LAST_LINE_WITHIN = 1.0
"""Seconds within which the scheduler must answer for a run to print its last line."""
HEALTHY = 0
EXIT = {"blind": 12, "critical": 11, "warning": 10}
"""Exit statuses of ``sdpipe status --once``, the gravest first; a traceback's is 1."""
GOING_ON = ("starting", "training", "validating", "waiting")
"""States of an unfinished run."""
IN_ONE_LINE = ("failed", "blind", "compute_straggler", "slow_host")
"""Kinds of findings that come first in the last line of a run, even if they cost little."""

_WIDTH = 40
RECENT = 64
"""Number of updates in a bar."""
_LETTERS = dict(zip(PHASES, "-dfboig^v>|.x", strict=True))
MEANINGS = {
    "other": "anything else",
    "injected": "injected sleep",
    "gc": "garbage collection",
    "wait_up": "waits for the stage before",
    "wait_down": "waits for the next stage",
    "send": "waits until a stage has taken what was sent",
    "wait_stage": "waits for its pipeline otherwise",
    "wait_group": "waits for replicas",
    "exchange": "moves tensors between replicas",
}
_CELL = (
    "a cell: what the worker does, iteration (behind the furthest) {its last group} step/of which it waits for replicas"
)


def exit_status(found: Sequence[Finding]) -> int:
    """Return the exit status of ``sdpipe status --once``."""
    severities = {finding.severity for finding in found}
    return next((status for severity, status in EXIT.items() if severity in severities), HEALTHY)


def to_plain(recording: Recording, status: Status | None, found: Sequence[Finding] | None = None) -> dict[str, Any]:
    """Return the view of a run in plain values, for JSON and all other forms. Without ``found``, the findings are
    computed here."""
    found = findings(recording) if found is None else found
    rate, why = recording.samples_per_second(), abstains(recording)
    plain: dict[str, Any] = {} if status is None else status_page.to_plain(status)
    return plain | {
        "schema": SCHEMA,
        "line": in_one_line(recording, found),
        "state": recording.state,
        "seconds": round(recording.now - recording.begun, 1),
        "ended": _ended(recording),
        "doing": _doing_to_plain(recording),
        "pipelines": _pipelines_to_plain(recording),
        "healthy": why is None and all(finding.severity == "note" for finding in found),
        "findings": [
            {
                "kind": finding.kind,
                "severity": finding.severity,
                "workers": [{"stage": worker.stage, "pipeline": worker.pipeline} for worker in finding.workers],
                "seconds_ago": round(max(0.0, recording.now - finding.since), 3),
                "text": _said(finding),
                "evidence": finding.evidence,
                "cost": None if finding.cost is None else asdict(finding.cost),
                "advice": [asdict(advice) | {"text": _recommended(advice)} for advice in finding.advice],
            }
            for finding in found
        ],
        "abstains": why,
        "samples_per_second": None if rate is None else round(rate, 3),
        "updates": [_worker_to_plain(recording, worker) for worker in sorted(recording.series)],
    }


def text(plain: dict[str, Any], status: Status | None) -> str:
    """Return the view ``plain`` as a page of text."""
    grave, notes = (
        [each for each in plain["findings"] if (each["severity"] == "note") is note] for note in (False, True)
    )
    lines = [*_head(plain), *(line for finding in grave for line in _lines(finding))]
    if plain["ended"] is None:
        ago = {lost["pipeline"]: lasted(lost["seconds_ago"]) for lost in plain["pipelines"]["lost"]}
        lines += [
            f"lost     pipeline {pipeline} {since} ago: its log says why (pipeline-{pipeline}.log of sdpipe run)"
            for pipeline, since in ago.items()
        ]
    if plain["abstains"] is not None:
        lines.append(f"slow?    {plain['abstains']}")
    elif plain["healthy"]:
        lines.append("healthy  no worker is slower than its replicas")
    lines += [line for finding in notes for line in _lines(finding)]
    lines += ["", *_bars(plain["updates"])]
    if status is not None:
        lines += ["", status_page.render(status), "", _CELL]
    return "\n".join(lines)


def _head(plain: dict[str, Any]) -> list[str]:
    """Return the line that says what the run does, if its workers say so."""
    doing = plain["doing"]
    if doing is None:
        return []
    of = "" if doing["epochs"] is None else f" of {doing['epochs']}"
    parts = [f"{plain['state']}, epoch {doing['epoch'] + 1}{of}"]
    if doing["seconds_left"] is not None:
        parts.append(f"about {lasted(doing['seconds_left'])} left")
    return ["; ".join([*parts, *(f"{name} {value}" for name, value in doing["metrics"].items())])]


def lasted(seconds: float) -> str:
    """Format a duration in its two largest units."""
    minutes, hours = divmod(round(seconds), 60)[0], int(seconds) // 3600
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {round(seconds) % 60} s" if minutes else f"{seconds:.0f} s"


def _lines(finding: dict[str, Any]) -> list[str]:
    advice = [f"{'':9}→ {each['text']}" for each in finding["advice"]]
    return [f"{finding['severity'].upper():9}{finding['text']}  [{finding['kind']}]", *advice]


def _bars(workers: Sequence[dict[str, Any]]) -> list[str]:
    if not workers:
        return ["no worker has reported an update yet"]
    rows = [["stage", "pipeline", "rank", "where", "updates", "ms", "own", f"the last {RECENT} updates"]]
    drawn = ""
    for each in workers:
        us = [*each["recent_us"].values()]
        line = bar(us)
        where = "-" if each["host"] is None else f"{each['host']}, {each['device']}"
        rank = "-" if each["rank"] is None else each["rank"]
        numbers = [each["stage"], each["pipeline"], rank, where, each["updates"]]
        rows.append([*map(str, numbers), f"{sum(us) / 1e3:.1f}", f"{sum(us[:OWN]) / 1e3:.1f}", line])
        drawn += line
    legend = [f"{_LETTERS[name]} {MEANINGS.get(name, name)}" for name in PHASES if _LETTERS[name] in drawn]
    return [*status_page.aligned(rows), "own: without waits for other workers; " + ", ".join(legend)]


def bar(shares: Sequence[float], width: int = _WIDTH) -> str:
    """Return a bar of letters, as many for each phase as its share; the largest remainders get the places left."""
    total = sum(shares)
    if total <= 0:
        return ""
    exact = [width * share / total for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda phase: counts[phase] - exact[phase])
    for phase in by_remainder[: width - sum(counts)]:
        counts[phase] += 1
    return "".join(_LETTERS[name] * count for name, count in zip(PHASES, counts, strict=True))


def last_line(address: str, keys: WorkerKeys | None) -> str | None:
    """Return the line that rank 0 prints at the end of a run; None if the scheduler does not answer in time."""
    try:
        recording, _ = Follower(address, keys, newest=NEWEST).poll(LAST_LINE_WITHIN)
    except SchedulerError:  # training has succeeded in any case
        return None
    return in_one_line(recording)


def in_one_line(recording: Recording, found: Sequence[Finding] | None = None) -> str:
    """Return one line: the run's speed, the slow worker or whatever else held the run up, and the best advice. Further
    findings are counted, except those of little cost."""
    found = findings(recording) if found is None else found
    named = [finding for finding in found if finding.kind in IN_ONE_LINE]
    costly = [finding for finding in found if finding.severity != "note" and finding not in named[:1]]
    shown, more = (named or costly)[:1], costly if named else costly[1:]
    rate = recording.samples_per_second()
    parts = [] if rate is None else [f"{_rounded(rate)} samples/s"]
    if not named:
        parts.append(abstains(recording) or "no worker was slower than its replicas")
    for finding in shown:
        advice = sorted(finding.advice, key=lambda each: -(each.gain or 0.0))
        parts.append(" → ".join([_said(finding), *map(_recommended, advice[:1])]))
    if more:
        parts.append(f"{len(more)} more (log_dir= keeps a log, which sdpipe status reads)")
    return "sdpipe: " + "; ".join(parts)


def _said(finding: Finding) -> str:
    if finding.cost is None:
        return finding.text
    blamed = finding.kind in (*IN_ONE_LINE, "stalling")
    return f"{finding.text}: {'others waited' if blamed else 'it costs'} {100 * finding.cost.stood:.1f} % of the time"


def _recommended(advice: Advice) -> str:
    gain = "" if advice.gain is None else f" (up to {advice.gain:.2f} × as fast)"
    return advice.text + (f": {advice.python}" if advice.python else "") + gain


def _worker_to_plain(recording: Recording, worker: Worker) -> dict[str, Any]:
    series, about = recording.series[worker], recording.about.get(worker)
    return {
        "stage": worker.stage,
        "pipeline": worker.pipeline,
        "rank": None if about is None else about.rank,
        "host": None if about is None else about.host,
        "device": None if about is None else about.device,
        "updates": sum(life.made for life in series.lives),
        "updates_of_lives": [life.made for life in series.lives],
        "dropped": series.dropped,
        "phases_us": _means(series),
        "recent_us": _means(series.newest(RECENT)),
        "without_a_core_us": round(sum(series.core) / len(series), 1),
    }


def _ended(recording: Recording) -> str | None:
    """Return the local time at which the run ended, if it has."""
    if recording.state.partition(":")[0] in GOING_ON or not recording.clock:
        return None
    last = max([life.ends[-1] for series in recording.series.values() for life in series.lives if len(life)], default=0)
    at = recording.now if recording.over else last or recording.now
    return datetime.datetime.fromtimestamp(recording.clock + at).strftime("%Y-%m-%d %H:%M")


def _doing_to_plain(recording: Recording) -> dict[str, Any] | None:
    """Return what the furthest pipeline does, with the longest time left that a worker reports."""
    there = [doing for worker, doing in sorted(recording.doing.items()) if worker not in recording.gone]
    if not there:
        return None
    furthest = max(there, key=lambda doing: doing.epoch)
    left = [doing.left for doing in there if doing.left is not None]
    return {
        "epoch": furthest.epoch,
        "epochs": furthest.epochs,
        "seconds_left": max(left, default=None) if _ended(recording) is None else None,
        "metrics": dict(furthest.metrics),
    }


def _pipelines_to_plain(recording: Recording) -> dict[str, Any]:
    """Return how many pipelines train, how many ever did or were lost, and how long ago each lost one was lost."""
    gone = {worker.pipeline: recording.now - since for worker, since in sorted(recording.gone.items())}
    ever = {worker.pipeline for worker in (*recording.series, *recording.active)} | gone.keys()
    return {
        "training": len({worker.pipeline for worker in (*recording.active, *recording.doing)} - gone.keys()),
        "of": len(ever),
        "lost": [{"pipeline": pipeline, "seconds_ago": round(ago, 1)} for pipeline, ago in gone.items()],
    }


def _means(series: Series) -> dict[str, float]:
    sums = map(sum, zip(*series.us, strict=True))
    return {name: round(us / len(series), 1) for name, us in zip(PHASES, sums, strict=True)}


def _rounded(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.3g}"
