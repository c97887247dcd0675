"""Slow devices: each computation takes longer, in proportion to its length.

The paper's shared GPUs (SDPipe, §5.5) were replayed like this: at recorded speeds, on dedicated devices that idle for
the rest of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_sdpipe.errors import ConfigurationError, check_number
from lightning_sdpipe.heterogeneity.delays import Pass, uniform
from lightning_sdpipe.heterogeneity.injector import Heterogeneity
from lightning_sdpipe.heterogeneity.tracks import Track, read_tracks

SHARED_GPUS = Path(__file__).parent / "traces" / "shared_gpus.json"
"""Sixteen synthetic tracks in the spirit of §5.5, made by ``recipes/tools/synthetic.py``."""

FIGURE = SHARED_GPUS.with_name("figure.json")
"""Sixteen tracks of the paper's shared GPUs, read off a published figure; the file says which, and how accurately."""


@dataclass(frozen=True)
class Static:
    """Constant slowness: device i takes ``factors[i]`` times as long as at full speed.

    Args:
        factors: each at least 1, by global rank; they repeat if there are more devices.

    Raises:
        ConfigurationError: there are no factors, or one is below 1.
    """

    factors: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        _check_factors("factors", self.factors)

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Return 0: there is no delay beside the slowness."""
        return 0.0

    def track(self, rank: int) -> Track | None:
        """Return a constant track; None at full speed."""
        factor = self.factors[rank % len(self.factors)]
        return None if factor == 1.0 else Track(1.0, (1.0 / factor,))


@dataclass(frozen=True)
class Trace:
    """Replays recorded speeds: device i follows track i, from its first computation on.

    Args:
        files: trace files, as ``recipes/tools/record.py`` writes them, whose tracks are used in this order; None for
            the synthetic :data:`SHARED_GPUS`, and ``"figure"`` in place of a file for :data:`FIGURE`.
        time_scale: length of a recorded second, in seconds of training; 0.1 replays ten times as fast.
        seed: if there are more devices than tracks, tracks are reused from a random time on, drawn with this seed.

    Raises:
        ConfigurationError: a file is no trace, or the scale is not positive.
    """

    files: Sequence[str | Path] | None = None
    time_scale: float = 1.0
    seed: int = 0
    _tracks: tuple[Track, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("time_scale", self.time_scale, "a finite number above 0", above=0, below=math.inf)
        files = (SHARED_GPUS,) if self.files is None else self.files
        tracks = [track for file in files for track in read_tracks(FIGURE if file == "figure" else Path(file))]
        if not tracks:
            raise ConfigurationError(f"files={[str(file) for file in files]} hold no track; name at least one trace.")
        object.__setattr__(self, "_tracks", tuple(track.rescaled(self.time_scale) for track in tracks))

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Return 0: there is no delay beside the slowness."""
        return 0.0

    def track(self, rank: int) -> Track | None:
        """Return the track that this device replays."""
        lap, index = divmod(rank, len(self._tracks))
        track = self._tracks[index]
        return track if lap == 0 else replace(track, start_seconds=uniform(self.seed, rank) * track.seconds)


@dataclass(frozen=True)
class Slowed:
    """Additional slowness: every device takes ``factor`` times as long, on top of another heterogeneity.

    On a machine with fewer cores than workers, this gives each worker a device of its own: at 1/``factor`` of a core's
    speed, it needs a core for only that share of its time, and a worker that waits does not make others faster. With a
    factor for each device, ``Slowed(Delays(...), [1, 2])`` delays devices of different speeds.

    Args:
        base: the other heterogeneity.
        factor: at least 1; or such factors by global rank, which repeat if there are more devices.

    Raises:
        ConfigurationError: there are no factors, or one is below 1.
    """

    base: Heterogeneity
    factor: float | Sequence[float]

    def __post_init__(self) -> None:
        if isinstance(self.factor, Sequence):
            object.__setattr__(self, "factor", tuple(self.factor))
        _check_factors("factor", self._factors)

    @property
    def _factors(self) -> Sequence[float]:
        return self.factor if isinstance(self.factor, Sequence) else (self.factor,)

    def delay(self, stage: int, pipeline: int, iteration: int, during: Pass) -> float:
        """Return the delay of the base."""
        return self.base.delay(stage, pipeline, iteration, during)

    def track(self, rank: int) -> Track | None:
        """Return the track of the base, made slower."""
        track, factor = self.base.track(rank) or Track(1.0, (1.0,)), self._factors[rank % len(self._factors)]
        return replace(track, speeds=tuple(speed / factor for speed in track.speeds))


def _check_factors(name: str, factors: Sequence[float]) -> None:
    for factor in factors or ("nothing",):
        check_number(name, factor, "finite numbers of at least 1", least=1, below=math.inf)
