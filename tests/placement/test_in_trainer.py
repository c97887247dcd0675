"""Placements inside a real Trainer, on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_sdpipe import AllReduce, ConfigurationError, SDPipeStrategy
from lightning_sdpipe.heterogeneity import Static
from lightning_sdpipe.topology.groups import device_name, this_host
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.placement_file import Placement, write_placement
from tests.features.running import Regression, assert_same, on_four_ranks, pipelines, train_loader, weights

ACROSS = ((1, 2), (3, 0))
ALONG = ((2, 3), (1, 0))
"""Which device runs stage 0 and stage 1 of either pipeline; by default it is ((1, 0), (3, 2))."""

FACTORS = (1.0, 2.0, 3.0, 4.0)


class Random(Regression):
    """The first stage drops out, the second does not: their random states part. The optimizer has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def placed(directory: Path, rows: tuple[tuple[int, ...], ...], blocks: tuple[int, ...] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "placement.json"
    names = tuple(tuple(device_name(index) for index in row) for row in rows)
    write_placement(path, Placement("a test", {}, False, blocks and (blocks,) * len(names), names))
    return path


def _train(
    directory: Path, module: type[Regression], epochs: int, placement: Path | None, resume: Path | None = None
) -> tuple[dict[str, Tensor], Mesh, float | None, list[str]]:
    """Weights and mesh; how slow the rank is made; and the parameters that it holds."""
    torch.manual_seed(len(str(directory)))
    strategy = SDPipeStrategy(
        2,
        AllReduce(),
        placement=placement,
        partition="placed" if placement and "blocks" in str(placement) else "uniform",
        delays=Static(FACTORS),
        gather_module=False,
    )
    model = module()
    slowness = []

    class Look(L.Callback):
        def on_train_start(self, *_: object) -> None:
            track = strategy.injector._track
            slowness.append(1.0 if track is None else 1 / track.speeds[0])

    saving = ModelCheckpoint(directory, save_last=True)
    trainer = pipelines(directory, strategy, max_epochs=epochs, callbacks=[saving, Look()])
    trainer.fit(model, train_loader(), ckpt_path=resume)
    return weights(model), strategy.mesh, slowness[0], sorted(weights(model))


@pytest.mark.distributed
def test_devices_run_what_the_placement_says_and_learn_the_same(tmp_path: Path) -> None:
    default = on_four_ranks(_train, tmp_path / "default", Regression, 2, None)
    path = placed(tmp_path / "blocks", ACROSS, (3, 1))
    across = on_four_ranks(_train, tmp_path / "across", Regression, 2, path)
    whole = {name: value for parts, *_ in default for name, value in parts.items()}
    for rank, (parts, mesh, slowness, held) in enumerate(across):
        assert mesh == Mesh(((3, 0), (1, 2)))  # rank 0's pipeline comes first
        assert slowness == FACTORS[rank]  # of the device, whatever it runs
        assert_same([parts], {name: whole[name] for name in parts})
        assert held == (["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"] if rank in (1, 3) else [
            "net.3.bias", "net.3.weight"
        ])  # fmt: skip
    assert [slowness for _, _, slowness, _ in default] == list(FACTORS)


@pytest.mark.distributed
def test_a_checkpoint_of_one_placement_resumes_under_another(tmp_path: Path) -> None:
    """With the random states, optimizer states and weights of each worker, whoever it was."""
    across, along = placed(tmp_path / "a", ACROSS), placed(tmp_path / "b", ALONG)
    whole = on_four_ranks(_train, tmp_path / "whole", Random, 2, across)
    on_four_ranks(_train, tmp_path / "half", Random, 1, across)
    rest = on_four_ranks(_train, tmp_path / "the rest", Random, 2, along, tmp_path / "half" / "last.ckpt")
    expected = {name: value for parts, *_ in whole for name, value in parts.items()}
    assert rest[0][1] == Mesh(((1, 0), (2, 3))) != whole[0][1]
    for parts, *_ in rest:
        assert_same([parts], {name: expected[name] for name in parts}, rtol=1e-6, atol=1e-6)


def test_another_mesh_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = placed(tmp_path, ACROSS)
    for num_stages, devices in ((2, 2), (4, 4), (2, 6)):
        strategy = SDPipeStrategy(num_stages, placement=path)
        with pytest.raises(ConfigurationError, match=rf"2 stages × 2 pipelines \(4 on {this_host()}\); this run has"):
            L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)


def test_blocks_are_asked_for_only_where_they_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="partition='placed' needs a placement that names the blocks"):
        SDPipeStrategy(2, partition="placed", placement=placed(tmp_path, ACROSS))
    with pytest.raises(ConfigurationError, match="partition='placed' needs a placement"):
        SDPipeStrategy(2, partition="placed")
    assert SDPipeStrategy(2, partition="placed", placement=placed(tmp_path, ACROSS, (1, 3))).options.partition == (1, 3)


def test_a_host_may_be_given_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDPIPE_HOST", "left")
    assert device_name(3) == "left:3"
    monkeypatch.setenv("SDPIPE_HOST", "x" * 256)
    with pytest.raises(ConfigurationError, match="too long"):
        this_host()
