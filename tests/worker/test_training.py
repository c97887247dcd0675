"""What a worker does in each turn of the loop, without processes, a model or Lightning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.gradients import ReadySignal
from lightning_sdpipe.pipeline.stage_runner import CollectiveGuard
from lightning_sdpipe.sync.rendezvous import SyncPoint, SyncState
from lightning_sdpipe.worker.training import Phase, Training


class TwoAhead:
    """A pipeline whose stage runs two mini-batches ahead of its backwards."""

    flushes = late_only = False

    def __init__(self) -> None:
        self.in_flight = 0
        self.settled = 0

    @property
    def filling(self) -> bool:
        return self.in_flight < 2

    @property
    def draining(self) -> bool:
        return self.in_flight > 0

    def train(self, *arguments: Any) -> Tensor:
        self.in_flight += self.filling
        arguments[-1].passed("backward")
        return torch.tensor(1.0, requires_grad=True)

    def drain(self, exchange: Any, ready: ReadySignal) -> Tensor:
        ready.passed("backward")
        self.in_flight -= 1
        return torch.tensor(0.0, requires_grad=True)

    def rest(self, loss: Tensor) -> Tensor:
        return loss

    def finish(self) -> None:
        assert self.in_flight == 0

    def settle(self) -> None:
        self.settled += 1


class Elsewhere:
    """Where the others are, as a test has it."""

    def __init__(self, meetings: list[SyncPoint]) -> None:
        self.place, self.meetings, self.calls = SyncState.TRAINING, meetings, []  # type: ignore[var-annotated]

    def join(self) -> None:
        self.place = SyncState.TRAINING

    def come_together(self, position: int, steps: int) -> None:
        self.calls.append(position)
        self.place = SyncState.TOGETHER

    pause = come_together

    def wait_for_others(self, position: int, steps: int) -> SyncPoint:
        self.calls.append(position)
        return self.meetings.pop(0)


class NothingFrozen(nullcontext[None]):
    generation = 0

    def changed(self) -> bool:
        return False


class Announcing(SimpleNamespace):
    """A synchronizer that announces updates."""

    announce: Any = None
    by_samples = takes_several_backwards = False


def training(meetings: list[SyncPoint] | None = None) -> tuple[Training, list[int]]:
    """One, and the updates that it announces."""
    announced: list[int] = []
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    trainer = SimpleNamespace(
        accumulate_grad_batches=1,
        global_step=0,
        lightning_module=module,
        precision_plugin=SimpleNamespace(
            optimizer_step=lambda optimizer, model, closure: closure(), train_step_context=nullcontext
        ),
        strategy=SimpleNamespace(
            num_micro_batches=1, optimizers=[optimizer], backward=lambda loss, _: loss, root_device=torch.device("cpu")
        ),
        fit_loop=SimpleNamespace(_data_fetcher=None, epoch_loop=SimpleNamespace(batch_progress=progress)),
    )
    sync = Announcing(
        replica=SimpleNamespace(),
        announced=False,
        gradients=None,
        shares_next=False,
        begin=lambda updates: None,
        announce=announced.append,
        synchronise=lambda: None,
        statistics=SimpleNamespace(seconds_waiting=0.0),
    )
    parts = SimpleNamespace(pipeline=TwoAhead(), freezing=NothingFrozen(), runners=[SimpleNamespace(is_last=False)])
    client = SimpleNamespace(step_ended=lambda *_: None)
    groups = SimpleNamespace(mesh=SimpleNamespace(num_stages=1))
    draws = SimpleNamespace(stream=(), between_steps=lambda point: None, end_update=lambda optimizer: None)
    elsewhere = Elsewhere(meetings or [])
    made: dict[str, Any] = {"trainer": trainer, "parts": parts, "sync": sync, "rendezvous": elsewhere, "client": client}
    made |= {"groups": groups, "draws": draws, "guard": CollectiveGuard(1), "watch": None}
    return Training(**made, first_failure=nullcontext()), announced


def turn(it: Training, within: Callable[[], None] = lambda: None) -> Phase:
    """One of Lightning's: the phase in which the step ran."""
    source: Any = SimpleNamespace(portion=None, zeroes_gradients=True)
    it.begin_batch(None, source)
    phases = []

    def closure() -> Tensor:
        loss = it.step(None, (), source)
        phases.append(it.phase)
        within()
        return loss

    it.update(it.trainer.strategy.optimizers[0], closure)
    it.trainer.fit_loop.epoch_loop.batch_progress.current.ready += 1
    return phases[0]


def test_it_fills_steps_and_drains_before_it_leaves() -> None:
    it, announced = training()
    assert [turn(it) for _ in range(4)] == [Phase.FILLING, Phase.FILLING, Phase.UPDATING, Phase.UPDATING]
    assert (it.updates, announced) == (2, [0, 1])
    it.pause()
    assert (it.updates, announced) == (4, [0, 1, 2, 3]), "the backwards that were left"
    assert it.together
    assert it.phase is Phase.STEPPING
    assert turn(it) is Phase.FILLING


def test_an_absent_worker_counts_and_announces_nothing() -> None:
    it, announced = training([SyncPoint(2, closing=False), SyncPoint(4, closing=True)])
    it.begin_shards(uneven=True)
    assert turn(it) is Phase.FILLING
    assert it.wait_for_others() == SyncPoint(2, closing=False)
    it.begin_turn(has_batch=False)
    assert (it.phase, it.updates, announced) == (Phase.ABSENT, 1, [0])
    assert turn(it) is Phase.ABSENT
    it.come_together()
    assert it.phase is Phase.ABSENT
    assert it.wait_for_others().closing
    it.begin_turn(has_batch=False)
    assert turn(it) is Phase.ABSENT
    assert (it.updates, announced, it.mini_batches) == (3, [0], 1)
    it.begin_turn(has_batch=True)
    assert turn(it) is Phase.FILLING


def test_a_worker_without_batch_applies_what_it_has_accumulated() -> None:
    it, announced = training()
    source: Any = SimpleNamespace(portion=None, zeroes_gradients=True)
    it.begin_batch(None, source)
    it.step(None, (), source)  # Lightning asks for no update
    it.begin_turn(has_batch=False)
    assert turn(it) is Phase.FINISHING
    assert (it.updates, announced, it.phase) == (1, [], Phase.ABSENT)
    assert turn(it) is Phase.ABSENT, "there is nothing left"


def test_it_does_not_drain_within_an_update() -> None:
    it, _ = training()
    assert [turn(it) for _ in range(3)][-1] is Phase.UPDATING
    with pytest.raises(ConfigurationError, match="within an optimizer step, while older mini-batches are still"):
        turn(it, within=it.come_together)
