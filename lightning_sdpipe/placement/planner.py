"""Placement of a model's stages on a measured network: everything that ``sdpipe place`` decides.

DT-FM's data cost is that of an average over all replicas. SDPipe averages in groups of pipelines that are ready at
about the same time, so groups depend on the devices' speeds. So the real policy forms groups of pipelines of given
speeds, under a virtual clock, and the cost of averaging in these is computed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.balance import balance
from lightning_sdpipe.placement.arrange import ending_with, free_hosts
from lightning_sdpipe.placement.cost import Cost, CostModel, Stages, Weights, default_order, evaluate, weights
from lightning_sdpipe.placement.heterogeneous import ALTERNATIONS, best_cut, place_heterogeneous
from lightning_sdpipe.placement.model import StageTraffic, traffic_of
from lightning_sdpipe.placement.network import Network
from lightning_sdpipe.placement.search import Found, search
from lightning_sdpipe.placement.throughput import CutJob, PlacementJob, Spans, Sync
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.pairing import uniform
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.simulate.pipelines import Work
from lightning_sdpipe.simulate.run import simulate
from lightning_sdpipe.topology.placement_file import FORMAT, Placement

ITERATIONS, WARM_UP = 240, 40
"""Iterations of each pipeline, and the number of first ones that do not count: until P rounds have passed, nothing is
enforced."""

JITTER = 0.05
"""Largest relative deviation of an iteration's time: real times never repeat exactly."""


@dataclass(frozen=True)
class SimulatedStage:
    """The simulated run of one stage.

    Args:
        groups: the pipelines of each group, in the order of averaging.
        rate: mini-batches per second of all pipelines.
        efficiency: the rate over that of pipelines that never wait for each other and never average (η).
        seconds: seconds of averaging in a group, the mean over its members.
    """

    groups: tuple[tuple[int, ...], ...]
    rate: float
    efficiency: float
    seconds: float


def simulate_groups(
    policy: PolicyConfig,
    times: Sequence[float],
    averaging: Callable[[Sequence[int]], float],
    micro_batches: int = 1,
    seed: int = 0,
) -> SimulatedStage:
    """Simulate how the policy forms groups in one stage.

    Args:
        policy: the policy.
        times: seconds for a mini-batch of each pipeline; above 0.
        averaging: seconds that a group of these pipelines takes to average.
        micro_batches: micro-batches of a mini-batch; with the last backward a pipeline is ready.
        seed: seed of the jitter.
    """

    def seconds(worker: Worker, iteration: int) -> float:
        return times[worker.pipeline] * (1 + JITTER * (2 * uniform(seed, worker.pipeline, iteration) - 1))

    work = Work(
        1,
        len(times),
        ITERATIONS,
        seconds,
        num_micro_batches=micro_batches,
        exchange=lambda group: averaging([worker.pipeline for worker in group.members]),
    )
    run = simulate(policy, work)
    groups = [tuple(worker.pipeline for worker in group.members) for _, group in run.groups]
    groups = groups[len(groups) * WARM_UP // ITERATIONS :]
    rate = sum(run.rates(WARM_UP))
    alone = sum(
        (ITERATIONS - WARM_UP) / sum(seconds(Worker(0, pipeline), number) for number in range(WARM_UP, ITERATIONS))
        for pipeline in range(len(times))
    )
    spent = sum(len(group) * averaging(group) for group in groups)
    return SimulatedStage(tuple(groups), rate, rate / alone, spent / sum(map(len, groups)))


ALIKE = 1.05
"""Ratio of speeds below which devices count as equally fast: profiles are not more exact."""

FIRST_PART, SECOND_PART = 0.2, 0.6
"""Shares of the time, where devices are unlike: until the first only communication is optimised, and until the second
rank 0's rule is ignored."""


@dataclass(frozen=True)
class PlacementTask:
    """A placement task: what is to be placed, and the time for it.

    Args:
        num_stages: M.
        cost: how cuts add up; ``"pipedream"`` for the schedule of that name.
        num_micro_batches: micro-batches of a mini-batch; M by default.
        sync: whether all pipelines average together, or in SDPipe's groups.
        first: the device that will be rank 0.
        optimizer_state: bytes of its state for each byte of trained parameters.
        seconds: time of the search.
        seed: seed of all randomness.
    """

    num_stages: int
    cost: CostModel = "pipelined"
    num_micro_batches: int | None = None
    sync: Sync = "groups"
    first: int = 0
    optimizer_state: float = 2.0
    seconds: float = 10.0
    seed: int = 0

    @property
    def micro_batches(self) -> int:
        return self.num_micro_batches or self.num_stages


@dataclass(frozen=True)
class PlacementResult:
    """The result of a placement. ``cost`` is of communication alone; ``seconds`` are for a whole mini-batch of every
    pipeline. They are None if the model is not known, as are ``spans`` and ``drawn``. ``price`` is what rank 0's rule
    adds to either."""

    network: Network
    asked: PlacementTask
    stages: Stages
    weights: Weights
    cost: Cost
    default_cost: Cost
    price: float
    free_hosts: list[str]
    found: Found | None  # result of the search for the cheapest communication, if that decided
    spans: Spans | None = None
    seconds: float | None = None
    default_seconds: float | None = None
    drawn: SimulatedStage | None = None

    @property
    def num_pipelines(self) -> int:
        return len(self.stages[0])

    @property
    def rows(self) -> list[list[int]]:
        """Devices of each pipeline by stage, with the pipeline of rank 0 first."""
        rows = [list(row) for row in zip(*self.stages, strict=True)]
        return sorted(rows, key=lambda row: (self.asked.first not in row, min(row)))

    def placement(self, source: str) -> Placement:
        """Return the placement in the form of a file."""
        cost: dict[str, float | int | str] = {
            "model": self.asked.cost,
            "num_micro_batches": self.asked.micro_batches,
            "data_seconds": self.cost.data,
            "pipeline_seconds": self.cost.pipeline,
            "default_order_seconds": self.default_cost.total,
        }
        names = tuple(tuple(str(self.network.devices[device]) for device in row) for row in self.rows)
        blocks = None if self.spans is None else (tuple(map(len, self.spans)),) * len(names)
        reversible = self.weights.even and self.found is not None
        return Placement(FORMAT, source, cost, reversible, blocks, names)


def place(network: Network, asked: PlacementTask, traffic: StageTraffic | None = None) -> PlacementResult:
    """Search for a placement of ``asked.num_stages`` stages on all devices of ``network``.

    Args:
        network: a network that was measured, or written by hand.
        asked: the task.
        traffic: the traffic of the stages, if the network has no model, or instead of it.

    Raises:
        ConfigurationError: the devices do not form such pipelines, the traffic of the stages is unknown, the model
            cannot be cut or fits nowhere, or every placement needs a link that does not exist.
    """
    start = time.perf_counter()
    count, stages = len(network), asked.num_stages
    if stages < 1 or count % stages:
        allowed = [m for m in range(1, count + 1) if count % m == 0]
        raise ConfigurationError(
            f"{count} devices cannot form pipelines of {stages} stages: the number of stages must divide the number of "
            f"devices. Use one of {allowed}."
        )
    if traffic is not None:
        return _by_traffic(network, asked, traffic, asked.seconds)
    if network.model is None:
        raise ConfigurationError(
            "Nothing says what the stages send: the network was measured without a model. Measure with `--model "
            "IMPORT.PATH:NAME`, or give `--stage-bytes` and `--cut-bytes`."
        )
    job = job_of(network, asked)
    spans = _cut_by_blocks(job)
    speeds, memories = job.speeds, set(job.memories)
    if max(speeds) <= ALIKE * min(speeds) and len(memories) == 1:
        placed, spans = _by_cuts(job, asked, spans, start)
    else:
        placed, spans = _by_throughput(job, asked, spans, start)
    return _timed(placed, job, spans)


def _by_traffic(network: Network, asked: PlacementTask, traffic: StageTraffic, seconds: float) -> PlacementResult:
    num_pipelines = len(network) // asked.num_stages
    costs = weights(network, num_pipelines, traffic, asked.cost, asked.micro_batches)
    found = search(costs, num_pipelines, seconds, asked.seed)
    stages, cost = ending_with(asked.first, found.stages, costs)
    return PlacementResult(
        network,
        asked,
        stages,
        costs,
        cost,
        evaluate(default_order(asked.num_stages, num_pipelines), costs),
        max(0.0, cost.total - found.cost.total),
        free_hosts(found.stages, costs, network),
        found,
    )


def _by_cuts(job: PlacementJob, asked: PlacementTask, spans: Spans, start: float) -> tuple[PlacementResult, Spans]:
    """Places on equal devices, where communication decides; the cut and the placement are improved in turn."""
    best: tuple[float, PlacementResult, Spans] | None = None
    for _ in range(ALTERNATIONS):
        left = start + asked.seconds - time.perf_counter()
        placed = _by_traffic(job.network, asked, traffic_of(job.chain, spans), left / 2)
        seconds = CutJob(job, spans).seconds(placed.stages)
        if best is not None and seconds >= best[0] * (1 - 1e-9):
            break
        best = seconds, placed, spans
        spans = best_cut(job, placed.stages, spans)
        if spans == best[2]:
            break
    assert best is not None
    return best[1:]


def _by_throughput(
    job: PlacementJob, asked: PlacementTask, spans: Spans, start: float
) -> tuple[PlacementResult, Spans]:
    """Places on unlike devices, where the time of a mini-batch decides, of which communication is a part."""
    first = _by_traffic(job.network, asked, traffic_of(job.chain, spans), FIRST_PART * asked.seconds)
    starts = [first.stages, first.stages[::-1], default_order(asked.num_stages, job.num_pipelines)]
    free = _fastest(job, starts, asked.seed, start + SECOND_PART * asked.seconds)
    seconds, stages, cut = free
    if asked.first not in stages[-1]:
        starts = [_swapped(stages, asked.first, other) for other in stages[-1]] + [stages[::-1], *starts]
        ruled = replace(job, last=asked.first)
        seconds, stages, cut = _fastest(ruled, starts, asked.seed, start + asked.seconds)
    if math.isinf(seconds):
        raise ConfigurationError(
            f"Rank 0 must run a last stage, which {job.network.devices[asked.first]} cannot in any way that was tried. "
            "Name another device with `--first`, and start the run so that it is rank 0."
        )
    costs = CutJob(job, cut).weights(asked.cost)
    ends = [job.network.devices[device] for device in free[1][-1]]
    placed = replace(
        first,
        stages=stages,
        weights=costs,
        cost=evaluate(stages, costs),
        default_cost=evaluate(default_order(asked.num_stages, job.num_pipelines), costs),
        price=max(0.0, seconds - free[0]),
        free_hosts=sorted({device.host for device in ends if device.index == 0}),
        found=None,
    )
    return placed, cut


def _fastest(job: PlacementJob, starts: Sequence[Stages], seed: int, until: float) -> tuple[float, Stages, Spans]:
    best: tuple[float, Stages, Spans] | None = None
    for step in place_heterogeneous(job, starts, random.Random(seed)):
        if step is not None:
            stages, spans = step
            seconds = CutJob(job, spans).seconds(stages)
            if best is None or seconds < best[0]:
                best = seconds, stages, spans
        if best is not None and time.perf_counter() >= until:
            break
    assert best is not None, "it yields something, or raises"
    return best


def _swapped(stages: Stages, one: int, other: int) -> Stages:
    swap = {one: other, other: one}
    return [[swap.get(device, device) for device in group] for group in stages]


def job_of(network: Network, asked: PlacementTask) -> PlacementJob:
    """Return the job of the task, for pipelines of its number of stages on devices of ``network``, which has a
    model."""
    assert network.model is not None
    ahead, flush = range(asked.num_stages, 0, -1), asked.cost != "pipedream"
    in_flight = [min(asked.micro_batches, depth) if flush else asked.micro_batches * depth for depth in ahead]
    copies = [depth if depth > 1 and not flush else 0 for depth in ahead]
    return PlacementJob(
        network,
        network.model.chain,
        asked.num_stages,
        asked.micro_batches,
        flush,
        asked.sync,
        in_flight,
        copies,
        asked.optimizer_state,
    )


def _cut_by_blocks(job: PlacementJob) -> Spans:
    """Return the cut for devices that all equal the average one, linked by the median link."""
    links = [rate for a, row in enumerate(job.network.bandwidth()) for b, rate in enumerate(row) if a != b and rate]
    rate = median(links) if links else math.inf
    crossing = [
        math.inf if block.activation_bytes is None else (block.activation_bytes + block.gradient_bytes) / rate
        for block in job.chain[:-1]
    ]
    memory = job.memory([max(job.memories)] * job.num_stages)
    spans, _ = balance([block.seconds for block in job.chain], crossing, [1.0] * job.num_stages, memory)
    return spans


def _timed(placed: PlacementResult, job: PlacementJob, spans: Spans) -> PlacementResult:
    """Add the time of a mini-batch, and the groups that SDPipe's policy would form."""
    cut = CutJob(job, spans)
    drawn = None
    if job.sync == "groups" and job.num_pipelines > 1:
        times = [max(cut.pipeline_seconds(row), 1e-9) for row in zip(*placed.stages, strict=True)]

        def averaging(group: Sequence[int]) -> float:
            return max(
                cut.averaging_seconds(stage, [members[pipeline] for pipeline in group])
                for stage, members in enumerate(placed.stages)
            )

        drawn = simulate_groups(SemiDecentralized(), times, averaging, job.num_micro_batches)
    default = cut.seconds(default_order(job.num_stages, job.num_pipelines))
    return replace(placed, spans=spans, seconds=cut.seconds(placed.stages), default_seconds=default, drawn=drawn)
