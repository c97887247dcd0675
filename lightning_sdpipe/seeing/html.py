"""The page about a run, alive or over: one template with drawings in SVG, without scripts, which loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sdpipe.meter import OWN, PHASES
from lightning_sdpipe.seeing.page import MEANINGS, RECENT
from lightning_sdpipe.seeing.recording import Recording

MOST_WORKERS = 64
"""Largest number of workers whose phases are shown."""
STRETCHES, OF_UPDATES = 60, 8
"""Largest number of parts of the run whose speed is shown, and least number of updates of each."""
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


@dataclass(frozen=True)
class Chart:
    """A drawing with a legend: ``lines`` through points (x, y), and ``boxes`` from (left, bottom) to (right, top), both
    by name."""

    title: str
    x: str
    y: str
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]] = ()
    boxes: Sequence[tuple[str, Sequence[tuple[float, float, float, float]]]] = ()

    @property
    def names(self) -> list[str]:
        """Names of the legend."""
        return [name for name, _ in (*self.lines, *self.boxes)]

    @property
    def width(self) -> float:
        """Right end of the x axis."""
        return max([x for _, line in self.lines for x, _ in line] + [b[2] for _, some in self.boxes for b in some])

    @property
    def height(self) -> float:
        """Upper end of the y axis, a round number."""
        largest = max([y for _, line in self.lines for _, y in line] + [b[3] for _, some in self.boxes for b in some])
        digit = 10 ** math.floor(math.log10(largest)) if largest > 0 else 1.0
        return next(step * digit for step in (1, 2, 4, 6, 8, 10) if step * digit >= largest)


def speed(recording: Recording) -> list[Chart]:
    """Return the drawing of each pipeline's speed over time, once there is enough to draw."""
    last: dict[int, int] = {}
    for worker in recording.series:
        last[worker.pipeline] = max(worker.stage, last.get(worker.pipeline, 0))
    ends = {w.pipeline: s.ends for w, s in sorted(recording.series.items()) if w.stage == last[w.pipeline] and s.ends}
    begun = min((times[0] for times in ends.values()), default=0.0)
    stretches = min([STRETCHES, *(len(times) // OF_UPDATES for times in ends.values())])
    if not ends or stretches < 2 or recording.now <= begun:
        return []
    length = (recording.now - begun) / stretches
    lines = []
    for pipeline, times in ends.items():
        counts = [0] * stretches
        for end in times:
            counts[min(stretches - 1, int((end - begun) / length))] += 1
        points = [((stretch + 0.5) * length, count / length) for stretch, count in enumerate(counts)]
        lines.append((f"pipeline {pipeline}", points))
    return [Chart("Speed of each pipeline", "seconds since the first update shown", "mini-batches per second", lines)]


def page(
    title: str,
    plain: dict[str, Any],
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
        plain: :func:`~lightning_sdpipe.seeing.page.to_plain` of it, or empty if nothing is known.
        charts: drawings.
        facts: a line about the run, below the title.
        silence: reason why nothing new is known, if so.
        scheduler: the scheduler's page, as text.
        live: whether a browser asks for the page again and again.
    """
    import jinja2

    times = "recent_us" if live else "phases_us"
    workers = [each | {"us": each[times], "ms": sum(each[times].values()) / 1e3} for each in plain.get("updates", ())]
    for each in workers:
        each["own"] = sum([*each["us"].values()][:OWN]) / 1e3
    slowest = sorted(workers, key=lambda each: -each["own"])[:MOST_WORKERS]
    shown = [each for each in workers if each in slowest]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    rendered = template.render(
        title=title,
        plain={"findings": (), "abstains": None, "healthy": False, "line": ""} | plain,
        charts=charts,
        facts=facts,
        silence=silence,
        scheduler=scheduler,
        live=live,
        workers=shown,
        left_out=len(workers) - len(shown),
        longest=max((each["ms"] for each in shown), default=1.0),
        phases=[name for name in PHASES if any(each["us"][name] for each in shown)],
        colours=COLOURS,
        meanings=MEANINGS,
        recent=RECENT,
    )
    return rendered.encode()
