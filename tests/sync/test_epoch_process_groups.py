"""Process groups of epochs, made over gloo between threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.moving import GroupMean, Mover, finish
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.membership.members import Epoch, Exchanging, Member
from lightning_sdpipe.meter import Traffic
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.sync import epoch_process_groups
from lightning_sdpipe.sync.epoch_process_groups import EpochGroups
from lightning_sdpipe.sync.mover_choice import mover_among_groups
from lightning_sdpipe.sync.peers import Peers
from tests.exchange.threads import together
from tests.patience import limit, until


class Reports:
    """What a worker tells the scheduler."""

    def __init__(self) -> None:
        self.missed: dict[int, list[int]] = {}
        self.exchanged: list[Exchanging | None] = []

    def holds(self, epochs: Iterable[int]) -> None:
        pass

    def exchanges(self, exchange: Exchanging | None, moved: Callable[[], int]) -> None:
        self.exchanged.append(exchange)
        self.moved = moved

    def misses(self, epoch: int, pipelines: Iterable[int]) -> None:
        self.missed[epoch] = sorted(pipelines)


def epoch(number: int, *pipelines: int, tries: bool = False) -> Epoch:
    return Epoch(number, tuple(Member(i, 100 + i) for i in pipelines), "tested", tries=tries)


def group(number: int, *pipelines: int) -> Group:
    workers = tuple(Worker(0, i) for i in pipelines)
    return Group(workers, (1 / len(workers),) * len(workers), 7, "tested", epoch=number)


def in_epoch(number: int, *pipelines: int, of: int, stores: Mapping[str, Store]) -> EpochGroups:
    """The process groups of a worker that has entered it."""
    groups = EpochGroups(Worker(0, of), lambda name, cancelled: stores[name], limit(60), Reports())
    groups.enter(epoch(number, *pipelines))
    return groups


def assert_not_there(groups: EpochGroups, of: Group) -> None:
    """That it is said soon that there are no process groups of its epoch."""
    began = time.monotonic()
    with pytest.raises(WorkerFailedError, match=f"epoch {of.epoch} is not there"):
        groups.mean(of)
    assert time.monotonic() - began < limit(10).total_seconds()


def averaging(groups: EpochGroups, pipeline: int, traffic: Traffic, exchange: Exchange) -> Mover:
    """As training moves models."""
    nobody: Any = None
    peers = Peers(Worker(0, pipeline), nobody, groups, nobody, lambda mine: mine, traffic)
    replica: Any = SimpleNamespace(peers=peers, exchange=exchange)
    return mover_among_groups(replica)


def test_a_group_of_somebody_that_was_lost_before_fails_at_once_and_those_that_are_left_exchange() -> None:
    """As at a barrier: one of those that met is lost before they share a process group, which is then made without."""
    stores: dict[str, Store] = {"epoch-2-0": dist.HashStore()}

    def work(pipeline: int) -> tuple[float, list[int], list[float]]:
        groups = in_epoch(2, 0, 1, of=pipeline, stores=stores)
        tensor = torch.full((3,), float(pipeline))
        groups.mean(group(2, 0, 1))  # waits until it is made
        began = time.monotonic()
        groups.use(group(2, 0, 1, 2))
        with pytest.raises(WorkerFailedError, match=r"pipelines \[0, 1, 2\].*epoch 2, which has \[0, 1\]"):
            groups.replicas(group(2, 0, 1, 2))
        seconds = time.monotonic() - began
        groups.use(group(2, 0, 1))
        finish(groups.mean(group(2, 0, 1)).start([tensor], group(2, 0, 1)))
        groups.use(None)
        return seconds, groups.held, tensor.tolist()

    for seconds, held, mean in together(2, work):
        assert seconds < limit(5).total_seconds()
        assert (held, mean) == ([2], [0.5] * 3)


def test_what_training_sends_is_counted_and_what_pauses_send_is_not() -> None:
    store = dist.HashStore()

    def work(pipeline: int) -> list[int]:
        groups = EpochGroups(Worker(0, pipeline), lambda *_: store, limit(), Reports())
        groups.enter(epoch(1, 0, 1))
        traffic, counts = Traffic(), []
        for mover in (groups.mean(group(1, 0, 1)), averaging(groups, pipeline, traffic, Exchange())):
            finish(mover.start([torch.zeros(8)], group(1, 0, 1)))
            counts.append(traffic.bytes)
        return counts

    assert together(2, work) == [[0, 32]] * 2


def test_models_are_averaged_by_machines_which_each_epoch_tells_anew() -> None:
    """Pipeline 2 is lost, and pipeline 3 comes on a machine that was not there; the first two share theirs."""
    stores: dict[str, Store] = defaultdict(dist.HashStore)
    members = {1: (0, 1, 2), 2: (0, 1, 3)}
    machines = {0: "a", 1: "a", 2: "b", 3: "c"}

    def work(pipeline: int) -> list[tuple[Mapping[int, str] | None, list[float], int]]:
        traffic, seen = Traffic(), []
        stored, host = (lambda name, cancelled: stores[name]), machines[pipeline]
        groups = EpochGroups(Worker(0, pipeline), stored, limit(), Reports(), host)
        mover = averaging(groups, pipeline, traffic, Exchange(hierarchy="hosts"))
        for number, those in members.items():
            if pipeline in those:
                before, tensor = traffic.bytes, torch.full((64,), float(pipeline))
                groups.enter(epoch(number, *those))
                finish(mover.start([tensor], group(number, *those)))
                seen.append((groups.hosts(group(number, *those)), sorted({*tensor.tolist()}), traffic.bytes - before))
        return seen

    first, second, third, fourth = together(4, work)
    assert [hosts for hosts, _, _ in first] == [{0: "a", 1: "a", 2: "b"}, {0: "a", 1: "a", 3: "c"}]
    assert first[0][:2] == second[0][:2] == third[0][:2]
    assert first[1][:2] == second[1][:2] == fourth[0][:2]
    for seen, mean in ((first[0], 1.0), (first[1], 4 / 3)):
        assert seen[1] == pytest.approx([mean])
    assert third[0][2] < 64 * 4 * 4 / 3, (
        "who is alone on a machine sends its model once, and not two thirds of it twice"
    )


def test_what_an_exchange_that_broke_off_has_left_on_its_way_does_not_hold_up_the_next_one() -> None:
    """A receive that is let go closes the way for all that comes after it."""
    stores: dict[str, Store] = {"epoch-1-0": dist.HashStore(), "epoch-2-0": dist.HashStore()}
    let_go = threading.Event()

    def work(pipeline: int) -> tuple[list[int], list[float]]:
        groups = in_epoch(1, 0, 1, of=pipeline, stores=stores)
        mover = groups.mean(group(1, 0, 1))
        groups.use(group(1, 0, 1))
        if pipeline == 0:
            mover.start([torch.zeros(3)], group(1, 0, 1)).abort()
            let_go.set()
        else:
            let_go.wait()
            with suppress(WorkerFailedError):
                finish(mover.start([torch.zeros(3)], group(1, 0, 1)))
        groups.give_up(group(1, 0, 1))
        groups.use(None)
        assert_not_there(groups, group(1, 0, 1))
        groups.enter(epoch(2, 0, 1))
        tensor = torch.full((3,), float(pipeline))
        finish(groups.mean(group(2, 0, 1)).start([tensor], group(2, 0, 1)))
        return groups.held, tensor.tolist()

    assert together(2, work) == [([2], [0.5] * 3)] * 2


def test_an_exchange_that_breaks_off_ends_even_if_another_member_is_gone() -> None:
    """A receive from a member that is gone fails at once, and ends no wait for those that live."""
    stores: dict[str, Store] = {"epoch-1-0": dist.HashStore()}
    kept: list[EpochGroups] = []
    gone = threading.Event()

    def work(pipeline: int) -> str:
        groups = in_epoch(1, 0, 1, 2, of=pipeline, stores=stores)
        mover = groups.mean(group(1, 0, 2))
        if pipeline == 1:
            groups.give_up(group(1, 0, 1, 2))  # closes its connections, as its end does
            gone.set()
            return "gone"
        if pipeline == 2:
            kept.append(groups)  # it lives, but sends nothing
            return "lives"
        assert gone.wait()
        groups.use(group(1, 0, 2))
        threading.Timer(0.2, groups.broke, [7]).start()
        began = time.monotonic()
        with pytest.raises(WorkerFailedError, match="pipeline 2"):
            finish(mover.start([torch.zeros(3)], group(1, 0, 2)))
        assert time.monotonic() - began < limit(10).total_seconds()
        return "went on"

    assert together(3, work) == ["went on", "gone", "lives"]


def test_a_group_that_is_not_made_is_not_waited_for_once_there_is_a_newer_epoch() -> None:
    ends = threading.Event()

    class Nobody(dist.HashStore):  # type: ignore[misc]
        """The other member never says where it is."""

        def wait(self, keys: object, timeout: object = None) -> None:
            ends.wait()
            raise RuntimeError("ended")

        get = wait

    groups = EpochGroups(Worker(0, 0), lambda name, cancelled: Nobody(), limit(60), Reports())
    groups.enter(epoch(1, 0, 1))
    threading.Timer(0.2, groups.enter, [epoch(2, 0)]).start()
    try:
        assert_not_there(groups, group(1, 0, 1))
    finally:
        ends.set()


def test_who_is_left_alone_at_a_barrier_does_not_wait_for_a_process_group() -> None:
    """The other one had come to it, and was gone when the first heard that."""
    groups = EpochGroups(Worker(0, 0), lambda name, cancelled: dist.HashStore(), limit(60), Reports())
    groups.enter(epoch(2, 0))
    assert_not_there(groups, group(2, 0, 1))


def test_a_member_that_begins_late_is_waited_for_as_long_as_a_transfer_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only as long as it may take to make the group, which gloo takes where it is not told."""
    monkeypatch.setattr(epoch_process_groups, "CONNECTING", timedelta(seconds=4))
    stores: dict[str, Store] = {"epoch-1-0": dist.HashStore()}
    made = threading.Barrier(2)

    def work(pipeline: int) -> list[float]:
        groups = in_epoch(1, 0, 1, of=pipeline, stores=stores)
        mover = groups.mean(group(1, 0, 1))
        made.wait()
        time.sleep(5 * pipeline)
        tensor = torch.full((3,), float(pipeline))
        finish(mover.start([tensor], group(1, 0, 1)))
        return tensor.tolist()

    assert together(2, work) == [[0.5] * 3] * 2


@pytest.mark.parametrize("left", [epoch(2, 0), Epoch(2, (Member(0, 100), Member(1, 201)), "came back")])
def test_a_group_of_somebody_that_is_lost_meanwhile_is_given_up(left: Epoch, monkeypatch: pytest.MonkeyPatch) -> None:
    stores: dict[str, Store] = {"epoch-1-0": dist.HashStore()}
    kept: list[EpochGroups] = []

    def work(pipeline: int) -> str:
        groups = in_epoch(1, 0, 1, of=pipeline, stores=stores)
        mover = groups.mean(group(1, 0, 1))
        if pipeline == 1:
            kept.append(groups)  # it lives, but sends nothing
            return "lost"
        groups.use(group(1, 0, 1))
        monkeypatch.setattr(groups, "_make", lambda epoch: None)
        enters = threading.Timer(0.2, groups.enter, [left])
        enters.start()
        with pytest.raises(WorkerFailedError, match="pipeline 1"):
            finish(mover.start([torch.zeros(3)], group(1, 0, 1)))
        enters.join()
        assert groups.held == []
        return "went on"

    assert together(2, work) == ["went on", "lost"]


def test_of_exchanges_at_the_same_time_each_ends_when_its_own_member_is_lost() -> None:
    """A worker asks one neighbour while it answers another one."""
    stores: dict[str, Store] = {"epoch-1-0": dist.HashStore(), "epoch-2-0": dist.HashStore()}
    kept: list[EpochGroups] = []
    lost, made = threading.Event(), threading.Barrier(3)

    def pair(sequence: int, *pipelines: int) -> Group:
        return msgspec.structs.replace(group(1, *pipelines), sequence=sequence)

    def work(pipeline: int) -> list[float]:
        groups = in_epoch(1, 0, 1, 2, of=pipeline, stores=stores)
        tensor = torch.full((3,), float(pipeline))
        groups.mean(group(1, 0, 1, 2))  # waits until it is made
        made.wait()
        if pipeline == 2:
            kept.append(groups)  # it lives, but sends nothing
            return []
        if pipeline == 0:
            threading.Timer(0.2, groups.enter, [epoch(2, 0, 1)]).start()
            with groups.beside(pair(8, 0, 1)) as replicas:
                finish(GroupMean(replicas).start([tensor], pair(8, 0, 1)))
                with pytest.raises(WorkerFailedError, match="pipeline 2"), groups.beside(pair(9, 0, 2)) as others:
                    finish(GroupMean(others).start([torch.zeros(3)], pair(9, 0, 2)))
            lost.set()
            with pytest.raises(WorkerFailedError, match="gone since epoch 1"), groups.beside(pair(10, 0, 2)):
                raise AssertionError
        else:
            with groups.beside(pair(8, 0, 1)) as replicas:
                finish(GroupMean(replicas).start([tensor], pair(8, 0, 1)))
            assert lost.wait()
            groups.enter(epoch(2, 0, 1))
        with groups.beside(msgspec.structs.replace(group(2, 0, 1), sequence=11)) as replicas:
            finish(GroupMean(replicas).start([tensor], group(2, 0, 1)))
        return tensor.tolist()

    assert together(3, work) == [[0.5] * 3, [0.5] * 3, []]


def test_who_cannot_be_reached_is_told_in_an_epoch_that_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_process_groups, "_TRYING", 1.0)
    stores: defaultdict[str, Store] = defaultdict(dist.HashStore)
    first = threading.Lock()

    def store(name: str, pipeline: int) -> Store:
        with first:
            return stores[name if name != "try-1-0.0-0.2" else f"{name}-{pipeline}"]  # 0 and 2 do not find each other

    def work(pipeline: int) -> list[int]:
        reports = Reports()
        groups = EpochGroups(Worker(0, pipeline), lambda name, cancelled: store(name, pipeline), limit(), reports)
        groups.enter(epoch(1, 0, 1, 2, tries=True))
        until(lambda: 1 in reports.missed)
        return reports.missed[1]

    assert together(3, work) == [[2], [], [0]]


def test_what_a_worker_exchanges_is_told_with_how_far_it_is() -> None:
    store, both = dist.HashStore(), group(1, 0, 1)

    def work(pipeline: int) -> list[Exchanging | None]:
        reports = Reports()
        groups = EpochGroups(Worker(0, pipeline), lambda name, cancelled: store, limit(), reports)
        groups.use(both)
        assert reports.moved() == 0
        groups.enter(epoch(1, 0, 1))
        finish(groups.mean(both).start([torch.ones(2**18)], both))
        until(lambda: reports.moved() >= 2**20)  # half of it each way
        groups.use(None)
        return reports.exchanged

    assert together(2, work) == [[Exchanging(7, (0, 1), 0), None]] * 2


ENDS = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import Store
from lightning_sdpipe.sync.epoch_process_groups import EpochGroups
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.membership.members import Epoch, Member

class Nobody(Store):  # never says where the other member is
    def __init__(self, name, cancelled):
        super().__init__()
        self.cancelled = cancelled

    def set(self, key, value):
        waits.append(key)

    def wait(self, keys, timeout=None):
        while not self.cancelled():
            time.sleep(0.05)
        raise RuntimeError("cancelled")

    get = wait

waits = []
groups = EpochGroups(Worker(0, 0), Nobody, timedelta(seconds=5), None)
groups.enter(Epoch(1, (Member(0, 1), Member(1, 2)), "tested"))
while not waits:
    time.sleep(0.01)
raise ValueError("in an exchange")
"""


def test_a_process_that_fails_while_it_makes_a_group_ends_by_its_exception() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert ended.stderr.endswith("ValueError: in an exchange\n")
    assert ended.returncode == 1
