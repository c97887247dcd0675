"""What replicas do at a barrier, with a scheduler that is played by the test and threads that meet over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.moving import Pending
from lightning_sdpipe.membership.members import Met
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.sync.barriers import MOST_BYTES, Barriers
from tests.exchange import threads


class Place:
    """Where threads meet; those of ``gone`` are not waited for."""

    def __init__(self, pipelines: set[int]) -> None:
        self.pipelines = pipelines
        self.keys: list[str] = []
        self._here: dict[str, dict[int, bytes]] = {}
        self._met: dict[str, Met] = {}
        self._changed = threading.Condition()

    def loses(self, pipeline: int) -> None:
        with self._changed:
            self.pipelines.discard(pipeline)
            self._decide()

    def meet(self, pipeline: int, key: str, value: bytes) -> Met:
        with self._changed:
            self.keys.append(key)
            here = self._here.setdefault(key, {})
            here[pipeline] = value
            self._decide()
            assert self._changed.wait_for(lambda: key in self._met, 20)
            return self._met[key]

    def _decide(self) -> None:
        """The answer to a barrier is the same for all, whenever they hear it."""
        for key, here in self._here.items():
            if key not in self._met and self.pipelines <= here.keys():
                members = tuple(sorted(self.pipelines))
                self._met[key] = Met(0, key, members, tuple(here[i] for i in members), 7, epoch=1)
        self._changed.notify_all()


class Table:
    """Tensors that lie where all can see them: the mean is computed by each."""

    def __init__(self, fails: Callable[[int], bool] = lambda _: False) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.fails = fails


class Epochs:
    """In the place of process groups; :meth:`mean` gives one that reads the table."""

    def __init__(self, pipeline: int, table: Table) -> None:
        self.pipeline, self.table = pipeline, table

    def use(self, group: Group | None) -> None:
        pass

    def give_up(self, group: Group) -> None:
        pass

    def wait_for_newest(self) -> None:
        pass

    def mean(self, group: Group) -> Epochs:
        return self

    def start(self, tensors: list[Tensor], group: Group) -> Pending:
        return _Reading(self, tensors, group)


class Exchanging:
    """A weighted mean of what members have, of which subclasses know the :meth:`value`."""

    seconds_waiting = 0.0

    def __init__(self, epochs: Any, tensors: Sequence[Tensor], group: Group) -> None:
        self.epochs, self.tensors, self.group, self.left = epochs, tensors, group, True

    def commit(self) -> None:
        for place, tensor in enumerate(self.tensors):
            parts = zip(self.group.weights, self.group.members, strict=True)
            tensor.copy_(sum(weight * self.value(member.pipeline, place) for weight, member in parts))
        self.left = False

    def abort(self) -> None:
        self.left = False

    def value(self, pipeline: int, place: int) -> Tensor:
        raise NotImplementedError


class _Reading(Exchanging):
    def wait(self) -> bool:
        table = self.epochs.table
        if self.left and table.fails(self.epochs.pipeline):
            raise WorkerFailedError("a member is gone")
        return self.left

    def value(self, pipeline: int, place: int) -> Tensor:
        return self.epochs.table.tensors[pipeline]


class Line:
    def __init__(self, pipeline: int, place: Place) -> None:
        self.pipeline, self.place = pipeline, place

    def meet(self, key: str, value: bytes = b"") -> Met:
        return self.place.meet(self.pipeline, key, value)


def together(count: int, table: Table, work: Callable[[Barriers, int], Any]) -> list[Any]:
    """What ``work`` returns for each pipeline; None if it ended the pipeline."""
    place = Place(set(range(count)))

    def run(pipeline: int) -> Any:
        barriers = Barriers(Worker(0, pipeline), Line(pipeline, place), Epochs(pipeline, table), lambda: "here")  # type: ignore[arg-type]
        barriers.set_out()
        try:
            return work(barriers, pipeline)
        except SystemExit:
            return place.loses(pipeline)

    return threads.together(count, run)


def tensors(table: Table, pipeline: int) -> list[Tensor]:
    table.tensors[pipeline] = torch.full((3,), float(2**pipeline))
    return [table.tensors[pipeline].clone(), torch.tensor([pipeline, 10 - pipeline]), torch.empty(0)]


def test_the_mean_of_what_is_floating_and_the_largest_of_what_counts() -> None:
    table = Table()

    def average(barriers: Barriers, pipeline: int) -> list[list[float]]:
        mine = tensors(table, pipeline)
        barriers.meet()  # so that all have laid theirs on the table
        barriers.average(mine)
        return [tensor.tolist() for tensor in mine]

    expected = [[7 / 3] * 3, [2, 10], []]
    assert together(3, table, average) == [[pytest.approx(each) for each in expected]] * 3


def test_if_somebody_is_lost_all_that_are_left_do_it_again() -> None:
    """Also who had finished."""
    lost: list[int] = []
    table = Table(fails=lambda pipeline: pipeline == 1 and not lost)

    def average(barriers: Barriers, pipeline: int) -> list[float]:
        mine = tensors(table, pipeline)
        barriers.meet()
        if pipeline == 2:
            barriers.meet(b"\0")  # the barrier at which the average begins
            lost.append(2)
            raise SystemExit
        barriers.average(mine[:1])
        return mine[0].tolist()

    first, second, third = together(3, table, average)
    assert third is None
    assert first == second == [1.5] * 3


def test_before_its_first_segment_a_worker_is_alone() -> None:
    place = Place({0, 1})
    barriers = Barriers(Worker(0, 1), Line(1, place), Epochs(1, Table()), lambda: "here")  # type: ignore[arg-type]
    mine = torch.ones(2)
    assert barriers.average([mine]).pipelines == (1,)
    assert barriers.meet(b"word").values == (b"word",)
    assert place.keys == []


def test_barriers_are_numbered_from_each_segment_on() -> None:
    place, where = Place({0}), iter(["a", "a", "b"])
    barriers = Barriers(Worker(0, 0), Line(0, place), Epochs(0, Table()), lambda: next(where))  # type: ignore[arg-type]
    barriers.set_out()
    barriers.meet()
    barriers.meet()
    barriers.set_out()
    barriers.meet()
    with barriers.at("the beginning"):
        barriers.meet()
    assert place.keys == ["a/0", "a/1", "b/0", "the beginning/0"]


def test_who_comes_late_is_told_to_join_again() -> None:
    class Past:
        def meet(self, key: str, value: bytes = b"") -> Met:
            return Met(0, key, (0,), (value,), 3, past=True)

    barriers = Barriers(Worker(0, 0), Past(), Epochs(0, Table()), lambda: "here")  # type: ignore[arg-type]
    barriers.set_out()
    with pytest.raises(WorkerFailedError, match="join again"):
        barriers.meet()


def test_integers_that_are_too_many_are_refused() -> None:
    barriers = Barriers(Worker(0, 0), Line(0, Place({0})), Epochs(0, Table()), lambda: "here")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="integer buffers"):
        barriers.average([torch.zeros(MOST_BYTES, dtype=torch.int64)])
