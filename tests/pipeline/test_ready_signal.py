"""A worker says that it is ready once in an update, within the last backward or at the point that it waits for last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sdpipe.heterogeneity import Delays, Static
from lightning_sdpipe.heterogeneity.injector import DelayInjector, Heterogeneity
from lightning_sdpipe.pipeline.gradients import LastWait, ReadySignal


class Run:
    """Backwards of four layers, one tensor each, whose gradients are noted as they come."""

    def __init__(self, share: float, slowness: Heterogeneity | None = None) -> None:
        self.events: list[str] = []
        self.layers = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4)))
        weights = list(self.layers.parameters())
        for number, weight in enumerate(weights):
            weight.register_hook(lambda _, number=number: self.events.append(f"gradient {number}"))  # type: ignore[no-untyped-call]
        self.delays = DelayInjector(slowness or Delays(), 0, 0, sleep=lambda seconds: self.events.append("sleep"))
        self.ready = ReadySignal("backward", lambda: self.events.append("ready"))
        self.ready.expect()
        self.ready.begin(share, weights)

    def backward(self, *left_out: int) -> None:
        x = torch.ones(1, 2)
        for number, layer in enumerate(self.layers):
            x = x if number in left_out else layer(x)
        loss = x.sum()
        with self.ready.computing(self.delays):
            loss.backward()


def test_it_is_said_when_a_share_of_the_gradients_is_there() -> None:
    run = Run(0.75)
    run.backward()
    assert "ready" not in run.events
    run.events.clear()
    run.ready.last_backward()
    run.backward()
    assert run.events == ["gradient 3", "gradient 2", "gradient 1", "ready", "gradient 0"]


def test_or_before() -> None:
    run = Run(0.0)
    run.ready.last_backward()
    run.backward()
    assert run.events == ["ready", "gradient 3", "gradient 2", "gradient 1", "gradient 0"]


@pytest.mark.parametrize("frozen", [False, True])
def test_at_the_latest_when_the_backward_is_over(frozen: bool) -> None:
    run = Run(0.75)
    run.ready.last_backward()
    if frozen:
        run.layers[1].weight.requires_grad_(False)
        run.backward()
    else:
        run.backward(1)
    assert run.events == ["gradient 3", "gradient 2", "gradient 0", "ready"]


@pytest.mark.parametrize(("share", "events"), [(0.75, ["sleep", "ready", "sleep"]), (0.0, ["ready", "sleep"])])
def test_a_device_that_is_made_slow_says_it_after_its_own_share(share: float, events: list[str]) -> None:
    run = Run(share, Static((100.0,)))
    run.ready.last_backward()
    run.backward()
    assert [event for event in run.events if not event.startswith("gradient")] == events


@pytest.mark.parametrize("last", ["backward", "vote", "norm", "step"])
def test_it_fires_once_in_an_update_at_the_last_point_that_waits(last: LastWait) -> None:
    events: list[str] = []
    ready = ReadySignal(last, lambda: events.append("ready"))
    points: tuple[LastWait, ...] = ("backward", "vote", "norm", "step")
    for point in points:
        ready.passed(point)
    assert events == [], "no update has begun"
    for _ in range(2):
        ready.expect()
        for point in points:
            ready.passed(point)
            events.append(point)
        ready.drop()
    one = [*points[: points.index(last)], "ready", *points[points.index(last) :]]
    assert events == 2 * one


def test_a_module_that_does_not_clip_is_ready_after_its_step() -> None:
    events: list[str] = []
    ready = ReadySignal("norm", lambda: events.append("ready"))
    ready.expect()
    ready.passed("backward")
    assert events == []
    ready.passed("step")
    assert events == ["ready"]


def test_an_update_that_ends_otherwise_does_not_fire_later() -> None:
    run = Run(0.75)
    run.ready.drop()
    run.ready.last_backward()
    run.backward()
    run.ready.passed("step")
    assert "ready" not in run.events
