"""Training on an accelerator, beside the same on the CPU: on the fake one, whose processes may share a device over gloo
or have one each with a backend that orders messages as NCCL does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_sdpipe import AllReduce, Exchange, LocalSGD, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.payloads import EightBit, OneBit
from lightning_sdpipe.topology.groups import prepare_world
from recipes.gpu import checks
from recipes.gpu.elastic import killed
from recipes.gpu.rows import Row, attempt
from recipes.gpu.running import Machine
from tests import accelerator
from tests.features.running import as_torchrun, quiet_trainer
from tests.patience import limit
from tests.worker.elastic import jobs
from tests.workers import free_port, run_workers

NEW_DEVICES = True


STEPPED = "SDPIPE_TEST_STEPPED"  # a variable of the environment, which a step in a child process leaves as it is


class Net(L.LightningModule):
    """Blocks that draw, with buffers; a parameter outside of them, which all stages hold; a list of the user's with
    parameters; a metric; and a tensor that is made where the module says that it is. Steps run on the device
    ``only_on`` alone, if there is one."""

    def __init__(self, only_on: str = "", tried_here: bool = False) -> None:
        super().__init__()
        self.only_on, self.tried_here = only_on, tried_here
        torch.manual_seed(3)
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)), nn.BatchNorm1d(8)
        )
        self.scale = nn.Parameter(torch.ones(8))
        self.kept = list(self.parameters())
        self.mean = MeanMetric()
        self.losses: list[float] = []

    def error(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        os.environ[STEPPED] = "here"
        if self.only_on not in ("", x.device.type):
            raise RuntimeError(f"this is a kernel for {self.only_on}")
        noise = 0.01 * torch.randn(8, device=self.device)
        out = self.net(x * self.scale + noise)
        self.dtype_of_net = out.dtype
        return (out.float() - y).pow(2).mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.error(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_fit_start(self) -> None:
        assert (STEPPED in os.environ) == (self.tried_here and self.global_rank == 0)

    def on_train_start(self) -> None:
        assert self.kept[0] is self.scale, "which every stage holds"

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        error = self.error(batch)
        self.mean(error)
        self.log_dict({"error": error, "mean": self.mean})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


@dataclass
class Run:
    """Options of the strategy, and what else is to be tried."""

    strategy: dict[str, Any]
    resumes: bool = False
    bf16: bool = False
    only_there: bool = False  # steps do not run on the CPU
    within: float | None = 1e-5
    """None if it depends on time."""


def train(
    device: str,
    directory: Path,
    strategy: dict[str, Any],
    resume: Path | None = None,
    bf16: bool = False,
    only_there: bool = False,
) -> dict[str, Any]:
    """What this rank has after two epochs, or one more after ``resume``."""
    if device == "shared":  # Lightning counts devices, and these are one
        strategy = {**strategy, "parallel_devices": [torch.device(accelerator.NAME, 0)] * 2}
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 8, generator=generator), torch.randn(32, 8, generator=generator))
    L.seed_everything(1, verbose=False)
    plugin = MixedPrecision("bf16-mixed", "cpu" if device == "cpu" else accelerator.NAME)
    trainer = quiet_trainer(
        accelerator="cpu" if device == "cpu" else accelerator.Fake(),
        devices="auto" if device == "shared" else int(os.environ["WORLD_SIZE"]),
        max_epochs=2 if resume is None else 3,
        enable_checkpointing=False,
        default_root_dir=directory,
        plugins=[plugin] if bf16 else None,
        strategy=SDPipeStrategy(**strategy),
    )
    accelerated = device != "cpu"
    # a process that has used an accelerator has no child that runs a backward
    tried_here = (accelerated and only_there) or strategy.get("partition") == "balanced"
    module = Net(accelerator.NAME if accelerated and only_there else "", tried_here)
    os.environ.pop(STEPPED, None)
    trainer.fit(module, DataLoader(data, 8), DataLoader(data, 8), ckpt_path=resume, weights_only=False)
    if resume is None:
        trainer.save_checkpoint(directory / "saved.ckpt")
    if bf16 and trainer.strategy.has_results:
        assert module.dtype_of_net == torch.bfloat16
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": torch.tensor(module.losses), "metrics": metrics, "module": module.state_dict()}


def on_both(rank: int, port: int, count: int, ranked: bool, device: str, runs: Sequence[Run], path: Path) -> None:
    """Trains on the accelerator and on the CPU, in one world that the first run opens."""
    dist.destroy_process_group()  # that of `run_workers`
    accelerator.register(ranked)
    as_torchrun(rank, port, count, _on_both, (device, runs, path))


def _on_both(device: str, runs: Sequence[Run], path: Path) -> None:
    for number, run in enumerate(runs):
        found = {}
        for kind in (device, "cpu"):
            directory = path / f"{number}-{kind}"
            found[kind] = train(kind, directory, run.strategy, None, run.bf16, run.only_there)
            if run.resumes:
                found[kind]["resumed"] = train(kind, directory, run.strategy, resume=directory / "saved.ckpt")
        if run.within is None:
            assert found[device]["losses"].isfinite().all()
            continue
        torch.testing.assert_close(
            found[device],
            found["cpu"],
            rtol=run.within,
            atol=run.within,
            equal_nan=True,
            msg=lambda said, run=run: f"{run}: {said}",
        )


@pytest.fixture(scope="session")
def built() -> None:
    limit(400)  # another process of these tests may be compiling it
    try:
        accelerator.build()
    except accelerator.CannotBuildError as error:
        pytest.skip(f"the fake accelerator cannot be built: {error}")


# Exchanges of which `checks.replicas` compares the losses, in each payload, are left out here.
SHARED = [  # one device, over gloo: tensors go through the memory of the host
    Run({"num_stages": 2}, resumes=True),
    Run({"num_stages": 2, "num_micro_batches": 1, "schedule": "pipedream"}, only_there=True),
    Run({"num_stages": 2, "partition": "balanced"}),
    Run({"num_stages": 1, "sync": AllReduce()}, bf16=True, within=0.05),
    Run({"num_stages": 1, "sync": LocalSGD(every=2), "exchange": Exchange(OneBit(), overlap="step")}),
    Run(
        {"num_stages": 1, "sync": LocalSGD(every=1), "exchange": Exchange(EightBit(), "free", interval=0.0)},
        within=None,
    ),
]
ORDERED = [  # a device for each process: messages between two of them go in the order in which they are begun
    Run({"num_stages": 2, "num_micro_batches": 4}, bf16=True, within=0.05),
    Run({"num_stages": 2, "num_micro_batches": 4, "schedule": "interleaved_1f1b", "stages_per_worker": 2}),
    Run({"num_stages": 1, "sync": LocalSGD(every=2)}),
    Run({"num_stages": 1, "sync": AllReduce(), "exchange": Exchange(EightBit())}),
]


@pytest.mark.distributed
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("device", "runs"), [("shared", SHARED), ("one each", ORDERED)])
def test_two_ranks_compute_what_they_compute_on_the_cpu(device: str, runs: list[Run], tmp_path: Path) -> None:
    run_workers(2, on_both, free_port(), 2, device == "one each", device, runs, tmp_path)


@pytest.mark.distributed
@pytest.mark.usefixtures("built")
def test_two_pipelines_of_two_stages_compute_what_they_compute_on_the_cpu(tmp_path: Path) -> None:
    runs = [Run({"num_stages": 2, "sync": AllReduce()}), Run({"num_stages": 2, "sync": LocalSGD(every=2)})]
    run_workers(4, on_both, free_port(), 4, True, "one each", runs, tmp_path)


@pytest.mark.distributed
@pytest.mark.usefixtures("built")
def test_pipelines_of_an_elastic_run_come_are_killed_and_come_back(tmp_path: Path) -> None:
    def work() -> None:
        accelerator.register()
        jobs.fit(tmp_path, 64, {"sync": SemiDecentralized()}, accelerator.Fake())

    with jobs.elastic_run(tmp_path, 1, 2, start_pipelines=1) as run:
        run.start(0, work)
        run.wait_for_turns([0], 5)
        run.start(1, work)  # which gets its state from the other
        run.wait_for_turns([0, 1], 5)
        run.end(1)
        run.wait_for_turns([0], 5)
        run.start(1, work)
        run.wait_for_turns([0, 1], 20)
        assert run.finish() == {0: [0], 1: [0]}, run.said()
    first, back = run.rows(0)[-1], run.rows(1)[-1]
    assert back[0]["moments"] > 0
    pauses = [{row["pause"]: row["state"] for row in rows if "pause" in row} for rows in (first, back)]
    common = pauses[0].keys() & pauses[1].keys()
    assert common
    assert all(pauses[0][at] == pauses[1][at] for at in common)
    assert any(row.get("others", 0) > 0 for row in back)


class Fake(Machine):
    """Its ranks know the device."""

    def devices(self, ranks: int) -> list[torch.device]:
        accelerator.register()
        return super().devices(ranks)


NOT_HERE = (checks.nccl, checks.resnet, checks.bert, killed)


@pytest.mark.distributed
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("row", [row for row in checks.ROWS if row.work not in NOT_HERE], ids=lambda row: row.name)
def test_what_is_tried_on_a_gpu_passes(row: Row, tmp_path: Path) -> None:
    machine = Fake(accelerator.NAME, 1, tmp_path, dry=True, accelerator=accelerator.Fake())
    outcome = attempt(replace(row, seconds=1800.0), machine, tmp_path / "log")
    assert outcome.result == "passed", f"{outcome.details}\n{(tmp_path / 'log').read_text()[-3000:]}"


@pytest.mark.parametrize(
    ("given", "numbers", "backend"),
    [
        (None, [0, 1], "cpu:gloo,cuda:nccl"),
        ("nccl", [0, 1], "cpu:gloo,cuda:nccl"),
        ("gloo", [0, 1], "cpu:gloo,cuda:gloo"),
        (None, [0, 0], "cpu:gloo,cuda:gloo"),
        ("cpu:gloo,cuda:mine", [0, 1], "cpu:gloo,cuda:mine"),
    ],
)
def test_tensors_of_both_kinds_have_a_backend(given: str | None, numbers: list[int], backend: str) -> None:
    devices = [torch.device("cuda", number) for number in numbers]
    strategy = SDPipeStrategy(num_stages=2, parallel_devices=devices, process_group_backend=given)
    assert strategy._get_process_group_backend() == backend


def test_nccl_for_processes_that_share_a_gpu_is_refused() -> None:
    devices = [torch.device("cuda", 0)] * 2
    strategy = SDPipeStrategy(num_stages=2, parallel_devices=devices, process_group_backend="nccl")
    with pytest.raises(ConfigurationError, match="share a GPU"):
        strategy._get_process_group_backend()


def without_backend(rank: int) -> str:
    with pytest.raises(ConfigurationError) as refused:
        prepare_world(torch.device("xpu", 0))
    return str(refused.value)


@pytest.mark.distributed
def test_a_world_without_a_backend_for_the_device_is_refused() -> None:
    (said,) = run_workers(1, without_backend)
    assert "no backend for tensors on xpu" in said
