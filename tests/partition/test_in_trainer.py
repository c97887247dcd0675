"""Plans and initial values inside a real Trainer, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sdpipe import AllReduce, Balanced, SDPipeStrategy
from lightning_sdpipe.heterogeneity.emulate import EmulatedBlock


class Model(L.LightningModule):
    """Four blocks, of which the first is slow, built in ``configure_model``."""

    def __init__(self, directory: Path, device: str = "cpu", slow: float = 0.0) -> None:
        super().__init__()
        self.directory, self.build_on, self.slow = directory, device, slow
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        L.seed_everything(11, verbose=False)
        with torch.device(self.build_on):
            first = EmulatedBlock(self.slow, self.slow) if self.slow else nn.BatchNorm1d(4)
            self.net = nn.Sequential(first, nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_fit_start(self) -> None:  # later, one process has drawn the seed of its data loader
        assert self.net is not None
        here = {name: t.clone() for name, t in self.state_dict().items() if not t.is_meta}
        torch.save((here, torch.get_rng_state()), self.directory / f"{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(directory: Path, strategy: Any, devices: int, **options: Any) -> list[Any]:
    """What each rank holds when training starts."""
    directory.mkdir()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(16, 4, generator=generator), torch.randn(16, 1, generator=generator))
    trainer.fit(Model(directory, **options), DataLoader(data, 8))
    return [torch.load(directory / f"{rank}.pt") for rank in range(devices)]


def strategy(**options: Any) -> SDPipeStrategy:
    return SDPipeStrategy(num_stages=2, sync=AllReduce(), start_method="fork", **options)


@pytest.mark.distributed
def test_a_model_built_on_meta_starts_like_one_process(tmp_path: Path) -> None:
    ((expected, random_state),) = fit(tmp_path / "one", "auto", 1)
    ranks = fit(tmp_path / "two", strategy(), 2, device="meta")
    found: dict[str, Tensor] = {}
    for here, state in ranks:
        assert torch.equal(state, random_state)
        assert not found.keys() & here.keys()
        found |= here
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.distributed
def test_the_blocks_are_measured_and_cut_by_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ((_, random_state),) = fit(tmp_path / "one", "auto", 1, slow=0.02)
    first = ["net.0.weight"]
    for partition in ("balanced", Balanced([1.0, 2.0])):  # the second one reads the first one's profile
        ranks = fit(tmp_path / f"{partition}"[:8], strategy(partition=partition), 2, slow=0.02)
        assert sorted(list(here) for here, _ in ranks)[0] == first
        assert all(torch.equal(state, random_state) for _, state in ranks)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1
