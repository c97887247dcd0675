"""Programs of one stage beside plain Lightning and its DDP."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from lightning_sdpipe import PHDPSGD, AllReduce, DiLoCo, Exchange, LocalSGD, SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.exchange.payloads import EightBit
from tests.features.programs import PROGRAMS, AccumulatingMeans, Adversarial, ByHand, Program
from tests.features.running import (
    BATCH,
    Regression,
    on_four_ranks,
    pipelines,
    quiet_trainer,
    refuse_each,
    samples,
    train_loader,
    weights,
)
from tests.features.table import supported

pytestmark = pytest.mark.distributed
Outcome = tuple[dict[str, Tensor], int]


def _train(directory: Path, program: Program, devices: int, strategy: Any, **options: Any) -> Outcome:
    torch.manual_seed(1)
    model = program.module()
    given = {"enable_checkpointing": False, **program.options(), **options, "devices": devices, "strategy": strategy}
    trainer = quiet_trainer(default_root_dir=directory, **given)
    trainer.fit(model, program.loader())
    return weights(model), trainer.global_step


def _same(found: Outcome, expected: Outcome, name: str, **tolerance: float) -> None:
    assert found[1] == expected[1] > 0, name
    assert found[0].keys() == expected[0].keys(), name
    for key, value in expected[0].items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023


def _both(directory: Path, devices: int) -> list[tuple[str, Outcome, Outcome]]:
    """What this rank has after each program, and what it has after the same under plain Lightning or DDP."""
    found = []
    for name, program in PROGRAMS.items():
        theirs: Any = "auto" if devices == 1 else program.ddp
        ours = SDPipeStrategy(sync=AllReduce(), data="sharded")
        if theirs is not None:
            options = {"use_distributed_sampler": devices > 1}
            compared = (_train(directory, program, devices, each, **options) for each in (ours, theirs))
            found.append((name, *compared))
    return found


@supported("One stage", "manual optimization, any number of optimizers and backwards", "as plain Lightning and DDP do")
@supported(
    "One stage",
    "closures that are evaluated several times (`LBFGS`, SAM); `training_step` that returns None",
    "None adds nothing to a mean of gradients, which DDP refuses",
)
@supported("One stage", "`dataloader_iter`, generators and other iterables, modules without modules")
@supported(
    "One stage",
    "`StochasticWeightAveraging`, `WeightAveraging`, `EMAWeightAveraging`, `ModelPruning`, `LearningRateFinder`",
    "averages of the weights are made equal where models are",
)
@pytest.mark.parametrize("devices", [1, 2])
def test_whatever_trains_under_ddp_trains(tmp_path: Path, devices: int) -> None:
    for rank in on_four_ranks(_both, tmp_path, devices, count=devices):
        for name, ours, theirs in rank:
            _same(ours, theirs, name)


def _methods(directory: Path) -> list[Outcome]:
    ways: list[dict[str, Any]] = [
        {"sync": "semi_decentralized", "data": "dealt"},
        {"sync": "semi_decentralized", "exchange": Exchange(overlap="step"), "data": "sharded"},
        {"sync": LocalSGD(every=3), "exchange": Exchange(EightBit())},
        {"sync": DiLoCo(every=3)},
        {"sync": AllReduce(), "exchange": Exchange(EightBit(feedback=True))},
        {"sync": "semi_decentralized", "variance_correction": True},
    ]
    found = [_train(directory, PROGRAMS["adversarial"], 2, SDPipeStrategy(**way), max_epochs=3) for way in ways]
    return [*found, _train(directory, PROGRAMS["a closure called beforehand"], 2, SDPipeStrategy())]


@pytest.mark.distributed
def test_all_optimizers_are_averaged_together_by_every_method(tmp_path: Path) -> None:
    before, (one, other) = Adversarial().state_dict(), on_four_ranks(_methods, tmp_path, count=2)
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert mine[1] == theirs[1], number
        assert mine[1] == 2 * 3 * 4 or number == len(one) - 1, "two optimizers, three epochs of four batches"
        for name, value in mine[0].items():
            torch.testing.assert_close(value, theirs[0][name], msg=lambda m, n=name, i=number: f"{i}, {n}: {m}")
            assert value.isfinite().all()
        assert not torch.equal(mine[0]["net.0.weight"], before["net.0.weight"])


class OnceMore(ByHand):
    """One pipeline runs another backward on one batch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx == self.batch and self.trainer.global_rank == 1:
            self.manual_backward(self.loss(batch))


def _refused(directory: Path, batch: int) -> str:
    trainer = pipelines(directory, SDPipeStrategy(sync=AllReduce()), max_epochs=1)
    with pytest.raises((ConfigurationError, WorkerFailedError)) as refused:
        trainer.fit(OnceMore(batch), train_loader())
    return str(refused.value)


@pytest.mark.parametrize("batch", [1, 3], ids=["in between", "the last"])
def test_pipelines_that_run_other_backwards_are_named(tmp_path: Path, batch: int) -> None:
    for said in on_four_ranks(_refused, tmp_path, batch, count=2):
        assert "do not run the same backwards" in said
        assert "pipeline 0: " in said
        assert re.search(f"pipeline 1: (backward 2 of update {batch}|backward 1 of update {batch + 1})", said)


SHARDS = (4, 7)  # batches of each pipeline


class Uneven(AccumulatingMeans):
    """Pipelines of unlike numbers of batches, each of which ends amid an update."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(samples(64), self.own(self.trainer.global_rank)), BATCH)

    @staticmethod
    def own(pipeline: int) -> range:
        return range(32 * pipeline, 32 * pipeline + BATCH * SHARDS[pipeline])


def _uneven(directory: Path) -> tuple[dict[str, Tensor], int, list[str]]:
    saves = ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"max_epochs": -1, "max_steps": 5, "callbacks": [saves], "use_distributed_sampler": False}
    trainer, model = pipelines(directory, SDPipeStrategy(sync=AllReduce(), data="sharded"), **options), Uneven()
    trainer.fit(model)
    return weights(model), trainer.global_step, sorted(path.name for path in directory.glob("*.ckpt"))


def _uneven_by_hand() -> dict[str, Tensor]:
    """What means over the pipelines that train give: one keeps its last batch for the last one of the other."""
    model, steps = Uneven(), 0
    optimizer = model.configure_optimizers()
    batches = [list(DataLoader(Subset(samples(64), Uneven.own(pipeline)), BATCH)) for pipeline in range(2)]
    while True:
        for number in range(7):
            few = [batches[0][number]] if number < 3 else [batches[0][3]] if number == 6 else []
            trained = [*few, batches[1][number]]
            (sum(model.loss(batch) for batch in trained) / len(trained) / 2).backward()  # type: ignore[union-attr]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
            if steps == 5:
                return weights(model)


def test_a_pipeline_whose_data_end_amid_an_update_by_hand_follows(tmp_path: Path) -> None:
    expected = _uneven_by_hand()
    for found, steps, saved in on_four_ranks(_uneven, tmp_path, count=2):
        _same((found, steps), (expected, 5), "uneven")
        assert saved == ["step=2.ckpt", "step=4.ckpt"]


class InPart(Regression):
    """Has no loss for half of some batches and the whole of others, where x of the first sample is so large."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if batch[0].abs().max() < 50 else None


def _in_part(directory: Path) -> tuple[dict[str, Tensor], int]:
    strategy = SDPipeStrategy(sync=AllReduce(), data="sharded", num_micro_batches=2)
    trainer, model = pipelines(directory, strategy, max_epochs=1, use_distributed_sampler=False), InPart()
    trainer.fit(model, DataLoader(_marked(trainer.global_rank), BATCH))
    return weights(model), trainer.global_step


def _marked(pipeline: int) -> TensorDataset:
    """Three batches, of which pipeline 1 skips half of the first, half of the second and all of the third."""
    x, y = (tensor[12 * pipeline :][:12].clone() for tensor in samples().tensors)
    for number in (0, 6, 8, 10) if pipeline else ():
        x[number] += 100
    return TensorDataset(x, y)


def test_micro_batches_without_a_loss_add_nothing_and_the_others_count(tmp_path: Path) -> None:
    model = InPart()
    optimizer = model.configure_optimizers()
    for number in range(3):
        losses = []
        for pipeline in range(2):
            halves = [[tensor[4 * number + half :][:2] for tensor in _marked(pipeline).tensors] for half in (0, 2)]
            found = [model.training_step(half, number) for half in halves]
            if found != [None, None]:
                losses.append(sum(loss for loss in found if loss is not None) / 2)
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        optimizer.step()
    for found in on_four_ranks(_in_part, tmp_path, count=2):
        _same(found, (weights(model), 3), "in part")


def _divided(directory: Path) -> tuple[dict[str, Tensor], int]:
    strategy = SDPipeStrategy(sync=AllReduce(), num_micro_batches=2, batch_by_speed=True)
    trainer, model = pipelines(directory, strategy, max_epochs=1), InPart()
    trainer.fit(model, DataLoader(_marked_for_all()[0], BATCH))
    return weights(model), trainer.global_step


def _marked_for_all() -> tuple[TensorDataset, list[list[int]]]:
    """Three batches for each of two shards, one of which has no loss for its third; and the samples of each shard."""
    x, y = (tensor[:24].clone() for tensor in samples().tensors)
    shards = [list(DistributedSampler(TensorDataset(x), 2, home)) for home in range(2)]
    x[[shards[0][6], *(shards[1][place] for place in (0, 8, 10))]] += 100
    return TensorDataset(x, y), shards


def test_micro_batches_without_a_loss_add_nothing_whoever_trains_them(tmp_path: Path) -> None:
    model, (data, shards) = InPart(), _marked_for_all()
    optimizer = model.configure_optimizers()
    for number in range(3):
        halves = [shard[4 * number + half :][:2] for shard in shards for half in (0, 2)]
        found = [model.training_step(data[half], number) for half in halves]
        optimizer.zero_grad()
        (sum(loss for loss in found if loss is not None) / len(found)).backward()
        optimizer.step()
    for found in on_four_ranks(_divided, tmp_path, count=2):
        _same(found, (weights(model), 3), "divided")


def _resumed(directory: Path) -> list[Outcome]:
    """Two epochs at once, and in turn with a checkpoint of either kind."""
    program, found = PROGRAMS["two schedules"], []
    for epochs, path, distributed in (
        *((2, None, False), (1, None, False), (2, "half.ckpt", False)),
        *((1, None, True), (2, "half.ckpt", True)),
    ):
        strategy = SDPipeStrategy(sync=AllReduce(), save_distributed_checkpoint=distributed)
        model, trainer = program.module(), pipelines(directory, strategy, max_epochs=epochs, enable_checkpointing=False)
        trainer.fit(model, program.loader(), ckpt_path=path and directory / f"{distributed}" / path)
        if epochs == 1:
            trainer.save_checkpoint(directory / f"{distributed}" / "half.ckpt")
        else:
            found.append((weights(model), trainer.global_step))
    return found


def test_states_of_all_optimizers_are_in_checkpoints(tmp_path: Path) -> None:
    for whole, *resumed in on_four_ranks(_resumed, tmp_path, count=2):
        for distributed, each in enumerate(resumed):
            _same(each, whole, f"resumed, distributed: {bool(distributed)}")


def test_options_that_one_backward_needs_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_micro_batches": 2}, "num_micro_batches=2 does not go with the manual optimization of ByHand"),
        ({"sync": AllReduce(), "num_micro_batches": 2, "batch_by_speed": True}, "does not go with the manual"),
        ({"sync": PHDPSGD(group_size=2)}, "averages the gradients of one backward in each update"),
    ]
    refuse_each(tmp_path, [(ByHand(), said, {"strategy": SDPipeStrategy(**options)}) for options, said in cases])


class Numbered:
    """Batches that say which they are, and go on where a checkpoint was."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        while self.given < len(self):
            self.given += 1
            yield torch.full((1, 6), float(self.given)), torch.ones(1, 1)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Noting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.numbers.append(batch[0].mean().item())
        return self.loss(batch)


def _goes_on(directory: Path) -> list[list[float]]:
    found = []
    for steps, path in ((2, None), (4, directory / "half.ckpt")):
        trainer, model = pipelines(directory, SDPipeStrategy(), max_steps=steps, enable_checkpointing=False), Noting()
        trainer.fit(model, Numbered(), ckpt_path=path)
        trainer.save_checkpoint(directory / "half.ckpt")
        found.append(model.numbers)
    return found


def test_a_loader_with_a_state_of_its_own_goes_on_where_it_was(tmp_path: Path) -> None:
    assert on_four_ranks(_goes_on, tmp_path, count=1) == [[[1, 2], [3, 4]]]


class ReturnsNoLoss(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 5.0


class AsksForALoader(Regression):
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        """There is one loader, so there are no numbers of loaders."""


class Stopping(Regression):
    """Its loss has one dimension, of one number, and comes with something for hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with pytest.raises(MisconfigurationException, match="should not contain information about `dataloader_idx`"):
            self.log("loss/dataloader_idx_0", 1.0)  # the line that is wrong
        return {"loss": self.loss(batch).reshape(1), "number": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["number"] == batch_idx
        for twin in (copy.deepcopy(self), pickle.loads(pickle.dumps(self))):
            assert torch.equal(twin.loss(batch), self.loss(batch))
            own = twin.on_validation_epoch_end, twin._on_before_batch_transfer
            assert [method.__self__ is twin for method in own] == [True, True]
        assert len(copy.deepcopy(self.trainer.callbacks)) == len(self.trainer.callbacks)  # type: ignore[attr-defined]
        self.trainer.should_stop = batch_idx == 2

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        assert [type(each) for each in self.trainer.val_dataloaders] == [DataLoader, list], "as they were given"


def _as_lightning(directory: Path) -> None:
    trainer, model = pipelines(directory, SDPipeStrategy()), Stopping()
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}, "before a run"
    decided = trainer.strategy.reduce_boolean_decision(True), float(trainer.strategy.reduce(torch.tensor(2.0)))
    assert decided == (True, 2.0), "outside of a run"
    trainer.strategy._lightning_module, model.trainer = model, trainer
    trainer.strategy.load_model_state_dict({"state_dict": model.state_dict()})
    trainer.strategy.load_optimizer_state_dict({"optimizer_states": []})
    loader = train_loader()
    assert trainer.strategy.process_dataloader(loader) is loader, "outside of a run"
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    hint = pytest.warns(match="The 'train_dataloader' does not have many workers")
    with patch("lightning.fabric.utilities.data._num_cpus_available", return_value=4), hint:
        trainer.fit(model, loader, [train_loader(), list(train_loader())])
    assert trainer.global_step == 3, "a stop takes effect at once"
    assert type(trainer.train_dataloader) is DataLoader
    with pytest.raises(MisconfigurationException, match="must return a Tensor, a dict, or None"):
        pipelines(directory, SDPipeStrategy()).fit(ReturnsNoLoss(), train_loader())
    with pytest.raises(RuntimeError, match="but have included `dataloader_idx`"):
        pipelines(directory, SDPipeStrategy()).fit(AsksForALoader(), train_loader(), train_loader())


def test_one_process_stops_and_refuses_as_lightning_does(tmp_path: Path) -> None:
    on_four_ranks(_as_lightning, tmp_path, count=1)


class Growing(Regression):
    """Gets another head by the checkpoint, and notes what it and a callback find when a fit starts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.net[3] = nn.Linear(8, checkpoint["state_dict"]["net.3.weight"].shape[0])
        self.seen.append("loaded")

    def on_fit_start(self) -> None:
        self.seen.append(self.net[3].weight.detach().clone())

    def configure_optimizers(self) -> Any:
        self.seen.append("optimizers")
        return torch.optim.Adam(self.parameters(), 0.01)


class Anchor(L.Callback):
    """Keeps a state that is to be there when a fit starts."""

    def __init__(self, kind: Any = 1) -> None:
        self.kind, self.found = kind, kind

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kind = state["kind"]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found = self.kind


def _order(directory: Path, kind: str) -> list[Any]:
    """What is found, in the order of events, in a run that resumes from a checkpoint with an object of the user's."""
    torch.manual_seed(1)
    found: list[Any] = []
    for resumes in (False, True):
        strategy: Any = SDPipeStrategy(sync=AllReduce()) if kind == "ours" else kind
        model, anchor = Growing(), Anchor(1 if resumes else Path("of the user"))
        trainer = quiet_trainer(
            default_root_dir=directory, strategy=strategy, devices=1, callbacks=[anchor],
            enable_checkpointing=False, use_distributed_sampler=False, max_epochs=2 if resumes else 1,
        )  # fmt: skip
        if not resumes:
            model.net[3] = nn.Linear(8, 2)
        path = directory / f"{kind}.ckpt"
        trainer.fit(model, train_loader(), **({"ckpt_path": path, "weights_only": False} if resumes else {}))
        trainer.save_checkpoint(path)
        found = [*model.seen, anchor.found, weights(model), trainer.global_step]
        trainer.validate(model, train_loader(), ckpt_path=path, weights_only=False, verbose=False)
    return found


def _orders(directory: Path) -> tuple[list[Any], list[Any]]:
    return _order(directory, "auto"), _order(directory, "ours")


@supported(
    "One stage",
    "a run that resumes, in Lightning's order, and `weights_only=`",
    "weights and states of callbacks are there before `configure_optimizers` and `on_fit_start`; parts of a cut model, "
    "what is on `meta`, and newcomers of elastic runs get theirs after both",
)
def test_a_run_resumes_in_lightnings_order(tmp_path: Path) -> None:
    ((plain, ours),) = on_four_ranks(_orders, tmp_path, count=1)
    assert [type(each) for each in ours] == [type(each) for each in plain]
    assert ours[0] == "loaded"
    assert ours[3] == Path("of the user")
    torch.testing.assert_close(ours[2], plain[2])
    _same((ours[-2], ours[-1]), (plain[-2], plain[-1]), "resumed")


class Breaking(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 0:
            raise ValueError("by the user")
        return self.loss(batch)


def _breaks(directory: Path) -> tuple[str, list[int]]:
    for callback in (OnExceptionCheckpoint(directory), ModelCheckpoint(directory, save_on_exception=True)):
        trainer = pipelines(directory, SDPipeStrategy(), max_epochs=1, callbacks=[callback])
        with pytest.raises(ValueError, match="by the user") as broken:
            trainer.fit(Breaking(), train_loader())
    steps = [torch.load(path, weights_only=True)["global_step"] for path in sorted(directory.glob("*.ckpt"))]
    return str(broken.value), steps


@supported(
    "One stage",
    "a checkpoint after a failure: `OnExceptionCheckpoint`, `save_on_exception=True`",
    "rank 0 writes what it has, if it is there to do so",
)
def test_what_there_is_is_saved_after_a_failure(tmp_path: Path) -> None:
    ((said, steps),) = on_four_ranks(_breaks, tmp_path, count=1)
    assert (said, steps) == ("by the user", [2, 2])


def _left(directory: Path) -> list[tuple[int, int, int]]:
    """Descriptors, threads and processes after some fits, some of which fail."""
    found = []
    for number in range(4):
        timer, saves = Timer(duration="00:01:00:00"), ModelCheckpoint(directory, every_n_train_steps=3)
        trainer = pipelines(directory, SDPipeStrategy(), max_epochs=1, callbacks=[timer, saves])
        if number % 2:
            with pytest.raises(ValueError, match="by the user"):
                trainer.fit(Breaking(), train_loader())
        else:
            trainer.fit(Regression(), train_loader())
            copy.deepcopy(trainer.callbacks)
            again = pickle.loads(pickle.dumps(trainer))
            assert [type(callback) for callback in again.callbacks] == [Timer, ModelCheckpoint]
            assert again.strategy.statistics.groups == 8
        assert trainer.callbacks == [timer, saves]
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        gc.collect()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        found.append((len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)))
    return found


def test_a_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither one that ends nor one that fails; and a user gets back what the user gave."""
    (found,) = on_four_ranks(_left, tmp_path, count=1)
    assert found[0] == found[1] == found[2] == found[3]
