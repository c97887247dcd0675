"""Training in virtual time: the simulator says when each worker steps and which workers average, and models follow it.

So methods are compared by the time to a target, without shared cores or noise in the clock: the same seeds give the
same curves. The pipelines have one stage. Policies and parameter servers decide as in a real run; a mini-batch is
computed on the model with which its computation began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from lightning_sdpipe.policies import Decision, Left, PolicyConfig, Ready
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.simulate import Work, simulate
from recipes.baselines.admission import AdmissionRule
from recipes.baselines.virtual_server import Server

Vector = NDArray[numpy.float64]
HELD_OUT, INPUTS, CLASSES = 360, 64, 10


class Problem(Protocol):
    """A learning problem."""

    start: Vector

    def change(self, model: Vector, pipeline: int) -> Vector:
        """Return what one mini-batch of ``pipeline``, computed on ``model``, adds to its model."""

    def value(self, model: Vector) -> float:
        """Return the loss, or the accuracy on held-out samples."""


class Quadratic:
    """½ Σ hᵢ xᵢ², with curvatures hᵢ from 0.05 to 1 and gradient noise in proportion to √hᵢ."""

    def __init__(self, pipelines: int, lr: float, seed: int, dimensions: int = 64, noise: float = 0.3) -> None:
        self._curvature, self._lr = numpy.geomspace(0.05, 1.0, dimensions), lr
        self._noise = noise * numpy.sqrt(self._curvature)
        self._random = [numpy.random.default_rng((seed, pipeline)) for pipeline in range(pipelines)]
        self.start = numpy.full(dimensions, 3.0)

    def change(self, model: Vector, pipeline: int) -> Vector:
        """See :class:`Problem`."""
        gradient = self._curvature * model + self._noise * self._random[pipeline].standard_normal(len(model))
        change: Vector = -self._lr * gradient
        return change

    def value(self, model: Vector) -> float:
        """Return the loss."""
        return float(0.5 * (self._curvature * model**2).sum())


class Network:
    """A two-layer network on the handwritten digits, trained by SGD with momentum; each pipeline draws from its own
    shard."""

    def __init__(self, pipelines: int, lr: float, seed: int, hidden: int, batch_size: int, momentum: float) -> None:
        from sklearn.datasets import load_digits

        digits, draws = load_digits(), numpy.random.default_rng([seed, 1 << 20])
        order = numpy.random.default_rng(seed).permutation(len(digits.target))
        images, labels = digits.data[order] / 16 - 0.5, digits.target[order]
        self._held = images[:HELD_OUT], labels[:HELD_OUT]
        self._shares = [
            (images[HELD_OUT + p :: pipelines], labels[HELD_OUT + p :: pipelines]) for p in range(pipelines)
        ]
        self._random = [numpy.random.default_rng([seed, p]) for p in range(pipelines)]
        self._lr, self._hidden, self._batch_size, self._momentum = lr, hidden, batch_size, momentum
        first = draws.normal(size=(INPUTS, hidden)) * (2 / INPUTS) ** 0.5
        second = draws.normal(size=(hidden, CLASSES)) * (2 / hidden) ** 0.5
        self.start = numpy.concatenate([first.ravel(), numpy.zeros(hidden), second.ravel(), numpy.zeros(CLASSES)])
        self._velocity = [numpy.zeros_like(self.start) for _ in range(pipelines)]

    def change(self, model: Vector, pipeline: int) -> Vector:
        """See :class:`Problem`."""
        images, labels = self._shares[pipeline]
        chosen = self._random[pipeline].integers(0, len(labels), self._batch_size)
        images, labels = images[chosen], labels[chosen]
        first, first_bias, second, second_bias = self._layers(model)
        hidden = numpy.maximum(images @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        error = numpy.exp(scores - scores.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[numpy.arange(self._batch_size), labels] -= 1
        error /= self._batch_size
        back = (error @ second.T) * (hidden > 0)
        parts = (images.T @ back).ravel(), back.sum(axis=0), (hidden.T @ error).ravel(), error.sum(axis=0)
        self._velocity[pipeline] = self._momentum * self._velocity[pipeline] + numpy.concatenate(parts)
        change: Vector = -self._lr * self._velocity[pipeline]
        return change

    def value(self, model: Vector) -> float:
        """Return the accuracy on held-out samples."""
        (images, labels), (first, first_bias, second, second_bias) = self._held, self._layers(model)
        scores = numpy.maximum(images @ first + first_bias, 0) @ second + second_bias
        return float((scores.argmax(axis=1) == labels).mean())

    def _layers(self, model: Vector) -> tuple[Vector, Vector, Vector, Vector]:
        hidden = self._hidden
        a, b, c = INPUTS * hidden, (INPUTS + 1) * hidden, (INPUTS + 1 + CLASSES) * hidden
        return model[:a].reshape(INPUTS, hidden), model[a:b], model[b:c].reshape(hidden, CLASSES), model[c:]


class Point(NamedTuple):
    """A point of a learning curve."""

    seconds: float
    updates: int
    """Number of groups, or of a server's rounds."""
    steps: int
    """Number of mini-batches whose gradients count."""
    value: float


def by_decisions(method: PolicyConfig, work: Work, problem: Problem) -> list[Point]:
    """Train until one worker has done all iterations of ``work``; return a point whenever as many further mini-batches
    have counted as there are pipelines."""
    points = [Point(0.0, 0, 0, problem.value(problem.start))]
    decided_at: float | None = None
    for at, decisions, trainee in _followed(method, work, problem):
        if decided_at is not None and trainee.steps >= points[-1].steps + work.num_pipelines:
            points.append(Point(decided_at, trainee.updates, trainee.steps, problem.value(trainee.model)))
        decided_at = at if decisions else None
    return points


def by_time(method: PolicyConfig, work: Work, problem: Problem, due: Sequence[float]) -> list[Point]:
    """Train, and return a point for each time in ``due``."""
    points, left = list[Point](), list(due)
    for at, _, trainee in _followed(method, work, problem):
        while left and at > left[0]:
            points.append(Point(left.pop(0), trainee.updates, trainee.steps, problem.value(trainee.model)))
    return points


def _followed(
    method: PolicyConfig, work: Work, problem: Problem
) -> Iterator[tuple[float, Sequence[Decision], _Models | Server]]:
    """Yield the time and decisions of each event before models follow it, and last an infinite time."""
    trainee: _Models | Server = _Models(work.num_pipelines, problem)
    if isinstance(method, AdmissionRule):
        served = method.make_policy(1, work.num_pipelines)
        trainee, run = Server(served, problem), simulate(served, replace(work, announce=method.announces))
    else:
        run = simulate(method, work)
    for at, event, decisions in run.entries:
        if isinstance(event, Left):
            break  # from here on there are fewer workers
        yield at, decisions, trainee
        if isinstance(event, Ready):
            trainee.step(event.worker.pipeline)
        for group in decisions:
            if isinstance(group, Group):
                trainee.average(group)
    yield numpy.inf, (), trainee


class _Models:
    """A model for each pipeline, averaged in groups."""

    def __init__(self, num_pipelines: int, problem: Problem) -> None:
        self._problem = problem
        self._models = numpy.tile(problem.start, (num_pipelines, 1))
        self._computed_on = self._models.copy()
        self.updates = self.steps = 0

    @property
    def model(self) -> Vector:
        """The mean of the pipelines' models."""
        mean: Vector = self._models.mean(0)
        return mean

    def step(self, pipeline: int) -> None:
        """Add one mini-batch's change to the pipeline's model."""
        self._models[pipeline] += self._problem.change(self._computed_on[pipeline], pipeline)
        self.steps += 1

    def average(self, group: Group) -> None:
        """Average the models of a group; members that do not wait for it keep computing on their old model."""
        members = [worker.pipeline for worker in group.members]
        self._models[members] = numpy.array(group.weights) @ self._models[members]
        going_on = [worker.pipeline for worker in group.members if worker not in group.passive]
        self._computed_on[going_on] = self._models[going_on]
        self.updates += 1
