"""Training in virtual time: the simulator says when each worker steps and which ones average, and plain SGD follows it.

So methods are compared by the time to a target without a core to share and without noise in the clock: the same seeds
give the same curves. The pipelines have one stage. What policies and parameter servers decide is what they decide in a
real run; a gradient is computed on the model with which its computation began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy
from numpy.typing import NDArray

from lightning_sdpipe.policies import Left, PolicyConfig, Ready
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.simulate import Work, simulate
from recipes.baselines.admission import AdmissionPolicy, AdmissionRule

Vector = NDArray[numpy.float64]


class Problem(Protocol):
    """The problem that is learned."""

    start: Vector

    def gradient(self, model: Vector, pipeline: int, random: numpy.random.Generator) -> Vector:
        """Return the gradient of one mini-batch of ``pipeline``."""

    def loss(self, model: Vector) -> float:
        """Return the loss, which should become small."""


class Quadratic:
    """½ Σ hᵢ xᵢ², with curvatures from 0.05 to 1 and noise in the gradients that is larger where they are."""

    def __init__(self, dimensions: int = 64, noise: float = 0.3) -> None:
        self._curvature = numpy.geomspace(0.05, 1.0, dimensions)
        self._noise = noise * numpy.sqrt(self._curvature)
        self.start = numpy.full(dimensions, 3.0)

    def gradient(self, model: Vector, pipeline: int, random: numpy.random.Generator) -> Vector:
        """See :class:`Problem`."""
        return self._curvature * model + self._noise * random.standard_normal(len(model))

    def loss(self, model: Vector) -> float:
        """See :class:`Problem`."""
        return float(0.5 * (self._curvature * model**2).sum())


class Digits:
    """Softmax regression on the handwritten digits; every fifth image is kept for the loss, and each pipeline draws
    mini-batches from its own share of the others."""

    def __init__(self, num_pipelines: int, batch_size: int = 32) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = numpy.hstack([images / 16.0, numpy.ones((len(images), 1))])
        y = numpy.eye(10)[labels]
        held = numpy.arange(len(x)) % 5 == 0
        self._held = x[held], y[held]
        self._shares = [(x[~held][i::num_pipelines], y[~held][i::num_pipelines]) for i in range(num_pipelines)]
        self._batch_size = batch_size
        self.start = numpy.zeros(x.shape[1] * 10)

    def gradient(self, model: Vector, pipeline: int, random: numpy.random.Generator) -> Vector:
        """See :class:`Problem`."""
        x, y = self._shares[pipeline]
        drawn = random.integers(len(x), size=self._batch_size)
        missed = numpy.exp(_log_softmax(x[drawn] @ model.reshape(-1, 10))) - y[drawn]
        gradient: Vector = (x[drawn].T @ missed / self._batch_size).ravel()
        return gradient

    def loss(self, model: Vector) -> float:
        """The cross-entropy of the images that were kept."""
        x, y = self._held
        return float(-(y * _log_softmax(x @ model.reshape(-1, 10))).sum() / len(x))


def _log_softmax(scores: Vector) -> Vector:
    shifted = scores - scores.max(1, keepdims=True)
    result: Vector = shifted - numpy.log(numpy.exp(shifted).sum(1, keepdims=True))
    return result


class Point(NamedTuple):
    """A point of a learning curve."""

    seconds: float
    updates: int
    """Groups, or rounds of a server."""
    steps: int
    """Mini-batches whose gradients count."""
    loss: float


def train(method: PolicyConfig, work: Work, problem: Problem, learning_rate: float, seed: int) -> list[Point]:
    """Train until one worker has done all iterations of ``work``: from then on the workers are fewer.

    Args:
        method: a policy's values.
        work: of one stage.
        problem: what is learned.
        learning_rate: of SGD.
        seed: of the mini-batches.
    """
    trainee: _Models | _Server
    if isinstance(method, AdmissionRule):
        served = method.make_policy(1, work.num_pipelines)
        run = simulate(served, replace(work, announce=method.announces))
        trainee = _Server(served, problem, learning_rate, seed)
    else:
        run = simulate(method, work)
        trainee = _Models(work.num_pipelines, problem, learning_rate, seed)
    points = [Point(0.0, 0, 0, problem.loss(problem.start))]
    evaluated = 0
    for at, event, decisions in run.entries:
        if isinstance(event, Left):
            break
        if isinstance(event, Ready):
            trainee.step(event.worker.pipeline)
        for group in decisions:
            trainee.average(group)
        if decisions and trainee.steps >= evaluated + work.num_pipelines:
            evaluated = trainee.steps
            points.append(Point(at, trainee.updates, trainee.steps, problem.loss(trainee.model)))
    return points


def at_target(points: Sequence[Point], target: float) -> Point | None:
    """The first point with a loss of at most ``target``; None if there is none."""
    return next((point for point in points if point.loss <= target), None)


class _Models:
    """A model for each pipeline, averaged in groups."""

    def __init__(self, num_pipelines: int, problem: Problem, learning_rate: float, seed: int) -> None:
        self._problem, self._learning_rate = problem, learning_rate
        self._random = [numpy.random.default_rng((seed, pipeline)) for pipeline in range(num_pipelines)]
        self._models = numpy.tile(problem.start, (num_pipelines, 1))
        self._computed_on = self._models.copy()
        self.updates = self.steps = 0

    @property
    def model(self) -> Vector:
        mean: Vector = self._models.mean(0)
        return mean

    def step(self, pipeline: int) -> None:
        gradient = self._problem.gradient(self._computed_on[pipeline], pipeline, self._random[pipeline])
        self._models[pipeline] -= self._learning_rate * gradient
        self.steps += 1

    def average(self, group: Group) -> None:
        members = [worker.pipeline for worker in group.members]
        self._models[members] = numpy.array(group.weights) @ self._models[members]
        going_on = [worker.pipeline for worker in group.members if worker not in group.passive]
        self._computed_on[going_on] = self._models[going_on]
        self.updates += 1


class _Server:
    """The parameters at a server, by what it has decided."""

    def __init__(self, served: AdmissionPolicy, problem: Problem, learning_rate: float, seed: int) -> None:
        self._problem, self._learning_rate = problem, learning_rate
        num_pipelines = served.participants.num_pipelines
        self._random = [numpy.random.default_rng((seed, pipeline)) for pipeline in range(num_pipelines)]
        self._verdicts = iter(served.verdicts)
        self.model = problem.start.copy()
        self._round = numpy.zeros_like(self.model)
        self._pulled = numpy.tile(problem.start, (num_pipelines, 1))
        self.updates = self.steps = 0

    def step(self, pipeline: int) -> None:
        gradient = self._problem.gradient(self._pulled[pipeline], pipeline, self._random[pipeline])
        verdict = next(self._verdicts)
        self._round -= self._learning_rate * verdict.weight * gradient
        self.steps += verdict.weight > 0.0
        if verdict.closes is not None:
            self.model = self.model + verdict.closes * self._round
            self._round = numpy.zeros_like(self.model)
            self.updates += bool(verdict.released)  # in bulk synchronous training the last push of a round
        self._pulled[list(verdict.released)] = self.model

    def average(self, group: Group) -> None:
        """Do nothing: a worker that goes on has pulled."""
