"""Joint batches that are divided by speed among the pipelines that are there, on real processes, one of which is
killed in a round."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.dealing.joint_rounds import JointRounds
from lightning_sdpipe.sync import AllReduce
from recipes.harness.processes import hook
from tests.worker.elastic import jobs
from tests.worker.elastic.jobs import BATCH, SAMPLES, Diary, ElasticRun, elastic_run, fit
from tests.worker.elastic.test_all_reduce import Fault, Rounds

pytestmark = pytest.mark.distributed

PARTS, PIPELINES = 2, 3


class Shares(Callback):
    """Writes down how each round was divided, and who was in it."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (diary,) = (each for each in trainer.callbacks if isinstance(each, Diary))  # type: ignore[attr-defined]
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        training = strategy.training

        def ends(rounds: JointRounds, members: Sequence[int], trained: Sequence[int], *_: Any) -> None:
            shares = [[pipeline, places] for pipeline, places in rounds.turn().items()]
            diary.say(shares=shares, there=trained, epoch=trainer.current_epoch, update=training.updates)

        hook(JointRounds, "ended", ends)


def train(directory: Path, num_stages: int, fault: Fault | None = None) -> None:
    if fault is not None and int(os.environ["RANK"]) == 0:
        fault.inject()
    if os.environ["SDPIPE_PIPELINE"] == "1":
        jobs.SECONDS *= 8
    options = {"sync": AllReduce(), "num_stages": num_stages, "batch_by_speed": True, "num_micro_batches": PARTS}
    fit(directory, SAMPLES, options, more=[Rounds(), Shares()])


def check(run: ElasticRun, rank: int) -> None:
    """That all pipelines divided each round alike, and were equal after it; and that each micro-batch of an epoch was
    in a round, once if there is one stage."""
    made: dict[int, set[int]] = {}
    divided: dict[tuple[int, int], list[Any]] = {}
    for row in (row for pipeline in range(PIPELINES) for row in run.rows(pipeline, rank)[-1]):
        if "made" in row:
            made.setdefault(row["made"], set()).add(row["digest"])
        elif row.get("there"):  # where all are held up, nobody has a share
            divided.setdefault((row["epoch"], row["update"]), []).append((row["shares"], row["there"]))
    assert made
    assert all(len(seen) == 1 for seen in made.values()), "equal after every update"
    trained: dict[int, Counter[tuple[int, ...]]] = {}
    for (epoch, _), each in divided.items():
        assert all(other == each[0] for other in each)
        shares, there = each[0]
        places = [tuple(place) for pipeline, mine in shares if pipeline in there for place in mine]
        trained.setdefault(epoch, Counter()).update(places)
    for epoch, places in trained.items():
        assert len(places) == SAMPLES // BATCH * PARTS, (epoch, sorted(places))
        assert run.num_stages > 1 or set(places.values()) == {1}, (epoch, places)


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_is_killed_in_a_round_and_comes_back(tmp_path: Path, num_stages: int) -> None:
    with elastic_run(tmp_path, num_stages, PIPELINES) as run:
        work = partial(train, tmp_path, num_stages)
        run.lose_and_regain(partial(work, fault=Fault("amid", 12)), work, PIPELINES)
        run.finish_well(sync=AllReduce())
        for rank in range(num_stages):
            check(run, rank)
        rows = [row for row in run.rows(0)[-1] if len(row.get("there", ())) == PIPELINES]
        sizes = [{pipeline: len(places) for pipeline, places in row["shares"]} for row in rows]
        whole = [size for size in sizes if sum(size.values()) == PARTS * PIPELINES]
        assert any(size[1] < max(size.values()) for size in whole), "the slow one trains less"
