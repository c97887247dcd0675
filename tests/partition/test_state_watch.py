"""What a step keeps in Python: used where all stages change it alike, and refused where some would miss a change."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from enum import Enum
from functools import partial
from string import Template
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.partition.state_watch import TouchedError, Untouched
from lightning_sdpipe.worker.assembly import refuse_counting
from tests.partition.cutting import LossOf, Stepping, assert_equal_when_cut, planned
from tests.partition.test_side_channels import Blocks, batches

GLOBAL = np.random.default_rng(5)
NUMBER, NUMBERS = 1.0, [1.0]


class Shared:
    """Used as a place for variables."""

    number = 1.0


def function(value: float) -> float:
    return value * getattr(function, "factor", 1.0)


class Meter:
    __slots__ = ("history", "sum")

    def __init__(self) -> None:
        self.sum, self.history = 0.0, deque([0.0], maxlen=3)

    def __call__(self) -> float:
        return self.sum

    def add(self, value: float) -> None:
        self.sum += value
        self.history.append(value)


class Model(Blocks):
    kind = staticmethod(partial(nn.Linear, 4, 4))
    of_class, in_class, ticks_of_class = 1.0, [1.0], itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.ticks, self.cycle = itertools.count(), itertools.cycle([1.0, 2.0])
        self.number, self.flag, self.text, self.maybe = 0.5, False, "a", None
        self.meter, self.history, self.state = Meter(), [1.0], {"a": {"b": 1.0}}
        self.namespace, self.array = SimpleNamespace(value=1.0), np.ones(1)
        self.draws, self.arrays, self.numbers = torch.Generator(), np.random.default_rng(1), random.Random(2)
        self.draws.manual_seed(3)


def squared(y: Tensor) -> Tensor:
    return y.square().mean()


def counter(model: Any, x: Tensor) -> Tensor:
    loss = squared(model(x * model.number))
    model.number += 1
    return loss


def flag(model: Any, x: Tensor) -> Tensor:
    loss = squared(model(x if model.flag else -2 * x))
    model.flag = True
    return loss


def only_is(model: Any, x: Tensor) -> Tensor:
    """Looks at which object it is, and does nothing with it."""
    loss = squared(model(x if model.maybe is None else -2 * x + 1))
    model.maybe = loss.item()
    return loss


def in_torch(model: Any, x: Tensor) -> Tensor:
    """Only C++ looks at the number, and asks for its type first."""
    loss = squared(model(x + torch.full((4,), model.number)))
    model.number = loss.item()
    model.flag = not model.flag
    return loss


def global_number(model: Any, x: Tensor) -> Tensor:
    global NUMBER
    loss = squared(model(x * NUMBER))
    NUMBER = loss.item()
    return loss


def amidst(model: Any, x: Tensor) -> Tensor:
    """Changed between the last two blocks."""
    for number, layer in enumerate(model.layers):
        x = layer(x) + model.number
        model.number = number / 8 if number == 2 else model.number
    return squared(x)


def counted() -> Any:
    number = 1.0

    def loss_of(model: Any, x: Tensor) -> Tensor:
        nonlocal number
        loss = squared(model(x * number))
        number = loss.item()
        return loss

    return loss_of


def shared_meter() -> Any:
    meter = Meter()

    def read(x: Tensor) -> Tensor:
        return x + meter()

    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = squared(model(read(x)))
        meter.add(loss.item())
        return loss

    return loss_of


def in_every_block(model: Any, x: Tensor) -> Tensor:
    return squared(model(x))


def kept(read: Callable[[Any], float], write: Callable[[Any, float], object]) -> LossOf:
    """The loss of the last step, kept in some place, is used where this one begins."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = squared(model(x * read(model)))
        write(model, loss.item())
        return loss

    return loss_of


def drawn(draw: Callable[[Any], Any]) -> LossOf:
    """At the beginning and at the end."""

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return squared(model(x + draw(model)) + draw(model))

    return loss_of


HERE = __name__


MISSED = [
    (kept(lambda model: model.number, lambda model, loss: setattr(model, "number", loss)), "model.number"),
    (kept(lambda model: vars(model)["number"], lambda model, loss: setattr(model, "number", loss)), "model.number"),
    (kept(lambda model: model.number, lambda model, loss: vars(model).update(number=loss)), "model.number"),
    (kept(lambda model: model.maybe or 0.5, lambda model, loss: setattr(model, "maybe", loss)), "model.maybe"),
    (kept(lambda model: model.meter(), lambda model, loss: model.meter.add(loss)), "model.meter"),
    (kept(lambda model: sum(model.history), lambda model, loss: model.history.append(loss)), "model.history"),
    (kept(lambda model: model.state["a"]["b"], lambda model, loss: model.state["a"].update(b=loss)), "model.state"),
    (
        kept(lambda model: model.namespace.value, lambda model, loss: setattr(model.namespace, "value", loss)),
        "model.namespace",
    ),
    (kept(lambda model: float(model.array[0]), lambda model, loss: model.array.fill(loss)), "model.array"),
    (kept(lambda model: model.of_class, lambda model, loss: setattr(Model, "of_class", loss)), "Model.of_class"),
    (
        kept(lambda model: type(model).of_class, lambda model, loss: setattr(Model, "of_class", loss)),
        "Model.of_class",
    ),
    (kept(lambda model: model.in_class[-1], lambda model, loss: Model.in_class.append(loss)), "Model.in_class"),
    (kept(lambda model: Shared.number, lambda model, loss: setattr(Shared, "number", loss)), f"{HERE}.Shared"),
    (kept(lambda model: function(1.0), lambda model, loss: setattr(function, "factor", loss)), f"{HERE}.function"),
    (kept(lambda model: NUMBERS[-1], lambda model, loss: NUMBERS.append(loss)), f"{HERE}.NUMBERS"),
    (global_number, f"{HERE}.NUMBER"),
    (counter, "model.number"),
    (flag, "model.flag"),
    (only_is, "model.maybe"),
    (in_torch, "model.number"),
    (amidst, "model.number"),
    (drawn(lambda model: next(model.ticks)), "model.ticks"),
    (drawn(lambda model: next(model.ticks_of_class)), "Model.ticks_of_class"),
    (drawn(lambda model: next(model.cycle)), "model.cycle"),
    (drawn(lambda model: torch.randn(4, generator=model.draws)), "model.draws"),
    (drawn(lambda model: float(model.arrays.random())), "model.arrays"),
    (drawn(lambda model: model.numbers.random()), "model.numbers"),
    (drawn(lambda model: float(GLOBAL.random())), f"{HERE}.GLOBAL"),
    (counted(), "the variable number of counted"),
    (shared_meter(), "the variable meter of shared_meter"),
]


@pytest.mark.parametrize(("loss_of", "what"), MISSED)
@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_what_a_stage_would_miss_is_refused(loss_of: Any, what: str, num_stages: int) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"training_step changes {what}[\w.]* after the end of a stage that reads"
    ):
        planned(Stepping(Model(), loss_of), batches(2), num_stages)


@pytest.mark.parametrize(("loss_of", "what"), MISSED)
def test_a_run_that_changes_state_is_told_from_others(loss_of: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Model()
    for name in ("ticks", "cycle"):
        delattr(model, name) if name not in what else None
    if not what.endswith("ticks_of_class"):
        monkeypatch.delattr(Model, "ticks_of_class")
        if not what.endswith(("ticks", "cycle")):
            Untouched(model).run(partial(model, batches(1)[0]))
    module = Stepping(model, loss_of)
    with pytest.raises(TouchedError):
        Untouched(module).run(partial(module.training_step, batches(1)[0]))


@pytest.mark.parametrize("kind", ["attribute", "list", "patch", "weight", "metric", "buffer"])
def test_a_run_that_leaves_tensors_is_told_from_others(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    of_the_users: Any = Stepping(model, lambda model, x: squared(model(x)))
    of_the_users.kept, of_the_users.metric, of_the_users.patch = [], MeanMetric(), pytest.MonkeyPatch()
    of_the_users.register_buffer("buffer", torch.zeros(1))
    before = Untouched(of_the_users)
    before.run(partial(of_the_users.training_step, batches(1)[0]))  # which changes running means
    acts: dict[str, Callable[[], object]] = {
        "attribute": lambda: setattr(of_the_users, "last", torch.ones(1)),
        "list": lambda: of_the_users.kept.append(torch.ones(1)),
        "patch": lambda: setattr(of_the_users.patch, "last", torch.ones(1)),
        "weight": lambda: nn.init.ones_(model[0].weight),  # type: ignore[arg-type]
        "metric": lambda: of_the_users.metric.update(1.0),
        "buffer": lambda: of_the_users.buffer.add_(1),
    }
    with pytest.raises(TouchedError):
        before.run(acts[kind])


class Mode(Enum):
    FIRST, LATER = range(2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Mode.FIRST, Mode.LATER),
        (np.float32(1), np.float32(2)),
        (1j, 2j),
        (b"first", b"later"),
        (frozenset({1}), frozenset({2})),
        (date(2023, 1, 1), date(2024, 1, 1)),
        (torch.float32, torch.float64),
    ],
)
def test_values_of_which_only_another_one_can_be_there_are_seen_to_change(before: object, after: object) -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = squared(model(x if model.maybe is before else -2 * x))
        model.maybe = after
        return loss

    model: Any = Model()
    model.maybe = before
    with pytest.raises(ConfigurationError, match=r"training_step changes model\.maybe after the end of a stage"):
        planned(Stepping(model, loss_of), batches(2), 2)


def test_another_object_of_a_library_is_seen_to_be_there() -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = squared(model(x + len(model.maybe.template)))
        model.maybe = Template("later")
        return loss

    model: Any = Model()
    model.maybe = Template("at first")
    with pytest.raises(ConfigurationError, match=r"training_step changes model\.maybe after the end of a stage"):
        planned(Stepping(model, loss_of), batches(2), 2)


def test_a_generator_that_blocks_of_several_stages_draw_from_is_refused() -> None:
    class Drawing(nn.Module):
        def __init__(self, draws: torch.Generator) -> None:
            super().__init__()
            self.linear, self.draws = nn.Linear(4, 4), draws

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.randn(4, generator=self.draws)

    model = Model()
    model.layers = nn.ModuleList([Drawing(model.draws) for _ in range(4)])
    with pytest.raises(ConfigurationError, match="draws"):
        planned(Stepping(model, in_every_block), batches(2), 2)
    for layer in model.layers:
        layer.draws = torch.Generator()  # one for each
    assert_equal_when_cut(Stepping(model, in_every_block), batches(2), 2)


def early(model: Any, x: Tensor) -> Tensor:
    """All stages come here."""
    model.number += 0.25
    model.meter.add(model.number)
    model.state["a"]["b"] += 1
    x = (
        x
        + model.meter()
        + next(model.ticks)
        + vars(model)["number"]
        + Shared.number
        + function(Model.of_class)
        + model.state["a"]["b"]
        + torch.randn(4, generator=model.draws)
        + model.numbers.random()
    )
    return squared(model(x + float(model.arrays.random())))


def begun_anew(model: Any, x: Tensor) -> Tensor:
    """The end of a step changes what the next one begins by setting."""
    model.number, model.history = 0.0, []
    x = x + model.number + len(model.history)
    loss = squared(model(x))
    model.number += loss.item()
    model.history.append(loss.item())
    return loss


def only_late(model: Any, x: Tensor) -> Tensor:
    """Nothing but the end of a step uses it."""
    loss = squared(model(x)) * (1 + model.meter() + model.number + next(model.cycle)) + torch.randn(
        (), generator=model.draws
    )
    model.meter.add(loss.item())
    model.number = loss.item()
    return loss


def test_what_workers_with_several_stages_would_count_twice_is_refused() -> None:
    cut = planned(Stepping(Model(), early), batches(2), 4)
    assert {"model.number", "model.draws"} <= set(cut.travel["training_step"].counted)
    refuse_counting(cut, 1)
    with pytest.raises(ConfigurationError, match="runs the step once for each"):
        refuse_counting(cut, 2)
    refuse_counting(planned(Stepping(Model(), lambda model, x: squared(model(x))), batches(2), 4), 2)


def test_what_only_the_end_changes_is_known_to_be_handed_on() -> None:
    cut = planned(Stepping(Model(), only_late), batches(2), 2)
    assert set(cut.travel["training_step"].late) == {"model.number", "model.meter", "model.draws", "model.cycle"}


@pytest.mark.parametrize("loss_of", [early, begun_anew, only_late])
@pytest.mark.parametrize("num_stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_no_stage_misses_is_as_in_one_process(loss_of: Any, num_stages: int) -> None:
    torch.manual_seed(0)
    assert_equal_when_cut(Stepping(Model(), loss_of), batches(3), num_stages)


class Changing(L.LightningModule):
    """Changes something that all stages use, early or late in its step."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.model, self.late = Model(), late


class Logging(Changing):
    def training_step(self, batch: Tensor) -> Tensor:
        if not self.late:
            self.log("mean", batch.mean())
        metrics = self.trainer.callback_metrics
        loss = squared(self.model(batch * (metrics.get("val_loss", 1.0) + metrics.get("mean_epoch", 0.0))))
        if self.late:
            self.log_dict({"mean": batch.mean()})
        return loss


class Decaying(Changing):
    def training_step(self, batch: Tensor) -> Tensor:
        (group,) = self.trainer.optimizers[0].param_groups
        if not self.late:
            group["lr"] *= 0.9
        loss = squared(self.model(batch))
        if self.late:
            group["lr"] = loss.item()
        return loss


class Keeper(L.Callback):
    def __init__(self) -> None:
        self.factors = [1.0]


class Asking(Changing):
    """Keeps state in a callback of the user's."""

    def training_step(self, batch: Tensor) -> Tensor:
        (keeper,) = (callback for callback in self.trainer.callbacks if isinstance(callback, Keeper))
        if not self.late:
            keeper.factors.append(2.0)
        loss = squared(self.model(batch * keeper.factors[-1]))
        if self.late:
            keeper.factors = [loss.item()]
        return loss


class Difficulty(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0


class Feeding(Changing):
    """Keeps state in the user's data module."""

    def training_step(self, batch: Tensor) -> Tensor:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if not self.late:
            data.level *= 2.0
        loss = squared(self.model(batch * data.level))
        if self.late:
            data.level = loss.item()
        return loss


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Logging, "the metric 'mean_epoch'"),
        (Feeding, "the datamodule Difficulty"),
        (Decaying, "the options of the optimizer's group 0"),
        (Asking, "the callback Keeper"),
    ],
)
def test_what_the_trainer_keeps(make: type[Changing], what: str) -> None:
    for late in (False, True):
        module = make(late)
        module.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[Keeper()])
        module.trainer.datamodule = Difficulty()  # type: ignore[attr-defined]
        module.trainer.strategy.optimizers = [torch.optim.SGD(module.parameters())]
        with pytest.raises(ConfigurationError, match=rf"changes {what}[\w.]* after") if late else nullcontext():
            assert planned(module, batches(2), 2).travel["training_step"].metrics == ()


@pytest.mark.parametrize("block", [0, -1])
def test_blocks_log_on_the_last_stage_only(block: int) -> None:
    module = Logging(late=True)
    module.training_step = lambda batch: squared(module.model(batch))  # type: ignore[method-assign,assignment]
    inner: Any = module.model.layers[block]
    forward = inner.forward

    def logging(x: Tensor) -> Tensor:
        module.log("mean", x.mean().item())
        return forward(x)  # type: ignore[no-any-return]

    inner.forward = logging
    with pytest.raises(ConfigurationError, match="logs the metric 'mean'") if block == 0 else nullcontext():
        planned(module, batches(2), 2)


def test_metrics_that_only_the_end_logs_are_known() -> None:
    module = Logging(late=True)
    module.training_step = lambda batch: module.log("loss", module.model(batch).mean())  # type: ignore[method-assign,assignment]
    found = planned(module, batches(2), 2).travel["training_step"].metrics
    assert found == ("the metric 'loss'", "the metric 'loss_epoch'", "the metric 'loss_step'")


def test_of_a_large_list_the_length_is_looked_at() -> None:
    def append(model: Any, x: Tensor) -> Tensor:
        loss = squared(model(x + len(model.history)))
        model.history.append(1)
        return loss

    model = Model()
    model.history = [0] * 20_000  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match=r"changes model\.history after"):
        planned(Stepping(model, append), batches(2), 2)
