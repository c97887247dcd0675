"""``sdpipe check``: whole against cut."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from queue import SimpleQueue

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_sdpipe.cli import main


class Residual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x) + first
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss


class Secretive(Residual):
    """Numbers leave blocks through an object of a library, which no operation of torch shows."""

    def __init__(self) -> None:
        super().__init__()
        numbers: SimpleQueue[float] = SimpleQueue()

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                numbers.put(float(x.detach().abs().sum()))
                return self.linear(x) * numbers.qsize()

        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        while not self.numbers.empty():
            self.numbers.get()
        return super().forward(x)


def residual() -> tuple[Residual, Tensor]:
    return Residual(), torch.ones(6, 4)


def secretive() -> tuple[Residual, Tensor]:
    return Secretive(), torch.ones(6, 4)


class TimeFirst(Residual):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.cumsum(0), batch_idx)


def time_first() -> tuple[TimeFirst, Tensor]:
    return TimeFirst(), torch.ones(6, 6, 4)


def unlike() -> tuple[Residual, Tensor]:
    module = Residual()
    with torch.no_grad():
        module.layers[0][0].bias.add_(torch.rand(4, generator=GENERATOR))
    return module, torch.ones(6, 4)


GENERATOR = torch.Generator()


def test_a_cut_model_that_computes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:residual", "--stages", "3"]) == 0
    printed = capsys.readouterr().out
    assert "3 stages compute the same as the whole model" in printed
    assert "loss of micro-batch 0" in printed


def test_each_cut_is_compared_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:residual", "--stages", "1,3,2,3"]) == 0
    printed = capsys.readouterr().out
    for line in ("Pipeline 0: 1 stage computes", "Pipelines 1, 3: 3 stages compute", "Pipeline 2: 2 stages compute"):
        assert printed.count(f"{line} the same as the whole model") == 1


@pytest.mark.parametrize(("factory", "said"), [("residual", "is the mean"), ("time_first", "is NOT the mean")])
def test_whether_a_batch_may_be_split(capsys: pytest.CaptureFixture[str], factory: str, said: str) -> None:
    assert main(["check", f"{__name__}:{factory}"]) == 0
    assert f"The loss of the batch {said} of those of its micro-batches" in capsys.readouterr().out


def test_one_that_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:secretive", "--stages", "2"]) == 1
    assert "NOT the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "message"), [("unlike", "other values each time"), ("Residual", "returned no batch"), ("no", "import")]
)
def test_what_cannot_be_compared(factory: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{__name__}:{factory}"]) == 2
    assert message in capsys.readouterr().err


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A console script does not have it in ``sys.path``, as ``python -m`` does."""
    (tmp_path / "my_model.py").write_text(f"from {__name__} import residual as make")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.chdir(tmp_path)
    for command in ("check", "partition"):
        assert main([command, "my_model:make"]) == 0, capsys.readouterr().err
