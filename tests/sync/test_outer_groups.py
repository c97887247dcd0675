"""DiLoCo by groups, in threads, beside DiLoCo of all: the mean of all pipelines is the same whatever the groups are."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange import moving
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.policies import Group
from lightning_sdpipe.policies.partial_reduce import PartialReduce
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.sync import DiLoCo, outer_averaging
from lightning_sdpipe.sync.rendezvous import Rendezvous
from lightning_sdpipe.sync.synchronizer import Synchronizer
from tests.sync.stage import SIZE, Stage, change, equal

N, EVERY, ROUNDS = 4, 2, 6
LR, MOMENTUM = 0.7, 0.9
PAIRS = PartialReduce(group_size=2)


class Work:
    """Trains as far as one update after the last round, meets all, and makes another round.

    Args:
        in_step: whether no pipeline begins a round that others have not.
    """

    def __init__(self, in_step: bool) -> None:
        self._barrier = threading.Barrier(N if in_step else 1)

    def __call__(
        self, pipeline: int, parameter: nn.Parameter, sync: Synchronizer, rendezvous: Rendezvous
    ) -> tuple[Tensor, Tensor]:
        rendezvous.join()
        for number in range(EVERY * ROUNDS + 1):
            time.sleep(0.004 * pipeline)  # so that not all come in each round
            self._update(pipeline, parameter, sync, number)
        rendezvous.pause(position=0)
        met = parameter.detach().clone()
        rendezvous.join()
        for number in range(EVERY * ROUNDS + 1, EVERY * (ROUNDS + 1)):
            self._update(pipeline, parameter, sync, number)
        rendezvous.pause(position=1)
        momentum = sync.parameter_states()[parameter]["outer_momentum"]
        return met, torch.stack([parameter.detach(), momentum])

    def _update(self, pipeline: int, parameter: nn.Parameter, sync: Synchronizer, number: int) -> None:
        sync.announce(number)
        parameter.data.add_(change(pipeline, number))
        sync.synchronise()
        if self._barrier.parties > 1:
            self._barrier.wait()


def by_formula(groups: list[Group]) -> tuple[Tensor, Tensor]:
    """Returns what :class:`Work` returns, from rows of base, negative momentum and model."""
    states = {i: torch.stack([equal(i), torch.zeros(SIZE), equal(i)]) for i in range(N)}
    made = dict.fromkeys(range(N), 0)

    def meet(members: list[int], step: bool) -> None:
        base, momentum, model = torch.stack([states[i] for i in members]).mean(0)
        if step:
            momentum = MOMENTUM * momentum + model - base
            base = base + LR * (model - base + MOMENTUM * momentum)
        states.update({i: torch.stack([base, momentum, base]) for i in members})

    def train(i: int, updates: int) -> None:
        states[i][2] += sum(change(i, number) for number in range(made[i], made[i] + updates))
        made[i] += updates

    for group in groups:
        if all(count == EVERY * ROUNDS for count in made.values()):
            for i in range(N):
                train(i, 1)
            meet([*range(N)], step=True)
            met = states[0][0]
        members = [worker.pipeline for worker in group.members]
        for i in members:
            train(i, EVERY - made[i] % EVERY)
        meet(members, step=True)
    meet([*range(N)], step=False)
    return met, torch.stack([states[0][0], states[0][1]])


@pytest.mark.parametrize("group", [SemiDecentralized(window=0.001), PAIRS], ids=["semi_decentralized", "pairs"])
def test_bases_momenta_and_models_are_averaged_in_the_groups_of_the_policy(
    stage: Stage, group: SemiDecentralized | PartialReduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PIECE", 32)
    monkeypatch.setattr(outer_averaging, "PIECE", 32)
    groups: list[Group] = []
    found = stage.run(DiLoCo(EVERY, LR, MOMENTUM, group=group), Exchange(), equal, Work(False), groups=groups)
    expected = by_formula(groups)
    assert len(groups) > ROUNDS + 1, "all were in one group each time"
    for met, end in found:
        assert torch.equal(met, found[0][0])
        assert torch.equal(end, found[0][1])
        torch.testing.assert_close(met, expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(end, expected[1], rtol=1e-4, atol=1e-5)


def test_the_mean_of_all_moves_as_if_all_were_in_each_round(stage: Stage) -> None:
    method, groups = DiLoCo(EVERY, LR, MOMENTUM, group=SemiDecentralized(window=0.001)), list[Group]()
    usual = stage.run(DiLoCo(EVERY, LR, MOMENTUM), Exchange(), equal, Work(True))
    found = stage.run(method, Exchange(), equal, Work(True), groups=groups)
    assert len(groups) > ROUNDS + 1, "all were in one group each time"
    for ours, theirs in zip(found[0], usual[0], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_worker_that_rested_keeps_its_base(stage: Stage) -> None:
    method = DiLoCo(EVERY, LR, MOMENTUM, group=PAIRS)

    def rests(pipeline: int, parameter: nn.Parameter, sync: Any, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        for number in range(EVERY):
            if number == 1 and pipeline == 0:
                rendezvous.rest()
                rendezvous.rejoin()
            sync.announce(number)
            parameter.data.add_(change(pipeline, number))
            sync.synchronise()
        rendezvous.pause(position=0)
        return parameter.detach().clone()

    def goes_on(pipeline: int, parameter: nn.Parameter, sync: Any, rendezvous: Rendezvous) -> Tensor:
        rendezvous.join()
        for number in range(EVERY):
            sync.announce(number)
            parameter.data.add_(change(pipeline, number))
            sync.synchronise()
        rendezvous.pause(position=0)
        return parameter.detach().clone()

    rested = stage.run(method, Exchange(), equal, rests)
    torch.testing.assert_close(rested[0], stage.run(method, Exchange(), equal, goes_on)[0])


def test_a_newcomer_begins_with_the_base_of_its_donor(stage: Stage) -> None:
    given = [torch.full((SIZE,), 2.0), torch.full((SIZE,), 3.0)]

    def work(pipeline: int, parameter: nn.Parameter, sync: Any, rendezvous: Rendezvous) -> Tensor:
        if pipeline == 1:
            sync.take({"pieces": given[:1]})
            sync.load_parameter_states({parameter: {outer_averaging.MOMENTUM: given[1]}})
        rendezvous.join()
        momentum = sync.parameter_states().get(parameter, {outer_averaging.MOMENTUM: torch.zeros(SIZE)})[
            outer_averaging.MOMENTUM
        ]
        state = torch.stack([parameter.detach(), *sync.handover()["pieces"], momentum])
        rendezvous.pause(position=0)
        return state

    states = stage.run(DiLoCo(EVERY, LR, MOMENTUM, group=PAIRS), Exchange(), equal, work)
    assert torch.equal(states[1], torch.stack([given[0], *given]))
    assert torch.equal(states[0], torch.stack([equal(0), equal(0), torch.zeros(SIZE)]))


def test_what_does_not_go_with_groups_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"quorum=0.5 does not go with group="):
        DiLoCo(quorum=0.5, group=PAIRS)
    with pytest.raises(ConfigurationError, match=r"fragments=2 does not go with group=.* Use fragments=1; or leave"):
        DiLoCo(fragments=2, group=PAIRS)
    with pytest.raises(ConfigurationError, match=r"group='pairs' is not allowed; give SemiDecentralized"):
        DiLoCo(group="pairs")  # type: ignore[arg-type]
