"""Placement of a model on devices of unlike speed and memory, which DT-FM leaves as future work (§8).

All-reduce wants devices of equal speed within a stage, and slow stages to have fewer blocks; pipelines that average in
groups may as well be slow as a whole. So the cut and the placement depend on each other: annealing swaps devices and
moves cuts by a block, and is alternated with the exact cut for the devices of each stage
(:func:`~lightning_sdpipe.partition.balance.balance`) until nothing changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Sequence
from itertools import islice, pairwise, permutations

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import balance
from lightning_sdpipe.placement.cost import Stages
from lightning_sdpipe.placement.throughput import CutJob, PlacementJob, Spans, averaging_seconds_per_byte, combined

ROUNDS = 12
ALTERNATIONS = 5
"""Largest number of times that the cut and the placement are improved in turn."""

MOVES_PER_DEVICE, LEAST_MOVES = 150, 4000
"""Number of moves of one annealing."""

HOT, COLD = 2.0, 0.001
"""First and last temperature, as shares of the start's seconds per device."""

POWER = 8.0
"""Power of the mean that stands for the slowest pipeline while annealing: most moves do not change a maximum."""

SHARE = 0.03
"""Share of every group's data cost besides the largest, and of all stages' time besides the busiest."""

MISFIT = 0.1
"""Penalty of a device that may not run its stage while annealing, as a share of the start's seconds: valid placements
may lie behind invalid ones."""

CUTS, FARTHEST = 0.2, 3
"""Share of moves that move a cut, and largest number of blocks by which they do, since a cut may have to pass blocks
whose output cannot travel."""

CHUNK = 8
"""Number of moves between two yields."""

ROWS = 8
"""Number of pipelines whose own best cut is tried."""

ORDERS = 24
"""Number of orders of stages in which these get the largest memories."""


def place_heterogeneous(
    job: PlacementJob, starts: Sequence[Stages], rng: random.Random, rounds: int = ROUNDS
) -> Generator[tuple[Stages, Spans] | None, None, None]:
    """Search for the placement and the cut that train fastest.

    Args:
        job: the model and the devices.
        starts: placements to begin with, besides those by speed and by memory.
        rng: source of all randomness.
        rounds: number of annealings.

    Yields:
        better and better placements, each with its cut, and None in between, so that a caller short of time can stop.

    Raises:
        ConfigurationError: no placement that was tried fits into the devices.
    """
    begun: list[tuple[float, Stages, Spans]] = []
    refusals: list[ConfigurationError] = []
    for stages in (*starts, *_by_speed(job), *_by_memory(job)):
        yield None
        if len(begun) >= len(starts) + 2:
            break
        try:
            spans = best_cut(job, stages)
        except ConfigurationError as error:
            refusals.append(error)
        else:
            begun.append((CutJob(job, spans).seconds(stages), stages, spans))
    if not begun:
        raise refusals[-1]
    begun.sort(key=lambda start: start[0])
    best, stages, spans = begun[0]
    yield stages, spans
    for number in range(rounds):
        _, stages, spans = begun[number % len(begun)]
        seconds = math.inf
        for _ in range(ALTERNATIONS):
            stages, spans = yield from _anneal(job, stages, spans, rng)
            spans = best_cut(job, stages, spans)
            before, seconds = seconds, CutJob(job, spans).seconds(stages)
            if seconds < best * (1 - 1e-12):
                best = seconds
                yield stages, spans
            if seconds >= before * (1 - 1e-9):
                break


def best_cut(job: PlacementJob, stages: Stages, known: Spans | None = None) -> Spans:
    """Return the cut that trains fastest on these devices. Candidates are ``known`` and the cuts that suit the slowest
    device of each stage, the mean or one of the pipelines; the time for averaging a block's parameters counts as its
    work or not.

    Raises:
        ConfigurationError: no cut fits into the devices.
    """
    seconds = [block.seconds for block in job.chain]
    crossing = _crossing(job)
    slowness = [
        min(1e3, max(job.slowness[a][b] for a, b in zip(above, below, strict=True)))  # no link: as slow as it gets
        for above, below in pairwise(stages)
    ]
    memory = job.memory([min(job.memories[device] for device in group) for group in stages])
    rows = [[job.speeds[device] for device in row] for row in zip(*stages, strict=True)]
    columns = list(zip(*rows, strict=True))
    wanted = [[min(column) for column in columns], [sum(column) / len(column) for column in columns], *rows[:ROWS]]
    per_byte = max(averaging_seconds_per_byte(job, group) for group in stages)
    averaged = [block.seconds + per_byte * block.parameter_bytes for block in job.chain]
    cuts = [] if known is None else [known]
    for work in (seconds, averaged) if 0 < per_byte < math.inf else (seconds,):
        cuts += [balance(work, crossing, speeds, memory, slowness)[0] for speeds in wanted]
    return min(cuts, key=lambda spans: CutJob(job, spans).seconds(stages))


def pipeline_cut(job: PlacementJob, devices: Sequence[int]) -> Spans:
    """Return the cut that makes the slowest stage of one pipeline fastest.

    Args:
        job: the model and the devices.
        devices: the devices of the stages.

    Raises:
        ConfigurationError: no cut fits into the devices.
    """
    slowness = [min(1e3, job.slowness[above][below]) for above, below in pairwise(devices)]
    seconds, speeds = [block.seconds for block in job.chain], [job.speeds[device] for device in devices]
    return balance(seconds, _crossing(job), speeds, job.memory([job.memories[d] for d in devices]), slowness)[0]


def _crossing(job: PlacementJob) -> list[float]:
    """Return the bytes over the cut after each block, both ways; infinite where its output cannot travel."""
    return [
        math.inf if block.activation_bytes is None else float(block.activation_bytes + block.gradient_bytes)
        for block in job.chain[:-1]
    ]


def _by_speed(job: PlacementJob) -> Iterator[Stages]:
    """Yield stages of devices of equal speed, and pipelines of these."""
    order = sorted(range(len(job.network)), key=lambda device: -job.speeds[device])
    yield _columns(order, job.num_pipelines)
    yield [list(group) for group in zip(*_columns(order, job.num_stages), strict=True)]


def _by_memory(job: PlacementJob) -> Iterator[Stages]:
    """Yield stages of devices of about equal memory, with the largest for each stage in turn; the first stage keeps
    most."""
    order = sorted(range(len(job.network)), key=lambda device: (-job.memories[device], -job.speeds[device]))
    columns = _columns(order, job.num_pipelines)
    for stages in islice(permutations(range(job.num_stages)), ORDERS):
        yield [columns[number] for number in stages]


def _columns(order: Sequence[int], size: int) -> Stages:
    return [list(order[first : first + size]) for first in range(0, len(order), size)]


def _anneal(
    job: PlacementJob, stages: Stages, spans: Spans, rng: random.Random
) -> Generator[None, None, tuple[Stages, Spans]]:
    """Return the best placement and cut met on the way."""
    walk = _Walk(job, stages, spans)
    moves = max(MOVES_PER_DEVICE * len(job.network), LEAST_MOVES)
    unit = walk.cost / len(job.network)
    for move in range(moves):
        if move % CHUNK == 0:
            yield None
        tolerance = -unit * HOT * (COLD / HOT) ** (move / moves) * math.log(1.0 - rng.random())
        if rng.random() < CUTS:
            walk.move_cut(rng, tolerance)
        else:
            walk.swap(rng, tolerance)
    return walk.best


class _Walk:
    """A placement and a cut during annealing, with the times of each pipeline and of each group's averaging."""

    def __init__(self, job: PlacementJob, stages: Stages, spans: Spans) -> None:
        self._cut = CutJob(job, spans)
        self._stages = [list(group) for group in stages]
        self._rows, self._data = self._all()
        self._misfits, self._misfit = 0, 0.0
        self.cost = self._surrogate(self._rows, self._data, 0)
        self._misfit = MISFIT * self.cost
        self.best = [list(group) for group in stages], spans
        self._best_seconds = self._cut.seconds(stages)

    def _all(self) -> tuple[list[tuple[float, float]], list[float]]:
        rows = [self._cut.pipeline(row) for row in zip(*self._stages, strict=True)]
        return rows, [self._cut.group_seconds(stage, group) for stage, group in enumerate(self._stages)]

    def _surrogate(self, rows: Sequence[tuple[float, float]], data: Sequence[float], misfits: int) -> float:
        times = [seconds for seconds, _ in rows]
        averaging = max(data) + SHARE * sum(data)
        slack = SHARE * sum(busy for _, busy in rows) / len(rows) + misfits * self._misfit
        if self._cut.job.sync == "groups":
            return combined(times, averaging, "groups") + slack
        top = max(times)
        mean = sum((time / top) ** POWER for time in times) / len(times) if 0 < top < math.inf else 1.0
        return float(top * mean ** (1 / POWER) + averaging + slack)

    def swap(self, rng: random.Random, tolerance: float) -> None:
        """Swap the places of two devices, if the cost grows by less than ``tolerance``."""
        stages, cut = self._stages, self._cut
        g, h = rng.randrange(len(stages)), rng.randrange(len(stages))
        i, k = rng.randrange(len(stages[0])), rng.randrange(len(stages[0]))
        one, other = stages[g][i], stages[h][k]
        misfits = self._misfits + cut.fits(one, g) + cut.fits(other, h) - cut.fits(other, g) - cut.fits(one, h)
        stages[g][i], stages[h][k] = other, one
        rows, data = list(self._rows), list(self._data)
        for pipeline in {i, k}:
            rows[pipeline] = cut.pipeline([group[pipeline] for group in stages])
        for stage in {g, h} if g != h else ():
            data[stage] = cut.group_seconds(stage, stages[stage])
        if not self._accept(rows, data, misfits, tolerance):
            stages[g][i], stages[h][k] = one, other

    def move_cut(self, rng: random.Random, tolerance: float) -> None:
        """Move blocks of one stage to a neighbour, if the cost grows by less than ``tolerance``."""
        job, spans = self._cut.job, list(self._cut.spans)
        if len(spans) == 1:
            return
        at = rng.randrange(len(spans) - 1)
        end = spans[at].stop + rng.choice((-1, 1)) * rng.randint(1, FARTHEST)
        if not spans[at].start < end < spans[at + 1].stop or job.chain[end - 1].activation_bytes is None:
            return
        spans[at], spans[at + 1] = range(spans[at].start, end), range(end, spans[at + 1].stop)
        before, self._cut = self._cut, CutJob(job, spans)
        misfits = sum(not self._cut.fits(d, stage) for stage, group in enumerate(self._stages) for d in group)
        if not self._accept(*self._all(), misfits, tolerance):
            self._cut = before

    def _accept(self, rows: list[tuple[float, float]], data: list[float], misfits: int, tolerance: float) -> bool:
        cost = self._surrogate(rows, data, misfits)
        if not cost - self.cost < tolerance:
            return False
        self._rows, self._data, self._misfits, self.cost = rows, data, misfits, cost
        if misfits:
            return True
        seconds = combined([time for time, _ in rows], max(data), self._cut.job.sync)
        if seconds < self._best_seconds * (1 - 1e-12):
            self._best_seconds = seconds
            self.best = [list(group) for group in self._stages], self._cut.spans
        return True
