"""What people are told of a training."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer

from lightning_sdpipe.lightning_internals import due_by_clock
from lightning_sdpipe.loop.outlook import Outlook


def trainer(**changed: Any) -> Any:
    batches = SimpleNamespace(current=SimpleNamespace(ready=0))
    values = {"max_epochs": 4, "max_steps": -1, "current_epoch": 0, "global_step": 0, "num_training_batches": 10}
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))
    states = {"validating": False, "sanity_checking": False, "callbacks": [], "fit_loop": loop}
    return SimpleNamespace(**values | states | changed)


def at(of: Any, epoch: int, batch: int) -> None:
    of.current_epoch, of.fit_loop.epoch_loop.batch_progress.current.ready = epoch, batch
    of.global_step = 10 * epoch + batch


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, 50),  # 15 of 40 batches took 30 s
        ({"max_epochs": None, "max_steps": 20}, 10),
        ({"max_steps": 20}, 10),
        ({"max_epochs": -1}, None),
        ({"max_epochs": -1, "max_steps": sys.maxsize}, None),  # and no heartbeat could say so many seconds
        ({"num_training_batches": math.inf}, 90),  # of whole epochs
        ({"num_training_batches": 5}, 30),  # a fast pipeline trains more batches than its share
    ],
)
def test_the_time_that_is_left_follows_from_the_share_that_is_done(limits: dict[str, Any], left: int | None) -> None:
    now, of = [100.0], trainer(**limits)
    outlook = Outlook(of, lambda: now[0])
    assert outlook.doing().left is None, "nothing is known yet"
    now[0] = 130.0
    at(of, 1, 5)
    assert outlook.doing().left == left
    assert outlook.doing().epochs == (limits.get("max_epochs", 4) if limits.get("max_epochs", 4) == 4 else None)


def test_no_epoch_after_the_last_one_is_told() -> None:
    of = trainer()
    at(of, 4, 0)
    assert Outlook(of).doing().epoch == 3


def test_a_resumed_training_counts_from_where_it_went_on() -> None:
    now, of = [0.0], trainer()
    at(of, 2, 0)
    outlook = Outlook(of, lambda: now[0])
    now[0] = 10.0
    at(of, 3, 0)
    assert outlook.doing().left == 10


def test_a_limit_of_time_counts_also_while_it_is_hidden_from_its_callback() -> None:
    timer, now = Timer(timedelta(seconds=60)), [0.0]
    outlook = Outlook(trainer(max_epochs=-1, callbacks=[timer]), lambda: now[0])
    assert outlook.doing().left == 60
    now[0] = 20.0
    with due_by_clock(timer, False):
        assert outlook.doing().left == 40


def test_metrics_are_texts_of_which_the_first_are_told() -> None:
    of = trainer(validating=True)
    outlook = Outlook(of, lambda: 0.0)
    outlook.metrics = {"val_loss": 0.123456, "loss": math.nan} | {f"z{number}": 1.0 for number in range(9)}
    told = outlook.doing()
    assert told.what == "validating"
    assert told.metrics[:2] == (("loss", "nan"), ("val_loss", "0.1235"))
    assert len(told.metrics) == 8


def test_metrics_may_be_replaced_while_a_heartbeat_tells_them() -> None:
    """An error there would end the heartbeats, and with them the run."""
    outlook = Outlook(trainer(), lambda: 0.0)

    class Replaced(dict[str, float]):
        def __iter__(self) -> Iterator[str]:
            outlook.metrics = {}
            return super().__iter__()

    outlook.metrics = Replaced(loss=1.0)
    assert outlook.doing().metrics == (("loss", "1"),)
