"""An exchange that survives its members: what is tried again, and with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.background import Overlapped
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.worker.elastic.replica import FaultTolerantMean


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

    def moved(self) -> None:
        pass

    def exchange(self, group: Group) -> Any:
        if self.failures.get(group.sequence) == -1:
            raise WorkerFailedError("the process group is gone")

        class Mover:
            def start(_, tensors: Sequence[Tensor], group: Group) -> Inner:
                return Inner(tensors[0], self.failures.get(group.sequence, 99))

        return Mover()


class Line:
    def __init__(self, *answers: Group) -> None:
        self.answers = list(answers)
        self.said: list[tuple[str, int]] = []

    def completed(self, sequence: int) -> None:
        self.said.append(("completed", sequence))

    def broken(self, group: Group) -> Group:
        self.said.append(("broken", group.sequence))
        return self.answers.pop(0)


def average(epochs: Epochs, line: Line, first: Group) -> list[float]:
    tensor = torch.zeros(3)
    finish(FaultTolerantMean(epochs, line).start([tensor], first))  # type: ignore[arg-type]
    assert epochs.used[-1:] in ([None], [])
    return tensor.tolist()


def test_an_exchange_that_succeeds_is_said_to_be_complete() -> None:
    line = Line()
    assert average(Epochs({}), line, group(4, 0, 1)) == [1, 1, 1]
    assert line.said == [("completed", 4)]


def test_who_is_alone_exchanges_nothing() -> None:
    line = Line()
    assert average(Epochs({}), line, group(4, 0)) == [0, 0, 0]
    assert line.said == []


def test_after_a_failure_all_pieces_are_tried_again_among_those_that_are_left() -> None:
    line = Line(group(9, 0, 1))
    assert average(Epochs({4: 1}), line, group(4, 0, 1, 2)) == [2, 1, 1]  # the first piece had been taken over
    assert line.said == [("broken", 4), ("completed", 9)]


def test_a_group_that_is_gone_before_it_begins_is_tried_again_too_and_more_than_once() -> None:
    line, epochs = Line(group(9, 0, 1, 3), group(10, 0, 1)), Epochs({4: -1, 9: 0})
    assert average(epochs, line, group(4, 0, 1, 2, 3)) == [1, 1, 1]
    assert line.said == [("broken", 4), ("broken", 9), ("completed", 10)]
    assert epochs.given_up == [9], "of 4 nothing is on its way"


def test_who_is_left_alone_keeps_what_it_has() -> None:
    line = Line(group(9, 0))
    assert average(Epochs({4: 2}), line, group(4, 0, 1)) == [1, 1, 0]
    assert line.said == [("broken", 4)]


def test_what_a_mean_changes_is_right_though_pieces_were_taken_over_before_it_broke() -> None:
    model = torch.zeros(3)
    mover: Any = FaultTolerantMean(Epochs({4: 1}), Line(group(9, 0, 1)))  # type: ignore[arg-type]
    late = Overlapped(mover, 10.0, begins_again=True)
    late.begin([model], group(4, 0, 1, 2))
    model += 10  # trained meanwhile
    late.end()
    assert model.tolist() == [12, 11, 11]
