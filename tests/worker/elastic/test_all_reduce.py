"""All-reduce of the pipelines that are there, on real processes that are killed in every phase of a round."""

from __future__ import annotations

import os
import signal
import zlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import WorkerFailedError
from lightning_sdpipe.exchange.encoded_mean import EncodedMean
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Half
from lightning_sdpipe.exchange.present_rounds import PresentRounds, Round
from lightning_sdpipe.exchange.references import CommonReference
from lightning_sdpipe.sync import AllReduce
from lightning_sdpipe.sync.present_averaging import PresentAveraging
from recipes.harness.processes import hook
from tests.worker.elastic.jobs import BATCH, SAMPLES, Diary, ElasticRun, elastic_run, fit

pytestmark = pytest.mark.distributed

BATCHES = SAMPLES // BATCH
IN_FULL = Exchange()


class Rounds(Callback):
    """Writes down what each round was made of, and what the parameters are after each update."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SDPipeStrategy)
        (self.diary,) = (each for each in trainer.callbacks if isinstance(each, Diary))  # type: ignore[attr-defined]
        self.training, rounds = strategy.training, strategy.training.sync
        assert isinstance(rounds, PresentAveraging)
        self.rounds, heard = rounds, rounds.on_round

        def hear(outcome: Round) -> None:
            said = {"members": outcome.members, "batches": outcome.batches, "weight": outcome.weight}
            ways = {"again": rounds.again, "taken": rounds.taken}
            self.diary.say(round=self.training.updates, epoch=trainer.current_epoch, **said, **ways)
            heard(outcome)

        rounds.on_round = hear

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        of = [p.detach().numpy().tobytes() for p in module.parameters() if not p.is_meta]
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.diary.say(made=self.training.updates, digest=zlib.crc32(b"".join(of)), rates=rates)


class Fault:
    """Ends this process in the round of an ``update``, in a ``phase``: when the first bucket is on its way, or when the
    mean has come. Or it breaks off then, as if the mean had not come."""

    def __init__(self, phase: str, update: int) -> None:
        self.phase, self.update, self.broke = phase, update, False

    def inject(self) -> None:
        def strike(rounds: PresentRounds, *_: Any) -> None:
            if rounds.mark >= self.update:
                os.kill(os.getpid(), signal.SIGKILL)

        def strike_coded(mean: EncodedMean, *_: Any) -> None:
            if isinstance(mean.coding, CommonReference) and mean.coding.update >= self.update:
                os.kill(os.getpid(), signal.SIGKILL)

        def break_off(rounds: PresentRounds, *_: Any) -> None:
            if rounds.mark >= self.update and not self.broke:
                self.broke = True
                raise WorkerFailedError("as if the mean had not come")

        match self.phase:
            case "amid":
                hook(PresentRounds, "_reduce", strike, after=True)
                hook(EncodedMean, "_combine", strike_coded)
            case "after":
                hook(PresentRounds, "_means", strike)
            case "breaks":
                hook(PresentRounds, "_means", break_off)


def train(
    directory: Path, num_stages: int = 1, fault: Fault | None = None, exchange: Exchange = IN_FULL, rank: int = 0
) -> None:
    if fault is not None and int(os.environ["RANK"]) == rank:
        fault.inject()
    os.environ["SDPIPE_HOST"] = "aab"[int(os.environ["SDPIPE_PIPELINE"])]
    fit(directory, SAMPLES, {"sync": AllReduce(), "num_stages": num_stages, "exchange": exchange}, more=[Rounds()])


def check(run: ElasticRun, pipelines: list[int], weight_of_each: int = BATCH) -> dict[str, int]:
    """That replicas were equal after every update, that each made each update once, and that with one stage each batch
    was in one update; how many rounds were tried again, and how many means handed over."""
    found: Counter[str] = Counter()
    for rank in range(run.num_stages):
        made: dict[int, set[Any]] = {}
        of: dict[int, set[Any]] = {}
        for pipeline in pipelines:
            rows = run.rows(pipeline, rank)[-1]
            updates = [row["round"] for row in rows if row.get("weight", 0) > 0]
            assert updates == sorted(set(updates)), "each once"
            for row in rows:
                if "made" in row:
                    made.setdefault(row["made"], set()).add((row["digest"], *row["rates"]))
                elif row.get("weight", 0) > 0:
                    said = tuple(row["members"]), tuple(map(tuple, row["batches"])), row["weight"]
                    of.setdefault(row["round"], set()).add((row["epoch"], *said))
            ways = [row for row in rows if "again" in row][-1]
            found.update({"again": ways["again"], "taken": ways["taken"]})
        assert made
        different = {update: seen for update, seen in made.items() if len(seen) > 1}
        assert not different, (rank, different)
        assert all(len(seen) == 1 for seen in of.values()), of
        rounds = [next(iter(seen)) for _, seen in sorted(of.items())]
        assert all(weight == weight_of_each * len(batches) for _, _, batches, weight in rounds)
        for epoch in {epoch for epoch, *_ in rounds}:
            trained = Counter(batch for of_epoch, _, batches, _ in rounds if of_epoch == epoch for batch in batches)
            whole = epoch > min(epoch for epoch, *_ in rounds) or 0 in {min(of)}
            if run.num_stages == 1 and trained:
                assert max(trained.values()) == 1, (epoch, trained)
            if whole:
                assert len(trained) == BATCHES, (epoch, sorted(trained))
    return dict(found)


@pytest.mark.parametrize(
    ("num_stages", "phase", "exchange"),
    [
        pytest.param(1, "amid", IN_FULL, marks=pytest.mark.slow),
        pytest.param(1, "after", IN_FULL, marks=pytest.mark.slow),
        (2, "amid", IN_FULL),
        pytest.param(1, "amid", Exchange(EightBit(block=8, feedback=True)), marks=pytest.mark.slow),
        (1, "amid", Exchange(EightBit(block=8, feedback=True), hierarchy="hosts")),
        pytest.param(2, "after", Exchange(Half()), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_is_killed_in_a_round_and_comes_back(
    tmp_path: Path, num_stages: int, phase: str, exchange: Exchange
) -> None:
    with elastic_run(tmp_path, num_stages, 3) as run:
        work = partial(train, tmp_path, num_stages, exchange=exchange)
        run.lose_and_regain(partial(work, fault=Fault(phase, 8)), work)
        run.finish_well(sync=AllReduce())
        check(run, [0, 1, 2], BATCH if exchange.is_full else 1)


def test_one_that_breaks_off_gets_the_mean_of_encoded_gradients_all_the_same(tmp_path: Path) -> None:
    with elastic_run(tmp_path, 1, 2) as run:
        for pipeline in range(2):
            fault = Fault("breaks", 12) if pipeline == 1 else None
            run.start(pipeline, partial(train, tmp_path, 1, fault, Exchange(EightBit(block=8, feedback=True))))
        run.wait_for_turns([0, 1], 24)
        assert run.finish() == {0: [0], 1: [0]}, run.said()
        ways = check(run, [0, 1], 1)
        assert ways["again"] + ways["taken"] == 1, "it is taken, unless the other one has not got all of it, either"
        run.check_replicas([0, 1])
