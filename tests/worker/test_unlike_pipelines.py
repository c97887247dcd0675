"""Pipelines of unlike depths under AllReduce are one process on their joined batches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sdpipe.partition.cut_step import CutModel
from lightning_sdpipe.partition.message import NOTHING_MORE
from lightning_sdpipe.scheduler.log.event_log import read_log
from tests.features.running import assert_same, on_four_ranks
from tests.worker.unlike_pipelines import (
    BATCH,
    BATCHES,
    DEPTHS,
    PLACED,
    SCRIPT,
    WIDTH,
    Tied,
    go_on,
    groups_of_machines,
    loader,
    on_a_machine,
    semi_decentralized,
    train,
    trainer,
)
from tests.workers import free_port, run_workers

pytestmark = pytest.mark.distributed

ROWS = [[0], [2, 1], [5, 4, 3]]  # of each pipeline, the ranks of its stages


def of_file(file: Path) -> dict[str, Tensor]:
    """The contents of a checkpoint as :meth:`Tied.held` names them."""
    saved = torch.load(file, weights_only=False)
    values: dict[str, Tensor] = dict(saved["state_dict"])
    names = [name for name, _ in Tied().named_parameters()]
    for place, state in saved["optimizer_states"][0]["state"].items():
        values |= {f"{names[place]}: {key}": value for key, value in state.items()}
    return values


assert_parts = partial(assert_same, rtol=0, atol=0)


def test_all_reduce_on_pipelines_of_unlike_depths_is_one_process(tmp_path: Path) -> None:
    ranks: list[Any] = on_four_ranks(train, tmp_path, count=6)
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

    by_speed, losses, sizes = zip(*(rank["by_speed"] for rank in ranks), strict=True)
    assert_parts([*by_speed], by_speed[0])
    assert_parts([{**by_speed[0], "count": by_speed[0]["count"] * 3}], alone, atol=1e-5)
    assert losses[0] == pytest.approx(module.losses, abs=1e-5)
    assert {sum(together) for together in zip(*(sizes[own[0]] for own in ROWS), strict=True)} == {3 * BATCH}
    assert max(sizes[0]) > BATCH

    assert_parts([rank["alike"] for rank in ranks], of_file(tmp_path / "unlike.ckpt"))
    assert_parts([rank["unlike"] for rank in ranks], of_file(tmp_path / "alike.ckpt"))
    assert {rank["placed"] for rank in ranks} == {PLACED}
    assert "blocks.5.bias" in ranks[0]["unlike"], "rank 0 has the last block of six, as the placement says"
    assert "blocks.4.linear.weight" not in ranks[0]["unlike"]
    assert_parts([go_on(tmp_path / "unlike.ckpt")], of_file(tmp_path / "unlike.ckpt"))


class Emulation:
    """SDPipe on three whole models in one process, with the groups of a script."""

    def __init__(self, seed: int) -> None:
        self.models = [Tied(dropout=0.3) for _ in DEPTHS]
        self._optimizers = [torch.optim.Adam(model.parameters(), lr=0.02) for model in self.models]
        self._blocks = [range(len(model.blocks)) for model in self.models]
        paths = [f"blocks.{number}" for number in self._blocks[0]]
        self._cuts = [
            CutModel(m, paths, [s], torch.device("cpu")) for m, s in zip(self.models, self._blocks, strict=True)
        ]
        self._seed, self._update = seed, 0

    def train(self, epoch: int) -> None:
        batches = loader(1)
        batches.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for model in self.models:
            model.blocks[2].requires_grad_(epoch == 0)
        for number, (x, y) in enumerate(batches):
            for pipeline in range(len(self.models)):
                self._step(pipeline, epoch, number, x[pipeline::3], y[pipeline::3])
            self._average([SCRIPT.members(self._update, pipeline) for pipeline in range(len(self.models))])
            self._update += 1
        self._average([dict.fromkeys(range(3), 1 / 3)] * 3)

    def _step(self, pipeline: int, epoch: int, number: int, x: Tensor, y: Tensor) -> None:
        model, cut, optimizer = self.models[pipeline], self._cuts[pipeline], self._optimizers[pipeline]
        optimizer.zero_grad()
        training = [*RunningStage].index(RunningStage.TRAINING)
        for part, (inputs, targets) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            cut.streams.begin(self._seed, epoch, training, 0, 3 * number + pipeline, part)
            outputs = cut.run(self._blocks[pipeline], partial(model, inputs), None, NOTHING_MORE)
            (nn.functional.mse_loss(outputs, targets) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    def _average(self, groups: list[dict[int, float]]) -> None:
        """``groups[i]``: the members of the group of pipeline i, and how much each counts."""
        with torch.no_grad():
            for parameters in zip(*(model.parameters() for model in self.models), strict=True):
                if parameters[0].requires_grad:
                    means = [sum(w * parameters[i] for i, w in group.items()) for group in groups]
                    for parameter, mean in zip(parameters, means, strict=True):
                        parameter.copy_(mean)

    def held(self, pipeline: int) -> dict[str, Tensor]:
        model, optimizer = self.models[pipeline], self._optimizers[pipeline]
        values = {name: value for name, value in model.state_dict().items() if name != "count"}
        for name, parameter in model.named_parameters():
            values |= {f"{name}: {key}": value for key, value in optimizer.state[parameter].items()}
        return values


def test_groups_of_pipelines_of_unlike_depths_are_three_models_in_one_process(tmp_path: Path) -> None:
    ranks: list[Any] = on_four_ranks(semi_decentralized, tmp_path, count=6)
    alone = Emulation(ranks[0]["seed"])
    for epoch in range(2):
        alone.train(epoch)
    for pipeline, own in enumerate(ROWS):
        parts = [{name: value for name, value in ranks[rank]["held"].items() if name != "count"} for rank in own]
        assert_parts(parts, alone.held(pipeline), atol=1e-5)
    assert ranks[3]["groups"] == (2 * BATCHES, 1 + 2 + 3 + 2 + 1 + 1 + 2 + 3)

    (record,) = read_log(tmp_path / "scheduler.jsonl")
    assert record.depths == tuple(DEPTHS)
    assert list(record.differences()) == []

    for key in ("seen", "dealt_batches"):  # copies follow after each update, within the pipeline
        for own in ROWS:
            first = [held for _, held in ranks[own[0]][key]]
            for rank in own[1:]:
                for (_, copies), of_first in zip(ranks[rank][key], first, strict=True):
                    assert_parts([copies], {**copies, **{n: v for n, v in of_first.items() if n in copies}})
    for key in ("held", "dealt"):  # at the end of the epoch
        parts = [{name: value for name, value in rank[key].items() if ":" not in name} for rank in ranks]
        assert_parts(parts, parts[0])
    trained = [[value for value, _ in ranks[rank]["dealt_batches"]] for own in ROWS for rank in own]
    assert trained[1] == trained[2], "all stages of a pipeline train the same batches"
    assert trained[3] == trained[4] == trained[5]
    for rank in ranks:  # hooks see a turn more of a pipeline that was dealt nothing, which trains nothing
        assert float(rank["dealt"]["count"]) == pytest.approx(2 * BATCHES * BATCH), "the pipelines' mean"


def test_machines_may_have_unlike_numbers_of_devices_and_pipelines_unlike_numbers_of_batches(tmp_path: Path) -> None:
    found = run_workers(3, on_a_machine, free_port(), tmp_path)
    assert_parts([held for held, _ in found], found[0][0])
    assert found[0][1] == found[1][1] == found[2][1]


def test_unlike_machines_may_hold_equal_pipelines(tmp_path: Path) -> None:
    """Three pipelines of one stage, one of them on a machine of its own: which share a host is heard of the ranks."""
    assert run_workers(3, groups_of_machines, free_port(), tmp_path) == [(((0,), (1, 2)), 6)] * 3
