"""An elastic run of three pipelines, one of which is killed and restarted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_sdpipe import SDPipeStrategy
from recipes.gpu.models import TINY_BERT, Kind
from recipes.gpu.rows import Values
from recipes.gpu.running import NEVER, Machine, Trial, adamw, loader, trainer_of
from recipes.harness import pipelines

PIPELINES, STRUCK, BEFORE, AFTER = 3, 1, 10, 5
STEP_SECONDS = 0.05


def killed(machine: Machine) -> Values:
    """Kill a pipeline with ``kill -9``; return the longest step of the others, and when it was back."""
    folder, work = machine.folder / "elastic", partial(train, machine)
    folder.mkdir()
    with pipelines.Pipelines(folder, 1, PIPELINES) as run:
        for pipeline in range(PIPELINES):
            run.start(pipeline, work)
        _wait(run, lambda: all(len(steps(run, each)) >= BEFORE for each in range(PIPELINES)))
        at = run.kill(STRUCK)
        run.start(STRUCK, work)
        _wait(run, lambda: len([each for each in steps(run, STRUCK) if each > at]) >= AFTER)
    others = [record for record in run.records() if record.pipeline != STRUCK]
    usual, longest = pipelines.usual_and_longest(pipelines.spans(others, "step"), at)
    back = min(each for each in steps(run, STRUCK) if each > at) - at
    return {"usual step, s": usual, "longest step of the others, s": longest, "back after, s": back}


def steps(run: pipelines.Traces, pipeline: int) -> list[float]:
    """Return the times at which this pipeline finished steps, in all its lives."""
    return [at for record in run.records(pipeline) for at in record.times("step")]


def _wait(run: pipelines.Pipelines, until: Callable[[], bool]) -> None:
    def seen() -> bool:
        if not all(map(run.lives, range(PIPELINES))):
            raise RuntimeError(f"a pipeline has ended; {run.said()}")
        return until()

    run.wait(seen, "the pipelines", NEVER)


class Diary(pipelines.Diary):
    """Writes down when a step ends."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.say(step=True)


def train(machine: Machine) -> None:
    """Train a pipeline until it is killed."""
    backend = "gloo" if machine.shares(PIPELINES) else None
    devices = machine.devices(max(1, machine.count))  # each pipeline takes one of them
    strategy = SDPipeStrategy(parallel_devices=devices, process_group_backend=backend)
    kind = Kind(True, TINY_BERT, 16, 8)
    trainer = trainer_of(machine, strategy, 1, max_epochs=1, callbacks=[Diary()])
    trainer.fit(Trial(kind.net(), adamw, STEP_SECONDS), loader(kind.samples(100_000), kind.batch))
