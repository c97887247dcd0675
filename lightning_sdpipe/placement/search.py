"""Searches for the layout with the most mini-batches per second: which device runs which blocks of which pipeline.

The search is simulated annealing, in rounds. A move swaps the places of two devices, one of which may have been left
out so far; reverses consecutive stages; moves a cut by a few blocks; or, if depths may change, moves a device to
another pipeline or a new one, leaves it out, or splits or joins pipelines. Most swaps replace an end of a slow link, or
a busy device, often by a device that is near. The rate depends on maxima over pipelines, stages and links, most of
which a move does not change, so while annealing, power means with a rising power take the place of maxima.

The number of moves, not time, ends the search, and every number comes from sums, products and square roots in a fixed
order. So with the same seed every machine finds the same layout, unless a time limit cuts the search short.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, permutations
from typing import TypeAlias

import numpy as np

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import balance
from lightning_sdpipe.placement.arrange import arrange
from lightning_sdpipe.placement.cost import shares
from lightning_sdpipe.placement.rate import Array, Job, Layout, Shape, Spans, Times, times
from lightning_sdpipe.topology.mesh import rows_of

MOVES = 300_000
"""Moves of a search: some 10 s for 64 devices."""

ROUNDS = 8
STARTS = ("best", "near pipelines", "near stages", "random")
"""What the rounds begin with, in turn."""

POWERS = (2, 3, 4, 5)
"""The exponent k of the power means of 2^k, for each quarter of a round."""

HOT, WARM, COLD = 0.8, 0.1, 0.01
"""First temperature of a round, first temperature of a round from the best layout, and last temperature: ratios to the
seconds per device at the start."""

MISFIT = 0.1
"""Ratio of the penalty for a worker that does not fit, or a missing link, to the seconds at the start. It is finite,
since valid layouts may lie behind invalid ones."""

SLOW, NEAR = 0.85, 0.65
"""Share of swaps that replace an end of a slow link or a busy device; of those at a link, the share that take a device
near its other end: of n others, the one of rank n u³, with u uniform."""

FARTHEST = 3
"""Largest number of blocks by which a cut moves, since it may have to pass blocks whose output cannot travel."""

ALIKE = 1.05
"""Devices count as equally fast up to this ratio of speeds, since profiles are no more exact."""

ORDERS = 24
"""Most orders in which stages get the devices, sorted by memory, as a start."""

DEPTHS, CUTS, REVERSALS = 0.5, 0.3, 0.2
"""Probability that a move changes depths, if not then a cut, if not then the order of stages, where possible; all other
moves swap devices."""

TOGETHER = 16
"""Number of swaps that are tried together; the best one that is accepted is made."""

CLOCK = 256
"""Moves between readings of the clock."""


@dataclass
class Found:
    """The best layout that fits, its seconds (1 / rate), and the number of moves made. ``complete`` says that the
    search was not cut short. ``improvements`` has, for each better layout, the moves made so far, its seconds, and the
    seconds since the search began."""

    layout: Layout
    seconds: float
    moves: int
    complete: bool
    improvements: list[tuple[int, float, float]]


@dataclass
class Search:
    """A search for the fastest layout.

    Args:
        job: the model, the devices and the schedule.
        depths: number of stages of each pipeline at first.
        moves: number of moves after which the search is done.
        seed: seed of all randomness.
        seconds: limit of time, which cuts the search short.
        unlike: whether pipelines may have different cuts.
        free: whether depths may change, and cuts with them.
        clock: returns monotonic seconds.
    """

    job: Job
    depths: Sequence[int]
    moves: int = MOVES
    seed: int = 0
    seconds: float = math.inf
    unlike: bool = False
    free: bool = False
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        job, self.unlike = self.job, self.unlike or self.free
        self.made, self.rng, self._began = 0, random.Random(self.seed), self.clock()
        self.best: Found | None = None
        self.among, self.between = _distances(job, len(self.depths), job.number(self.depths))
        order = self.between.argsort(axis=1, kind="stable").tolist()
        self.near = [[other for other in row if other != number] for number, row in enumerate(order)]
        """For each device, the others from near to far."""
        self._cuts: dict[tuple[int, ...], Spans | None] = {}
        self._kinds = _kinds(job)
        self._refusal: ConfigurationError | None = None

    # ------------------------------------------------------------------ rounds

    def run(self, starts: Sequence[Layout] = ()) -> Found:
        """Search from these layouts and from others.

        Raises:
            ConfigurationError: no layout that was tried fits into the devices, or all need a link that does not exist.
        """
        first = [*starts, *self._starts()]
        for layout in first:
            self.offer(layout)
            self._arrange(layout)
        for number in range(ROUNDS):
            kind = STARTS[number % len(STARTS)]
            start = self._start(kind, first)
            if start is None:
                break
            hot = WARM if kind == "best" else HOT
            self._arrange(self._anneal(start, hot, self.moves * (number + 1) // ROUNDS))
            if self.is_late:
                break
        if self.best is None:
            raise self._refusal or ConfigurationError(
                "Every placement that was found needs a link that does not exist, or more memory than there is. "
                "Connect the devices, search longer, or choose another number of stages."
            )
        self.best.moves, self.best.complete = self.made, not self.is_late
        return self.best

    @property
    def is_late(self) -> bool:
        return self.made < self.moves and self.clock() >= self._began + self.seconds

    def offer(self, layout: Layout) -> Times:
        """Keep ``layout`` if it fits and is the fastest so far."""
        found = times(self.job, Shape(self.job, layout.cuts), _flat(layout)[None])
        if self.is_better(found, 0):
            self.keep(layout, float(found.seconds[0]))
        return found

    def is_better(self, found: Times, number: int) -> bool:
        """Return whether a layout fits and is the fastest so far."""
        best = math.inf if self.best is None else self.best.seconds
        return not found.misfits[number] and bool(found.seconds[number] < best * (1 - 1e-12))

    def keep(self, layout: Layout, seconds: float) -> None:
        """Keep ``layout`` as the fastest so far."""
        if self.best is None:
            self.best = Found(layout, seconds, 0, False, [])
        self.best.layout, self.best.seconds = layout, seconds
        self.best.improvements.append((self.made, seconds, self.clock() - self._began))

    def _arrange(self, layout: Layout) -> None:
        """Try the best order of the stages of ``layout``, and the best device after each, by the links' costs."""
        if not layout.alike:
            return
        job, shape = self.job, Shape(self.job, layout.cuts[:1])
        (late, slow, missing), rule = job.links, shares(job.cost, job.number(layout.depths))
        absent = 0.0 if missing is None else np.where(missing, math.inf, 0.0)
        crossing, at_once = shape.crossing[:-1], late if rule.step else 0.0
        steps = [(rule.step * amount * slow + at_once + absent).tolist() for amount in crossing]
        periods = [(rule.period * amount * slow + absent).tolist() for amount in crossing]
        for stages in arrange(layout.stages, steps, periods, shape.sends_alike):
            if not self.is_late:
                self.offer(Layout(tuple(zip(*stages, strict=True)), layout.cuts))

    # ------------------------------------------------------------------ starts

    def _starts(self) -> Iterator[Layout]:
        """Yield layouts to start from: the default order, and those that put devices together that are near or have
        similar speed or memory."""
        job, count, depths = self.job, len(self.job.network), self.depths
        speed = sorted(range(count), key=lambda device: -job.speeds[device])
        memory = sorted(range(count), key=lambda device: (-job.memories[device], -job.speeds[device]))
        orders: list[Sequence[Sequence[int]]] = [rows_of(depths), self._rows_of(speed), self._columns_of(speed)]
        orders += [self._near_rows(length, True) for length in range(2, max(depths) // 2 + 1)]
        orders += [self._near_rows(max(depths), tight) for tight in (True, False)]
        orders += [self._near_columns(tight) for tight in (True, False)]
        columns = self._columns_of(memory)
        orders += [
            [[row[number] for number in stages if number < len(row)] for row in columns]
            for stages in islice(permutations(range(max(depths))), ORDERS)
        ]
        seen = set[tuple[tuple[int, ...], ...]]()
        for rows in orders:
            key = tuple(map(tuple, rows))
            if key not in seen and len(seen) < 7 + max(depths) + ORDERS * (len(set(job.memories)) > 1):
                seen.add(key)
                layout = self.cut(rows)
                if layout is not None:
                    yield layout

    def _start(self, kind: str, first: Sequence[Layout]) -> Layout | None:
        if kind == "best" or self.free:
            return self.best.layout if self.best is not None else (first[0] if first else None)
        if kind == "random":
            order = list(range(len(self.job.network)))
            self.rng.shuffle(order)
            rows = self._rows_of(order)
        else:
            rows = self._near_rows(max(self.depths)) if kind == "near pipelines" else self._near_columns()
        return self.cut(rows) or (first[0] if first else None)

    def _rows_of(self, order: Sequence[int]) -> list[list[int]]:
        left = iter(order)
        return [[next(left) for _ in range(depth)] for depth in self.depths]

    def _columns_of(self, order: Sequence[int]) -> list[list[int]]:
        left, rows = iter(order), [list[int]() for _ in self.depths]
        for stage in range(max(self.depths)):
            for row, depth in zip(rows, self.depths, strict=True):
                if stage < depth:
                    row.append(next(left))
        return rows

    def _near_rows(self, length: int, tight: bool = False) -> list[list[int]]:
        """Return pipelines made of pieces of this ``length``, each of devices that are near each other."""
        rows = [list[int]() for _ in self.depths]
        pieces = [
            (row, min(length, depth - first))
            for first in range(0, max(self.depths), length)
            for row, depth in zip(rows, self.depths, strict=True)
            if first < depth
        ]
        order = iter(self._clustered([size for _, size in pieces], self.between, tight))
        for row, size in pieces:
            row += islice(order, size)
        return rows

    def _near_columns(self, tight: bool = False) -> list[list[int]]:
        sizes = [sum(stage < depth for depth in self.depths) for stage in range(max(self.depths))]
        return self._columns_of(self._clustered(sizes, self.among, tight))

    def _clustered(self, sizes: Sequence[int], far: Array, tight: bool) -> list[int]:
        """Return all devices, ordered so that each part of these ``sizes`` has near ones: those nearest to a random
        device or, if ``tight``, to the device with the nearest neighbours. Ties are broken at random."""
        noise, left, order = [self.rng.random() for _ in far], list(range(len(far))), list[int]()
        for size in sizes:
            one = self.rng.choice(left)
            if tight and size > 1:
                spread = np.sort(far[np.ix_(left, left)], axis=1)[:, :size].sum(axis=1)  # with itself, at distance 0
                one = left[int(spread.argmin())]
            part = sorted(left, key=lambda device: (device != one, far[one, device], noise[device]))[:size]
            left = [device for device in left if device not in part]
            order += part
        return order

    # -------------------------------------------------------------------- cuts

    def cut(self, rows: Sequence[Sequence[int]]) -> Layout | None:
        """Return the pipelines with the cuts that make their slowest stages fastest; None if no cut fits."""
        devices = tuple(map(tuple, rows))
        if self.unlike:
            cuts = [self.cut_of(row) for row in devices]
            return None if None in cuts else Layout(devices, tuple(spans for spans in cuts if spans is not None))
        job, columns = self.job, list(zip(*devices, strict=True))
        memories = [min(job.memories[device] for device in column) for column in columns]
        speeds = [[job.speeds[device] for device in column] for column in columns]
        links = [min(1e3, max(job.slowness(a, b) for a, b in zip(*pair, strict=True))) for pair in pairwise(columns)]
        found: list[tuple[float, Layout]] = []
        for wanted in ([min(each) for each in speeds], [sum(each) / len(each) for each in speeds]):
            spans = self._balanced(wanted, memories, links)
            if spans is not None:
                layout = Layout(devices, (spans,) * len(devices))
                found.append((float(self.offer(layout).seconds[0]), layout))
        return min(found, key=lambda entry: entry[0])[1] if found else None

    def cut_of(self, row: Sequence[int]) -> Spans | None:
        """Return the cut of one pipeline, the same for the same kinds of devices; None if no cut fits."""
        kinds = tuple(self._kinds[device] for device in row)
        if kinds not in self._cuts:
            job = self.job
            memories = [job.memories[device] for device in row]
            links = [min(1e3, job.slowness(a, b)) for a, b in pairwise(row)]
            self._cuts[kinds] = self._balanced([job.speeds[device] for device in row], memories, links)
        return self._cuts[kinds]

    def _balanced(self, speeds: Sequence[float], memories: Sequence[float], links: Sequence[float]) -> Spans | None:
        job = self.job
        number = job.micro_batches or max(len(speeds), *(self.depths if not self.free else [1]))
        try:
            memory = job.memory(memories, number)
            return balance([block.seconds for block in job.chain], job.crossing, speeds, memory, links)[0]
        except ConfigurationError as error:
            self._refusal = self._refusal or error
            return None

    # ------------------------------------------------------------------- moves

    def _anneal(self, layout: Layout, hot: float, until: int) -> Layout:
        """Move until ``until`` moves have been made in all; return the last layout."""
        walk, begun = _Walk(self, layout), self.made
        count, moves, looked = len(self.job.network), max(until - self.made, 1), self.made
        for number, power in enumerate(POWERS):
            walk.smooth(power)
            unit = walk.seconds / count
            end = begun + moves * (number + 1) // len(POWERS)
            while self.made < end:
                if self.made >= looked + CLOCK:
                    looked = self.made
                    if self.is_late:
                        return walk.layout
                progress = (self.made - begun) / moves
                self.made += walk.move(unit * hot * (COLD / hot) ** progress)
        return walk.layout


_Changed: TypeAlias = tuple[Shape, Array, list[list[int]]]
"""Changed layouts: their shape, the devices of each, and the devices that each leaves out."""


class _Walk:
    """A layout during annealing."""

    def __init__(self, search: Search, layout: Layout) -> None:
        self._search, self._job, self._rng = search, search.job, search.rng
        self._shape = Shape(search.job, layout.cuts)
        self._devices = _flat(layout)
        used = set(self._devices.tolist())
        self._out = [device for device in range(len(search.job.network)) if device not in used]
        self._places = self._places_by_stage()
        self._penalty = 0.0
        self.smooth(POWERS[0])
        self._penalty = MISFIT * self.seconds
        self.smooth(POWERS[0])

    def smooth(self, power: int) -> None:
        """Use power means of 2^``power`` from now on."""
        self._power = power
        self._times = times(self._job, self._shape, self._devices[None], power)
        self._number = 0
        self.seconds = float(self._times.smooth[0] + self._penalty * self._times.misfits[0])

    @property
    def layout(self) -> Layout:
        devices, first = self._devices.tolist(), [*self._shape.first.tolist(), len(self._devices)]
        return Layout(tuple(tuple(devices[a:b]) for a, b in pairwise(first)), self._shape.cuts)

    def move(self, temperature: float) -> int:
        """Try moves at this ``temperature``, in seconds; return their number."""
        random, deepest = self._rng.random, max(map(len, self._shape.cuts))
        if self._search.free and random() < DEPTHS:
            changed = self._changed_depths()
        elif len(self._job.chain) > deepest > 1 and random() < CUTS:
            changed = self._moved_cut()
        elif self._shape.even and deepest > 1 and random() < REVERSALS:
            changed = self._reversed()
        else:
            changed = self._swapped()
        if changed is None:
            return 1
        shape, devices, out = changed
        found = times(self._job, shape, devices, self._power)
        tolerance = [-temperature * math.log(1.0 - self._rng.random()) for _ in range(len(devices))]
        seconds = found.smooth + self._penalty * found.misfits
        number = int((seconds - tolerance).argmin())
        if seconds[number] - tolerance[number] < self.seconds:
            if shape is not self._shape:
                self._shape = shape
                self._places = self._places_by_stage()
            self._devices, self._out, self._times, self._number = devices[number], out[number], found, number
            self.seconds = float(seconds[number])
            if self._search.is_better(found, number):
                self._search.keep(self.layout, float(found.seconds[number]))
        return len(devices)

    def _swapped(self) -> _Changed:
        """Swap two devices, in :data:`TOGETHER` ways; one of the two may be a device that was left out."""
        devices, random, every = self._devices, self._rng.random, [self._out] * TOGETHER
        changed, count = np.repeat(devices[None], TOGETHER, axis=0), len(devices)
        for number in range(TOGETHER):
            place, wanted = self._place()
            other = int(random() * (count + len(self._out)))
            if wanted is not None:
                there = np.flatnonzero(devices == wanted)
                other = int(there[0]) if len(there) else count + self._out.index(wanted)
            if other < count:
                changed[number, place], changed[number, other] = devices[other], devices[place]
            else:
                out = every[number] = list(self._out)
                changed[number, place], out[other - count] = out[other - count], int(devices[place])
        return self._shape, changed, every

    def _place(self) -> tuple[int, int | None]:
        """Return a place whose device is to be swapped, and the device that should replace it; None if any may."""
        random, found, number = self._rng.random, self._times, self._number
        choice = random() / SLOW
        if choice < 0.1:
            return int(found.averaging[number].argmax()), None
        if choice < 0.25 and self._job.computes:
            return int((found.computing[number] + found.links[number]).argmax()), None
        if choice >= 1.0 or not self._places:
            return int(random() * len(self._devices)), None
        places = self._places[int(random() * len(self._places))]
        place = int(places[found.links[number, places].argmax()])
        place, partner = (place, place + 1) if random() < 0.5 else (place + 1, place)
        if random() >= NEAR:
            return place, None
        near = self._search.near[int(self._devices[partner])]
        return place, near[int(random() ** 3 * len(near))]

    def _reversed(self) -> _Changed | None:
        """Reverse consecutive stages of all pipelines; all stages are alike."""
        depth, random = len(self._shape.cuts[0]), self._rng.random
        first, last = sorted((int(random() * depth), int(random() * depth)))
        if first == last or len({*map(len, self._shape.cuts)}) > 1:
            return None
        grid = self._devices.reshape(-1, depth).copy()
        grid[:, first : last + 1] = grid[:, first : last + 1][:, ::-1]
        return self._shape, grid.reshape(1, -1), [self._out]

    def _moved_cut(self) -> _Changed | None:
        """Move blocks from one stage to a neighbour: in one pipeline, or in all if they share one cut."""
        rng, cuts = self._rng, list(self._shape.cuts)
        row = rng.randrange(len(cuts))
        spans = list(cuts[row])
        if len(spans) < 2:
            return None
        at = rng.randrange(len(spans) - 1)
        end = spans[at].stop + rng.choice((-1, 1)) * rng.randint(1, FARTHEST)
        if not spans[at].start < end < spans[at + 1].stop or self._job.crossing[end - 1] == math.inf:
            return None
        spans[at], spans[at + 1] = range(spans[at].start, end), range(end, spans[at + 1].stop)
        cuts = [tuple(spans) if number == row or not self._search.unlike else cut for number, cut in enumerate(cuts)]
        return Shape(self._job, cuts), self._devices[None], [self._out]

    def _changed_depths(self) -> _Changed | None:
        """Move a device to another pipeline or a new one, leave one out or add one, or split or join pipelines."""
        rng, rows = self._rng, [list(row) for row in self.layout.rows]
        out, one, other = list(self._out), rng.randrange(len(rows)), rng.randrange(len(rows) + 1)
        rows.append([])
        match rng.choice("mmmoisj"):
            case "m" if other != one:
                device = rows[one].pop(rng.randrange(len(rows[one])))
                rows[other].insert(rng.randint(0, len(rows[other])), device)
            case "o":
                out.append(rows[one].pop(rng.randrange(len(rows[one]))))
            case "i" if out:
                rows[other].insert(rng.randint(0, len(rows[other])), out.pop(rng.randrange(len(out))))
            case "s" if len(rows[one]) > 1:
                half = rng.randrange(1, len(rows[one]))
                rows[one], rows[-1] = rows[one][:half], rows[one][half:]
            case "j" if one != other < len(rows) - 1:
                rows[other] += rows[one]
                rows[one] = []
            case _:
                return None
        rows = [row for row in rows if row]
        known = dict(zip(self.layout.rows, self._shape.cuts, strict=True))
        cuts = [known.get(tuple(row)) or self._search.cut_of(row) for row in rows]
        if not rows or None in cuts:
            return None
        shape = Shape(self._job, [spans for spans in cuts if spans is not None])
        return shape, np.array([[device for row in rows for device in row]]), [out]

    def _places_by_stage(self) -> list[Array]:
        """Return, for each stage except the last, its places that have a cut after them."""
        before = np.flatnonzero(~self._shape.is_last)
        stage = self._shape.stage[before]
        return [before[stage == number] for number in range(int(stage.max(initial=-1)) + 1)]


def _distances(job: Job, num_pipelines: int, micro_batches: int) -> tuple[Array, Array]:
    """Return the seconds of a typical message between any two devices, as replicas and as neighbouring stages."""
    late, slow, _ = job.links
    rule, crossing = shares(job.cost, micro_batches), [amount for amount in job.crossing if amount < math.inf]
    amount = max(crossing, default=0.0) / 2 * max(rule.step, rule.period / micro_batches)
    held = sum(block.parameter_bytes for block in job.chain) / max(1, len(job.network) // num_pipelines) / num_pipelines
    return late + held * slow, late + amount * slow


def _flat(layout: Layout) -> Array:
    return np.array([device for row in layout.rows for device in row])


def _kinds(job: Job) -> list[int]:
    """Return a number for each device, shared by devices with the same memory and about the same speed."""
    leaders: list[int] = []
    found = []
    for device, (speed, memory) in enumerate(zip(job.speeds, job.memories, strict=True)):
        ratios = {
            number: speed / job.speeds[other] for number, other in enumerate(leaders) if memory == job.memories[other]
        }
        same = [number for number, ratio in ratios.items() if 1 / ALIKE <= ratio <= ALIKE]
        found.append(same[0] if same else len(leaders))
        leaders += [] if same else [device]
    return found
