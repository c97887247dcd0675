"""Elastic runs for tests: what their pipelines train, and what they must have done."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from lightning_sdpipe import SDPipeStrategy, SDPipeWeightAveraging
from lightning_sdpipe.policies import registry
from lightning_sdpipe.scheduler.log.event_log import read_log
from lightning_sdpipe.worker.training import Phase
from recipes.harness import pipelines, processes
from tests import patience
from tests.loop.numbered import Numbered, Slow
from tests.patience import limit
from tests.workers import listening

BATCH = 4
SAMPLES = 96
SECONDS = 0.02
"""Of a batch."""
FINDING_OUT = 30.0  # seconds


class Model(L.LightningModule):
    """Each pipeline initialises it differently, as no script should."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["SDPIPE_PIPELINE"]))
        one, two = Slow(SECONDS / 2), Slow(SECONDS / 2)
        self.net = nn.Sequential(nn.Linear(2, 8), one, nn.BatchNorm1d(8), nn.Tanh(), two, nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ByHand(Model):
    """Two optimizers, which the training step steps one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()  # type: ignore[call-arg]

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(half.parameters(), 0.01) for half in (self.net[:3], self.net[3:])]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]


def sums(module: L.LightningModule) -> dict[str, float]:
    """Of each of the tensors that this process has."""
    return {name: value.double().sum().item() for name, value in module.state_dict().items() if not value.is_meta}


class Diary(pipelines.Diary):
    """Writes down what happens to the model."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.before = time.monotonic()
        self.directory = directory

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        steps = [int(state["step"]) for state in optimizer.state.values()]
        moments = max(steps, default=0)
        where = {"started": trainer.global_step, "epoch": trainer.current_epoch, "listens": listening()}
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        where["averaged"] = [int(each) for each in strategy.training.sync.replica.averages if each.dim() == 0]
        self.say(**where, moments=moments, state=sums(module))
        self.before = time.monotonic()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch = batch[1].tolist()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _: Any) -> None:
        """Before the scheduler can be told of it: this process may be killed at any moment."""
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        if strategy.training.phase is Phase.FINISHING:  # with the gradients of others
            return
        self.say(trained=self.batch, epoch=trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, _: Any, batch: Any, __: int) -> None:
        now, strategy = time.monotonic(), trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        members = strategy.statistics.members - strategy.statistics.groups  # others that it averaged with
        seconds, self.before = now - self.before, now
        self.say(step=trainer.global_step, epoch=trainer.current_epoch, took=seconds, others=members)

    def on_validation_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.validated = sums(module)  # the average over time, if there is one

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.say(
            pause=trainer.global_step,
            epoch=trainer.current_epoch,
            state=sums(module),
            of=self.validated,
            metrics=metrics,
        )
        self.before = time.monotonic()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.should_stop |= (self.directory / "stop").exists()  # on whoever sees it first

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.say(ended=trainer.global_step, rates=rates, leads=trainer.is_global_zero)


def fit(
    directory: Path,
    samples: int,
    options: dict[str, Any],
    accelerator: Any = "cpu",
    average: bool = False,
    more: Sequence[Callback] = (),
    model: Callable[[], L.LightningModule] = Model,
    evaluated: int = 16,
    beside: float = 1.0,
    **limits: Any,
) -> None:
    """What the user's script does: it trains until the test says stop. So many samples are ``evaluated`` at once, and
    those to be trained have a number ``beside``."""
    strategy = SDPipeStrategy(**{"timeout": limit(FINDING_OUT), **options})
    callbacks: list[Callback] = [SDPipeWeightAveraging(decay=0.9)] if average else []
    trainer = L.Trainer(
        accelerator=accelerator,
        strategy=strategy,
        default_root_dir=directory,
        max_epochs=10_000,
        logger=CSVLogger(directory, flush_logs_every_n_steps=1),
        log_every_n_steps=5,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Diary(directory), *more, ModelCheckpoint(every_n_train_steps=10, save_top_k=-1)],
        **limits,
    )
    data, seen = Numbered(samples, beside), Subset(Numbered(samples, 1.0), range(16))
    trainer.fit(model(), DataLoader(data, BATCH, shuffle=True), DataLoader(seen, evaluated))


class ElasticRun(pipelines.Pipelines):
    """A run in ``directory``, with a log of the scheduler's events."""

    def __init__(self, directory: Path, num_stages: int, num_pipelines: int, **terms: Any) -> None:
        self._log = directory / "events.jsonl"
        super().__init__(directory, num_stages, num_pipelines, log=self._log, **terms)

    def rows(self, pipeline: int, rank: int = 0) -> list[list[dict[str, Any]]]:
        """What each start of a worker that has begun to train wrote down, the oldest first."""
        return [record.lines for record in self.records(pipeline, rank) if record.lines]

    def turns(self, pipeline: int) -> int:
        """Of the newest start."""
        rows = self.rows(pipeline)
        return sum("took" in row for row in rows[-1]) if rows else 0

    def wait(self, until: Callable[[], Any], what: str, seconds: float = 0.0) -> Any:
        """For as long as the processes do something, whatever the ``seconds``."""
        codes = {pipeline: self.exit_codes(pipeline) for pipeline in self.newest}
        return patience.until(until, lambda: f"{what} did not happen; exit codes were {codes}:\n{self.said()}")

    def wait_for_turns(self, pipelines: Iterator[int] | range | list[int], more: int) -> None:
        """Until all of them have made so many turns more."""
        aims = {pipeline: self.turns(pipeline) + more for pipeline in pipelines}
        for pipeline, aim in aims.items():
            self._wait_while_it_runs(pipeline, lambda i=pipeline, aim=aim: self.turns(i) >= aim, f"turn {aim}")

    def wait_for_newcomer(self, pipeline: int) -> None:
        """Until the second start of a pipeline has made its first turn."""
        self._wait_while_it_runs(pipeline, lambda: len(self.rows(pipeline)) == 2, "the newcomer's first turn")

    def _wait_while_it_runs(self, pipeline: int, holds: Callable[[], bool], what: str) -> None:
        self.wait(lambda: (over := self.ended(pipeline)) or holds() or over, f"{what} of pipeline {pipeline}")
        assert holds(), f"pipeline {pipeline} ended before {what}:\n{self.said()}"

    def comes_back(self, pipeline: int, work: Callable[[], None], turns: int) -> None:
        """It is started for the second time, and makes so many turns more."""
        self.start(pipeline, work)
        self.wait_for_newcomer(pipeline)
        self.wait_for_turns([pipeline], turns)

    def lose_and_regain(
        self,
        dies: Callable[[], None],
        work: Callable[[], None],
        pipelines: int = 3,
        alone: int = 8,
        again: int = 8,
        kill_after: int = 0,
    ) -> float:
        """Starts so many ``pipelines``. The last one ``dies`` by itself, or is killed after so many turns; when the
        others have made some ``alone``, it comes back and makes some ``again``. The time of its death."""
        last = pipelines - 1
        for pipeline in range(pipelines):
            self.start(pipeline, dies if pipeline == last else work)
        if kill_after:
            self.wait_for_turns(range(pipelines), kill_after)
            self.kill(last)
        self.wait(lambda: self.ended(last), f"the death of pipeline {last}")
        died = self.rows(last)[0][-1]["at"]
        self.wait_for_turns(range(last), alone)
        self.comes_back(last, work, again)
        return float(died)

    def finish_well(self, **options: Any) -> None:
        """Ends the run: all end well, groups were those of the ``options``, and replicas were equal at every pause, bit
        for bit, metrics too."""
        codes = self.finish()
        assert codes == dict.fromkeys(codes, [0] * self.num_stages), self.said()
        self.check_policy(**options)
        self.check_replicas(sorted(codes))

    def ends_as(self, codes: dict[int, list[int]]) -> None:
        """Ends the run: the newest starts have these exit codes, no sample was lost, and those that ended well were
        equal at every pause."""
        found = self.finish()
        assert found == codes, self.said()
        self.check_samples()
        self.check_replicas([pipeline for pipeline, of in codes.items() if not any(of)])

    def check_replicas(self, pipelines: Sequence[int]) -> None:
        """They were equal at every pause."""
        for rank in range(self.num_stages):
            pauses: dict[tuple[int, int], list[Any]] = {}
            for row in (row for pipeline in pipelines for row in self.rows(pipeline, rank)[-1] if "pause" in row):
                pauses.setdefault((row["epoch"], row["pause"]), []).append((row["state"], row["of"], row["metrics"]))
            assert pauses
            for at, seen in pauses.items():
                assert all(other == seen[0] for other in seen), (rank, at, seen)

    def check_samples(self, samples: int = SAMPLES, rank: int = 0) -> None:
        """None was lost in any epoch, as this rank has trained them."""
        trained = self.trained(rank)
        assert sorted(trained) == list(range(len(trained)))
        assert all(set(counts) == set(range(samples)) for counts in trained.values())

    def check_turns(self, pipelines: Sequence[int], at: float, seconds: float = 5.0) -> None:
        """None near ``at`` took that much longer than others."""
        for pipeline in pipelines:
            longest, median = self.longest(pipeline, at)
            assert longest < median + limit(seconds).total_seconds(), (longest, median)

    def finish(self) -> dict[int, list[int | None]]:
        """Ends the run with the epoch; the exit codes of the last start of each pipeline."""
        (self.directory / "stop").touch()
        return self.codes("the end")

    def codes(self, at: str) -> dict[int, list[int | None]]:
        """Waits for all pipelines to end; the exit codes of the last start of each."""
        self.wait(lambda: all(map(self.ended, self.newest)), at)
        return {pipeline: self.exit_codes(pipeline) for pipeline in self.newest}

    def check_policy(self, **options: Any) -> None:
        """That all groups were made by that of the script's options."""
        deciding = [each for each in read_log(self._log) if any(entry.decisions for entry in each.entries)]
        policies = [registry.from_plain(record.beginning.policy) for record in deciding]
        with mock.patch.dict(os.environ, {"SDPIPE_PIPELINE": "0", "SDPIPE_SCHEDULER": self.scheduler.address}):
            method = SDPipeStrategy(**options).options.method
        assert policies == [getattr(method, "elastic_policy", method.policy)], policies

    def trained(self, rank: int = 0) -> dict[int, Counter[int]]:
        """How often each sample was trained in each epoch, by this rank of all pipelines."""
        found: dict[int, Counter[int]] = {}
        for pipeline in self.newest:
            for rows in self.rows(pipeline, rank):
                for row in rows:
                    if "trained" in row:
                        found.setdefault(row["epoch"], Counter()).update(row["trained"])
        return found

    def longest(self, pipeline: int, at: float, seconds: float = 1.5) -> tuple[float, float]:
        """The longest turn from ``at`` on, and the median of all."""
        turns = [row for row in self.rows(pipeline)[-1] if "took" in row]
        took = sorted(row["took"] for row in turns)
        near = [row["took"] for row in turns if at <= row["at"] <= at + seconds]
        return max(near, default=0.0), took[len(took) // 2]


def die_in(owner: Any, name: str, number: int, after: bool = False) -> None:
    """Ends this process in its call of this function of that number, or when that is over."""
    calls = count(1)

    def strike(*_: Any) -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    processes.hook(owner, name, strike, after)


@contextmanager
def elastic_run(
    directory: Path, num_stages: int, num_pipelines: int, *, work: Callable[[], None] | None = None, **terms: Any
) -> Iterator[ElasticRun]:
    """All pipelines begin, with ``work``, if there is some."""
    with ElasticRun(directory, num_stages, num_pipelines, **terms) as run:
        for pipeline in range(num_pipelines) if work is not None else ():
            run.start(pipeline, work)
        yield run
