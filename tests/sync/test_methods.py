"""Every synchronisation method in a real Trainer on 2 × 2 workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_sdpipe import ADPSGD, AllReduce, ConfigurationError, LocalSGD, SDPipeStrategy
from lightning_sdpipe.policies import registry
from lightning_sdpipe.sync import PartialReduce, SemiDecentralized
from lightning_sdpipe.sync.capabilities import Combination
from lightning_sdpipe.sync.methods import check, deals, method_of
from tests.features.running import Regression, assert_same, samples
from tests.strategy.test_strategy import fit

ROWS = ((5, 3), (2, 4))  # mini-batches of the two pipelines in each epoch, where they differ


class EqualReplicas(L.Callback):
    """Fails the run if the replicas of a stage differ at the end of an epoch; the strategy's own callback ran first.
    Brings rank 0's statistics home, as metrics."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        statistics = trainer.strategy.statistics  # type: ignore[attr-defined]
        trainer.callback_metrics["groups"] = torch.tensor(statistics.groups)
        trainer.callback_metrics["mean_group_size"] = torch.tensor(statistics.mean_group_size)
        for name, tensor in pl_module.state_dict().items():
            if not tensor.is_meta:
                largest, smallest = tensor.clone(), tensor.clone()
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=trainer.strategy.groups.stage)  # type: ignore[attr-defined]
                dist.all_reduce(smallest, dist.ReduceOp.MIN, group=trainer.strategy.groups.stage)  # type: ignore[attr-defined]
                assert torch.equal(largest, smallest), f"{name} differs between pipelines"


def train(
    directory: Path, sync: Any, module: Regression | None = None, stages: int = 2, **options: Any
) -> tuple[Regression, dict[str, float]]:
    """By two pipelines."""
    schedule, exchange = options.pop("schedule", "1f1b"), options.pop("exchange", None)
    strategy = SDPipeStrategy(
        stages, sync=sync, exchange=exchange, schedule=schedule, data="sharded", start_method="fork"
    )
    trainer, model = fit(directory, strategy, 2 * stages, 4, module, callbacks=[EqualReplicas()], **options)
    return model, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.distributed
def test_partial_reduce_learns_with_several_stages_per_worker(tmp_path: Path) -> None:
    x, y = samples(48).tensors
    before = nn.functional.mse_loss(Regression().net(x), y).item()
    strategy = SDPipeStrategy(2, sync=PartialReduce(2, 0.5), schedule="interleaved_1f1b", start_method="fork")
    _, model = fit(tmp_path, strategy, 6, 4, Regression(0.03), callbacks=[EqualReplicas()])
    assert nn.functional.mse_loss(model.net(x), y).item() < 0.95 * before


@pytest.mark.distributed
def test_all_reduce_accumulates_as_one_process_does(tmp_path: Path) -> None:
    _, expected = fit(tmp_path / "one", "auto", 1, 8, accumulate_grad_batches=2)
    model, metrics = train(tmp_path / "four", AllReduce(), schedule="zero_bubble", accumulate_grad_batches=2)
    assert_same([model.state_dict()], expected.state_dict())
    assert metrics["groups"] == 6  # only when an update follows


class Momentum(Regression):
    """The step depends on the gradients before it; they are seen, averaged, where Lightning promises gradients."""

    def on_after_backward(self) -> None:
        self.seen = [p.grad.clone() for p in self.parameters() if not p.is_meta and p.grad is not None]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(self.trainer.strategy, SDPipeStrategy):
            for seen in self.seen:
                mean = seen.clone()
                dist.all_reduce(mean, group=self.trainer.strategy.groups.stage)
                torch.testing.assert_close(mean / 2, seen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.distributed
def test_all_reduce_is_exact_for_stateful_optimizers_and_clipping(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"}
    _, expected = fit(tmp_path / "one", "auto", 1, 8, Momentum(), **options)
    model, _ = train(tmp_path / "four", AllReduce(bucket_mib=1e-4), Momentum(), 1, **options)
    assert_same([model.state_dict()], expected.state_dict())


class OwnRows(IterableDataset[tuple[Tensor, Tensor]]):
    """As many mini-batches of 4 as the pipeline has in this epoch."""

    def __init__(self, pipeline: int) -> None:
        self._pipeline = pipeline
        self._epochs = iter(ROWS)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = (tensor[24 * self._pipeline :] for tensor in samples(48).tensors)
        yield from zip(x[: 4 * next(self._epochs)[self._pipeline]], y, strict=False)


class Uneven(Regression):
    """Its momentum depends on how long a pipeline has trained."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(OwnRows(self.trainer.strategy.distributed_sampler_kwargs["rank"]), 4)  # type: ignore[attr-defined]


@pytest.mark.distributed
def test_a_pipeline_with_less_data_does_not_hold_all_reduce_up(tmp_path: Path) -> None:
    expected = Uneven()
    optimizer = expected.configure_optimizers()
    loaders = [DataLoader(OwnRows(pipeline), 4) for pipeline in range(2)]
    for rows in ROWS:
        batches = [list(loader) for loader in loaders]
        assert tuple(map(len, batches)) == rows
        for number in range(max(rows)):
            optimizer.zero_grad()
            last = number == max(rows) - 1  # everybody's last batch is trained at the end of the epoch
            there = [part[-1 if last else number] for part in batches if last or number < len(part) - 1]
            torch.stack([nn.functional.mse_loss(expected.net(x), y) for x, y in there]).mean().backward()
            optimizer.step()
    model, _ = train(tmp_path, AllReduce(), Uneven())
    assert_same([model.state_dict()], expected.state_dict())


@pytest.mark.distributed
def test_a_pipeline_with_less_data_does_not_hold_others_up(tmp_path: Path) -> None:
    """They learn, and end each epoch with equal replicas."""
    x, y = samples(48).tensors
    before = nn.functional.mse_loss(Regression().net(x), y).item()
    model, metrics = train(tmp_path, ADPSGD(asynchronous=True), Uneven())
    assert nn.functional.mse_loss(model.net(x), y).item() < 0.9 * before
    assert 1 < metrics["mean_group_size"] <= 2, "alone when the other has ended its epoch"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: AllReduce(bucket_mib=0), "bucket_mib=0"),
        (lambda: LocalSGD(every=0), "every=0"),
        (lambda: PartialReduce(decay=1.0), "decay=1.0"),
        (lambda: SDPipeStrategy(2, sync="allreduce"), "sync='allreduce'"),
        (lambda: SDPipeStrategy(2, sync=AllReduce), "sync=AllReduce is a class; pass an object"),  # type: ignore[arg-type]
        (lambda: SDPipeStrategy(2, sync="no_such.module:Policy"), "No module named 'no_such'"),
    ],
)
def test_wrong_values_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()


def test_what_does_not_fit_the_mesh_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigurationError, match="group_size=3 is not allowed with 2 pipelines; give 2"):
        L.Trainer(accelerator="cpu", devices=4, strategy=SDPipeStrategy(2, sync=PartialReduce()), logger=False)


def test_groups_of_those_that_have_stepped_do_not_go_without_a_flush() -> None:
    check(method_of(PartialReduce()), Combination(PartialReduce(), schedule="pipedream"))
    check(method_of(SemiDecentralized()), Combination(SemiDecentralized(), schedule="pipedream", num_stages=2))
    with pytest.raises(ConfigurationError, match="would wait for the slowest of all"):
        SDPipeStrategy(2, sync=PartialReduce(), schedule="pipedream")


def test_batches_are_dealt_by_themselves_where_no_policy_holds_pipelines_in_step() -> None:
    method = method_of(SemiDecentralized())
    assert deals("auto", method, 4, None)
    assert deals("auto", method, 4, registry.to_json(SemiDecentralized(window=0.5)))
    assert not deals("auto", method, 4, registry.to_json(ADPSGD()))
    assert not deals("auto", method, 4, '{"type": "their_package:Policy"}')
    assert deals("dealt", method, 4, registry.to_json(ADPSGD()))
