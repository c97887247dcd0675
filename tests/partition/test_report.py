import re
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.cli import main
from lightning_sdpipe.partition import ownership
from lightning_sdpipe.partition.command import table
from lightning_sdpipe.partition.plan import Plan
from lightning_sdpipe.partition.profile import BlockProfile


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).mean()


def with_batch() -> tuple[nn.Module, Tensor]:
    return Model(), torch.ones(2, 3)


class Looking(Model, L.LightningModule):
    """Its step looks at the Trainer, and at the learning rate."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.trainer.training
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        self.log("lr", optimizer.param_groups[0]["lr"] + schedule.get_last_lr()[0])
        return self.net(batch).mean() / (1 + self.trainer.global_step)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def looking() -> tuple[nn.Module, Tensor]:
    return Looking(), torch.ones(2, 3)


@pytest.mark.parametrize("partition", ["auto", "uniform"])
def test_a_step_may_look_at_the_trainer(partition: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", f"{__name__}:looking", "--partition", partition]) == 0
    printed = capsys.readouterr()
    assert len(rows(printed.out)) == 2
    assert not printed.err
    assert main(["check", f"{__name__}:looking", "--partition", "1,2"]) == 0
    assert "2 stages compute the same as the whole model" in capsys.readouterr().out


class Sharing(nn.Module):
    """Runs most of itself twice."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.shared, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.shared(self.shared(self.entry(batch)).tanh())).mean()  # type: ignore[no-any-return]


def sharing() -> tuple[nn.Module, Tensor]:
    return Sharing(), torch.ones(2, 3)


def test_all_that_a_stage_holds_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", f"{__name__}:sharing"]) == 0
    printed = capsys.readouterr().out
    assert [row[2] for row in rows(printed)[:2]] == [str(32 + 72), str(72 + 9)]
    assert "saves no memory" not in printed
    with mock.patch.object(ownership, "_SAVES_NOTHING", 0.7):
        assert main(["partition", f"{__name__}:sharing"]) == 0
    assert "every stage holds at least 72% of the parameters" in (printed := capsys.readouterr().out)
    assert "most of it in ['shared']" in printed


PLAN = Plan((("net.0",), ("net.1",), ("net.2",)), (range(2), range(2, 3)))
PROFILE = [BlockProfile(0.001, 0.002, 32, 32), BlockProfile(0.003, 0.004, 2048, 32), BlockProfile(0.005, 0.006, 8, 8)]


def rows(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()[2:]]


def test_the_table_adds_up_each_stage() -> None:
    assert rows(table(Model(), PLAN, PROFILE)) == [
        ["0", "net.0 … net.1 (2)", "16", "4.00", "6.00", "2.0"],
        ["1", "net.2", "5", "5.00", "6.00", "–"],
    ]
    assert rows(table(Model(), PLAN))[1] == ["1", "net.2", "5", "–", "–", "–"]


def test_each_block_can_have_a_row() -> None:
    assert [row[:3] for row in rows(table(Model(), PLAN, PROFILE, each_block=True))] == [
        ["0", "net.0", "16"],
        ["0", "net.1", "0"],
        ["1", "net.2", "5"],
    ]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", f"{__name__}:with_batch", "--stages", "2", "--partition", "1,2"]) == 0
    first, second = rows(capsys.readouterr().out)
    assert first[1:3] == ["net.0", "16"]
    assert second[1:3] == ["net.1 … net.2 (2)", "5"]
    assert float(first[3]) > 0
    cuts = ["--stages", "3", "--partition", "balanced", "--speeds", "1,1,2"]
    assert main(["partition", f"{__name__}:with_batch", *cuts]) == 0
    assert len(rows(capsys.readouterr().out)) == 3


def test_each_pipeline_may_have_its_own_cut(capsys: pytest.CaptureFixture[str]) -> None:
    cuts = ["--stages", "1,2,2,2", "--partition", "3/1,2/2,1/1,2"]
    assert main(["partition", f"{__name__}:with_batch", *cuts]) == 0
    text = capsys.readouterr().out
    parts = text.split("\n\n")
    assert [part.splitlines()[0] for part in parts[:3]] == ["Pipeline 0: ", "Pipelines 1, 3: ", "Pipeline 2: "]
    assert [[row[1] for row in rows(part)[1:]] for part in parts[1:3]] == [
        ["net.0", "net.1 … net.2 (2)"],
        ["net.0 … net.1 (2)", "net.2"],
    ]
    assert parts[3] == "Replicas: 3 sections, each with a worker in every pipeline.\n"
    balanced = ["--stages", "1,2", "--partition", "balanced", "--speeds", "1/1,0.1"]
    assert main(["partition", f"{__name__}:with_batch", *balanced]) == 0
    assert "net.0 … net.1 (2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.such:thing"], "cannot be imported"),
        (["builtins:dict"], "returned a dict"),
        ([f"{__name__}:Model", "--partition", "balanced"], "returned no batch"),
        ([f"{__name__}:Model", "--stages", "9"], "Use at most 3, or name smaller modules"),
        ([f"{__name__}:Model", "--stages", "1,9"], "pipeline 1: num_stages=9 is more than the model's 3 blocks"),
        ([f"{__name__}:Model", "--stages", "1,2", "--partition", "1,2"], "give one list per pipeline"),
        ([f"{__name__}:Model", "--stages", "2", "--partition", "3/1,2"], "has a list for each pipeline"),
        ([f"{__name__}:Model", "--partition", "1,two"], "--partition 1,two is not known"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", *arguments]) == 2
    assert message in capsys.readouterr().err
