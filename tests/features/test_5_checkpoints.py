"""What a checkpoint holds, who can read it, and what a run that resumes from it computes."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.checkpoints import consolidate
from lightning_sdpipe.checkpoints.distributed import is_distributed
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import OneBit
from lightning_sdpipe.sync import NoSync
from tests.features.running import (
    Regression,
    assert_same,
    eval_loader,
    on_four_ranks,
    one_process,
    pipelines,
    train_loader,
    weights,
)
from tests.features.table import supported
from tests.own_session import module, script
from tests.scripts import save_forever

pytestmark = pytest.mark.distributed


class Random(Regression):
    """Drops out, and has an optimizer and a schedule with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def _train(
    directory: Path,
    module: type[Regression],
    epochs: int,
    num_stages: int,
    resume: Path | None = None,
    distributed: bool | Literal["async"] = False,
    sync: Any = None,
    exchange: Exchange | None = None,
) -> tuple[dict[str, Tensor], int]:
    """Trains and saves ``directory/last.ckpt``, and draws random numbers that an uninterrupted run would not."""
    torch.manual_seed(len(str(directory)))
    strategy = SDPipeStrategy(
        num_stages, sync or AllReduce(), data="sharded", save_distributed_checkpoint=distributed, exchange=exchange
    )
    saving = ModelCheckpoint(directory, save_last=True)
    trainer, model = pipelines(directory, strategy, max_epochs=epochs, callbacks=[saving]), module()
    trainer.fit(model, train_loader(), ckpt_path=resume)
    return weights(model), trainer.global_step


def _read_without_the_package(path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_sdpipe"]:
        del sys.modules[name]
    sys.modules["lightning_sdpipe"] = None  # type: ignore[assignment]  # importing it would fail
    checkpoint = torch.load(path, weights_only=True)
    print(sorted(checkpoint["state_dict"]), checkpoint["global_step"], len(checkpoint["optimizer_states"]))


@supported("Checkpoints", "a `.ckpt` is an ordinary Lightning checkpoint of the whole model",
           "`MyModule.load_from_checkpoint` reads it in one process, without this package")  # fmt: skip
def test_ordinary(tmp_path: Path) -> None:
    ranks = on_four_ranks(_train, tmp_path, Regression, 1, 2)
    with script(tmp_path, _read_without_the_package, tmp_path / "last.ckpt") as run:
        assert run.wait() == 0, run.printed()
    shown = run.printed()
    assert shown.startswith("['net.0.bias'")
    assert shown.endswith(" 4 1\n")
    loaded = Regression.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert_same([parts for parts, _ in ranks], loaded.state_dict(), rtol=0, atol=0)


def _at_once_and_in_turn(directory: Path, num_stages: int, distributed: Any, *how: Any) -> list[Any]:
    """What two epochs leave that are trained at once, and one after the other."""
    whole = _train(directory / "whole", Random, 2, num_stages, None, bool(distributed), *how)
    _train(directory / "half", Random, 1, num_stages, None, distributed, *how)
    half = directory / "half" / "last.ckpt"
    assert is_distributed(half) == bool(distributed)
    # another directory, so that the random states start elsewhere
    return [whole, _train(directory / "the rest", Random, 2, num_stages, half, distributed, *how)]


def _resume(directory: Path, count: int, *how: Any) -> None:
    tolerance = 0 if count == 1 else 1e-6
    for (theirs, expected), (mine, steps) in on_four_ranks(_at_once_and_in_turn, directory, *how, count=count):
        assert steps == expected
        assert_same([mine], theirs, rtol=tolerance, atol=tolerance)


@supported("Checkpoints", "`fit(ckpt_path=…)`: optimizer, schedule, loops and random states go on",
           "bit-equal on 1 × 1. With several pipelines and methods that average models, a `.ckpt` has the optimizer's "
           "state of the first pipeline; a distributed checkpoint has all")  # fmt: skip
@pytest.mark.parametrize(
    ("count", "num_stages", "exchange"), [(1, 1, None), (4, 2, Exchange(OneBit(block=8, after=6)))], ids=str
)
def test_resume(tmp_path: Path, count: int, num_stages: int, exchange: Exchange | None) -> None:
    _resume(tmp_path, count, num_stages, False, None, exchange)


def _save_both(directory: Path) -> None:
    for distributed in (False, True):
        _train(directory / f"half {distributed}", Regression, 1, 2, None, distributed)


@supported("Checkpoints", "a checkpoint of M × N workers resumes on M′ × N′")
def test_resume_on_others(tmp_path: Path) -> None:
    halves = [tmp_path / f"half {distributed}" / "last.ckpt" for distributed in (False, True)]
    on_four_ranks(_save_both, tmp_path)
    assert [half.is_dir() for half in halves] == [False, True]

    def rest(num_stages: int, num_pipelines: int, distributed: bool) -> list[tuple[dict[str, Tensor], int]]:
        place, count = tmp_path / f"{num_stages} {num_pipelines}", num_stages * num_pipelines
        half = halves[distributed]
        return on_four_ranks(_train, place, Regression, 2, num_stages, half, distributed, count=count)

    # each pipeline takes batches of the same size, so with N′ of them a step takes N′ times as many samples
    expected = {count: rest(1, count, count == 2)[0] for count in (1, 2)}
    assert [steps for _, steps in expected.values()] == [4 + 8, 4 + 4]
    for count, num_stages, distributed in ((1, 3, False), (2, 2, False), (1, 4, True)):
        for parts, steps in rest(num_stages, count, distributed):
            assert steps == expected[count][1]
            assert_same([parts], {name: expected[count][0][name] for name in parts}, f"{num_stages} × {count}")


@supported("Checkpoints", "`SDPipeStrategy(save_distributed_checkpoint=True)` or `\"async\"`",
           "each rank writes its part with `torch.distributed.checkpoint`, with the optimizer states of all pipelines; "
           "`python -m lightning_sdpipe.checkpoints.consolidate` makes one file")  # fmt: skip
def test_distributed_checkpoint(tmp_path: Path) -> None:
    _resume(tmp_path, 4, 2, "async", NoSync())  # the optimizers of the two pipelines differ
    one, several = tmp_path / "one.ckpt", tmp_path / "half" / "last.ckpt"
    with script(tmp_path, module, consolidate.__name__, str(several), str(one)) as run:
        assert run.wait() == 0, run.printed()
    trainer = one_process(tmp_path / "rest of one")
    trainer.fit(Random(), train_loader(), ckpt_path=one, weights_only=False)
    assert trainer.global_step > 4
    (optimizer,) = trainer.optimizers
    assert len(optimizer.state) == len(list(Random().parameters()))
    for place in (tmp_path / "whole", tmp_path / "the rest"):  # saved by all ranks
        assert len([*(place / "last.ckpt").glob("*.distcp")]) == 4
        assert not list(place.glob(".*"))


class OnMeta(Regression):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))


def _afterwards(directory: Path) -> list[bool]:
    """Is what each run leaves whole, and if not, is it refused to be saved?"""
    outcomes = []
    for gather, model in ((None, Regression()), (None, OnMeta()), (False, Regression()), (True, OnMeta())):
        pipelines(directory, SDPipeStrategy(2, AllReduce(), gather_module=gather)).fit(model, train_loader())
        whole = all(not p.is_meta for p in model.parameters())
        if whole:
            torch.save(model.state_dict(), directory / f"{model.global_rank}.pt")
        else:
            with pytest.raises(ConfigurationError, match="This worker holds only its own stage of the module"):
                torch.save(model.state_dict(), directory / f"{model.global_rank}.pt")
        outcomes.append(whole)
    return outcomes


@supported("Checkpoints", "after a run, the module is whole and trained in every process",
           "`torch.save(model.state_dict())` and `trainer.save_checkpoint` work. One that was built on `meta` is not "
           "gathered, and refuses to be saved, unless `SDPipeStrategy(gather_module=True)`")  # fmt: skip
def test_the_module_afterwards(tmp_path: Path) -> None:
    assert on_four_ranks(_afterwards, tmp_path, count=2) == [[True, False, False, True]] * 2
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@supported("Checkpoints", "a crash, or a full disk, while a checkpoint is written leaves the one before it",
           "a full disk ends the run with the file, and the bytes that are needed and free; "
           '`SDPipeStrategy(on_checkpoint_error="continue")` goes on')  # fmt: skip
@pytest.mark.parametrize("distributed", [False, True])
def test_crash(tmp_path: Path, distributed: bool) -> None:
    path = tmp_path / "last.ckpt"
    with script(tmp_path, save_forever.main, path, distributed) as run:
        while len(saved := re.findall(r"^\d+$", run.printed(), re.MULTILINE)) < 3:
            assert run.process.is_alive(), run.printed()
            time.sleep(0.01)
        time.sleep(0.05)  # somewhere within the next one
        os.killpg(run.pid, signal.SIGKILL)
        assert run.left() == []
    state = _load_distributed_checkpoint(path) if distributed else torch.load(path, weights_only=True)
    (values,) = {tuple(value.unique().tolist()) for value in state["state_dict"].values()}
    assert values[0] >= int(saved[2])


def _save_twice(directory: Path) -> list[list[str]]:
    """Two callbacks save into one directory: one keeps the best, and the other one every one."""
    module = Regression()
    module.validation_step = lambda batch, batch_idx: module.log("score", float(module.current_epoch))  # type: ignore[method-assign]
    savers = [
        ModelCheckpoint(directory, "model", "score", mode="min"),
        ModelCheckpoint(directory, "model", save_top_k=1, monitor=None),
    ]
    strategy = SDPipeStrategy(1, AllReduce(), save_distributed_checkpoint="async")
    pipelines(directory, strategy, callbacks=savers).fit(module, train_loader(), eval_loader())
    return [[Path(each.best_model_path).name, str(Path(each.best_model_path).exists())] for each in savers]


def test_a_name_is_taken_while_its_checkpoint_is_written(tmp_path: Path) -> None:
    for best, last in on_four_ranks(_save_twice, tmp_path, count=2):
        assert best[1] == last[1] == "True"
        assert best[0] != last[0]
