"""An exchange that survives its members: what is left of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange import transfers
from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.sync.peers import Peers, Surviving
from lightning_sdpipe.topology.groups import Replicas
from tests.exchange.threads import Crew


def group(sequence: int, *pipelines: int) -> Group:
    size = len(pipelines)
    return Group(tuple(Worker(0, i) for i in pipelines), (1 / size,) * size, sequence, "tested", epoch=sequence)


class Inner:
    """Adds one to each of three pieces; fails before piece ``fails_at``."""

    seconds_waiting = 0.5

    def __init__(self, tensor: Tensor, fails_at: int) -> None:
        self.tensor, self.fails_at, self.piece, self.aborted = tensor, fails_at, 0, False

    def wait(self) -> bool:
        if self.piece == self.fails_at:
            raise WorkerFailedError("pipeline 2 is gone")
        return self.piece < 3

    def commit(self) -> None:
        self.tensor[self.piece] += 1
        self.piece += 1

    def abort(self) -> None:
        self.aborted = True


class Epochs:
    """Groups of epochs; ``failures`` says at which piece the exchange of each fails, -1 if its group is gone."""

    def __init__(self, failures: dict[int, int]) -> None:
        self.failures = failures
        self.used: list[int | None] = []
        self.given_up: list[int] = []

    def use(self, group: Group | None) -> None:
        self.used.append(None if group is None else group.sequence)

    def give_up(self, group: Group) -> None:
        self.given_up.append(group.epoch)

    def wait_for_newest(self) -> None:
        pass

    def replicas(self, group: Group) -> Any:
        if self.failures.get(group.sequence) == -1:
            raise WorkerFailedError("the process group is gone")
        return Replicas(None, {0: 0}, 0, 0)  # type: ignore[arg-type]

    def hosts(self, group: Group) -> None: ...

    def surviving(self) -> Surviving:
        class Mover:
            def start(_, tensors: Sequence[Tensor], group: Group) -> Inner:
                return Inner(tensors[0], self.failures.get(group.sequence, 99))

        nobody: Any = None
        peers = Peers(Worker(0, 0), nobody, self, nobody, lambda mine: mine, Traffic())  # type: ignore[arg-type]
        return Surviving(peers, lambda replicas, hosts: Mover())  # type: ignore[arg-type, return-value]


def average(epochs: Epochs, first: Group) -> list[float]:
    tensor = torch.zeros(3)
    finish(epochs.surviving().start([tensor], first))
    assert epochs.used[-1:] in ([None], [])
    return tensor.tolist()


def test_an_exchange_that_succeeds_changes_the_whole_model() -> None:
    epochs = Epochs({})
    assert average(epochs, group(4, 0, 1)) == [1, 1, 1]
    assert epochs.given_up == []


def test_who_is_alone_exchanges_nothing() -> None:
    assert average(Epochs({}), group(4, 0)) == [0, 0, 0]


@pytest.mark.parametrize(("fails_at", "model", "given_up"), [(1, [1, 0, 0], [4]), (0, [0] * 3, [4]), (-1, [0] * 3, [])])
def test_after_a_failure_it_keeps_what_was_taken_over_and_what_it_has(
    fails_at: int, model: list[int], given_up: list[int]
) -> None:
    """Of a process group that is gone before the exchange begins, nothing is on its way."""
    epochs = Epochs({4: fails_at})
    assert average(epochs, group(4, 0, 1, 2)) == model
    assert epochs.given_up == given_up


def test_a_source_that_has_not_heard_of_it_may_be_silent_for_a_worker_timeout() -> None:
    crew, peers = Crew(2), Epochs({}).surviving()._peers
    peers.epochs.replicas = lambda group: crew.replicas(0)  # type: ignore[method-assign]
    peers.client = SimpleNamespace(limit=0.1)  # type: ignore[assignment]
    with pytest.raises(WorkerFailedError, match="pipeline 1 of stage 0"):
        transfers.begin({}, {1: torch.zeros(1)}, peers.giver(group(4, 0, 1)), 0).wait()


def test_what_broke_off_beside_training_changes_what_was_taken_over_only() -> None:
    model = torch.zeros(3)
    late = Overlapped(Epochs({4: 1}).surviving(), 10.0)
    late.begin([model], group(4, 0, 1, 2))
    model += 10  # trained meanwhile
    late.end()
    assert model.tolist() == [11, 10, 10]
