"""Relative speed of devices over time, and the files that hold it.

A *track* is one device's speed as a fraction of its best, at even intervals; a *trace file* holds the tracks of one or
more devices. ``docs/heterogeneity.md`` documents the format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lightning_sdpipe.errors import ConfigurationError, check_number, os_errors_as

FORMAT = "sdpipe-trace/1"


@dataclass(frozen=True)
class Track:
    """One device's relative speed over time; after its end it starts over.

    Args:
        interval_seconds: how long each speed holds.
        speeds: fractions of the full speed, above 0 and at most 1.
        start_seconds: where in the track a replay starts.

    Raises:
        ConfigurationError: there are no speeds, or a value is out of range.
    """

    interval_seconds: float
    speeds: tuple[float, ...]
    start_seconds: float = 0.0

    def __post_init__(self) -> None:
        seconds = self.interval_seconds
        check_number("interval_seconds", seconds, "a finite number above 0", above=0, below=math.inf)
        if not self.speeds:
            raise ConfigurationError("A track needs at least one speed.")
        for index, speed in enumerate(self.speeds):
            check_number(f"Speed {index}", speed, "a number above 0 and up to 1", above=0, most=1)

    @property
    def seconds(self) -> float:
        """Length of the track."""
        return self.interval_seconds * len(self.speeds)

    def duration(self, since: float, work: float) -> float:
        """Return the seconds that this device needs for ``work``, in seconds at full speed, if it begins ``since``
        seconds after the start of the replay: until the integral of the speed is ``work``."""
        position, into = divmod(since + self.start_seconds, self.interval_seconds)
        index, elapsed = int(position), 0.0
        while True:
            speed = self.speeds[index % len(self.speeds)]
            left = self.interval_seconds - into
            if work <= left * speed:
                return elapsed + work / speed
            work -= left * speed
            elapsed += left
            index, into = index + 1, 0.0

    def rescaled(self, time_scale: float) -> Track:
        """Return the same track, stretched to ``time_scale`` times its length."""
        return replace(
            self, interval_seconds=self.interval_seconds * time_scale, start_seconds=self.start_seconds * time_scale
        )


class _File(msgspec.Struct, forbid_unknown_fields=True, tag_field="format", tag=FORMAT):
    source: str
    interval_seconds: float
    tracks: list[tuple[float, ...]]


def read_tracks(path: Path) -> list[Track]:
    """Read the tracks of a trace file, in order.

    Raises:
        ConfigurationError: the file cannot be read, or is not a trace.
    """
    try:
        with os_errors_as(f"The trace {path} cannot be read"):
            file = msgspec.json.decode(path.read_bytes(), type=_File)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{path} is not a trace of format {FORMAT}: {error}. docs/heterogeneity.md shows it."
        ) from error
    return [Track(file.interval_seconds, speeds) for speeds in file.tracks]


def write_tracks(path: Path, source: str, interval_seconds: float, tracks: Iterable[Iterable[float]]) -> None:
    """Write a trace file with one track per line.

    Args:
        path: the file, which is overwritten.
        source: origin of the recording, in words.
        interval_seconds: interval of all tracks.
        tracks: relative speeds.
    """
    lines = ",\n".join(f"  [{', '.join(f'{speed:.3f}' for speed in track)}]" for track in tracks)
    head = "\n".join(
        f' "{name}": {msgspec.json.encode(value).decode()},'
        for name, value in (("format", FORMAT), ("source", source), ("interval_seconds", interval_seconds))
    )
    path.write_text(f'{{\n{head}\n "tracks": [\n{lines}\n ]\n}}\n', encoding="utf-8")
