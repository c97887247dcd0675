"""Stages that are given different batches are found, in whichever mini-batch, and in whichever part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from lightning_sdpipe import AllReduce, SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.pipeline.data import stand_in
from lightning_sdpipe.pipeline.digest import LENGTH, LIMIT, BatchDigest
from tests.features.running import Regression, samples
from tests.strategy.test_strategy import fit


def batch() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "pixels": torch.randn(4, 3, 250, 301).to(memory_format=torch.channels_last),  # above the limit
        "ids": torch.randint(0, 9, (4, 7)),
        "mask": torch.ones(4, 7, dtype=torch.bool),
        "half": torch.randn(4, 2).bfloat16(),
        "complex": torch.randn(4, 2, dtype=torch.complex64),
        "array": np.arange(4.0),
        "sequences": pack_sequence([torch.arange(3.0), torch.arange(2.0)]),
        "sparse": torch.eye(4).to_sparse(),
        "ragged": torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
        "more": [torch.empty(0), (torch.zeros(()), "text", 3)],
    }


def refusal(theirs: Any, mine: Any, **parts: Any) -> str:
    sent = [float(number) for number in BatchDigest(theirs, **parts).numbers]  # as they travel
    assert len(sent) == LENGTH
    try:
        BatchDigest(mine).compare([int(number) for number in sent], 0)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_equal_batches_are_equal() -> None:
    assert refusal(batch(), batch()) == ""


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch['pixels']", lambda b: b["pixels"].copy_(b["pixels"] + 1e-4 * torch.randn(4, 3, 250, 301))),
        ("batch['ids']", lambda b: b["ids"][3].roll(1)),
        ("batch['mask']", lambda b: b["mask"][2].logical_not_()),
        ("batch['half']", lambda b: b["half"].neg_()),
        ("batch['complex']", lambda b: b["complex"].conj_physical_()),
        ("batch['array']", lambda b: b["array"].sort()),
        ("batch['sequences'].data", lambda b: b["sequences"].data.add_(1)),
        ("batch['sparse']", lambda b: b["sparse"].mul_(2)),
        ("batch['ragged']", lambda b: b["ragged"].values().add_(1)),
        ("batch['more'][1][0]", lambda b: b["more"][1][0].add_(1)),
    ],
)
def test_the_part_that_differs_is_named(name: str, change: Callable[[Any], Any]) -> None:
    changed = batch()
    if name == "batch['ids']":
        changed["ids"][[0, 1]] = changed["ids"][[1, 0]]  # the order counts
    elif name == "batch['array']":
        changed["array"] = changed["array"][::-1].copy()
    else:
        change(changed)
    assert f"on stage 0 {name} came with other values" in refusal(changed, batch())


def test_a_part_of_another_shape_and_other_parts() -> None:
    changed = batch()
    changed["ids"] = changed["ids"].reshape(7, 4)
    assert "on stage 0 batch['ids'] came of another shape" in refusal(changed, batch())
    del changed["mask"]
    assert "have other parts than here: batch['pixels'] or batch['ids']" in refusal(changed, batch())
    assert "split_batch returned batches of other shapes on some stages (stage 0)" in refusal(
        batch(), batch(), parts=[(2, 7)]
    )


def test_many_parts_share_a_place() -> None:
    parts = list(torch.zeros(30, 2))
    changed = [part.clone() for part in parts]
    changed[14] += 1
    assert "on stage 0 batch[2] or batch[14] or batch[26] came with other values" in refusal(changed, parts)


def test_one_sample_of_a_large_tensor_is_seen() -> None:
    images = torch.randn(64, 3, 64, 64)
    assert images.nbytes > LIMIT
    for sample in range(64):
        changed = images.clone()
        changed[sample] = changed[sample].flip(-1)
        assert refusal([changed], [images])


def test_what_a_step_changes_in_place_does_not_matter() -> None:
    ours, theirs = torch.ones(4, 3), torch.ones(4, 3)
    digest = BatchDigest([ours])
    ours.zero_()
    digest.compare(BatchDigest([theirs]).numbers, 0)


def test_a_stand_in_goes_with_any_values_of_its_shape() -> None:
    images, labels = torch.ones(4, 3), torch.arange(4)
    assert refusal([images, labels], [stand_in((4, 3)), labels]) == ""
    assert refusal([stand_in((4, 3)), labels], [images, labels]) == ""
    assert "batch[0] came of another shape" in refusal([images, labels], [stand_in((4, 2)), labels])
    assert "batch[1] came with other values" in refusal([images, labels], [stand_in((4, 3)), labels + 1])
    between = BatchDigest([stand_in((4, 3)), labels])
    between.compare(BatchDigest([images, labels]).numbers, 0)
    with pytest.raises(ConfigurationError, match=r"on stage 1 batch\[0\] came with other values"):
        BatchDigest([images + 1, labels]).compare(between.numbers, 1)  # as the stage between has passed it on


class LaterOn(Dataset[Any]):
    """Begins to draw from a generator of the process in the second epoch, or for validation."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.asked = 0
        self.module: Any = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = (part[None] for part in samples(16)[index])
        self.asked += 1  # by the rehearsal as well
        if self.asked <= 24 or self.module.global_rank == 0:
            return x, y
        if self.kind == "longer":
            return x.repeat(2, 1), y
        return x, y + 1


class Later(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.data = LaterOn(kind)
        self.data.module = self

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 4)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("labels", {}),
        ("labels", {"schedule": "pipedream"}),
        ("labels", {"schedule": "interleaved_1f1b", "stages_per_worker": 2, "num_micro_batches": 2}),
        ("longer", {"num_micro_batches": 2}),
    ],
    ids=repr,
)
def test_a_data_set_that_begins_to_draw_later_is_refused(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    what = "came with other values" if kind == "labels" else "came of another shape"
    name = r"batch\[1\]" if kind == "labels" else r"batch\[0\]"
    strategy = SDPipeStrategy(2, sync=AllReduce(), start_method="fork", **options)
    with pytest.raises(Exception, match=rf"were given different batches[\s\S]*on stage \d {name} {what}"):
        fit(tmp_path, strategy, 2, 4, module=Later(kind), max_epochs=3)


def test_options_of_the_optimizer_that_differ_are_refused() -> None:
    theirs = BatchDigest(batch(), options=[{"lr": 0.1, "betas": (0.9, 0.999)}]).numbers
    BatchDigest(batch(), options=[{"lr": 0.1, "betas": (0.9, 0.999)}]).compare(theirs, 0)
    with pytest.raises(ConfigurationError, match=r"options are not on stage 0 what they are here.*\{'lr': 0.05,"):
        BatchDigest(batch(), options=[{"lr": 0.05, "betas": (0.9, 0.999)}]).compare(theirs, 0)
