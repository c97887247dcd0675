"""Many deaths at random times: random pipelines, phases, signals and methods, all drawn from a seed.

Each run trains a small regression to its end while pipelines, and the scheduler, are killed and come back. Checked is
that nobody hangs or goes back, that every sample of every epoch is trained, by those that survive
exactly once, and that the loss at the end is that of the same run without deaths. A run that fails is named by its
seed, with which it can be tried again: ``suite.runs=1 seed=…``; what depends on who is how fast at the time differs.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import Exchange, SDPipeStrategy
from lightning_sdpipe.exchange.value import Overlap
from lightning_sdpipe.sync import NoSync
from recipes.suites.elastic_world import Diary, Fault, Record, World
from recipes.suites.injected_faults import inject
from recipes.suites.ratios import Ratios, Row, ratio
from recipes.suites.trainings import quiet

LOWER_IS_BETTER = frozenset({"soak"})

FEATURES, BATCH = 8, 4
NOISE = 0.5
STILL = 90.0  # seconds without an update of anybody, after which a run hangs
INSIDE = ("forward", "backward", "optimizer", "waiting", "exchange", "half_sent", "step_end", "newcomer", "donor")


class RunFailedError(RuntimeError):
    """A run that did not come to its end, or lost something, after so many deaths."""

    def __init__(self, reason: str, kills: int) -> None:
        super().__init__(reason)
        self.kills = kills


@dataclass(frozen=True)
class Regression:
    """What every pipeline trains."""

    num_stages: int
    num_pipelines: int
    sync: Any
    overlap: Overlap
    batch_seconds: float
    batches: int
    epochs: int


class Noted(Diary):
    """Notes the samples and the loss of every batch that is trained; Lightning's loop has turns in which none is."""

    _stepped = False

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._stepped = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self._stepped:
            self._stepped = False
            loss = None if outputs is None else float(outputs["loss"])
            samples = [int(number) for number in batch[0]]
            self.say("update", update=trainer.global_step, epoch=trainer.current_epoch, samples=samples, loss=loss)


class Learner(L.LightningModule):
    """A linear regression with a hidden layer between, so that there is something to cut."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Linear(16, 1))
        self._seconds = seconds

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        _, features, targets = batch
        time.sleep(self._seconds)
        loss: Tensor = (self.net(features) - targets).pow(2).mean()
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), 0.01)


def run(
    *,
    methods: Mapping[str, Any],
    kills: int,
    runs: int | None,
    kills_of_run: int,
    overlaps: Sequence[Overlap],
    num_stages: Sequence[int],
    num_pipelines: int,
    batch_seconds: float,
    batches: int,
    epochs: int,
    calm: float,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Runs until there were so many deaths, or so many runs.

    Args:
        methods: specifications for Hydra, by name; drawn for each run.
        kills: in all.
        runs: at most; None for as many as it takes.
        kills_of_run: at most.
        overlaps: of the exchange; drawn for each run whose method has one.
        num_stages: drawn for each run.
        num_pipelines: N of each run.
        batch_seconds: that a batch takes besides its compute.
        batches: of each pipeline in an epoch.
        epochs: of each run.
        calm: mean seconds between two deaths.
        seed: of the first run; the following ones count up from it.
    """
    quiet()
    rows: list[Row] = []
    calm_losses: dict[tuple[str, str, int], float] = {}
    while sum(row["kills"] for row in rows) < kills and (runs is None or len(rows) < runs):
        number = seed + len(rows)
        draws = random.Random(f"soak {number}")  # numbers that are near draw alike at first
        name, stages = draws.choice(sorted(methods)), draws.choice(list(num_stages))
        sync, overlap = hydra.utils.instantiate(methods[name]), draws.choice(list(overlaps))
        if isinstance(sync, NoSync):
            overlap = "none"
        work = Regression(stages, num_pipelines, sync, overlap, batch_seconds, batches, epochs)
        row: Row = {"seed": number, "method": name, "overlap": overlap, "num_stages": stages, "kills": 0}
        kind = name, overlap, stages
        try:
            if kind not in calm_losses:
                calm_losses[kind] = _one(work, random.Random(0), 0, calm)["loss"]
            row |= _one(work, draws, kills_of_run, calm) | {"failed": "", "calm_loss": calm_losses[kind]}
        except RunFailedError as error:
            row |= {"failed": str(error), "kills": error.kills}
        rows.append(row)
        print(_told(row, sum(each["kills"] for each in rows)), flush=True)
    return rows, ratios(rows)


def ratios(rows: Sequence[Row]) -> Ratios:
    """Failures per run, and the loss at the end over that of the run without deaths."""
    deaths = sum(row["kills"] for row in rows)
    failed = [float(bool(row["failed"])) for row in rows]
    found = {
        "soak/failed": ratio([sum(failed)], 0.0, f"runs that hung, or lost something, of {len(rows)}; {deaths} deaths")
    }
    good = [row for row in rows if not row["failed"]]
    if good:
        quotients = [row["loss"] / row["calm_loss"] for row in good]
        meaning = "loss at the end of a run with deaths over that of the same run without"
        found["soak/loss"] = ratio(quotients, 1.1, meaning)
    return found


def _told(row: Row, deaths: int) -> str:
    said = f"seed {row['seed']}, {row['method']}, overlap {row['overlap']}, {row['num_stages']} stages, "
    said += f"{row['kills']} deaths ({deaths} in all): "
    return said + (f"FAILED: {row['failed']}" if row["failed"] else f"loss {row['loss']:.4f}, {row['what']}")


def _one(work: Regression, draws: random.Random, kills: int, calm: float) -> Row:
    """One run to its end.

    Raises:
        RunFailedError: nobody makes an update, somebody fails, or something was lost.
    """
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    world = World(directory, work, ["--worker-timeout", "2"], learn)
    done = _Deaths(world, draws, kills, calm)
    try:
        done.until_the_end()
        records = world.records()
        codes = [code for pipeline in done.finished for code in world.exit_codes(pipeline)]
        assert codes, f"nobody has finished: {world.said()}"
        assert not any(codes), f"exit codes {codes}: {world.said()}"
        _check(records, work)
    except (TimeoutError, AssertionError) as error:
        (directory / "deaths.txt").write_text("\n".join(done.told))
        raise RunFailedError(f"{directory} has what everybody said; {str(error)[:1000]}", done.count) from error
    finally:
        world.close()
    shutil.rmtree(directory)
    losses = [
        line["loss"]
        for record in records
        for line in record.lines
        if line["what"] == "update" and line["epoch"] == work.epochs - 1 and line["loss"] is not None
    ]
    return {"kills": done.count, "loss": statistics.mean(losses), "what": dict(sorted(done.what.items()))}


class _Deaths:
    """Kills and starts again, at drawn times, while the run goes on."""

    def __init__(self, world: World, draws: random.Random, kills: int, calm: float) -> None:
        self.count = 0
        self.what: Counter[str] = Counter()
        self.told: list[str] = []
        """Lines with times, for who looks at a run that failed."""
        self.finished: set[int] = set()
        self._world, self._draws, self._kills, self._calm = world, draws, kills, calm
        self._everybody = range(world.work.num_pipelines)
        self._due: dict[int, float] = {}
        """When a dead pipeline is started again."""
        self._stopped: set[int] = set()
        self._made, self._made_at, self._asks_at = -1, time.monotonic(), 0.0

    def until_the_end(self) -> _Deaths:
        """Returns when all that live have finished."""
        world = self._world
        for pipeline in self._everybody:
            world.launch(pipeline)
        world.serve()
        everybody = self._everybody
        world.wait(lambda: len(world.members()) == len(everybody), "all to come")
        next_death = time.monotonic() + self._draws.expovariate(1 / self._calm)
        while not self._is_over():
            time.sleep(0.02)
            self._look_for_a_hang()
            self._bury_and_start()
            if time.monotonic() >= next_death and self.count < self._kills:
                next_death = time.monotonic() + self._draws.expovariate(1 / self._calm)
                self._strike()
        return self

    def _is_over(self) -> bool:
        """Has anybody finished, and all others that live?"""
        ended = {i for i in self._everybody if i not in self._due and not self._any_lives(i)}
        self.finished = {i for i in ended if not any(self._world.exit_codes(i))}
        return bool(self.finished) and all(i in ended or i in self._due for i in self._everybody)

    def _any_lives(self, pipeline: int) -> bool:
        return any(code is None for code in self._world.exit_codes(pipeline))

    def _look_for_a_hang(self) -> None:
        now, made = time.monotonic(), sum(path.stat().st_size for path in self._world.directory.glob("*.diary"))
        if made != self._made:
            self._made, self._made_at = made, now
        if now >= self._asks_at:
            self._asks_at = now + 5.0
            if (over := self._world.failure()) is not None:
                raise TimeoutError(f"the run was ended: {over}")
        if now - self._made_at > STILL:
            raise TimeoutError(f"nobody has made an update for {STILL:g} s; {self._world.said()}")

    def _bury_and_start(self) -> None:
        now, world = time.monotonic(), self._world
        for pipeline in self._everybody:
            if pipeline in self._due:
                if now >= self._due[pipeline] and not self.finished:
                    del self._due[pipeline]
                    self._stopped.discard(pipeline)
                    self._tell(f"starts pipeline {pipeline}")
                    world.launch(pipeline, self._perhaps_a_fault())
            elif any(world.exit_codes(pipeline)):  # one of it has failed or was killed; the rest follows
                world.end(pipeline)
                self._due[pipeline] = now + self._draws.uniform(0.0, 1.0)

    def _perhaps_a_fault(self) -> Fault | None:
        if self.count >= self._kills or self._draws.random() > 0.25:
            return None
        phase = self._draws.choice(INSIDE)
        fault = Fault(phase, self._draws.randrange(2 * self._world.work.batches))
        self._count(phase, f"to come: {fault}")
        return fault

    def _strike(self) -> None:
        world, draws = self._world, self._draws
        members = [i for i in world.members() if i not in self._due and i not in self._stopped and world.lives(i)]
        kind = draws.choices(["kill", "term", "stop", "scheduler"], [70, 10, 8, 12])[0]
        if kind == "scheduler":
            world.restart_scheduler()
        elif len(members) < 2:  # the last one must stay: nobody else has the model
            return
        else:
            victim, rank = draws.choice(members), draws.randrange(world.work.num_stages)
            number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}[kind]
            world.kill(victim, rank, number)
            if kind == "stop":
                self._stopped.add(victim)
                self._due[victim] = time.monotonic() + draws.uniform(0.0, 4.0)
            self._tell(f"pipeline {victim}, rank {rank}")
        self._count(kind)

    def _count(self, kind: str, more: str = "") -> None:
        self.count += 1
        self.what[kind] += 1
        self._tell(f"{kind} {more}")

    def _tell(self, what: str) -> None:
        self.told.append(f"{time.strftime('%H:%M:%S')} {time.monotonic():.3f} {what}")


def _check(records: Sequence[Record], work: Regression) -> None:
    """Raises AssertionError, with what was lost."""
    every = set(range(work.batches * BATCH * work.num_pipelines))
    for epoch in range(work.epochs):
        trained: Counter[int] = Counter()
        by_survivors: Counter[int] = Counter()
        for record in records:
            survives = any(line["what"] == "end" for line in record.lines)
            for line in record.lines:
                if line["what"] == "update" and line["epoch"] == epoch and record.rank == 0:
                    trained.update(line["samples"])
                    by_survivors.update(line["samples"] if survives else [])
        missing = every - trained.keys()
        assert not missing, f"{len(missing)} samples of epoch {epoch} were not trained: {sorted(missing)[:20]}"
        twice = [sample for sample, count in by_survivors.items() if count > 1]
        assert not twice, f"{len(twice)} samples of epoch {epoch} were trained twice by survivors: {sorted(twice)[:20]}"
    for record in records:
        made = [line["update"] for line in record.lines if line["what"] == "update"]
        assert made == sorted(made), f"a process of pipeline {record.pipeline} went back: {made}"


def learn(
    work: Regression, directory: Path, name: str, environment: Mapping[str, str], fault: Fault | None = None
) -> None:
    """One worker, in a process of its own."""
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {**environment, "OMP_NUM_THREADS": "1"}  # else Lightning gives each job all processors
    torch.set_num_threads(1)
    quiet()
    torch.manual_seed(1)  # of the model and its data; the suite's seed draws what happens
    count = work.batches * BATCH * work.num_pipelines
    features = torch.randn(count, FEATURES)
    targets = features.sum(1, keepdim=True) + NOISE * torch.randn(count, 1)
    module = Learner(work.batch_seconds / work.num_stages)
    diary = Noted(directory / f"{name}.diary")
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=SDPipeStrategy(
            sync=work.sync,
            exchange=Exchange(overlap=work.overlap),
            num_micro_batches=1,
            timeout=timedelta(seconds=60),
        ),
        callbacks=[diary],
        max_epochs=work.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if fault is not None:
        inject(fault, trainer, module, diary)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(count), features, targets), BATCH, shuffle=True))
