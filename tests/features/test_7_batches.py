"""Batches of all kinds, split into micro-batches: gradients are those of the whole batch in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_sdpipe import AllReduce, SDPipeStrategy
from tests.features.running import (
    Outcome,
    Regression,
    assert_same,
    fitted,
    on_four_ranks,
    on_pipelines,
    refuse_each,
    samples,
    trainer_of_this_process,
    weights,
)
from tests.features.table import refused, supported

pytestmark = pytest.mark.distributed


class Lists(Regression):
    """Pictures of several sizes, their boxes, names and a packed sequence: one of each for a sample."""

    def train_dataloader(self) -> Any:
        def collate(batch: list[tuple[Tensor, Tensor]]) -> Any:
            pictures = [
                x.expand(1 + index % 3, 6) * torch.arange(1.0, 2 + index % 3)[:, None]
                for index, (x, _) in enumerate(batch)
            ]
            targets = [{"y": y.expand(1 + index % 2), "id": index} for index, (_, y) in enumerate(batch)]
            names = [f"{index}" for index in range(len(batch))]
            return pictures, targets, {"names": names, "series": pack_sequence(pictures, enforce_sorted=False)}

        return DataLoader(samples(), 8, collate_fn=collate)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, targets, more = batch
        assert len(pictures) == len(more["names"]) == (2 if on_pipelines() else 8)
        assert [target["id"] for target in targets] == [int(name) for name in more["names"]]
        series, lengths = pad_packed_sequence(more["series"], batch_first=True)
        x = torch.stack([picture.mean(0) for picture in pictures]) + series.sum(1) / lengths[:, None]
        return nn.functional.mse_loss(
            self.net(x), torch.stack([target["y"].mean(0, keepdim=True) for target in targets])
        )


class TimeFirst(Regression):
    """The samples are in the second dimension, and some count more than others."""

    def train_dataloader(self) -> Any:
        def collate(batch: list[tuple[Tensor, Tensor]]) -> Any:
            x, y = (torch.stack(part) for part in zip(*batch, strict=True))
            return torch.stack([x, 2 * x, 3 * x]), y, torch.arange(len(batch)) % 3

        return DataLoader(samples(), 8, collate_fn=collate)

    def split_batch(self, batch: Any, n: int) -> Iterator[Any]:
        x, y, counts = batch
        return zip(x.chunk(n, 1), y.chunk(n), counts.chunk(n), strict=True)

    def weigh_batch(self, batch: Any) -> float:
        return float(batch[2].sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, counts = batch
        losses = (self.net(x.mean(0)) - y).square().squeeze(1)
        loss = (losses * counts).sum() / counts.sum()
        self.log("train", loss, on_step=False, on_epoch=True, batch_size=int(counts.sum()))
        return loss


def _fit(directory: Path, module: type[Regression]) -> tuple[dict[str, Tensor], dict[str, float]]:
    options: dict[str, Any] = {}
    if on_pipelines():
        options["strategy"] = SDPipeStrategy(4, AllReduce(), num_micro_batches=4)
    trainer, model = trainer_of_this_process(directory, use_distributed_sampler=False, **options), module()
    trainer.fit(model)
    return weights(model), {name: float(value) for name, value in trainer.callback_metrics.items()}


_KINDS = [Lists, TimeFirst]


def _fit_all(directory: Path) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    return [_fit(directory, kind) for kind in _KINDS]


@supported("Batches", "lists with an element for each sample, dicts, dataclasses, NumPy arrays, packed sequences",
           "split like tensors that have the samples in their first dimension")  # fmt: skip
@supported("Batches", "`split_batch(batch, n)` and `weigh_batch(batch)` in the LightningModule",
           "for batches of any other kind, and for losses that are no mean over samples")  # fmt: skip
def test_batches(tmp_path: Path) -> None:
    ranks = on_four_ranks(_fit_all, tmp_path)
    for number, kind in enumerate(_KINDS):
        expected, metrics = _fit(tmp_path, kind)
        assert not torch.equal(expected["net.0.weight"], kind().net[0].weight)
        assert_same([rank[number][0] for rank in ranks], expected)
        assert ranks[0][number][1] == pytest.approx(metrics, rel=1e-5)


class Normalised(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def on_train_start(self) -> None:
        raise AssertionError("it is too late")


def _eighteen() -> list[DataLoader[Any]]:
    return [DataLoader(samples(18), 8)]


def _small(directory: Path) -> Outcome:
    options: Any = {"strategy": SDPipeStrategy(2, num_micro_batches=4)} if on_pipelines() else {}
    return fitted(directory, None, _eighteen(), use_distributed_sampler=False, **options)


def test_a_last_batch_of_fewer_samples_than_micro_batches(tmp_path: Path) -> None:
    ranks = on_four_ranks(_small, tmp_path, count=2)
    assert_same([rank[0] for rank in ranks], _small(tmp_path)[0])


def test_a_layer_that_cannot_normalise_the_last_micro_batches_is_named_before_training(tmp_path: Path) -> None:
    error = "one of the layers ['net.1'] cannot normalise it"
    ways = [{"strategy": SDPipeStrategy(n, num_micro_batches=4), "loaders": _eighteen()} for n in (2, 1)]
    refuse_each(tmp_path, [(Normalised(), error, way) for way in ways], use_distributed_sampler=False)


class Undivided(TimeFirst):
    split_batch = None  # type: ignore[assignment]


class AtRandom(TimeFirst):
    def split_batch(self, batch: Any, n: int) -> Iterator[Any]:
        x, y, counts = batch
        sizes = [1, 7] if self.global_rank else [4, 4]
        return zip(x.split(sizes, 1), y.split(sizes), counts.split(sizes), strict=True)


_DISAGREE = "its parts do not tell how many samples it has"


@refused("Batches", "tensors whose first dimensions differ, objects of unknown kinds", _DISAGREE,
         "the parts are named; not with `num_micro_batches=1`")  # fmt: skip
def test_a_batch_that_cannot_be_split(tmp_path: Path) -> None:
    other_shapes = "split_batch returned batches of other shapes on some stages"
    cases = [
        (module, error, {"strategy": SDPipeStrategy(2), "loaders": [module.train_dataloader()]})
        for module, error in ((Undivided(), _DISAGREE), (AtRandom(), other_shapes))
    ]
    refuse_each(tmp_path, cases, use_distributed_sampler=False)
