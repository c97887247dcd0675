"""Islands that are far apart and preempted: DiLoCo by quorum over slow links, while processes are killed.

Every pipeline is a host of its own (a network namespace) whose link the kernel holds down to a rate. Messages between
workers arrive later by an emulated latency, and so does what they and the scheduler say to each other, through a proxy.
Devices sleep instead of computing, and one is slower than the others. A pipeline that was killed is started again at
once, from a process that has imported everything, and gets the state of another one.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import Exchange, SDPipeStrategy
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock
from recipes.suites.emulated import passes
from recipes.suites.far_apart.samples import PacedBert, Text, learn_together, loader, losses, reached, rows_of, target
from recipes.suites.faults.elastic_world import Record, World, note_transfers, set_up
from recipes.suites.faults.injected_faults import Fault
from recipes.suites.late_messages import arrive_late
from recipes.suites.namespaces import hosts, inside
from recipes.suites.ratios import Ratios, Row, ratio
from recipes.suites.soak import Noted
from recipes.suites.trainings import make_trainer, quiet

LOWER_IS_BETTER = frozenset({"samples"})

UTILISATION_GOAL, QUORUM_GOAL, BYTES_GOAL, SAMPLES_GOAL = 0.83, 1.3, 70.0, 1.05
FEATURES, BATCH = 8, 4
KILLED, CALM, WAITS, BEST, ALL_REDUCE = "killed", "calm", "waits for all", "best", "all_reduce"
PATIENCE = 900.0
"""Seconds that a run may take."""


@dataclass(frozen=True)
class Islands:
    """The training of every pipeline, as :class:`~recipes.suites.faults.elastic_world.World` reads it.

    Args:
        num_pipelines: number of islands; the last one has the slow device.
        sync: a method.
        batch_seconds: length of a mini-batch, emulated.
        slow: factor of that on the slow device.
        num_parameters: of the model.
        batches: of all pipelines together in the only epoch.
        latency: seconds that a message takes besides, between workers or between one and the scheduler.
        text: what a BERT learns in the place of the emulated model, if any.
        rows: of it.
        seed: of the model.
    """

    num_pipelines: int
    sync: Any
    batch_seconds: float
    slow: float
    num_parameters: int
    batches: int
    latency: float
    num_stages: int = 1
    text: Text | None = None
    rows: Sequence[Tensor] = ()
    seed: int = 1

    def seconds(self, pipeline: int) -> float:
        """Return the length of a mini-batch on that island."""
        return self.batch_seconds * (self.slow if pipeline == self.num_pipelines - 1 else 1.0)


class Learner(L.LightningModule):
    """One emulated block."""

    def __init__(self, seconds: float, num_parameters: int) -> None:
        super().__init__()
        self.net = nn.Sequential(EmulatedBlock(*passes(seconds), num_parameters=num_parameters))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        output: Tensor = self.net(batch[1])
        return output.mean()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), 1e-3)


class Counted(Noted):
    """Notes how many bytes were sent to other islands so far, too, after each update."""

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        super().on_train_batch_end(trainer, *others)
        self._say_sent(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._say_sent(trainer)
        super().on_train_end(trainer, pl_module)

    def _say_sent(self, trainer: L.Trainer) -> None:
        assert isinstance(trainer.strategy, SDPipeStrategy)
        self.say("sent", bytes=trainer.strategy.statistics.bytes_sent)


def run(
    *,
    method: Mapping[str, Any],
    exchange: Mapping[str, Any],
    work: Mapping[str, Any],
    rate_mbit: float,
    kill_every: float,
    repeats: int,
    samples: Mapping[str, Any],
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Train with kills, without, and without where each round waits for all; and a BERT with kills and without.

    Args:
        method: specification of DiLoCo for Hydra, with a quorum.
        exchange: likewise.
        work: options of :class:`Islands`.
        rate_mbit: of every link, in either direction.
        kill_every: seconds.
        repeats: of each run.
        samples: ``text``, options of :class:`~recipes.suites.far_apart.samples.Text`; ``work``, those of
            :class:`Islands` that differ; ``fast_lrs``, learning rates, at the best of which it is compared with
            all-reduce; and the number of ``seeds``, which may be 0.
        seed: of the victims.

    Raises:
        NotAllowed: network namespaces cannot be made here.
    """
    quiet()
    rows: list[Row] = []

    def train(islands: Islands, draws: random.Random | None) -> tuple[list[Record], int]:
        with hosts(islands.num_pipelines + 1, rate_mbit) as names, inside(names[-1]):
            return _one(islands, names, draws, kill_every, hydra.utils.instantiate(exchange))

    for repeat in range(repeats):
        for name, options in ((KILLED, {}), (CALM, {}), (WAITS, {"quorum": None, "grace": "auto", "delay": 0})):
            islands = Islands(sync=hydra.utils.instantiate({**method, **options}), **work)
            records, kills = train(islands, random.Random(seed + repeat) if name == KILLED else None)
            rows.append({"run": name, "repeat": repeat, "kills": kills, **measured(records, islands)})
            print(rows[-1], flush=True)
    found = ratios(rows)
    for number in range(seed, seed + samples["seeds"]):
        text = Text(**samples["text"])
        of_bert: dict[str, Any] = {**work, **samples["work"], "rows": rows_of(text, number), "seed": number}
        calm = Islands(sync=hydra.utils.instantiate(method), text=text, **of_bert)
        fast = [replace(calm, text=replace(text, lr=lr)) for lr in samples["fast_lrs"]]
        killed = [losses(train(each, random.Random(number))[0]) for each in (calm, *fast)]
        row = to_target(losses(train(calm, None)[0]), killed, [by_all_reduce(each) for each in fast])
        rows.append({"run": "bert", "repeat": number, **row})
        print(rows[-1], flush=True)
    return rows, found | samples_ratios(rows)


def by_all_reduce(islands: Islands) -> list[float]:
    """Return the loss of each mini-batch of BERT where all islands average the gradients of each update."""
    assert islands.text is not None
    return learn_together(islands.text, islands.rows, islands.num_pipelines, islands.batches, islands.seed)


def to_target(calm: Sequence[float], killed: Sequence[Sequence[float]], all_reduce: Sequence[Sequence[float]]) -> Row:
    """Return how many mini-batches each run takes to the loss that the one without kills has while it still falls.

    Args:
        calm: losses without kills.
        killed: the same with kills, at the same learning rate and at some that are faster.
        all_reduce: of all-reduce at the faster ones.
    """
    goal = target(calm)
    return {
        "target": goal,
        CALM: reached(calm, goal),
        KILLED: reached(killed[0], goal),
        BEST: min(reached(each, goal) for each in killed),
        ALL_REDUCE: min(reached(each, goal) for each in all_reduce),
    }


def samples_ratios(rows: Sequence[Row]) -> Ratios:
    """Samples to the target with kills over those without, and over all-reduce's; one value per seed."""
    of_bert = [row for row in rows if row["run"] == "bert"]
    if not of_bert:
        return {}
    what = "mini-batches of a small BERT in the model at a loss, with kills over"
    return {
        "samples/far_apart": ratio(
            [row[KILLED] / row[CALM] for row in of_bert], SAMPLES_GOAL, f"{what} without; one value per seed"
        ),
        "samples/all_reduce": ratio(
            [row[BEST] / row[ALL_REDUCE] for row in of_bert],
            None,
            f"{what} all-reduce of the gradients (without kills, in one process), each at its best learning rate",
        ),
    }


def measured(records: Sequence[Record], islands: Islands) -> Row:
    """Return the seconds of a run and its utilisation: the seconds of mini-batches that are in the model over those of
    all devices. A mini-batch that died with a pipeline is trained again, and its last training counts.

    Raises:
        ValueError: a mini-batch was never trained.
    """
    trained = sorted(
        (line["at"], tuple(line["samples"]), record.pipeline)
        for record in records
        for line in record.lines
        if line["what"] == "trained"
    )
    last = {samples: pipeline for _, samples, pipeline in trained}
    if len(last) != islands.batches:
        raise ValueError(f"{len(last)} of {islands.batches} mini-batches were trained")
    began = min(at for record in records for at in record.times("start"))
    seconds = trained[-1][0] - began
    useful = sum(islands.seconds(pipeline) for pipeline in last.values())
    sent = sum(max(_said(record, "sent"), default=0) for record in records)
    nodes = islands.num_pipelines
    by_all_reduce = 2 * (nodes - 1) * 4 * islands.num_parameters * islands.batches / nodes
    return {
        "seconds": seconds,
        "utilisation": useful / (nodes * seconds),
        "trained_again": len(trained) - len(last),
        "bytes": sent,
        "state_bytes": sum(size for record in records for size in _said(record, "received")),
        "all_reduce_bytes": by_all_reduce,
    }


def _said(record: Record, what: str) -> list[int]:
    """Return the bytes that a process has said."""
    return [line["bytes"] for line in record.lines if line["what"] == what]


def ratios(rows: Sequence[Row]) -> Ratios:
    """Utilisation and bytes with kills, and without; speed without. No rows give none."""
    if not rows:
        return {}
    of = {name: [row for row in rows if row["run"] == name] for name in (KILLED, CALM, WAITS)}
    pairs = zip(of[WAITS], of[CALM], strict=True)
    kills = sum(row["kills"] for row in of[KILLED])
    states = sum(row["state_bytes"] for row in of[KILLED]) / 1e6
    return {
        "far_apart/utilisation": ratio(
            [row["utilisation"] for row in of[KILLED]],
            UTILISATION_GOAL,
            f"seconds of mini-batches in the model over those of all devices; {kills} kills",
        ),
        "far_apart/calm": ratio([row["utilisation"] for row in of[CALM]], None, "the same without kills"),
        "far_apart/quorum": ratio(
            [waits["seconds"] / calm["seconds"] for waits, calm in pairs],
            QUORUM_GOAL,
            "time of the epoch if each round waits for all, over that by quorum, without kills",
        ),
        "far_apart/bytes": ratio(
            [row["all_reduce_bytes"] / row["bytes"] for row in of[KILLED]],
            BYTES_GOAL,
            "bytes that all-reduce of the gradients would send (by arithmetic) over those sent, with kills; states of "
            f"newcomers, {states:.0f} MB, are not counted",
        ),
        "far_apart/bytes/calm": ratio(
            [row["all_reduce_bytes"] / row["bytes"] for row in of[CALM]], None, "the same without kills"
        ),
    }


def _one(
    islands: Islands, names: Sequence[str], draws: random.Random | None, kill_every: float, exchange: Exchange
) -> tuple[list[Record], int]:
    """One run to its end; returns what its processes noted, and the number of kills.

    Raises:
        TimeoutError: it does not end.
    """
    directory, pipelines = Path(tempfile.mkdtemp(prefix="far-apart-")), range(islands.num_pipelines)
    world = World(directory, islands, target=partial(learn, exchange), hosts=names, late=islands.latency)
    kills = 0
    try:
        world.start()
        world.wait(lambda: all(world.updates(i) for i in pipelines), "all islands to train", 120.0)
        next_kill, end = time.monotonic() + kill_every, time.monotonic() + PATIENCE
        while not all(world.exit_codes(i) == [0] for i in pipelines):
            time.sleep(0.05)
            if time.monotonic() > end:
                raise TimeoutError(f"the run did not end in {PATIENCE:g} s; {world.said()}")
            finished = any(world.exit_codes(i) == [0] for i in pipelines)
            gone = [i for i in pipelines if any(world.exit_codes(i))]
            if finished and all(i in gone or world.exit_codes(i) == [0] for i in pipelines):
                break
            for pipeline in [] if finished else gone:
                world.launch(pipeline)
            trains = [i for i in pipelines if world.lives(i) and world.updates(i)]
            if draws is not None and time.monotonic() >= next_kill and not finished and len(trains) > 1:
                next_kill += kill_every
                kills += 1
                world.kill(draws.choice(trains))
        return world.records(), kills
    finally:
        world.close()
        shutil.rmtree(directory)


def learn(
    exchange: Exchange,
    work: Islands,
    directory: Path,
    name: str,
    environment: Mapping[str, str],
    fault: Fault | None = None,
) -> None:
    """One worker, in a process of its own."""
    set_up(directory, name, environment)
    arrive_late(work.latency)
    diary = Counted(directory / f"{name}.diary")
    note_transfers(diary)
    torch.manual_seed(work.seed)
    strategy = SDPipeStrategy(sync=work.sync, exchange=exchange, num_micro_batches=1, timeout=timedelta(seconds=120))
    trainer = make_trainer(strategy, 1, diary)
    seconds = work.seconds(int(environment["SDPIPE_PIPELINE"]))
    if work.text is None:
        count = work.batches * BATCH
        data = DataLoader(TensorDataset(torch.arange(count), torch.randn(count, FEATURES)), BATCH)
        trainer.fit(Learner(seconds, work.num_parameters), data)
    else:
        trainer.fit(PacedBert(work.text, seconds), loader(work.text, work.rows, work.batches))
