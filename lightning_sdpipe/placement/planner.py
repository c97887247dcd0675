"""Places a model's stages on a measured network: everything that ``sdpipe place`` decides.

DT-FM's data cost is for an average over all replicas. SDPipe averages in groups of pipelines that are ready at about
the same time, so groups depend on the devices' speeds. Therefore the real policy forms groups of pipelines with these
speeds under a virtual clock, and the cost of averaging in those groups is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import msgspec
import numpy as np

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.cost import CostModel
from lightning_sdpipe.placement.model import Block
from lightning_sdpipe.placement.network import Network
from lightning_sdpipe.placement.rate import Job, Layout, Shape, Spans, Sync, Times, times
from lightning_sdpipe.placement.search import MOVES, Found, Search
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate.pipelines import Work
from lightning_sdpipe.simulate.run import jittered, simulate
from lightning_sdpipe.topology.mesh import Mesh, rows_of
from lightning_sdpipe.topology.placement_file import Placement

ITERATIONS, WARM_UP = 240, 40
"""Iterations of each pipeline, and how many of the first do not count, since the policy enforces nothing until P rounds
have passed."""

JITTER = 0.05
"""Largest relative deviation of an iteration's time: real times never repeat exactly."""


@dataclass(frozen=True)
class Drawn:
    """Groups that a policy forms from the pipelines.

    Args:
        groups: the pipelines of each group, in the order of averaging.
        seconds: mean seconds that a member spends in averaging.
        efficiency: η, the ratio of the rate to the rate of pipelines that never wait for each other and never average.
    """

    groups: tuple[tuple[int, ...], ...]
    seconds: float
    efficiency: float

    @property
    def members(self) -> float:
        """Mean number of members of a group."""
        return sum(map(len, self.groups)) / len(self.groups)


def simulate_groups(
    policy: PolicyConfig, times: Sequence[float], averaging: Callable[[Sequence[int]], float], micro_batches: int = 1
) -> Drawn:
    """Simulate how the policy forms groups in one stage.

    Args:
        policy: the policy.
        times: seconds of a mini-batch of each pipeline; above 0.
        averaging: returns the seconds that a group of these pipelines takes to average.
        micro_batches: micro-batches of a mini-batch; a pipeline is ready with the last one's backward.
    """
    share = jittered(1.0, JITTER)
    work = Work(
        1,
        len(times),
        ITERATIONS,
        lambda worker, iteration: times[worker.pipeline] * share(worker, iteration),
        num_micro_batches=micro_batches,
        exchange=lambda group: averaging([worker.pipeline for worker in group.members]),
    )
    run, alone = simulate(policy, work), simulate(NoSync(), replace(work, exchange=lambda group: 0.0))
    groups = [tuple(worker.pipeline for worker in group.members) for _, group in run.groups]
    groups = groups[len(groups) * WARM_UP // ITERATIONS :]
    spent = sum(len(group) * averaging(group) for group in groups) / sum(map(len, groups))
    return Drawn(tuple(groups), spent, sum(run.rates(WARM_UP)) / sum(alone.rates(WARM_UP)))


RULED = 4
"""If the fastest layout breaks rank 0's rule, ratio of all moves to those of the second search, which obeys it."""


@dataclass(frozen=True)
class PlacementTask:
    """A placement task: what to place, and how long to search.

    Args:
        num_stages: M, or the number of stages of each pipeline.
        cost: how transfers add up; ``"pipedream"`` for the schedule of that name.
        num_micro_batches: micro-batches of a mini-batch; by default as many as the deepest pipeline has stages.
        sync: whether all pipelines average together, or in SDPipe's groups.
        first: the device that will be rank 0; by default the network's first, if it is used.
        optimizer_state: bytes of optimizer state for each byte of trained parameters.
        moves: moves of the search.
        seed: seed of all randomness.
        seconds: limit of time, which cuts the search short.
    """

    num_stages: int | tuple[int, ...]
    cost: CostModel = "pipelined"
    num_micro_batches: int | None = None
    sync: Sync = "groups"
    first: int | None = None
    optimizer_state: float = 2.0
    moves: int = MOVES
    seed: int = 0
    seconds: float = math.inf


@dataclass(frozen=True)
class Communication:
    """Seconds of communication alone for a mini-batch of every pipeline, when all pipelines average together. Of
    ``total``, ``data`` is spent on averaging the replicas. ``default`` is the total of the default order at the uniform
    cut, infinite if that is impossible. ``links`` has the seconds of each pipeline's cuts, ``averaging`` those of its
    stages."""

    total: float
    data: float
    default: float
    links: list[list[float]]
    averaging: list[list[float]]

    @property
    def pipeline(self) -> float:
        """Seconds spent on sending activations and gradients."""
        return max(0.0, self.total - self.data)


@dataclass(frozen=True)
class PlacementResult:
    """The result of a placement. ``seconds`` is the time for a mini-batch of every pipeline, computation included, and
    ``default_seconds`` that of the default order at the uniform cut, infinite if that is impossible. ``price`` is what
    rank 0's rule adds to ``seconds``. ``communication`` is None if pipelines have different cuts."""

    job: Job
    layout: Layout
    first: int
    found: Found
    times: Times
    seconds: float
    default_seconds: float
    price: float
    free_hosts: list[str]
    communication: Communication | None
    drawn: Drawn | None

    @property
    def network(self) -> Network:
        return self.job.network

    @property
    def num_pipelines(self) -> int:
        return len(self.layout.rows)

    @property
    def num_stages(self) -> int | list[int]:
        """M, or the number of stages of each pipeline: the strategy's argument."""
        return self.layout.depths[0] if self.layout.alike else self.layout.depths

    @property
    def blocks(self) -> list[list[int]]:
        """Number of blocks of each stage of each pipeline."""
        return [[len(span) for span in spans] for spans in self.layout.cuts]

    @property
    def micro_batches(self) -> int:
        return self.job.number(self.layout.depths)

    @property
    def rate(self) -> float:
        """Mini-batches per second of all pipelines."""
        return self.num_pipelines / self.seconds if self.seconds else math.inf

    @property
    def shape(self) -> str:
        """Shape as text, such as ``2 × 2 without 1`` or ``1 + 2 + 2``."""
        depths = self.layout.depths
        shape = f"{depths[0]} × {len(depths)}" if self.layout.alike else " + ".join(map(str, depths))
        return shape + (f" without {len(self.left_out)}" if self.left_out else "")

    @property
    def left_out(self) -> list[int]:
        """Devices that run nothing."""
        used = {device for row in self.layout.rows for device in row}
        return [device for device in range(len(self.network)) if device not in used]

    def placement(self, source: str) -> Placement:
        """Return the placement in the form that is written to a file."""
        cost: dict[str, float | int | str] = {
            "model": self.job.cost,
            "num_micro_batches": self.micro_batches,
            "mini_batches_per_second": self.rate,
        }
        if (links := self.communication) is not None:
            cost |= {"data_seconds": links.data, "pipeline_seconds": links.pipeline}
            cost["default_order_seconds"] = links.default
        cost = {name: value for name, value in cost.items() if value != math.inf}  # which JSON does not have
        names = tuple(tuple(str(self.network.devices[device]) for device in row) for row in self.layout.rows)
        blocks = tuple(map(tuple, self.blocks)) if self.network.model is not None else None
        return Placement(source, cost, reversible(self.job, self.layout), blocks, names)


def place(network: Network, asked: PlacementTask, stages: tuple[Block, ...] | None = None) -> PlacementResult:
    """Search for the fastest placement of ``asked.num_stages`` stages on all devices of ``network``.

    Args:
        network: a network that was measured, or written by hand.
        asked: the task.
        stages: the stages, each as a block, in place of the network's model.

    Raises:
        ConfigurationError: the devices do not form such pipelines, what stages send is unknown, the model cannot be cut
            or does not fit, or every placement needs a link that does not exist.
    """
    if isinstance(asked.num_stages, int):
        mesh = Mesh.build(len(network), asked.num_stages)
    else:
        mesh = Mesh.of_depths(len(network), asked.num_stages, False, "the network's devices are")
        if asked.cost == "pipedream":
            raise ConfigurationError(
                "--cost pipedream is for a schedule that needs pipelines of one depth and cut. Give one number of "
                "--stages, or another cost."
            )
    job = job_of(network, asked, stages)
    return _placed(job, asked, mesh.depths, unlike=not isinstance(asked.num_stages, int))


def place_freely(network: Network, asked: PlacementTask) -> tuple[list[PlacementResult], list[str]]:
    """For each possible depth, search for the fastest pipelines that all have that depth and one cut; then search for
    the fastest pipelines of any depths and cuts. The moves are divided among the searches; devices may be left out.

    Returns:
        The results, and why other shapes are impossible. The one of any depths comes last, and only if its pipelines
        differ or it is faster.

    Raises:
        ConfigurationError: the network has no model, or nothing is possible.
    """
    job, count = job_of(network, asked, None), len(network)
    numbers = [m for m in sorted({count // n for n in range(1, count + 1)}) if m <= len(job.chain)]
    found: list[PlacementResult] = []
    refusals: list[str] = []
    part = replace(asked, moves=asked.moves // 2 // len(numbers), seconds=asked.seconds / 2 / len(numbers))
    for stages in numbers:
        try:
            found.append(_placed(job, part, [stages] * (count // stages), unlike=False))
        except ConfigurationError as error:
            refusals.append(f"{stages} stages: {error}")
    if asked.cost != "pipedream":
        half = replace(asked, moves=asked.moves // 2, seconds=asked.seconds / 2)
        starts = [placed.layout for placed in sorted(found, key=lambda placed: placed.seconds)]
        depths = starts[0].depths if starts else [min(len(job.chain), count)]
        try:
            any_depths = _placed(job, half, depths, unlike=True, free=True, starts=starts)
        except ConfigurationError as error:
            refusals.append(f"unlike depths: {error}")
        else:
            if not any_depths.layout.alike or all(any_depths.rate > (1 + 1e-6) * placed.rate for placed in found):
                found.append(any_depths)
    if not found:
        raise ConfigurationError("\n".join(["No placement that was tried is possible.", *refusals]))
    return found, refusals


def job_of(network: Network, asked: PlacementTask, stages: tuple[Block, ...] | None) -> Job:
    """Return the job of a task on all devices of ``network``.

    Raises:
        ConfigurationError: what stages send is unknown.
    """
    chain = stages or (() if network.model is None else network.model.chain)
    if not chain:
        raise ConfigurationError(
            "Nothing says what the stages send: the network was measured without a model. Measure with `--model "
            "IMPORT.PATH:NAME`, or give one number of --stages with `--stage-bytes` and `--cut-bytes`."
        )
    return Job(network, chain, asked.num_micro_batches, asked.cost, asked.sync, asked.optimizer_state)


def _placed(
    job: Job,
    asked: PlacementTask,
    depths: Sequence[int],
    unlike: bool,
    free: bool = False,
    starts: Sequence[Layout] = (),
) -> PlacementResult:
    search = Search(job, depths, asked.moves, asked.seed, asked.seconds, unlike, free)
    found = ruled = search.run(starts)
    first = asked.first
    if first is None:
        used = {device for row in found.layout.rows for device in row}
        first = 0 if 0 in used else found.layout.rows[0][-1]
    if all(row[-1] != first for row in found.layout.rows):
        following = sorted(ending_with(first, job, found.layout), key=lambda layout: _order(times_of(job, layout)))
        try:
            ruled = replace(search, job=replace(job, last=first), moves=asked.moves // RULED).run(following[:1])
        except ConfigurationError as error:
            raise ConfigurationError(
                f"Rank 0 must run a last stage, which {job.network.devices[first]} cannot in any way that was tried. "
                "Name another device with `--first`, and start the run so that it is rank 0."
            ) from error
    by_row = dict(zip(ruled.layout.rows, ruled.layout.cuts, strict=True))
    rows = sorted(by_row, key=lambda row: (row[-1] != first, len(row), row))
    layout = Layout(tuple(rows), tuple(by_row[row] for row in rows))
    return _result(job, layout, first, replace(found, complete=found.complete and ruled.complete), ruled.seconds)


def _result(job: Job, layout: Layout, first: int, found: Found, seconds: float) -> PlacementResult:
    depths, chain = layout.depths, job.chain
    free = found.layout.rows
    ends = [job.network.devices[row[-1]] for row in free]
    if reversible(job, found.layout):
        ends += [job.network.devices[row[0]] for row in free]
    default = Layout(rows_of(depths), tuple(uniform_cut(len(chain), depth) for depth in depths))
    possible = all(chain[span[-1]].activation_bytes is not None for spans in default.cuts for span in spans[:-1])
    slow = times_of(job, default) if possible else None
    default_seconds = math.inf if slow is None or slow.misfits[0] else float(slow.seconds[0]) * len(depths)
    communication = _communication(job, layout, default if possible else None) if layout.alike else None
    own, drawn = times_of(job, layout), None
    if job.computes and job.sync == "groups" and layout.alike and len(layout.rows) > 1:
        drawn = _drawn(job, layout, own)
    return PlacementResult(
        job,
        layout,
        first,
        found,
        own,
        seconds * len(depths),
        default_seconds,
        max(0.0, seconds - found.seconds) * len(depths),
        sorted({device.host for device in ends if device.index == 0}),
        communication,
        drawn,
    )


def _communication(job: Job, layout: Layout, default: Layout | None) -> Communication:
    replaced, count, depth = msgspec.structs.replace, len(layout.rows), layout.depths[0]
    network = replaced(job.network, devices=tuple(replaced(each, memory_bytes=None) for each in job.network.devices))
    chain = tuple(replaced(block, seconds=0.0) for block in job.chain)
    alone = replace(job, network=network, chain=chain, sync="all_reduce")
    own, other = times_of(alone, layout), None if default is None else times_of(alone, default)
    return Communication(
        float(own.seconds[0]) * count,
        float(own.averaging.max()),
        math.inf if other is None or other.misfits[0] else float(other.seconds[0]) * count,
        own.links.reshape(count, depth)[:, :-1].tolist(),
        own.averaging.reshape(count, depth).tolist(),
    )


def times_of(job: Job, layout: Layout) -> Times:
    """Return the seconds of a layout."""
    return times(job, Shape(job, layout.cuts), np.array([[device for row in layout.rows for device in row]]))


def _order(found: Times) -> tuple[int, float]:
    return int(found.misfits[0]), float(found.seconds[0])


def reversible(job: Job, layout: Layout) -> bool:
    """Return whether pipelines may also run in reverse: all stages are alike, and so are all devices."""
    even = layout.alike and Shape(job, layout.cuts[:1]).even
    return even and len(set(job.memories)) == 1 and len(set(job.speeds)) == 1


def uniform_cut(num_blocks: int, num_stages: int) -> Spans:
    """Return the cut that ``partition="uniform"`` makes; the first stages have one block more if there is a
    remainder."""
    each, more = divmod(num_blocks, num_stages)
    stops = [0, *accumulate(each + (stage < more) for stage in range(num_stages))]
    return tuple(range(a, b) for a, b in pairwise(stops))


def ending_with(device: int, job: Job, layout: Layout) -> Iterator[Layout]:
    """Yield layouts like ``layout`` in which ``device`` runs a last stage: it is swapped with a device that does, or
    pipelines are reversed."""
    backward = tuple(row[::-1] for row in layout.rows)
    for rows in (layout.rows, backward) if reversible(job, layout) else (layout.rows,):
        if any(row[-1] == device for row in rows):
            yield Layout(rows, layout.cuts)
        for end in [row[-1] for row in rows]:
            swap = {device: end, end: device}
            yield Layout(tuple(tuple(swap.get(each, each) for each in row) for row in rows), layout.cuts)


def _drawn(job: Job, layout: Layout, own: Times) -> Drawn:
    """Return the groups that SDPipe's policy would form from pipelines with one cut."""
    late, slow, _ = job.links
    held = [sum(job.chain[block].parameter_bytes for block in span) for span in layout.cuts[0]]

    def averaging(group: Sequence[int]) -> float:
        """Return the seconds of averaging of the slowest member in any stage."""
        if len(group) < 2:
            return 0.0
        members = np.array([layout.rows[pipeline] for pipeline in group]).T  # by stage
        exchanges = [
            (late[np.ix_(row, row)] + amount / len(group) * slow[np.ix_(row, row)]).sum(axis=1).max()
            for row, amount in zip(members, held, strict=True)
        ]
        return float(max(exchanges))

    seconds = [max(float(each), 1e-9) for each in own.pipelines[0]]
    return simulate_groups(SemiDecentralized(), seconds, averaging, job.number(layout.depths))
