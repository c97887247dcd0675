"""``sdpipe report``: one file about a finished run, to keep or to send: findings, phases, speed, groups and lag.

A page has no script, and loads nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sdpipe.errors import ConfigurationError, carried_out
from lightning_sdpipe.meter import PHASES
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Event, Joined, Left, Lost, Worker
from lightning_sdpipe.scheduler.log.event_log import Record, read_log
from lightning_sdpipe.seeing.detectors import abstains, findings
from lightning_sdpipe.seeing.finding import Finding
from lightning_sdpipe.seeing.page import HEALTHY, in_one_line, recommended, said
from lightning_sdpipe.seeing.recording import Recording, Series, of_record
from lightning_sdpipe.seeing.what_if import advised
from lightning_sdpipe.simulate.run import lags

KINDS = (".html", ".png")
MOST_WORKERS = 64
"""Largest number of workers whose phases are shown."""
MOST_LAGS = 10_000_000
"""Largest number of comparisons of models for lags: more take many seconds."""
STRETCHES, OF_UPDATES = 60, 8
"""Largest number of parts of the run whose speed is shown, and least number of updates of each."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 2 when it cannot be carried out."""
    parser = argparse.ArgumentParser(prog="sdpipe report", description="Writes one file about a run that is over.")
    parser.add_argument("log", type=Path, help="of its scheduler: log_dir= or sdpipe scheduler --log keeps it")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help=".html or .png")
    options = parser.parse_args(arguments)

    def written() -> int:
        write(options.log, options.output)
        print(f"Report: {options.output}")
        return HEALTHY

    return carried_out(written)


def missing() -> list[str]:
    """Return the names of missing packages that a report needs."""
    return [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]


def write(log: Path, output: Path) -> None:
    """Write a report about the last scheduler of ``log``.

    Raises:
        ConfigurationError: the log cannot be read, the file cannot be written, or a package is not installed.
    """
    if output.suffix not in KINDS:
        raise ConfigurationError(f"{output} is none of the kinds of a report; end it with {' or '.join(KINDS)}")
    if needed := missing():
        raise ConfigurationError(f"{' and '.join(needed)} not found; pip install 'lightning-sdpipe[report]'")
    record = read_log(log)[-1]
    recording = of_record(record)
    found = advised(recording, findings(recording))
    picture = _picture(record, recording, "" if output.suffix == ".html" else _headline(recording, found))
    data = picture if output.suffix == ".png" else _page(log.name, record, recording, found, picture).encode()
    try:
        output.write_bytes(data)
    except OSError as error:
        raise ConfigurationError(f"the report {output} cannot be written: {error.strerror}") from error


def _headline(recording: Recording, found: Sequence[Finding]) -> str:
    line = in_one_line(recording)
    others = [each for each in found if said(each) not in line]
    return "\n".join([line, *(f"{each.severity}: {said(each)}" for each in others[:4])])


def _page(log: str, record: Record, recording: Recording, found: Sequence[Finding], picture: bytes) -> str:
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(Path(__file__).with_name("report.html").read_text())
    shown = _slowest(recording)
    phases = [name for at, name in enumerate(PHASES) if any(us[at] for each in shown.values() for us in each.us)]
    return template.render(
        log=log,
        line=in_one_line(recording),
        method=_method(record, recording),
        num_stages=record.beginning.num_stages,
        num_pipelines=record.beginning.num_pipelines,
        began=record.beginning.time,
        seconds=recording.now - record.beginning.at,
        abstains=abstains(recording),
        found=found,
        said=said,
        recommended=recommended,
        in_groups=_in_groups(record),
        picture=base64.b64encode(picture).decode(),
        phases=phases,
        workers=[_cells(recording, worker, phases) for worker in sorted(shown)],
        left_out=len(recording.series) - len(shown),
    )


def _slowest(recording: Recording) -> dict[Worker, Series]:
    """Return the workers that are shown."""
    own = {worker: statistics.fmean(series.own()) for worker, series in recording.series.items()}
    return {worker: recording.series[worker] for worker in sorted(own, key=lambda each: -own[each])[:MOST_WORKERS]}


def _cells(recording: Recording, worker: Worker, phases: Sequence[str]) -> list[str]:
    series, about = recording.series[worker], recording.about.get(worker)
    means = dict(zip(PHASES, map(statistics.fmean, zip(*series.us, strict=True)), strict=True))
    milliseconds = [sum(means.values()), statistics.fmean(series.own()), *(means[phase] for phase in phases)]
    rank = "-" if about is None else str(about.rank)
    return [recording.name(worker), rank, str(len(series)), *(f"{us / 1e3:.1f}" for us in milliseconds)]


def _picture(record: Record, recording: Recording, title: str) -> bytes:
    """Return the picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8 if _in_groups(record) else 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 + _in_groups(record), 2, squeeze=False)
    _draw_phases(axes[0][0], recording)
    _draw_speed(axes[0][1], record, recording)
    if _in_groups(record):
        _draw_groups(axes[1][0], record)
        _draw_lag(axes[1][1], record)
    if title:
        figure.suptitle(title, fontsize=9)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def _method(record: Record, recording: Recording) -> str:
    """Return the method as workers say it; for an older log, the scheduler's policy."""
    said = sorted({about.sync for about in recording.about.values()} - {""})
    return ", ".join(said or [f"{name}={value}" for name, value in record.beginning.policy.items()])


def _in_groups(record: Record) -> bool:
    """Return whether workers averaged in groups; else all meet in each update, or none does."""
    return any(entry.decisions for entry in record.entries)


def _draw_phases(axis: Any, recording: Recording) -> None:
    from matplotlib import colormaps

    shown = sorted(_slowest(recording).items(), reverse=True)
    labels = [f"{worker.stage}, {worker.pipeline}" for worker, _ in shown]
    left = [0.0] * len(shown)
    for at, name in enumerate(PHASES):
        widths = [statistics.fmean(us[at] for us in series.us) / 1e3 for _, series in shown]
        if any(widths):
            axis.barh(labels, widths, left=left, label=name, color=colormaps["tab20"](at))
            left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.set_xlabel("ms of an update")
    axis.set_ylabel("stage, pipeline")
    if any(left):
        axis.legend(fontsize="x-small", ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def _draw_speed(axis: Any, record: Record, recording: Recording) -> None:
    last = recording.num_stages - 1
    begun = record.beginning.at
    stretches = max(1, min(STRETCHES, *(len(series) // OF_UPDATES for series in recording.series.values()), STRETCHES))
    length = max(1e-3, recording.now - begun) / stretches
    for worker, series in sorted(recording.series.items()):
        if worker.stage == last:
            ended = Counter(min(stretches - 1, int((end - begun) / length)) for end in series.ends)
            rates = [ended[stretch] / length for stretch in range(stretches)]
            axis.plot(
                [(stretch + 0.5) * length for stretch in range(stretches)], rates, label=f"pipeline {worker.pipeline}"
            )
    axis.set_xlabel("s")
    axis.set_ylabel("mini-batches/s")
    axis.set_ylim(bottom=0)
    if 0 < len(axis.lines) <= 16:
        axis.legend(fontsize="x-small")


def _draw_groups(axis: Any, record: Record) -> None:
    sizes: dict[str, Counter[int]] = {}
    for entry in record.entries:
        for group in entry.decisions:
            sizes.setdefault(group.reason, Counter())[len(group.members)] += 1
    bottom: Counter[int] = Counter()
    for reason, counts in sorted(sizes.items()):
        found = sorted(counts)
        axis.bar(found, [counts[size] for size in found], bottom=[bottom[size] for size in found], label=reason)
        bottom += counts
    axis.set_xlabel("members of a group")
    axis.set_ylabel("groups")
    axis.set_xticks(sorted(bottom))
    axis.legend(fontsize="x-small")


def _draw_lag(axis: Any, record: Record) -> None:
    """Draw the lag between two sync points, at each of which all models become equal."""
    joined = [entry.event.worker.pipeline for entry in record.entries if isinstance(entry.event, Joined)]
    pipelines = 1 + max(joined, default=0)
    axis.set_xlabel("s")
    axis.set_ylabel("steps of others that a model lacks")
    if record.beginning.num_stages * len(record.entries) * pipelines**2 > MOST_LAGS:
        axis.set_title("left out: too many events", fontsize=9)
        return
    for stage in range(1 if record.depths else record.beginning.num_stages):  # or groups are of whole pipelines
        points = [point for part in _between_pauses(record) for point in lags(part, stage, pipelines)]
        if points:
            times, steps = zip(*points, strict=True)
            axis.step(times, steps, where="post", label=f"stage {stage}")
    if 0 < len(axis.lines) <= 16:
        axis.legend(fontsize="x-small")


def _between_pauses(record: Record) -> Iterator[list[tuple[float, Event, list[Group]]]]:
    """Yield events of policies while any worker takes part, in seconds since the beginning."""
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
