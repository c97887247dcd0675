"""Search for the cheapest placement: which device runs which stage of which pipeline.

The search is anytime: it can be stopped at any moment and has a placement then. It is deterministic: with the same seed
it examines the same placements in the same order, however fast the machine is, so two searches that had the time to
finish agree. In turn it tries

1. the default order, pipelines of near devices, and stages of near devices;
2. placements of classes of like devices as runs of equal groups (``class_search.py``), few runs first;
3. a proof (``exact.py``), where there are few enough compositions;
4. annealing device by device (``anneal.py``), from pipelines of near devices, stages of near devices, random ones and
   the best placement so far, each outcome arranged in the best way (``arrange.py``); and more runs in between.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement import class_search
from lightning_sdpipe.placement.anneal import anneal, neighbours
from lightning_sdpipe.placement.arrange import arrange
from lightning_sdpipe.placement.cost import Cost, Stages, Weights, default_order, evaluate, lower_bound
from lightning_sdpipe.placement.exact import prove

ROUNDS = 24
MOVES_PER_DEVICE = 700
"""Number of moves of one annealing, per device."""

HOT, WARM, COLD = 0.8, 0.25, 0.03
"""First temperature of annealing, first temperature when the best placement is annealed once more, and last
temperature: as shares of the start's cost per device."""

MOST_CLASSES = 16
"""Largest number of classes of identical devices; beyond, devices that are nearly alike are put together."""

FEW_RUNS = 2
STRUCTURES_PER_ROUND = 8

FIRST_PROOF, LATER_PROOFS = 5000, 500
"""Steps of the proof before the first round and after each."""

STARTS = ("pipelines", "stages", "random", "best", "best", "best")


@dataclass
class Found:
    """The best placement so far.

    ``bound`` is a lower bound of the cost. ``optimal`` says that no placement costs less than this one. ``complete``
    says that the search was not cut short, so that every machine finds the same. ``improvements`` has the seconds at
    which better placements were found, and their costs.
    """

    stages: Stages
    cost: Cost
    bound: float
    optimal: bool = False
    complete: bool = False
    improvements: list[tuple[float, float]] = field(default_factory=list)


def search(
    weights: Weights,
    num_pipelines: int,
    seconds: float = 10.0,
    seed: int = 0,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
    """Search for the cheapest placement.

    Args:
        weights: costs of the links of M × N devices.
        num_pipelines: N.
        seconds: limit of the search.
        seed: seed of all randomness.
        rounds: number of annealings, after which the search is done.
        clock: monotonic seconds.

    Raises:
        ConfigurationError: there are not M × N devices, or every placement needs a link that does not exist.
    """
    start = clock()
    count, num_stages = len(weights.exchange[0]), weights.num_stages
    if num_stages * num_pipelines != count:
        raise ConfigurationError(
            f"{count} devices cannot form {num_pipelines} pipelines of {num_stages} stages, which need "
            f"{num_stages * num_pipelines}. Choose a number of stages that divides the number of devices."
        )
    first = default_order(num_stages, num_pipelines)
    found = Found(first, evaluate(first, weights), lower_bound(weights, num_pipelines))
    work = _work(weights, num_pipelines, found, random.Random(seed), rounds)
    while True:
        try:
            stages = next(work)
        except StopIteration as end:
            found.optimal, found.complete = end.value, True
            break
        if stages is not None:
            cost = evaluate(stages, weights)
            if cost.total < found.cost.total * (1 - 1e-12):
                found.stages, found.cost = stages, cost
                found.improvements.append((clock() - start, cost.total))
        if clock() - start >= seconds:
            break
    if found.cost.total == math.inf:
        raise ConfigurationError(
            "Every placement that was found needs a link that does not exist. Connect the devices, search longer, or "
            "choose another number of stages."
        )
    if found.cost.total <= found.bound * (1 + 1e-9):
        found.optimal = True
    if found.optimal:
        found.bound = found.cost.total
    return found


def _work(
    weights: Weights, num_pipelines: int, best: Found, rng: random.Random, rounds: int
) -> Generator[Stages | None, None, bool]:
    """Yield placements to consider, and None in between. ``best`` is the best one considered so far. Return whether
    that is optimal in the end."""
    finite = _without_gaps(weights)
    near = neighbours(finite)
    yield None
    for kind in ("pipelines", "stages"):
        yield from arrange(_start(kind, finite, num_pipelines, rng), finite)
    coarse = (yield from _Coarse.begin(finite, num_pipelines, best, rng)) if weights.even else None
    if coarse is not None:
        yield from coarse.few_runs()
        yield from coarse.prove(FIRST_PROOF)
        if coarse.optimal:
            return True
    count = len(weights.exchange[0])
    for number in range(rounds):
        kind = STARTS[number % len(STARTS)]
        start = best.stages if kind == "best" else _start(kind, finite, num_pipelines, rng)
        yield start
        hot = WARM if kind == "best" else HOT
        stages = yield from anneal(start, finite, near, rng, MOVES_PER_DEVICE * count, hot / count, COLD / count)
        yield stages
        yield from arrange(stages, finite)
        if coarse is not None:
            yield from coarse.more_runs()
            yield from coarse.prove(LATER_PROOFS)
            if coarse.optimal:
                return True
    return False


class _Coarse:
    """The search among placements of classes, in slices. It can prove something only if devices are identical."""

    def __init__(
        self,
        classes: class_search.Classes,
        are_identical: bool,
        weights: Weights,
        num_pipelines: int,
        best: Found,
        rng: random.Random,
    ) -> None:
        self._classes, self._provable, self._weights = classes, are_identical, weights
        self._num_pipelines, self._best, self._rng = num_pipelines, best, rng
        self._costs = class_search.ClassCosts(classes.weights)
        self._structures = class_search.structures(weights.num_stages, rng)
        self._more = cycle(lengths for lengths in self._structures if len(lengths) > FEW_RUNS)
        self._proof: Generator[class_search.Outline | None, None, bool] | None = None
        self.optimal = False

    @classmethod
    def begin(
        cls, weights: Weights, num_pipelines: int, best: Found, rng: random.Random
    ) -> Generator[None, None, _Coarse | None]:
        """Make the search; return None if the devices do not fall into few classes."""
        classes = class_search.identical(weights)
        yield None
        are_identical = len(classes) <= MOST_CLASSES
        if not are_identical:
            classes = yield from class_search.alike(weights)
        return cls(classes, are_identical, weights, num_pipelines, best, rng) if len(classes) <= MOST_CLASSES else None

    def few_runs(self) -> Iterator[Stages | None]:
        """Try the structures of few runs."""
        for lengths in self._structures:
            if len(lengths) <= FEW_RUNS:
                yield from self._runs(lengths)

    def more_runs(self) -> Iterator[Stages | None]:
        """Try the next structures of more runs."""
        for lengths in islice(self._more, STRUCTURES_PER_ROUND):
            yield from self._runs(lengths)

    def _runs(self, lengths: Sequence[int]) -> Iterator[Stages | None]:
        best = None
        for outline in class_search.anneal_runs(lengths, self._classes, self._costs, self._num_pipelines, self._rng):
            best = outline or best
            yield None
        if best is not None:
            yield from self._of_devices(best)

    def _of_devices(self, outline: class_search.Outline) -> Iterator[Stages | None]:
        return arrange(self._classes.devices(outline.groups), self._weights, outline.limit)

    def prove(self, steps: int) -> Iterator[Stages | None]:
        """Continue the proof for ``steps`` steps."""
        if not self._provable:
            return
        if self._proof is None:
            num_stages, cost = self._weights.num_stages, evaluate(self._best.stages, self._weights).total
            self._proof = prove(self._costs, self._classes.sizes, num_stages, self._num_pipelines, cost)
        for _ in range(steps):
            try:
                outline = next(self._proof)
            except StopIteration as end:
                self.optimal, self._provable = end.value, False
                return
            yield None
            if outline is not None:
                yield from self._of_devices(outline)


def _start(kind: str, weights: Weights, num_pipelines: int, rng: random.Random) -> Stages:
    """Return pipelines of near devices, stages of near devices, or a random placement."""
    count = len(weights.exchange[0])
    if kind == "random":
        order = list(range(count))
        rng.shuffle(order)
        return [order[first : first + num_pipelines] for first in range(0, count, num_pipelines)]
    near = weights.step[0] if weights.step else weights.exchange[0]
    size = weights.num_stages if kind == "pipelines" else num_pipelines
    left, parts = set(range(count)), []
    while left:
        one = rng.choice(sorted(left))
        noise = {device: rng.random() for device in sorted(left)}
        part = sorted(left, key=lambda device: (near[one][device] if device != one else -1.0, noise[device]))[:size]
        left.difference_update(part)
        parts.append(part)
    return [list(group) for group in zip(*parts, strict=True)] if kind == "pipelines" else parts


def _without_gaps(weights: Weights) -> Weights:
    """Return weights in which missing links cost as much as a thousand of the most expensive ones."""
    matrices = {id(m): m for m in (*weights.exchange, *weights.step, *weights.period)}
    most = max((value for m in matrices.values() for row in m for value in row if value < math.inf), default=1.0)
    if not any(value == math.inf for m in matrices.values() for row in m for value in row):
        return weights
    filled = {
        key: [[value if value < math.inf else 1000 * most for value in row] for row in m] for key, m in matrices.items()
    }
    return Weights(*(tuple(filled[id(m)] for m in part) for part in (weights.exchange, weights.step, weights.period)))
