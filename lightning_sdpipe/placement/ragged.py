"""Search for the pipelines of a fleet, where each may have its own depth and its own cut.

The search is exact where that is quick (:mod:`lightning_sdpipe.placement.splits`); elsewhere annealing swaps and moves
devices, splits and merges pipelines.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.fleet import Counts, Fleet, Order, PlacedPipeline
from lightning_sdpipe.placement.network import Network
from lightning_sdpipe.placement.planner import PlacementTask
from lightning_sdpipe.placement.splits import free, of_depths, shared_cuts
from lightning_sdpipe.topology.placement_file import FORMAT, Placement

MOVES_PER_DEVICE = 400
"""Number of moves of one annealing, per device."""

HOT, COLD = 0.3, 0.003
"""First and last temperature, as shares of a pipeline's rate."""


@dataclass(frozen=True)
class RaggedResult:
    """Pipelines and their rate.

    Args:
        network: the network of all devices.
        asked: the task, with the device that will be rank 0 and the number of micro-batches.
        rows: the pipelines, with that of rank 0 first.
        rate: mini-batches per second of all pipelines.
        bound: upper bound of the rate.
        price: what rank 0's rule costs, in mini-batches per second.
        exact: whether all counts of devices were examined.
    """

    network: Network
    asked: PlacementTask
    rows: tuple[PlacedPipeline, ...]
    rate: float
    bound: float
    price: float
    exact: bool

    @property
    def depths(self) -> list[int]:
        """Number of stages of each pipeline."""
        return [len(row.devices) for row in self.rows]

    @property
    def blocks(self) -> list[list[int]]:
        """Number of blocks of each stage of each pipeline."""
        return [[len(span) for span in row.spans] for row in self.rows]

    @property
    def alike(self) -> bool:
        """True if all pipelines have one cut."""
        return all(row.spans == self.rows[0].spans for row in self.rows)

    @property
    def shape(self) -> str:
        """Shape as text, such as ``2 × 2`` or ``1 + 2 + 2``."""
        return f"{self.depths[0]} × {len(self.rows)}" if self.alike else " + ".join(map(str, self.depths))

    @property
    def left_out(self) -> list[int]:
        """Devices that run nothing."""
        used = {device for row in self.rows for device in row.devices}
        return [device for device in range(len(self.network)) if device not in used]

    def placement(self, source: str) -> Placement:
        """Return the placement in the form of a file."""
        cost: dict[str, float | int | str] = {
            "model": self.asked.cost,
            "num_micro_batches": self.asked.micro_batches,
            "mini_batches_per_second": self.rate,
        }
        names = tuple(tuple(str(self.network.devices[device]) for device in row.devices) for row in self.rows)
        return Placement(FORMAT, source, cost, False, tuple(map(tuple, self.blocks)), names)


def place_ragged(network: Network, asked: PlacementTask, depths: Sequence[int] = ()) -> RaggedResult:
    """Find the pipelines with the most mini-batches per second, of any depths or of ``depths``; devices may be left
    out.

    Args:
        network: a network with a model.
        asked: the task with the seconds to search; its number of stages is ignored.
        depths: depths of all pipelines, if they are given; they add up to the number of devices.

    Raises:
        ConfigurationError: the model fits in no such way, or the device that will be rank 0 cannot run a last stage.
    """
    if depths and sum(depths) != len(network):
        raise ConfigurationError(
            f"--stages {','.join(map(str, depths))} are {sum(depths)} workers, and the network has {len(network)} "
            "devices. Change one of them: each stage of each pipeline is a device."
        )
    late = _deadline(asked)

    def splits(fleet: Fleet) -> Iterator[tuple[Fleet, Sequence[Counts]]]:
        if not fleet.exact:
            yield fleet, _anneal(fleet, depths, random.Random(asked.seed), late)
        elif depths:
            yield fleet, of_depths(fleet, depths)
        else:
            yield from ((fleet, split) for split in free(fleet))

    if depths:
        return _best(network, asked, splits, [max(depths)], late)
    return _best(network, asked, splits, range(1, len(network) + 1), late)


def best_rectangle(network: Network, asked: PlacementTask) -> RaggedResult | None:
    """Find the fastest pipelines of one depth and one cut, where devices may be left out; None if there are none, or
    too many counts to examine. For the arguments see :func:`place_ragged`."""

    def splits(fleet: Fleet) -> Iterator[tuple[Fleet, Sequence[Counts]]]:
        for spans in shared_cuts(fleet) if fleet.exact else ():
            of_cut = fleet.with_cut(spans)
            yield from ((of_cut, split) for split in free(of_cut))

    try:
        return _best(network, asked, splits, range(1, len(network) + 1), _deadline(asked))
    except ConfigurationError:
        return None


def _deadline(asked: PlacementTask) -> Callable[[], bool]:
    until = time.perf_counter() + asked.seconds
    return lambda: time.perf_counter() >= until


def _best(
    network: Network,
    asked: PlacementTask,
    splits: Callable[[Fleet], Iterable[tuple[Fleet, Sequence[Counts]]]],
    deepest: Sequence[int],
    late: Callable[[], bool],
) -> RaggedResult:
    """Return the fastest of all splits, or of those found until it is late. If no number of micro-batches is asked
    for, it is the number of stages of the deepest pipeline, and each such depth is tried."""
    number = asked.num_micro_batches
    tried = [(m, m) for m in deepest] if number is None else [(number, deepest[-1])]
    best: tuple[float, Fleet, Fleet, list[Order]] | None = None
    complete = True
    for m, most in tried:
        fleet = Fleet(network, asked, m, most)
        for of_cut, split in splits(fleet):
            orders = [order for counts in split if (order := of_cut.order(counts, fleet.members(len(split))))]
            possible = len(orders) == len(split) > 0 and (number is not None or max(map(len, orders)) == most)
            made = of_cut.together(_rows(of_cut, orders, None)) if possible else 0.0
            if made > (best[0] if best else 0.0) * (1 + 1e-12):
                best = made, fleet, of_cut, orders
            if late() and best is not None:
                complete = False
                break
    if best is None:
        raise ConfigurationError(
            "The model fits into these devices in no such pipelines. Use devices with more memory, more micro-batches, "
            "or other numbers of stages."
        )
    _, every, fleet, orders = best
    ruled, first = _ruled(fleet, orders, asked.first)
    rows = sorted(_rows(fleet, ruled, first), key=lambda row: (row.devices[-1] != first, len(row.devices), row.devices))
    made = fleet.together(rows)
    price = max(0.0, fleet.together(_rows(fleet, orders, None)) - made)
    known = replace(asked, num_micro_batches=fleet.micro_batches, first=rows[0].devices[-1])
    return RaggedResult(network, known, tuple(rows), made, every.most(), price, complete and fleet.exact)


def _rows(fleet: Fleet, orders: Sequence[Order], first: int | None) -> list[PlacedPipeline]:
    """Return pipelines with a device for each place; ``first`` runs the last stage of the first one."""
    left = [[device for device in members if device != first] for members in fleet.classes]
    rows = []
    for number, order in enumerate(orders):
        devices = [
            first if first is not None and (number, stage) == (0, len(order) - 1) else left[kind].pop(0)
            for stage, kind in enumerate(order)
        ]
        row = fleet.row(tuple(devices))
        assert row is not None, "devices of a class have the same memory"
        rows.append(row)
    return rows


def _ruled(fleet: Fleet, orders: Sequence[Order], first: int) -> tuple[Sequence[Order], int | None]:
    """Return the orders, the first of which ends with the class of the device that will be rank 0, and that device;
    the device is None if no device of its class takes part."""
    kind, members = fleet.class_of(first), fleet.members(len(orders))
    if not any(kind in order for order in orders):
        return orders, None
    found: list[tuple[float, list[Order]]] = []
    for number, order in enumerate(orders):
        counts = tuple(order.count(each) for each in range(len(fleet.classes)))
        ending = fleet.order(counts, members, kind) if kind in order else None
        if ending is not None:
            ruled = [ending, *orders[:number], *orders[number + 1 :]]
            found.append((fleet.together(_rows(fleet, ruled, None)), ruled))
    if not found:
        raise ConfigurationError(
            f"Rank 0 must run a last stage, which {fleet.network.devices[first]} cannot in the pipelines that were "
            "found. Name another device with `--first`, and start the run so that it is rank 0."
        )
    return max(found, key=lambda entry: entry[0])[1], first


def _anneal(fleet: Fleet, depths: Sequence[int], rng: random.Random, late: Callable[[], bool]) -> Sequence[Counts]:
    """Return the best split met on the way; with ``depths``, devices are only swapped."""
    members = fleet.members(len(depths) or sum(fleet.counts))

    def made(parts: Sequence[Order]) -> float:
        rates = [rate for part in parts if part and (rate := fleet.rate(_counted(fleet, part), members))]
        if not rates:
            return 0.0
        return len(rates) * min(rates) if fleet.sync == "all_reduce" else sum(rates)

    parts = _start(fleet, depths, members)
    value = made(parts)
    best, unit, moves = (value, parts), value / len(parts) or 1.0, MOVES_PER_DEVICE * sum(fleet.counts)
    for move in range(moves):
        if late():
            break
        tried = _moved(parts, bool(depths), rng)
        changed = made(tried)
        if changed - value > unit * HOT * (COLD / HOT) ** (move / moves) * math.log(1.0 - rng.random()):
            parts, value = tried, changed
            best = max(best, (value, parts), key=lambda entry: entry[0])
    counted = [_counted(fleet, part) for part in best[1] if part]
    fitting = [counts for counts in counted if fleet.rate(counts, members)]
    return [] if depths and len(fitting) < len(depths) else fitting


def _start(fleet: Fleet, depths: Sequence[int], members: int) -> list[Order]:
    """Return devices in the order of their classes: by depth, or as many as it takes until the model fits."""
    left = [kind for kind, count in enumerate(fleet.counts) for _ in range(count)]
    if depths:
        return [tuple(left.pop(0) for _ in range(depth)) for depth in depths]
    parts: list[Order] = [()]
    for kind in left:
        parts[-1] = (*parts[-1], kind)
        if fleet.rate(_counted(fleet, parts[-1]), members):
            parts.append(())
    return parts


def _moved(parts: Sequence[Order], swap: bool, rng: random.Random) -> list[Order]:
    """Change the parts: swap two devices, move one, also to a new pipeline, or split or merge a pipeline."""
    tried = [list(part) for part in parts if part]
    kind = "swap" if swap else rng.choice(("swap", "swap", "move", "move", "split", "merge"))
    if kind in ("move", "split"):
        tried.append([])
    if len(tried) < 2:
        return list(parts)
    one, other = rng.sample(range(len(tried)), 2)
    if kind == "split":
        one, other = rng.randrange(len(tried) - 1), len(tried) - 1
    if not tried[one]:
        one, other = other, one
    rng.shuffle(tried[one])
    match kind:
        case "swap":
            place = rng.randrange(len(tried[other]))
            tried[one][0], tried[other][place] = tried[other][place], tried[one][0]
        case "move":
            tried[other].append(tried[one].pop())
        case "split":
            half = rng.randrange(1, len(tried[one]) + 1)
            tried[other], tried[one] = tried[one][:half], tried[one][half:]
        case "merge":
            tried[other] += tried[one]
            tried[one] = []
    return [tuple(part) for part in tried]


def _counted(fleet: Fleet, part: Order) -> Counts:
    return tuple(part.count(kind) for kind in range(len(fleet.classes)))
