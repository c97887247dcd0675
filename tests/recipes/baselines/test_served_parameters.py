"""The parameter server between real processes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from recipes.baselines.admission import AdmissionRule, admission
from recipes.baselines.served_parameters import RemoteServer, ServedParameters
from tests.workers import run_workers

SIZES = (5, 2)
START = [torch.arange(size, dtype=torch.float32) for size in SIZES]


def line(rank: int, pipelines: int, rule: AdmissionRule, timeout: float) -> ServedParameters | RemoteServer:
    """Rank 0 serves; rank is pipeline."""
    group = dist.group.WORLD
    assert group is not None
    if rank:
        return RemoteServer(0, group, "the parameter server (rank 0)")
    admitted = admission(rule, pipelines)
    for pipeline in range(pipelines):
        admitted.join(pipeline)
    return ServedParameters(START, admitted, {p: p for p in range(1, pipelines)}, group, timeout)


def changes(pipeline: int, clock: int) -> list[Tensor]:
    return [torch.full((size,), 10.0**pipeline * (clock + 1)) for size in SIZES]


def train(
    rank: int, slow: int, lengths: Sequence[int], staleness: int
) -> tuple[list[float], list[float], list[Tensor]]:
    """When this pipeline began and ended each clock, and what the server had in the end."""
    server = line(rank, len(lengths), AdmissionRule(staleness=staleness, combine="sum"), 15)
    begun, ended = [], []
    for clock in range(lengths[rank]):
        begun.append(time.monotonic())
        time.sleep(0.05 if rank == slow else 0.0)
        ended.append(time.monotonic())
        pulled = server.push(rank, changes(rank, clock))
        own = sum(10.0**rank * (k + 1) for k in range(clock + 1))
        assert (pulled.parameters[0] - START[0] >= own).all(), "its own changes are missing"
    server.leave(rank, [torch.zeros(size) for size in SIZES])
    final = [t.clone() for t in server.close()] if isinstance(server, ServedParameters) else []
    dist.barrier()
    return begun, ended, final


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("slow", "lengths", "staleness"),
    [(0, (6, 6, 6), 2), (2, (6, 6, 6), 0), (1, (8, 2, 8), 1)],
    ids=["the server is slow", "in step", "the slow one ends early"],
)
def test_the_bound_holds_and_every_change_is_added_once(slow: int, lengths: Sequence[int], staleness: int) -> None:
    outcomes = run_workers(3, train, slow, lengths, staleness)
    for fast, (begun, _, _) in enumerate(outcomes):
        for other, (_, ended, _) in enumerate(outcomes):
            for clock, moment in enumerate(begun):
                must_be_done = clock - staleness  # clocks of the other that lie before this moment
                if 0 < must_be_done <= lengths[other]:
                    assert ended[must_be_done - 1] <= moment, (fast, other, clock)
    total = sum(10.0**p * (k + 1) for p, length in enumerate(lengths) for k in range(length))
    for start, value in zip(START, outcomes[0][2], strict=True):
        torch.testing.assert_close(value, start + total)


def outrun(rank: int) -> str:
    """Rank 0 and 1 are ahead of rank 2, which does nothing until they have given up."""
    server = line(rank, 3, AdmissionRule(), 1.0)
    message = ""
    if rank < 2:
        with pytest.raises(WorkerFailedError) as caught:
            server.push(rank, changes(rank, 0))
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.distributed
def test_a_wait_ends_with_the_names_of_those_who_did_not_come() -> None:
    for message in run_workers(3, outrun)[:2]:
        assert message.startswith("the parameter server waited 1 s for pipelines [2]")
