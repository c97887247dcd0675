"""Forms of a recording for people and machines: findings, a bar of phases for each worker, and the last line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.scheduler.credentials import WorkerKeys
from lightning_sdpipe.scheduler.log import status_page
from lightning_sdpipe.scheduler.log.status import Status
from lightning_sdpipe.seeing.detectors import abstains, findings
from lightning_sdpipe.seeing.finding import Advice, Finding
from lightning_sdpipe.seeing.recording import Recording, of_scheduler
from lightning_sdpipe.seeing.what_if import with_gains

SCHEMA = 1
"""Version of the result of :func:`to_plain`; it grows where a key has gone, or has another meaning."""
LAST_LINE_WITHIN = 1.0
"""Seconds in which a run prints its last line, or none."""
HEALTHY = 0
EXIT = {"blind": 12, "critical": 11, "warning": 10}
"""Exit statuses of ``sdpipe status --once``, the gravest first; a traceback's is 1."""
IN_ONE_LINE = ("failed", "blind", "compute_straggler", "slow_host")
"""Kinds of findings that the last line of a run words rather than others, even if they cost little."""

_WIDTH = 40
RECENT = 64
"""Number of updates of a bar."""
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


def render(recording: Recording, status: Status | None, found: Sequence[Finding] | None = None) -> str:
    """Return a page of text with the findings, which are looked for if ``found`` is not given."""
    found, why = findings(recording) if found is None else found, abstains(recording)
    lines = [line for finding in found if finding.severity != "note" for line in _lines(finding)]
    if why is not None:
        lines.append(f"slow?    {why}")
    elif not lines:
        lines.append("healthy  no worker is slower than its replicas")
    lines += [line for finding in found if finding.severity == "note" for line in _lines(finding)]
    lines += ["", *_bars(recording)]
    if status is not None:
        lines += ["", status_page.render(status), "", _CELL]
    return "\n".join(lines)


def said(finding: Finding) -> str:
    """Return a finding and its cost as text for people."""
    if finding.cost is None:
        return finding.text
    blamed = finding.kind in (*IN_ONE_LINE, "stalling")
    return f"{finding.text}: {'others stood still' if blamed else 'it costs'} {100 * finding.cost.stood:.1f} %"


def recommended(advice: Advice) -> str:
    """Return an advice as text for people."""
    gain = "" if advice.gain is None else f" ({advice.gain:.2f} × as fast)"
    return advice.text + (f": {advice.python}" if advice.python else "") + gain


def to_plain(recording: Recording, status: Status | None, found: Sequence[Finding] | None = None) -> dict[str, object]:
    """Return plain values for JSON; see :func:`render`."""
    rate = recording.samples_per_second()
    plain: dict[str, object] = {} if status is None else status_page.to_plain(status)
    return plain | {
        "schema": SCHEMA,
        "findings": [
            {
                "kind": finding.kind,
                "severity": finding.severity,
                "workers": [{"stage": worker.stage, "pipeline": worker.pipeline} for worker in finding.workers],
                "seconds_ago": round(max(0.0, recording.now - finding.since), 3),
                "text": finding.text,
                "evidence": finding.evidence,
                "cost": None if finding.cost is None else asdict(finding.cost),
                "advice": [asdict(advice) for advice in finding.advice],
            }
            for finding in (findings(recording) if found is None else found)
        ],
        "abstains": abstains(recording),
        "samples_per_second": None if rate is None else round(rate, 3),
        "updates": [_worker_to_plain(recording, worker) for worker in sorted(recording.series)],
    }


def last_line(address: str, keys: WorkerKeys | None) -> str | None:
    """Return rank 0's line at the end of a run; None if the scheduler does not answer soon."""
    try:
        recording, _ = of_scheduler(address, keys, LAST_LINE_WITHIN)
    except SchedulerError:  # training has succeeded in any case
        return None
    return in_one_line(recording)


def in_one_line(recording: Recording) -> str:
    """Return the run's speed, which worker was slow or what else held it up, and what to pass; further findings are
    counted, and those of little cost left out."""
    found = findings(recording)
    named = [finding for finding in found if finding.kind in IN_ONE_LINE]
    costly = [finding for finding in found if finding.severity != "note" and finding not in named[:1]]
    shown, more = (named or costly)[:1], costly if named else costly[1:]
    rate = recording.samples_per_second()
    parts = [] if rate is None else [f"{_rounded(rate)} samples/s"]
    if not named:
        parts.append(abstains(recording) or "no worker was slower than its replicas")
    for finding in shown:
        advice = sorted(with_gains(recording, finding).advice, key=lambda each: -(each.gain or 0.0))
        parts.append(" → ".join([said(finding), *map(recommended, advice[:1])]))
    if more:
        parts.append(f"{len(more)} more (log_dir= keeps a log, which sdpipe status reads)")
    return "sdpipe: " + "; ".join(parts)


def bar(shares: Sequence[float], width: int = _WIDTH) -> str:
    """Return letters of phases, as many of each as its share; the largest remainders get the remaining places."""
    total = sum(shares)
    if total <= 0:
        return ""
    exact = [width * share / total for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda phase: counts[phase] - exact[phase])
    for phase in by_remainder[: width - sum(counts)]:
        counts[phase] += 1
    return "".join(_LETTERS[name] * count for name, count in zip(PHASES, counts, strict=True))


def _lines(finding: Finding) -> list[str]:
    advice = [f"{'':9}→ {recommended(each)}" for each in finding.advice]
    return [f"{finding.severity.upper():9}{said(finding)}  [{finding.kind}]", *advice]


def _bars(recording: Recording) -> list[str]:
    if not recording.series:
        return ["no worker has told of an update yet"]
    rows = [["stage", "pipeline", "rank", "where", "updates", "ms", "own", f"the last {RECENT} updates"]]
    drawn = ""
    for worker, series in sorted(recording.series.items()):
        about, recent = recording.about.get(worker), series.us[-RECENT:]
        shares = [sum(us[phase] for us in recent) for phase in range(len(PHASES))]
        milliseconds = [sum(times) / len(recent) / 1e3 for times in (shares, series.own()[-RECENT:])]
        rank, where = ("-", "-") if about is None else (str(about.rank), str(about))
        line = bar(shares)
        numbers = [str(number) for number in (worker.stage, worker.pipeline)]
        rows.append([*numbers, rank, where, str(len(series)), *(f"{each:.1f}" for each in milliseconds), line])
        drawn += line
    legend = [f"{_LETTERS[name]} {MEANINGS.get(name, name)}" for name in PHASES if _LETTERS[name] in drawn]
    return [*status_page.aligned(rows), "own: without waits for other workers; " + ", ".join(legend)]


def _worker_to_plain(recording: Recording, worker: Worker) -> dict[str, object]:
    series, about = recording.series[worker], recording.about.get(worker)
    means = [round(sum(times) / len(series), 1) for times in zip(*series.us, strict=True)]
    return {
        "stage": worker.stage,
        "pipeline": worker.pipeline,
        "rank": None if about is None else about.rank,
        "host": None if about is None else about.host,
        "device": None if about is None else about.device,
        "updates": len(series),
        "dropped": series.dropped,
        "phases_us": dict(zip(PHASES, means, strict=True)),
        "without_a_core_us": round(sum(series.core) / len(series), 1),
    }


def _rounded(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.3g}"
