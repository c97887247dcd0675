"""The page about a live or finished run: one template with SVG drawings, which loads nothing and works without
scripts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.seeing.page import GOING_ON, MEANINGS, RECENT, lasted
from lightning_sdpipe.seeing.recording import Recording

MOST_WORKERS = 64
"""Largest number of workers that are shown one by one."""
STRETCHES, OF_UPDATES = 60, 8
"""Largest number of stretches of the run whose speed is shown, and the least number of updates in each."""
MOST_PARTS = 6000
"""Largest number of parts in all lanes together."""
COLOURS = dict(
    zip(
        PHASES,
        (
            *("#b0bec5", "#8d6e63", "#43a047", "#1e88e5", "#00897b", "#d81b60", "#6d4c41"),
            *("#ffe082", "#ffcc80", "#ffab91", "#ef9a9a", "#e0e0e0", "#ce93d8"),
        ),
        strict=True,
    )
)
DOES = {
    "computes": "#1e88e5",
    "exchanges": "#8e24aa",
    "waits for replicas": "#f6a21e",
    "waits for its pipeline": "#ffd9a0",
}
"""Activities of a worker, with their colours."""
SCRIPT = """setInterval(async () => {
  try {
    const page = new DOMParser().parseFromString(await (await fetch(location)).text(), "text/html");
    const focus = document.activeElement?.parentElement?.id;
    for (const each of document.querySelectorAll("details[open]"))
      page.getElementById(each.id)?.setAttribute("open", "");
    document.title = page.title;
    document.body.replaceWith(page.body);
    if (focus) document.querySelector(`#${focus} > summary`)?.focus();
  } catch { document.body.className = "left"; }
}, 2000);"""
"""Reloads the page, and leaves open details open."""
_EXCHANGE, _WAIT_GROUP = PHASES.index("exchange"), PHASES.index("wait_group")


@dataclass(frozen=True)
class Lane:
    """What one worker does over time: ``does`` has, for each activity, the SVG path of its shares, from 0 to 1 along
    the run and from 0 to 1 across; marks are like ``("was lost", 0.2, "pipeline 1 was lost after 28 s")``."""

    name: str
    device: str
    does: Sequence[tuple[str, str]]
    marks: Sequence[tuple[str, float, str]]


def lanes(recording: Recording) -> list[Lane]:
    """Return a lane for each worker, with marks where its lives end and begin."""
    workers = sorted(recording.series, key=lambda worker: (worker.pipeline, worker.stage))[:MOST_WORKERS]
    begun = _begun(recording)
    return [_lane(recording, worker, begun, MOST_PARTS // max(25, len(workers))) for worker in workers]


def _begun(recording: Recording) -> float:
    """Return when the drawings begin: when the scheduler did, or with the first row if that is earlier."""
    firsts = (life.begun() for series in recording.series.values() for life in series.lives if len(life))
    return min([recording.begun or math.inf, *firsts, recording.now])


def _lane(recording: Recording, worker: Worker, begun: float, parts: int) -> Lane:
    series, long = recording.series[worker], (recording.now - begun) / parts or 1.0
    shares = [[0.0] * len(DOES) for _ in range(parts)]
    for life in series.lives:
        for end, us in zip(life.ends, life.us, strict=True):
            whole = sum(us) / 1e6
            spent = [sum(us[:OWN]) / 1e6, us[_EXCHANGE] / 1e6, us[_WAIT_GROUP] / 1e6]
            start, spent = end - whole, [*spent, whole - sum(spent)]
            for at in range(max(0, int((start - begun) / long)), min(parts - 1, int((end - begun) / long)) + 1):
                within = min(end, begun + (at + 1) * long) - max(start, begun + at * long)
                for kind, seconds in enumerate(spent):
                    shares[at][kind] += seconds * within / (whole or 1.0) / long
    paths, w = [], 1 / parts
    scaled = [(at, of, max(1.0, sum(of))) for at, of in enumerate(shares)]  # rows may overlap a little
    for kind, name in enumerate(DOES):
        drawn = [(at * w, sum(of[:kind]) / full, of[kind] / full) for at, of, full in scaled if of[kind] > 0.01]
        paths.append((name, "".join(f"M{x:.4f} {low:.2f}h{w:.4f}v{high:.2f}h-{w:.4f}z" for x, low, high in drawn)))
    lives = [life for life in series.lives if len(life)]
    turns = [turn for a, b in pairwise(lives) for turn in (("was lost", a.ends[-1]), ("is back", b.begun()))]
    if worker in recording.gone:
        turns.append(("was lost", recording.gone[worker]))
    marks = [
        (said, (at - begun) / (parts * long), f"pipeline {worker.pipeline} {said} after {at - begun:.0f} s")
        for said, at in turns
    ]
    about = recording.about.get(worker)
    stage = f", stage {worker.stage}" if recording.num_stages > 1 else ""
    return Lane(f"pipeline {worker.pipeline}{stage}", "" if about is None else str(about), paths, marks)


def restarts(recording: Recording) -> list[tuple[float, str]]:
    """Return when the scheduler was restarted, from 0 to 1 along the run, with a description."""
    begun = _begun(recording)
    long = recording.now - begun or 1.0
    return [
        ((at - begun) / long, f"the scheduler was started again after {lasted(at - begun)}")
        for at in recording.restarts
    ]


@dataclass(frozen=True)
class Chart:
    """A drawing with a legend: ``lines`` through points (x, y), and ``boxes`` (left, bottom, right, top), both by
    name."""

    title: str
    x: str
    y: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]] = ()
    boxes: Sequence[tuple[str, Sequence[tuple[float, float, float, float]]]] = ()
    until: float | None = None
    """Right end of the x axis, for a drawing below the lanes."""

    @property
    def names(self) -> list[str]:
        """Names of the legend."""
        return [name for name, _ in (*self.lines, *self.boxes)]

    @property
    def width(self) -> float:
        """Right end of the x axis."""
        return self.until or max(
            [x for _, line in self.lines for x, _ in line] + [b[2] for _, some in self.boxes for b in some]
        )

    @property
    def height(self) -> float:
        """Upper end of the y axis, a round number."""
        largest = max([y for _, line in self.lines for _, y in line] + [b[3] for _, some in self.boxes for b in some])
        digit = 10 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
        return next(step * digit for step in (1, 2, 4, 6, 8, 10) if step * digit >= largest)


def speed(recording: Recording) -> list[Chart]:
    """Return the drawing of each pipeline's speed over time, once there is enough to draw."""
    last: dict[int, Worker] = {}
    for worker in sorted(recording.series):
        last[worker.pipeline] = worker
    ends = {
        pipeline: [end for life in recording.series[worker].lives for end in life.ends]
        for pipeline, worker in sorted(last.items())
    }
    begun = _begun(recording)
    stretches = min(STRETCHES, max((len(times) // OF_UPDATES for times in ends.values()), default=0))
    if stretches < 2 or recording.now <= begun:
        return []
    length = (recording.now - begun) / stretches
    samples = {pipeline: about.samples for pipeline, worker in last.items() if (about := recording.about.get(worker))}
    known = all(samples.get(pipeline) for pipeline in ends)
    lines = []
    for pipeline, times in ends.items():
        counts = [0] * stretches
        for end in times:
            counts[min(stretches - 1, int((end - begun) / length))] += 1
        each = (samples[pipeline] or 1) if known else 1
        points = [((stretch + 0.5) * length, count * each / length) for stretch, count in enumerate(counts)]
        lines.append((f"pipeline {pipeline}", points))
    y = "samples per second" if known else "mini-batches per second"
    return [Chart("Speed of each pipeline", "seconds since the start", y, lines, until=recording.now - begun)]


def page(
    title: str,
    plain: dict[str, Any],
    recording: Recording | None = None,
    charts: Iterable[Chart] = (),
    *,
    facts: str = "",
    silence: str = "",
    scheduler: str = "",
    live: bool = False,
) -> bytes:
    """Return the page.

    Args:
        title: name of the run.
        plain: :func:`~lightning_sdpipe.seeing.page.to_plain` of ``recording``, or empty if nothing is known.
        recording: the run.
        charts: drawings of details.
        facts: a line about the run, below the title.
        silence: why nothing new is known; empty if something is.
        scheduler: the scheduler's page, as text.
        live: whether a browser reloads the page regularly.
    """
    import jinja2

    times = "recent_us" if live else "phases_us"
    workers = [each | {"us": each[times], "ms": sum(each[times].values()) / 1e3} for each in plain.get("updates", ())]
    for each in workers:
        each["own"] = sum([*each["us"].values()][:OWN]) / 1e3
    slowest = sorted(workers, key=lambda each: -each["own"])[:MOST_WORKERS]
    shown = [each for each in workers if each in slowest]
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    unknown = {"findings": (), "abstains": None, "healthy": False, "state": "unknown", "pipelines": None, "doing": None}
    rendered = template.render(
        title=title,
        plain=unknown | plain,
        lanes=[] if recording is None else lanes(recording),
        goes_on=plain.get("state", "").partition(":")[0] in GOING_ON,
        restarts=[] if recording is None else restarts(recording),
        left_out=len(workers) - len(shown),
        elapsed=0.0 if recording is None else recording.now - _begun(recording),
        speed=[] if recording is None else speed(recording),
        charts=charts,
        facts=facts,
        silence=silence,
        scheduler=scheduler,
        script=SCRIPT if live else "",
        workers=shown,
        longest=max((each["ms"] for each in shown), default=1.0),
        phases=[name for name in PHASES if any(each["us"][name] for each in shown)],
        does=DOES,
        colours=COLOURS,
        meanings=MEANINGS,
        recent=RECENT,
        lasted=lasted,
        ticks=ticks,
    )
    return rendered.encode()


def ticks(length: float) -> list[float]:
    """Return three to six round numbers from 0 to ``length``."""
    digit = 10 ** math.floor(math.log10(length or 1.0))
    step = next(step * digit for step in (0.2, 0.25, 0.5, 1, 2) if length < 5.5 * step * digit)
    return [number * step for number in range(int(length / step + 1e-9) + 1)]
