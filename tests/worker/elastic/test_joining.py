"""How pipelines come into a run, with a scheduler that is played by the test."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_sdpipe.errors import ConfigurationError, MustEndError, WorkerFailedError
from lightning_sdpipe.exchange.moving import Pending
from lightning_sdpipe.membership.members import Epoch, Member, Met
from lightning_sdpipe.membership.turn_order import Command, CommandKind
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.scheduler.client.client import Receive, Start
from lightning_sdpipe.sync.barriers import Barriers
from lightning_sdpipe.worker.elastic.elastic_batches import Duties, ElasticBatchSource
from lightning_sdpipe.worker.elastic.joining import Fit, begin_together, compare, join
from tests.exchange.threads import together
from tests.sync.test_barriers import Epochs, Exchanging, Place

EPOCH = Epoch(3, (Member(1, 7),), "tested")


class Door:
    """Gives one answer after the other."""

    def __init__(self, *answers: Start | Receive) -> None:
        self.answers = list(answers)
        self.said: list[str] = []

    def enrol(self, fingerprint: Mapping[str, str]) -> Start | Receive:
        return self.answers.pop(0)

    def received(self, transfer: str, update: int) -> Start | Receive:
        self.said.append(f"received {transfer} after {update}")
        return self.answers.pop(0)

    def missed(self, transfer: str, reason: str) -> Start | Receive:
        self.said.append(f"missed {transfer}: {reason}")
        return self.answers.pop(0)


def of_donor(receive: Receive) -> dict[str, Any]:
    if receive.donor == 5:
        raise WorkerFailedError("pipeline 5 is gone")
    return {"of": receive.donor, "elastic": {"updates": receive.update}}


def test_a_newcomer_begins_with_the_state_that_came_last() -> None:
    first, second, third = Receive(1, 0, "a", 4), Receive(1, 5, "b", 5), Receive(1, 2, "c", 6)
    door = Door(first, second, third, Start(EPOCH, fresh=False))
    assert join(door, {}, of_donor) == (Start(EPOCH, fresh=False), of_donor(third))
    assert door.said == ["received a after 4", "missed b: pipeline 5 is gone", "received c after 6"]


def test_a_newcomer_without_a_state_is_no_member_though_a_restarted_scheduler_says_so() -> None:
    for before in ([], [Receive(1, 0, "a", 4), Receive(1, 5, "b", 5)]):
        with pytest.raises(WorkerFailedError, match="Start the pipeline again"):
            join(Door(*before, Start(EPOCH, fresh=False)), {}, of_donor)


def test_who_begins_anew_forgets_the_state_of_a_donor_that_was_lost() -> None:
    """Another stage of its pipeline has not got any."""
    door = Door(Receive(1, 0, "a", 4), Start(EPOCH, fresh=True))
    assert join(door, {}, of_donor) == (Start(EPOCH, fresh=True), None)


def test_a_stage_ends_as_told_though_the_scheduler_has_heard_of_the_end_of_another_one_before() -> None:
    done: list[str] = []

    def leave() -> None:
        raise MustEndError(0, "stage 2 was told to end")

    sync = SimpleNamespace(settle=lambda: done.append("settles"), stop=lambda: done.append("stops"))
    training = SimpleNamespace(sync=sync, client=SimpleNamespace(leave=leave))
    fit: Any = SimpleNamespace(training=training, checkpoints=SimpleNamespace(wait=lambda: done.append("has written")))
    commands: Any = SimpleNamespace(done=lambda: done.append("all have drained"))
    nothing: Any = None
    duties = Duties(commands, nothing, nothing, nothing, lambda: Fit.leave(fit))
    source: Any = SimpleNamespace(_turns=SimpleNamespace(underway=False), _duties=duties)
    with pytest.raises(SIGTERMException):
        ElasticBatchSource._act(source, Command(CommandKind.LEAVE))
    assert done == ["all have drained", "settles", "stops", "has written"]


# ------------------------------------------------------------------------------ those that begin together

Moment = tuple[str, int, int]
"""What is about to be done for the first time, in which stage, by which pipeline."""


class Stages:
    """Two stages of three pipelines as threads; a pipeline is gone in all stages when a stage of it is lost.

    Before each step in which it needs others a thread calls ``before`` with the :data:`Moment`, which may lose it.
    """

    def __init__(self, before: Callable[[Moment], None] = lambda _: None) -> None:
        self.workers = list(product(range(2), range(3)))
        self.places = [Place({0, 1, 2}), Place({0, 1, 2})]
        self.outcomes: dict[tuple[int, int], tuple[bytes, list[float], list[int]]] = {}
        self.past: set[Moment] = set()
        self.changed = threading.Condition()
        self._before = before
        self._laid: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._lost: set[int] = set()

    def wait_for(self, *moments: Moment) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.past.issuperset(moments), 20), (moments, self.past)

    def exchange(self, moment: Moment, key: object, value: Any, among: Collection[int], me: int) -> dict[int, Any]:
        """What each of ``among`` has laid at ``key``, when all have."""
        pipeline = moment[2]
        self._before(moment)
        with self.changed:
            laid = self._laid[moment[0], key]
            laid[me] = value
            self.changed.notify_all()

            def all_there() -> bool:
                return all(other in laid for other in among)

            gone = {pipeline} if moment[0] == "gather" else set(among)
            assert self.changed.wait_for(lambda: all_there() or gone & self._lost, 20), (moment, laid)
            if not all_there():
                raise WorkerFailedError("somebody is gone")
            self.past.add(moment)
            self.changed.notify_all()
            return dict(laid)

    def meet(self, stage: int, pipeline: int, number: int, key: str, value: bytes) -> Met:
        moment = (f"barrier {number}", stage, pipeline)
        self._before(moment)
        met = self.places[stage].meet(pipeline, key, value)
        with self.changed:
            self.past.add(moment)
            self.changed.notify_all()
        return met

    def lose(self, pipeline: int) -> None:
        with self.changed:
            self._lost.add(pipeline)
            self.changed.notify_all()
        for place in self.places:
            place.loses(pipeline)

    def run(self) -> None:
        together(len(self.workers), lambda number: self._work(*self.workers[number]))

    def _work(self, stage: int, pipeline: int) -> None:
        numbers = count()
        worker = OneWorker(self, stage, pipeline)
        barriers = Barriers(Worker(stage, pipeline), worker, worker, lambda: "unused")  # type: ignore[arg-type]
        weights, steps = torch.full((3,), float(2**pipeline)), torch.tensor([pipeline])

        def gather(value: Any) -> list[Any]:
            said = self.exchange(("gather", stage, pipeline), (pipeline, next(numbers)), value, range(2), stage)
            return [said[j] for j in range(2)]

        try:
            with barriers.at("beginning"):
                source, said = begin_together(barriers, [weights, steps], b"words of %d" % pipeline, gather)
        except (SystemExit, WorkerFailedError):
            self.lose(pipeline)
        else:
            self.outcomes[stage, pipeline] = said[source], weights.tolist(), steps.tolist()


class OneWorker(Epochs):
    """What it has instead of a scheduler and of process groups."""

    def __init__(self, stages: Stages, stage: int, pipeline: int) -> None:
        self.stages, self.stage, self.pipeline = stages, stage, pipeline
        self.number = count()

    def meet(self, key: str, value: bytes = b"") -> Met:
        return self.stages.meet(self.stage, self.pipeline, next(self.number), key, value)

    def start(self, tensors: Sequence[Tensor], group: Group) -> Pending:
        return Copying(self, tensors, group)


class Copying(Exchanging):
    def wait(self) -> bool:
        if self.left:
            of, key = self.epochs, (self.epochs.stage, self.group.sequence)
            mine = [tensor.clone() for tensor in self.tensors]
            among = [member.pipeline for member in self.group.members]
            self.found = of.stages.exchange(("copy", of.stage, of.pipeline), key, mine, among, of.pipeline)
        return self.left

    def value(self, pipeline: int, place: int) -> Tensor:
        return self.found[pipeline][place]


def what_it_has(pipeline: int) -> tuple[bytes, list[float], list[int]]:
    return b"words of %d" % pipeline, [2.0**pipeline] * 3, [pipeline]


def test_those_that_begin_together_begin_with_what_the_first_one_has() -> None:
    stages = Stages()
    stages.run()
    assert stages.outcomes == dict.fromkeys(stages.workers, what_it_has(0))


def test_what_pipelines_say_that_begin_together_is_compared() -> None:
    def said(digest: int, sample: int) -> dict[str, Any]:
        return {"checkpoint": [digest, f"/{digest}.ckpt (epoch {digest}, …)"], "samples": [9, *[sample] * 8]}

    assert compare({0: said(1, 5), 3: said(1, 5)}) is None
    assert "sample 0 on pipeline 3 differs from that on pipeline 1. Each" in str(
        compare({3: said(1, 6), 0: said(1, 0), 1: said(1, 5)})
    )
    unlike = r"pipelines \[0, 2\]: /1.ckpt \(epoch 1, …\); pipelines \[1\]: /7.ckpt \(epoch 7, …\). Give all pipelines"
    with pytest.raises(ConfigurationError, match=unlike):
        compare({0: said(1, 5), 1: said(7, 5), 2: said(1, 5)})


@pytest.mark.parametrize(("lost_before", "source"), [("barrier 0", 1), ("gather", 1), ("copy", 1), ("barrier 1", 0)])
def test_all_stages_begin_with_what_one_pipeline_has_whoever_is_lost(lost_before: str, source: int) -> None:
    """Stage 1 of pipeline 0 is lost when stage 0 has gone on from there, in all pipelines where that is possible."""

    def before(moment: Moment) -> None:
        if moment == (lost_before, 1, 0):
            those = () if lost_before == "gather" else range(3)
            stages.wait_for(*[(lost_before, 0, pipeline) for pipeline in those])
            stages.lose(0)
            raise SystemExit

    stages = Stages(before)
    stages.run()
    assert stages.outcomes == {(j, i): what_it_has(source) for j, i in product(range(2), (1, 2))}
