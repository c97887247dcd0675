"""DiLoCo by samples, in threads, beside its formula."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.sync import DiLoCo, outer_averaging
from lightning_sdpipe.sync.capabilities import Combination
from lightning_sdpipe.sync.methods import check
from lightning_sdpipe.sync.outer_rounds_averaging import OuterRoundsAveraging
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.sync.stage import SIZE, Stage, change, equal, make_update

N, EVERY = 3, 2
LR, MOMENTUM = 0.7, 0.9


def update(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, numbers: range) -> None:
    for number in numbers:
        make_update(sync, parameter, number, change(pipeline, number))


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(overlap="step")], ids=str)
def test_members_weigh_as_much_as_they_have_trained(stage: Stage, exchange: Exchange) -> None:
    """In a round after two updates, and in that of a pause after a third, in which one pipeline trains nothing."""
    samples = [[1.0, 2.0, 1.0], [4.0, 4.0, 3.0], [0.5, 0.5, 0.0]]

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        for number, trained in enumerate(samples[pipeline]):
            sync.weigh(trained)
            update(pipeline, parameter, sync, range(number, number + 1))
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
    method = DiLoCo(EVERY, LR, MOMENTUM, weights="samples")

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> None:
        early = sync.handover()
        rendezvous.join()
        update(pipeline, parameter, sync, range(EVERY + 1))
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
        assert found["base"] == given["base"] == 1
        assert all(torch.equal(a, b) for a, b in zip(found["pieces"], given["pieces"], strict=True))
        assert torch.equal(
            newcomer.parameter_states()[parameter][outer_averaging.MOMENTUM],
            momentum[parameter][outer_averaging.MOMENTUM],
        )
        other = method.build(sync.replica)
        other.take(early)
        other.start()
        assert other.handover()["base"] == 0
        rendezvous.pause(position=EVERY + 1)

    stage.run(method, Exchange(), equal, train)


@pytest.mark.parametrize("exchange", [Exchange(), Exchange(overlap="step")], ids=str)
def test_one_that_has_rested_gets_the_base_that_it_has_missed_and_keeps_its_training(
    stage: Stage, exchange: Exchange
) -> None:
    """Without that it trains from an old base, and what it has moved by is wrong in the next round."""
    rested, back = threading.Barrier(N), threading.Barrier(N)
    groups: list[Group] = []

    def train(pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        for number in range(7):
            sync.weigh(1.0)
            update(pipeline, parameter, sync, range(number, number + 1))
            if number == 2 and pipeline == 2:
                rendezvous.rest()
            if number == 2:
                rested.wait()
            if number == 4 and pipeline != 2:
                back.wait()
            if number == 2 and pipeline == 2:
                back.wait()
                rendezvous.rejoin()
        rendezvous.pause(position=7)
        return parameter.detach().clone()

    found = stage.run(DiLoCo(EVERY, LR, MOMENTUM, weights="samples"), exchange, equal, train, groups=groups)
    assert all(torch.equal(outcome, found[0]) for outcome in found)
    assert any(group.source is not None for group in groups)


def test_a_round_that_an_earlier_scheduler_has_named_is_dropped_if_stage_0_has_not_called_it() -> None:
    """It may never call it: then all would wait for this worker, which trains on."""
    client, group = mock.Mock(), Group((Worker(1, 0), Worker(1, 1)), (0.5, 0.5), 8, "everybody came")
    client.is_of_an_earlier_scheduler = lambda group: group.sequence <= 8
    client.group_if_known.return_value = None
    sync = OuterRoundsAveraging.__new__(OuterRoundsAveraging)
    sync.replica, sync._peers = mock.Mock(client=client), mock.Mock()
    sync._state, sync._whole, sync._schedule = mock.Mock(rounds=3), mock.Mock(since=0), mock.Mock(every=9)
    sync._stands, sync._group, sync._update, sync._number = True, group, 6, 4
    assert not sync.called
    sync._peers.epochs.give_up.assert_called_once_with(group)
    client.ready.assert_called_once_with(5, 3, False)
    client.group_if_known.return_value, client.named_by = msgspec.structs.replace(group, sequence=9), 70
    assert sync.called == 70
    assert sync.called == 70, "that one is begun"


@pytest.mark.parametrize("named", [False, True], ids=["has handed over what it misses", "has named the next round"])
def test_one_that_was_called_to_a_round_of_an_earlier_scheduler_waits_for_no_other(named: bool) -> None:
    """It has not heard of its group: stage 0 of its pipeline, which has that round, waits for it in the next turn."""
    members = (Worker(1, 0), Worker(1, 1))
    group = Group(members, (0.5, 0.5), 9, "everybody came")
    given = Group(members, (0.0, 1.0), 9, "handed over", passive=members[1:])
    client = mock.Mock(named_by=71)
    client.group_unless_restarted.side_effect = [group] if named else [given, None]
    sync = OuterRoundsAveraging.__new__(OuterRoundsAveraging)
    sync.replica, sync._peers, sync._state = mock.Mock(client=client), mock.Mock(), mock.Mock(rounds=3)
    sync._whole, sync.statistics = mock.Mock(since=0), mock.Mock()
    sync._stands, sync._group, sync._underway, sync.announced = True, None, False, False
    sync._update, sync._number = 6, 4
    with mock.patch.object(sync, "_catch_up") as catch_up:
        sync.take_part(70)
        sync.synchronise()
    assert client.group_unless_restarted.mock_calls == [mock.call(70)] * (1 if named else 2)
    assert catch_up.mock_calls == ([] if named else [mock.call(given)])
    assert client.ready.mock_calls == ([] if named else [mock.call(5, 3, False)])
    assert (sync._stands, sync._called) == (True, None), "it stands for the next one"
    assert sync._group == (group if named else None)


@pytest.mark.parametrize(
    ("values", "instead"),
    [
        ({"weights": "samples", "fragments": 2}, "fragments=2 does not go with weights='samples'.* Use fragments=1"),
        ({"weights": "samples", "delay": 1, "mix": 0.5}, "Use mix=0"),
        ({"quorum": 0.5}, "quorum is not a value of DiLoCo; it has left the package: leave it out"),
        ({"group": None}, r"it has left the package: use SemiDecentralized\(\) or PartialReduce"),
        ({"weights": "losses"}, "weights='losses' is not allowed; give one of 'equal', 'samples'"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(values: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigurationError, match=instead):
        DiLoCo(**values)


def test_a_round_that_may_be_late_goes_on_beside_training() -> None:
    method = DiLoCo(weights="samples", delay=2)
    check(method, Combination(method, Exchange(overlap="step"), elastic=True))
    with pytest.raises(ConfigurationError, match="Use overlap='step'"):
        check(method, Combination(method, Exchange()))
