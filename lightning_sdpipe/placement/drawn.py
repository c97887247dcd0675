"""Which groups the real policy would form among pipelines of given speeds, and what averaging in them costs.

DT-FM's data cost is that of everybody averaging with everybody. SDPipe averages in groups of those that are ready at
about the same time, so which devices meet depends on their speeds: the policy itself decides, under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_sdpipe.policies.draws import uniform
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.simulate.pipelines import Work
from lightning_sdpipe.simulate.run import simulate

ITERATIONS, WARM_UP = 240, 40
"""Of each pipeline, and how many do not count: until P rounds have passed, nothing is enforced."""

JITTER = 0.05
"""An iteration takes up to so much more or less than usual: nothing ever takes exactly as long twice."""


@dataclass(frozen=True)
class Drawn:
    """What one stage did.

    Args:
        groups: pipelines that averaged together, in the order in which they did.
        rate: mini-batches per second of all pipelines.
        efficiency: the rate over that of pipelines that never wait for each other and never average (η).
        seconds: that averaging in a group took, the mean over those who took part.
    """

    groups: tuple[tuple[int, ...], ...]
    rate: float
    efficiency: float
    seconds: float


def draw(
    policy: PolicyConfig,
    times: Sequence[float],
    averaging: Callable[[Sequence[int]], float],
    micro_batches: int = 1,
    seed: int = 0,
) -> Drawn:
    """Lets the policy form groups in one stage.

    Args:
        policy: what forms them.
        times: seconds for a mini-batch of each pipeline; above 0.
        averaging: seconds that a group of these pipelines takes to average.
        micro_batches: of a mini-batch; with the last of its backwards a pipeline is ready.
        seed: of the jitter.
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
    return Drawn(tuple(groups), rate, rate / alone, spent / sum(map(len, groups)))
