"""Processes that Lightning, torchrun, SLURM or two machines start. The places of all ranks are what they print."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor, nn
from torch.distributed.launcher.api import elastic_launch

from lightning_sdpipe import AllReduce, SDPipeStrategy
from recipes.harness import namespaces
from tests.features.running import Regression
from tests.features.table import supported
from tests.namespaces import hosts
from tests.own_session import scripts, torchrun_of
from tests.scripts import launched
from tests.strategy.test_strategy import fit
from tests.workers import free_port, run_workers


def node(host: str | None, rank: int, address: str, port: int, each: int) -> None:
    """Run one of two nodes, which prints the places of its workers."""
    if host is not None:
        namespaces.enter(host)
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE  # gloo would look its address up by the host name
    for place in elastic_launch(torchrun_of(2, rank, address, port, each), launched.main)(2, each).values():
        print("PLACE " + json.dumps(place), flush=True)


def places(directory: Path, nodes: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What the ranks of all ``nodes``, run at the same time, printed, by rank."""
    with scripts(directory, *[(node, *arguments) for arguments in nodes]) as running:
        assert [agent.wait() for agent in running] == [0] * len(nodes), [agent.printed() for agent in running]
        found = [json.loads(line) for agent in running for line in re.findall(r"^PLACE (.*)$", agent.printed(), re.M)]
    return sorted(found, key=lambda place: place["rank"])


def check(found: list[dict[str, Any]], size: int = 4, host: str = "127.0.0.1") -> None:
    assert [place["rank"] for place in found] == list(range(size))
    assert [place["worker"] for place in found] == [[1, 0], [0, 0], [1, 1], [0, 1]][:size]  # stage, pipeline
    assert {place["world"] for place in found} == {size}
    assert {place["steps"] for place in found} == {8 // (size // 2)}
    assert {place["children"] for place in found} == {0}
    (address,) = {place["scheduler"] for place in found}
    assert address.startswith(f"tcp://{host}:")


@supported("Launching", "torchrun with one node or two", "rank 0 listens at the address of `--master-addr`")
@pytest.mark.distributed
def test_two_nodes_of_torchrun_on_loopback(tmp_path: Path) -> None:
    port = free_port()
    check(places(tmp_path, [(None, rank, "127.0.0.1", port, 2) for rank in range(2)]))


@supported("Launching", "two machines", "two network namespaces with a cable between them")
@pytest.mark.distributed
def test_two_machines(tmp_path: Path) -> None:
    first = namespaces.address(0)
    with hosts(2) as both:
        check(places(tmp_path, [(host, rank, first, 29555, 1) for rank, host in enumerate(both)]), size=2, host=first)


def slurm(rank: int, nodes: int, tasks_per_node: int) -> dict[str, str]:
    """What srun sets for one of its tasks."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(nodes * tasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_NNODES": str(nodes),
        "SLURM_NODEID": str(rank // tasks_per_node),
        "SLURM_NODELIST": "machine[7-8]",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % tasks_per_node),
    }


@pytest.mark.parametrize("rank", [0, 5])
def test_the_ranks_are_those_of_slurm_and_nothing_else_starts_processes(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else Lightning sets it
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # Lightning sets them, which the first line undoes in the end
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in slurm(rank, nodes=2, tasks_per_node=4).items():
        monkeypatch.setenv(name, value)
    trainer = L.Trainer(accelerator="cpu", strategy=SDPipeStrategy(2), devices=4, num_nodes=2, logger=False)
    strategy = trainer.strategy
    assert isinstance(strategy, SDPipeStrategy)
    environment = strategy.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert environment.creates_processes_externally
    assert (environment.main_address, environment.main_port) == ("machine7", 15000 + 4711)
    strategy._configure_launcher()
    assert strategy.launcher is not None
    assert strategy.launcher.launch(lambda: "in this process") == "in this process"
    assert strategy.launcher.procs == []
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (rank, rank % 4, rank // 4)
    assert (strategy.mesh.num_stages, strategy.mesh.num_pipelines) == (2, 4)
    assert strategy.mesh.locate(rank) == (0 if rank % 2 else 1, rank // 2)


@supported("Launching", "SLURM", "`srun` starts the processes")
@pytest.mark.distributed
def test_four_tasks_of_slurm() -> None:
    check(run_workers(4, _task, free_port()))


def _task(rank: int, port: int) -> dict[str, Any]:
    dist.destroy_process_group()  # Lightning opens its own
    os.environ |= {**slurm(rank, nodes=1, tasks_per_node=4), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return launched.main(1, 4)


@supported(
    "Launching",
    '`start_method="popen"`, `"fork"`, `"forkserver"`, `"spawn"`',
    'of the two that pickle the trainer, the tests run `"forkserver"`, with one pipeline',
)
@pytest.mark.distributed
def test_workers_that_get_the_trainer_pickled(tmp_path: Path) -> None:
    """The other ways are those of most tests: "popen" in test_strategy.py, "fork" nearly everywhere."""
    before = Regression()
    multiprocessing.set_forkserver_preload(["tests.features.running"])  # else both would import it
    trainer, model = fit(tmp_path, SDPipeStrategy(2, AllReduce(), start_method="forkserver"), 2, 4)
    assert not torch.equal(model.net[0].weight, before.net[0].weight)
    assert not torch.equal(model.net[3].weight, before.net[3].weight)
    assert trainer.callback_metrics["loss_epoch"] > 0


@pytest.mark.distributed
def test_forking_after_threads_have_computed_here(two_threads: None, tmp_path: Path) -> None:
    """As in a notebook: the worker would wait for OpenMP's threads, which it does not have, or in the group of a run
    before it in this process."""
    norm = nn.BatchNorm1d(512)
    norm(torch.randn(4096, 512)).sum().backward()
    short: Any = {"max_epochs": 1, "limit_train_batches": 2}
    fit(tmp_path, SDPipeStrategy(1, AllReduce()), 1, 4, Normalized(), **short)
    trainer, _ = fit(tmp_path, SDPipeStrategy(1, AllReduce(), start_method="fork"), 1, 4, Normalized(), **short)
    assert trainer.callback_metrics["threads"] == 2


class Normalized(Regression):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        nn.BatchNorm1d(512)(torch.randn(4096, 512)).sum().backward()  # large enough for several threads
        self.log("threads", float(torch.get_num_threads()))
        return super().training_step(batch, batch_idx)
