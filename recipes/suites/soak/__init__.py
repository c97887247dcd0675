"""Many faults at random times: their kinds, victims and phases, and the methods, are all drawn from a seed.

Each run trains a small regression to its end while pipelines and the scheduler are killed, stopped and cut off, alone
and two at once, and disks are full for a while. The suite checks that no run hangs or goes back, that every sample of
every epoch is trained, by survivors exactly once, and that the final loss is that of the same run without faults. A run
that loses all pipelines at once either resumes from its newest checkpoint or ends with that reason, as is drawn, too. A
run that fails is named by its seed, with which you can try it again: ``suite.runs=1 seed=…``. Timing between processes
still differs then.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import Exchange
from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.exchange.options import Overlap
from lightning_sdpipe.exchange.payloads import NAMES
from lightning_sdpipe.sync import capabilities
from lightning_sdpipe.sync.methods import check as check_combination
from lightning_sdpipe.sync.methods import method_for
from lightning_sdpipe.worker.options import Schedule
from recipes.harness.namespaces import NotAllowed, hosts, inside
from recipes.harness.pipelines import Record
from recipes.harness.small_disks import disk
from recipes.suites.elastic import Work, World
from recipes.suites.grid import Ratios, Row, ratio
from recipes.suites.soak.events import CUTS, FULL, SILENCE, Events
from recipes.suites.trainings import quiet

LOWER_IS_BETTER = frozenset({"soak"})

FEATURES, BATCH = 8, 4
NOISE = 0.5
CHECKPOINT_EVERY = 20


class Here(NamedTuple):
    """Where the runs are: network namespaces as for :class:`~recipes.harness.pipelines.Pipelines`; and, by kind of
    event, why it cannot be made here."""

    hosts: Sequence[str]
    left_out: Mapping[str, str]


class Learner(L.LightningModule):
    """A linear regression with a hidden layer, so that there is something to cut."""

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


def regression(work: Work, pipeline: int) -> Sequence[Any]:
    """Return the model and its data, which do not depend on the suite's seed."""
    count = work.batches * BATCH
    features = torch.randn(count, FEATURES)
    targets = features.sum(1, keepdim=True) + NOISE * torch.randn(count, 1)
    data = TensorDataset(torch.arange(count), features, targets)
    return Learner(work.batch_seconds / work.num_stages), DataLoader(data, BATCH, shuffle=True)


def run(
    *,
    methods: Mapping[str, Any],
    events: int,
    runs: int | None,
    events_of_run: int,
    overlaps: Sequence[Overlap],
    payloads: Sequence[str],
    schedules: Sequence[Schedule],
    num_stages: Sequence[int],
    num_pipelines: int,
    batch_seconds: float,
    batches: int,
    epochs: int,
    calm: float,
    seed: int,
) -> tuple[list[Row], Ratios]:
    """Make runs until there have been ``events`` events.

    Args:
        methods: specifications for Hydra, by name; one is drawn for each run.
        events: number of events in all.
        runs: most runs; None for as many as it takes.
        events_of_run: most events in a run.
        overlaps: overlaps of the exchange; one is drawn for each run, like the next two. A choice that does not go with
            the run's method is replaced by the plain one.
        payloads: names of the exchange's payloads.
        schedules: schedules of the pipelines.
        num_stages: numbers of stages; one is drawn for each run.
        num_pipelines: N of each run.
        batch_seconds: seconds of a batch besides its compute.
        batches: batches of each pipeline in an epoch.
        epochs: epochs of each run.
        calm: mean seconds between two events.
        seed: seed of the first run; later ones count up from it.
    """
    quiet()
    rows: list[Row] = []
    calm_losses: dict[tuple[Any, ...], float | None] = {}
    with here(num_pipelines) as place:
        while sum(row["events"] for row in rows) < events and (runs is None or len(rows) < runs):
            number = seed + len(rows)
            draws = random.Random(f"soak {number}")  # a string, since nearby integers would draw alike at first
            name, stages = draws.choice(sorted(methods)), draws.choice(list(num_stages))
            sync = hydra.utils.instantiate(methods[name])
            overlap, resumes = draws.choice(list(overlaps)), draws.random() < 0.5
            payload, schedule = draws.choice(list(payloads)), draws.choice(list(schedules))
            overlap, payload, schedule = _going_with(sync, stages, overlap, payload, schedule)
            work = Work(
                stages,
                num_pipelines,
                sync,
                batches * num_pipelines,
                regression,
                batch_seconds,
                epochs=epochs,
                checkpoint_every=CHECKPOINT_EVERY,
                schedule=schedule,
                exchange=Exchange(NAMES[payload](), overlap),
            )
            row: Row = {"seed": number, "method": name, "overlap": overlap, "payload": payload, "schedule": schedule}
            row |= {"num_stages": stages, "resumes": resumes}
            kind = name, overlap, payload, schedule, stages
            if kind not in calm_losses:
                calm_losses[kind] = _one(work, place, random.Random(0), 0, calm, False)["loss"]
            row |= _one(work, place, draws, events_of_run, calm, resumes) | {"calm_loss": calm_losses[kind]}
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows, ratios(rows, sorted(place.left_out))


def _going_with(
    sync: Any, num_stages: int, overlap: Overlap, payload: str, schedule: Schedule
) -> tuple[Overlap, str, Schedule]:
    """Return the overlap, the payload and the schedule, with plain ones in place of those that do not go with the
    method in an elastic run."""
    plain = "1f1b", "full", "none"
    chosen: Any
    for chosen in product(*zip((schedule, payload, overlap), plain, strict=True)):
        exchange = Exchange(NAMES[chosen[1]](), chosen[2])
        asked = capabilities.Combination(sync, exchange, chosen[0], num_stages, elastic=True)
        with suppress(ConfigurationError):
            check_combination(method_for(asked), asked)
            return chosen[2], chosen[1], chosen[0]
    raise ConfigurationError(f"sync={sync!r} does not go with elastic runs")


@contextmanager
def here(num_pipelines: int) -> Iterator[Here]:
    """Make cables that can be pulled, and check that disks can be filled, as far as this process may; print
    what it may not."""
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        try:
            with tempfile.TemporaryDirectory() as directory, disk(Path(directory) / "disk"):
                pass
        except NotAllowed as reason:
            left_out |= dict.fromkeys(FULL, str(reason))
        names: list[str] = []
        try:
            names = stack.enter_context(hosts(num_pipelines + 1))
            stack.enter_context(inside(names[-1]))
        except NotAllowed as reason:
            left_out |= dict.fromkeys(CUTS, str(reason))
        for why in sorted(set(left_out.values())):
            print(f"without {', '.join(kind for kind, reason in left_out.items() if reason == why)}: {why}")
        yield Here(names, left_out)


def ratios(rows: Sequence[Row], left_out: Sequence[str] = ()) -> Ratios:
    """Return the number of failed runs; the ratio of the final loss to that of the run without events; and the longest
    standstill of each run."""
    events, failed = sum(row["events"] for row in rows), sum(bool(row["failed"]) for row in rows)
    meaning = f"runs that hung, or lost something, of {len(rows)}; {events} events"
    if left_out:
        meaning += f", none of them {' or '.join(left_out)}, which cannot be made here"
    found = {"soak/failed": ratio([float(failed)], 0.0, meaning)}
    good = [row for row in rows if not row["failed"] and row["loss"] is not None and row["calm_loss"] is not None]
    if good:
        quotients = [row["loss"] / row["calm_loss"] for row in good]
        meaning = "loss at the end of a run with events over that of the same run without"
        found["soak/loss"] = ratio(quotients, 1.1, meaning)
        still = [row["still_s"] for row in good]
        found["soak/still"] = ratio(still, None, "seconds of each run in which no pipeline made an update, at most")
    return found


def _one(work: Work, here: Here, draws: random.Random, events: int, calm: float, resumes: bool) -> Row:
    """Make one run to its end; return its row, which says whether it failed or lost anything."""
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    disks = {kind: directory / name for kind, name in zip(FULL, ("checkpoints", "logs"), strict=True)}
    row: Row = {"failed": "", "still_s": None, "loss": None}
    with ExitStack() as stack:
        for kind, where in disks.items():
            if kind not in here.left_out:
                stack.enter_context(disk(where))
        world = stack.enter_context(World(directory, work, worker_timeout=SILENCE, resume=resumes, hosts=here.hosts))
        done = Events(world, draws, events, calm, frozenset(here.left_out), disks)
        try:
            done.until_the_end()
            records = world.records()
            if not done.ended:
                codes = [code for pipeline in done.finished for code in world.exit_codes(pipeline)]
                assert codes, f"no pipeline has finished: {world.said()}"
                assert not any(codes), f"exit codes {codes}: {world.said()}"
                check(records, work, anew=bool({"scheduler", "leader_and_scheduler", "full_logs"} & done.what.keys()))
                last = [line for record in records if record.rank == 0 for line in record.said("update")]
                losses = [line["loss"] for line in last if line["epoch"] == work.epochs - 1]
                row["loss"] = statistics.mean(loss for loss in losses if loss is not None)
            times = sorted(at for record in records for at in record.times("update"))
            row["still_s"] = max((after - before for before, after in pairwise(times)), default=0.0)
        except (TimeoutError, AssertionError, SchedulerError) as error:
            kept = Path(f"{directory}-failed")
            shutil.copytree(directory, kept)  # the disks are unmounted
            (kept / "events.txt").write_text("\n".join(done.told))
            row["failed"] = f"{kept} has what all processes said; {str(error)[:1000]}"
    shutil.rmtree(directory)
    what, left_out = dict(sorted(done.what.items())), dict(sorted(done.left_out.items()))
    row |= {"events": done.count, "bystanders": done.bystanders, "ended": done.ended}
    return row | {"what": what, "left_out": left_out}


def check(records: Sequence[Record], work: Work, anew: bool = False) -> None:
    """Raise AssertionError if anything was lost; a run may begin ``anew`` if its scheduler died with all pipelines."""
    if not anew:
        first = min((at for record in records for at in record.times("update")), default=float("inf"))
        for record in records:
            late = max((line["at"] - first for line in record.said("started") if line["started"] == 0), default=0.0)
            assert late < 2.0, f"a process of pipeline {record.pipeline} began anew {late:.1f} s after the first update"
    every = set(range(work.batches * BATCH))
    for epoch in range(work.epochs):
        trained: Counter[int] = Counter()
        by_survivors: Counter[int] = Counter()
        for record in [record for record in records if record.rank == 0]:
            samples = [s for line in record.said("trained") if line["epoch"] == epoch for s in line["trained"]]
            trained.update(samples)
            by_survivors.update(samples if record.said("ended") else [])
        missing = every - trained.keys()
        assert not missing, f"{len(missing)} samples of epoch {epoch} were not trained: {sorted(missing)[:20]}"
        twice = [sample for sample, count in by_survivors.items() if count > 1]
        assert not twice, f"{len(twice)} samples of epoch {epoch} were trained twice by survivors: {sorted(twice)[:20]}"
    for record in records:
        made = [line["update"] for line in record.said("update")]
        assert made == sorted(made), f"a process of pipeline {record.pipeline} went back: {made}"
