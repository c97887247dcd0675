"""``sdpipe report``: writes one file about a finished run, to keep or send: findings, phases, speed, groups and lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from lightning_sdpipe.command_line import Parser, check_installed
from lightning_sdpipe.errors import ConfigurationError, os_errors_as, shape
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Event, Joined, Left, Lost, Worker
from lightning_sdpipe.scheduler.log.event_log import Record, read_log
from lightning_sdpipe.scheduler.log.status_page import policy_of
from lightning_sdpipe.seeing.html import Chart, page
from lightning_sdpipe.seeing.page import to_plain
from lightning_sdpipe.seeing.recording import Recording, last_run, of_records
from lightning_sdpipe.simulate.run import lags

MOST_LAGS = 10_000_000
"""Largest number of comparisons of models for lags; more would take many seconds."""


def main(arguments: Sequence[str]) -> None:
    """Write the report."""
    parser = Parser("report", "Writes a report, one HTML file, about a run that is over.")
    parser.add_argument(
        "log",
        type=Path,
        help="the scheduler's log (scheduler.jsonl), which log_dir= or `sdpipe scheduler --log` writes",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="file to write")
    options = parser.parse_args(arguments)
    write(options.log, options.output)
    print(f"Report: {options.output}")


def missing() -> bool:
    """Return whether jinja2 is missing, which a report needs."""
    return find_spec("jinja2") is None


def write(log: Path, output: Path) -> None:
    """Write a report about the last run of ``log``.

    Raises:
        ConfigurationError: the log cannot be read, the file cannot be written, or a package is not installed.
    """
    if output.suffix != ".html":
        raise ConfigurationError(f"{output} is not allowed; a report is a page: let its name end with .html")
    check_installed("a report", "report", "jinja2")
    records = last_run(read_log(log))
    record, recording, beginning = records[-1], of_records(records), records[0].beginning
    facts = (
        f"{_method(record, recording)}; {shape(beginning.num_stages, beginning.num_pipelines)}; from "
        f"{beginning.time[:16].replace('T', ' ')} on, by the clock of the scheduler's machine"
    )
    charts = [*_groups(record), *_lag(record)]
    with os_errors_as(f"the report {output} cannot be written"):
        output.write_bytes(page(str(log), to_plain(recording, None), recording, charts, facts=facts))


def _method(record: Record, recording: Recording) -> str:
    """Return the method that workers report; if none does, the scheduler's policy."""
    said = sorted({about.sync for about in recording.about.values()} - {""})
    return ", ".join(said or [policy_of(record.beginning.policy)])


def _groups(record: Record) -> Iterator[Chart]:
    """Yield the drawing of groups by size and reason; nothing if there were no groups."""
    sizes: dict[str, Counter[int]] = {}
    for entry in record.entries:
        for group in entry.decisions:
            sizes.setdefault(group.reason, Counter())[len(group.members)] += 1
    below: Counter[int] = Counter()
    boxes = []
    for reason, counts in sorted(sizes.items()):
        found = [(size - 0.4, below[size], size + 0.4, below[size] + count) for size, count in sorted(counts.items())]
        boxes.append((reason, found))
        below += counts
    if boxes:
        yield Chart("Groups by size and reason", "members of a group", "groups", boxes=boxes)


def _lag(record: Record) -> Iterator[Chart]:
    """Yield the drawing of the lag of models between sync points, where all models become equal."""
    joined = [entry.event.worker.pipeline for entry in record.entries if isinstance(entry.event, Joined)]
    pipelines = 1 + max(joined, default=0)
    if record.beginning.num_stages * len(record.entries) * pipelines**2 > MOST_LAGS:
        return
    lines = []
    for stage in range(1 if record.depths else record.beginning.num_stages):  # or groups are whole pipelines
        points: list[tuple[float, float]] = []
        for at, steps in (point for part in _between_pauses(record) for point in lags(part, stage, pipelines)):
            points += [(at, points[-1][1] if points else steps), (at, steps)]
        if points:
            lines.append((f"stage {stage}", points))
    if lines and any(entry.decisions for entry in record.entries):
        yield Chart("Lag of models", "seconds", "steps of others that a model lacks", lines)


def _between_pauses(record: Record) -> Iterator[list[tuple[float, Event, list[Group]]]]:
    """Yield the policy's events for each time during which workers take part, in seconds since the beginning."""
    active: set[Worker] = set()
    part: list[tuple[float, Event, list[Group]]] = []
    for entry in record.entries:
        match entry.event:
            case Joined(worker):
                active.add(worker)
            case Left(worker) | Lost(worker):
                active.discard(worker)
        if isinstance(entry.event, Event):
            part.append((entry.at - record.beginning.at, entry.event, entry.decisions))
        if part and not active:
            yield part
            part = []
    if part:
        yield part
