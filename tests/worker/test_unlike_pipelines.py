"""Pipelines of unlike depths under AllReduce are one process on their joined batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.features.running import on_four_ranks
from tests.worker.unlike_pipelines import (
    BATCH,
    BATCHES,
    PLACED,
    WIDTH,
    Tied,
    go_on,
    loader,
    on_a_machine,
    train,
    trainer,
)
from tests.workers import free_port, run_workers

pytestmark = pytest.mark.distributed


def of_file(file: Path) -> dict[str, Tensor]:
    """The contents of a checkpoint as :meth:`Tied.held` names them."""
    saved = torch.load(file, weights_only=False)
    values: dict[str, Tensor] = dict(saved["state_dict"])
    names = [name for name, _ in Tied().named_parameters()]
    for place, state in saved["optimizer_states"][0]["state"].items():
        values |= {f"{names[place]}: {key}": value for key, value in state.items()}
    return values


def assert_parts(parts: list[dict[str, Tensor]], whole: dict[str, Tensor], **tolerance: float) -> None:
    assert set().union(*parts) == set(whole)
    for part in parts:
        for name, value in part.items():
            torch.testing.assert_close(value, whole[name], rtol=0, **{"atol": 0, **tolerance}, msg=name)


@pytest.mark.timeout(120)
def test_all_reduce_on_pipelines_of_unlike_depths_is_one_process(tmp_path: Path) -> None:
    ranks: list[Any] = on_four_ranks(train, tmp_path, count=6, timeout=110)
    module, run = Tied(), trainer(tmp_path)
    run.fit(module, loader(1), loader(1))
    alone = module.ended_with

    parts = [rank["held"] for rank in ranks]
    assert [len(part) for part in parts].count(len(alone)) == 1, "one pipeline is one worker"
    assert_parts(parts, parts[0])  # rank 0 has everything; copies and replicas are equal to the last bit
    assert_parts([{**parts[0], "count": parts[0]["count"] * 3}], alone, atol=1e-5)
    assert ranks[0]["losses"] == pytest.approx(module.losses, abs=1e-5)
    assert ranks[0]["val_loss"] == pytest.approx(float(run.callback_metrics["val_loss"]), abs=1e-5)
    assert len({str(rank["losses"]) for rank in ranks}) == 1

    sections = 4 * (WIDTH * WIDTH + 3 * WIDTH + WIDTH)  # of rank 3: block 4, and what of block 5 is not tied
    assert ranks[3]["bytes"] == 2 * BATCHES * (2 * 2 * sections // 3)

    expected = run.predict(module, DataLoader(loader(1).dataset, BATCH))
    torch.testing.assert_close(ranks[0]["predicted"], expected, rtol=0, atol=1e-4)

    assert_parts([rank["alike"] for rank in ranks], of_file(tmp_path / "unlike.ckpt"))
    assert_parts([rank["unlike"] for rank in ranks], of_file(tmp_path / "alike.ckpt"))
    assert {rank["placed"] for rank in ranks} == {PLACED}
    assert "blocks.5.bias" in ranks[0]["unlike"], "rank 0 has the last block of six, as the placement says"
    assert "blocks.4.linear.weight" not in ranks[0]["unlike"]
    assert_parts([go_on(tmp_path / "unlike.ckpt")], of_file(tmp_path / "unlike.ckpt"))


@pytest.mark.timeout(60)
def test_machines_may_have_unlike_numbers_of_devices_and_pipelines_unlike_numbers_of_batches(tmp_path: Path) -> None:
    found = run_workers(3, on_a_machine, free_port(), tmp_path, timeout=50)
    assert_parts([held for held, _ in found], found[0][0])
    assert found[0][1] == found[1][1] == found[2][1]
