"""DiLoCo by quorum, in threads, beside its formula: what members bring are changes from bases of their own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Full
from lightning_sdpipe.exchange.payloads.payload import Payload
from lightning_sdpipe.policies import Group
from lightning_sdpipe.sync import DiLoCo, PartialReduce, outer_averaging
from lightning_sdpipe.sync.capabilities import Combination, check
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.sync.stage import SIZE, Stage, change, equal

N, EVERY = 3, 2
LR, MOMENTUM = 0.7, 0.9


class Work:
    """Trains so many updates from a number on; the straggler begins when the others have made two rounds."""

    def __init__(self, straggler: int | None = None) -> None:
        self.straggler, self.others, self.ready = straggler, threading.Barrier(N), threading.Event()
        self.groups: list[Group] = []

    def __call__(self, pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        if self.straggler is not None:
            if pipeline != self.straggler:
                self.update(pipeline, parameter, sync, range(2 * EVERY))
            self.others.wait()
            if pipeline == self.straggler:
                self.update(pipeline, parameter, sync, range(EVERY))
            else:
                assert self.ready.wait(), "the straggler is ready before the others are again"
                self.update(pipeline, parameter, sync, range(2 * EVERY, 3 * EVERY))
        else:
            self.update(pipeline, parameter, sync, range(3 * EVERY))
        rendezvous.pause(position=3 * EVERY)
        return parameter.detach().clone()

    def update(self, pipeline: int, parameter: nn.Parameter, sync: Any, numbers: range) -> None:
        for number in numbers:
            sync.announce(number)
            if pipeline == self.straggler and sync.announced:
                self.ready.set()
            parameter.data.add_(change(pipeline, number))
            sync.synchronise()


@pytest.mark.parametrize(
    "exchange",
    [Exchange(), Exchange(EightBit(block=64)), Exchange(overlap="step"), Exchange(EightBit(), "step")],
    ids=str,
)
def test_rounds_of_all_are_those_without_a_quorum_bit_for_bit(stage: Stage, exchange: Exchange) -> None:
    ours, usual = (stage.run(DiLoCo(EVERY, LR, MOMENTUM, quorum=q), exchange, equal, Work()) for q in (1.0, None))
    for found in ours:
        assert torch.equal(found, usual[0])


def expected(groups: list[Group], straggler: int) -> Tensor:
    bases = dict.fromkeys(range(N), -1)
    states = {-1: (equal(0), torch.zeros(SIZE))}
    moved = {pipeline: torch.zeros(SIZE) for pipeline in range(N)}
    made = dict.fromkeys(range(N), 0)

    def step(base: int, members: list[int]) -> tuple[Tensor, Tensor]:
        phi, m = states[base]
        mean = torch.stack([moved[i] for i in members]).mean(0)
        m = MOMENTUM * m + mean
        return phi + LR * (mean + MOMENTUM * m), m

    for group in groups:
        members = [worker.pipeline for worker in group.members]
        assert group.lineage is not None
        assert group.lineage.bases == tuple(bases[i] for i in members)
        for i in members:
            moved[i] = moved[i] + sum(change(i, number) for number in range(made[i], made[i] + EVERY))
            made[i] += EVERY
        if group.lineage.goes_on:
            states[group.sequence] = step(max(bases[i] for i in members), members)
            bases |= dict.fromkeys(members, group.sequence)
            moved |= {i: torch.zeros(SIZE) for i in members}
    assert made == {i: EVERY if i == straggler else 3 * EVERY for i in range(N)}
    newest = max(bases.values())
    return step(newest, [*range(N)])[0] if any(each.any() for each in moved.values()) else states[newest][0]


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(overlap="step")], ids=str)
def test_a_straggler_brings_the_change_from_its_own_base_and_gets_the_newest(stage: Stage, exchange: Exchange) -> None:
    work = Work(straggler=2)
    outcomes = stage.run(DiLoCo(EVERY, LR, MOMENTUM, quorum=2, grace=0.0), exchange, equal, work, groups=work.groups)
    wanted = expected(work.groups, straggler=2)
    assert [len(group.members) for group in work.groups[:2]] == [2, 2]
    behind = [group for group in work.groups if group.lineage is not None and len(set(group.lineage.bases)) > 1]
    assert behind, "the straggler met the others"
    for found in outcomes:
        assert torch.equal(found, outcomes[0])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("payload", [Full(), EightBit(block=16)], ids=str)
def test_with_a_delay_nobody_waits_for_the_others(stage: Stage, payload: Payload) -> None:
    """One is ready, and trains on; the others are not before it has. No update is lost or counts twice."""
    far, updates = threading.Event(), [9, 5, 7]
    groups: list[Group] = []

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        if pipeline != 0:
            assert far.wait(), "pipeline 0 waited for the others"
        for number in range(updates[pipeline]):
            Work().update(pipeline, parameter, sync, range(number, number + 1))
            if pipeline == 0 and number == 5:
                far.set()
        rendezvous.pause(position=10)
        return parameter.detach().clone()

    method = DiLoCo(4, lr=1.0, momentum=0.0, delay=3, quorum=1.0)
    found = stage.run(method, Exchange(payload, overlap="step"), equal, train, groups=groups)
    moved = [torch.stack([change(i, number) for number in range(updates[i])]).sum(0) for i in range(N)]
    for outcome in found:
        assert torch.equal(outcome, found[0])
        tolerance = 1e-5 if isinstance(payload, Full) else 2e-2
        torch.testing.assert_close(outcome, equal(0) + torch.stack(moved).mean(0), rtol=0, atol=tolerance)
    assert [len(group.members) for group in groups][:1] == [N]


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(overlap="step")], ids=str)
def test_members_weigh_as_much_as_they_have_trained(stage: Stage, exchange: Exchange) -> None:
    """In a round after two updates, and in that of a pause after a third, in which one pipeline trains nothing."""
    samples = [[1.0, 2.0, 1.0], [4.0, 4.0, 3.0], [0.5, 0.5, 0.0]]

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        for number, trained in enumerate(samples[pipeline]):
            sync.weigh(trained)
            Work().update(pipeline, parameter, sync, range(number, number + 1))
        rendezvous.pause(position=3)
        return parameter.detach().clone()

    base, momentum = equal(0), torch.zeros(SIZE)
    for numbers in (range(2), range(2, 3)):
        counts = torch.tensor([sum(samples[i][number] for number in numbers) for i in range(N)])
        changes = torch.stack([sum(change(i, number) for number in numbers) for i in range(N)])  # type: ignore[misc]
        moved = (counts / counts.sum()) @ changes
        momentum = MOMENTUM * momentum + moved
        base = base + LR * (moved + MOMENTUM * momentum)
    assert EVERY == 2
    found = stage.run(DiLoCo(EVERY, LR, MOMENTUM, weights="samples"), exchange, equal, train)
    for outcome in found:
        assert torch.equal(outcome, found[0])
        torch.testing.assert_close(outcome, base, rtol=1e-5, atol=1e-6)


def test_a_newcomer_begins_with_the_base_of_its_donor(stage: Stage) -> None:
    """What the donor has moved by since then is not the newcomer's; a donor that has not begun gives its model only."""
    method = DiLoCo(EVERY, LR, MOMENTUM, quorum=1.0)

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> None:
        early = sync.handover()
        rendezvous.join()
        Work().update(pipeline, parameter, sync, range(EVERY + 1))
        given, momentum = sync.handover(), sync.parameter_states()
        assert momentum[parameter][outer_averaging.MOMENTUM].any()
        assert sync.loose == 1
        before = parameter.detach().clone()
        newcomer = method.build(sync.replica)
        newcomer.take(given)
        newcomer.load_parameter_states(momentum)
        newcomer.start()
        assert not torch.equal(parameter, before)
        torch.testing.assert_close(parameter.detach(), given["pieces"][0], rtol=0, atol=0)
        found = newcomer.handover()
        assert found["base"] == given["base"] == 0
        assert all(torch.equal(a, b) for a, b in zip(found["pieces"], given["pieces"], strict=True))
        assert torch.equal(
            newcomer.parameter_states()[parameter][outer_averaging.MOMENTUM],
            momentum[parameter][outer_averaging.MOMENTUM],
        )
        other = method.build(sync.replica)
        other.take(early)
        other.start()
        assert other.handover()["base"] == -1
        rendezvous.pause(position=EVERY + 1)

    stage.run(method, Exchange(), equal, train)


@pytest.mark.parametrize(
    ("values", "instead"),
    [
        ({"quorum": 0}, "quorum=0 is not allowed; give a number of pipelines from 1"),
        ({"quorum": 2, "fragments": 2}, "Use fragments=1"),
        ({"quorum": 0.5, "mix": 0.5}, "Use mix=0"),
        ({"grace": 2.0}, "or a quorum, such as 0.5"),
        ({"weights": "samples", "fragments": 2}, "fragments=2 does not go with weights='samples'.* Use fragments=1"),
        ({"weights": "samples", "group": PartialReduce()}, "Use weights='equal'; or leave group= out"),
        ({"weights": "losses"}, 'weights=\'losses\' is not allowed; give "equal" or "samples"'),
    ],
)
def test_what_a_quorum_does_not_go_with_is_refused_with_what_does(values: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigurationError, match=instead):
        DiLoCo(**values)


def test_a_round_that_may_be_late_goes_on_beside_training() -> None:
    method = DiLoCo(quorum=2, delay=2)
    check(method, Combination(method, Exchange(overlap="step"), elastic=True))
    with pytest.raises(ConfigurationError, match="Use overlap='step'"):
        check(method, Combination(method, Exchange()))
