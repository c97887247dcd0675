"""Real training that follows the decisions of a simulated run: what its staleness does to a model.

A two-layer network on scikit-learn's handwritten digits, under SGD with momentum. Every pipeline draws from a shard of
its own. A step begins with the model that the worker has when it is answered, and is added to what the model has become
when it ends; then groups average as they were decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from lightning_sdpipe.policies import Joined, Ready
from lightning_sdpipe.simulate import Run

Array = NDArray[np.float64]
Point = tuple[float, int, float]
"""Seconds, samples of all pipelines, and accuracy of the mean model on what is held out."""

HELD_OUT = 360
INPUTS, CLASSES = 64, 10


@dataclass(frozen=True)
class Task:
    """``target`` is the accuracy to reach; ``points`` how often it is looked."""

    hidden: int
    batch_size: int
    lr: float
    momentum: float
    target: float
    points: int


@dataclass
class _Replica:
    model: Array
    start: Array
    velocity: Array
    draws: np.random.Generator
    images: Array
    labels: NDArray[Any]


def train(run: Run, task: Task, seed: int) -> list[Point]:
    """Accuracy over time, until the first pipeline has finished."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = digits.data[order] / 16 - 0.5, digits.target[order]
    held_out = images[:HELD_OUT], labels[:HELD_OUT]
    first = _new_model(task, seed)
    count = run.work.num_pipelines
    replicas = [
        _Replica(
            first.copy(),
            first,
            np.zeros_like(first),
            np.random.default_rng([seed, p]),
            images[HELD_OUT + p :: count],
            labels[HELD_OUT + p :: count],
        )
        for p in range(count)
    ]
    end, samples, curve = min(run.finished.values()), 0, list[Point]()
    due = [end * (k + 1) / task.points for k in range(task.points)]
    for at, event, decisions in run.entries:
        while due and at > due[0]:
            mean = np.mean([replica.model for replica in replicas], axis=0)
            curve.append((due.pop(0), samples, _accuracy(mean, task, *held_out)))
        match event:
            case Joined(worker):
                replicas[worker.pipeline].start = replicas[worker.pipeline].model
            case Ready(worker):
                _step(replicas[worker.pipeline], task)
                samples += task.batch_size
        for group in decisions:
            mean = np.zeros_like(first)
            for worker, weight in zip(group.members, group.weights, strict=True):
                mean += weight * replicas[worker.pipeline].model
            for worker in group.members:
                replicas[worker.pipeline].model = mean.copy()
                if worker not in group.passive:
                    replicas[worker.pipeline].start = mean
    return curve


def reached(curve: Sequence[Point], target: float) -> Point | None:
    """Return the point where it was first as good as that, in the mean of three points."""
    for before, point, after in zip(curve, curve[1:], curve[2:], strict=False):
        if (before[2] + point[2] + after[2]) / 3 >= target:
            return point
    return None


def accuracy_at(curve: Sequence[Point], samples: int) -> float:
    """The mean of the last tenth of what had been seen by then."""
    return float(np.mean([point[2] for point in curve if 0.9 * samples <= point[1] <= samples]))


def _new_model(task: Task, seed: int) -> Array:
    draws = np.random.default_rng([seed, 1 << 20])
    first = draws.normal(size=(INPUTS, task.hidden)) * (2 / INPUTS) ** 0.5
    second = draws.normal(size=(task.hidden, CLASSES)) * (2 / task.hidden) ** 0.5
    return np.concatenate([first.ravel(), np.zeros(task.hidden), second.ravel(), np.zeros(CLASSES)])


def _layers(model: Array, hidden: int) -> tuple[Array, Array, Array, Array]:
    a, b, c = INPUTS * hidden, (INPUTS + 1) * hidden, (INPUTS + 1 + CLASSES) * hidden
    return model[:a].reshape(INPUTS, hidden), model[a:b], model[b:c].reshape(hidden, CLASSES), model[c:]


def _step(replica: _Replica, task: Task) -> None:
    chosen = replica.draws.integers(0, len(replica.labels), task.batch_size)
    images, labels = replica.images[chosen], replica.labels[chosen]
    first, first_bias, second, second_bias = _layers(replica.start, task.hidden)
    hidden = np.maximum(images @ first + first_bias, 0)
    scores = hidden @ second + second_bias
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    error = scores / scores.sum(axis=1, keepdims=True)
    error[np.arange(task.batch_size), labels] -= 1
    error /= task.batch_size
    back = (error @ second.T) * (hidden > 0)
    parts = (images.T @ back).ravel(), back.sum(axis=0), (hidden.T @ error).ravel(), error.sum(axis=0)
    replica.velocity = task.momentum * replica.velocity + np.concatenate(parts)
    replica.model = replica.model - task.lr * replica.velocity


def _accuracy(model: Array, task: Task, images: Array, labels: NDArray[Any]) -> float:
    first, first_bias, second, second_bias = _layers(model, task.hidden)
    scores = np.maximum(images @ first + first_bias, 0) @ second + second_bias
    return float((scores.argmax(axis=1) == labels).mean())
