"""``sdpipe measure`` on real processes: under torchrun on several machines, and what it says when all is not well."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import elastic_launch

import lightning_sdpipe.placement.measure  # noqa: F401  # before processes fork, since it takes long
from lightning_sdpipe import cli
from lightning_sdpipe.errors import ConfigurationError, WorkerFailedError
from lightning_sdpipe.placement import links
from lightning_sdpipe.placement import measure as command
from lightning_sdpipe.placement.job_store import JobStore
from lightning_sdpipe.placement.network import Network, read_network
from recipes.harness import namespaces
from tests.namespaces import hosts
from tests.own_session import scripts, torchrun_of
from tests.workers import free_port, run_workers

RATE = 40  # Mbit/s of the second machine's cable


def torchrun(rank: int, names: Sequence[str], arguments: list[str]) -> None:
    """What ``torchrun --no-python sdpipe`` does, in a process that has imported torch already, and so has its worker,
    which is a copy."""
    namespaces.enter(names[rank])
    os.environ |= {"SDPIPE_HOST": f"m{rank}", "GLOO_SOCKET_IFNAME": namespaces.INTERFACE, "OMP_NUM_THREADS": "1"}
    elastic_launch(torchrun_of(len(names), rank, namespaces.address(0), 29557), sdpipe)(arguments)


def sdpipe(arguments: list[str]) -> None:
    sys.exit(cli.main(arguments))


def measured(names: Sequence[str], file: Path) -> list[str]:
    """What each host printed."""
    measuring = ["measure", "-o", str(file), "--pair-timeout", "2"]
    with scripts(file.parent, *[(torchrun, rank, names, measuring) for rank in range(len(names))]) as agents:
        assert [agent.wait() for agent in agents] == [0] * len(agents), [agent.printed() for agent in agents]
        return [agent.printed() for agent in agents]


@pytest.mark.distributed
def test_torchrun_on_three_machines_of_which_two_cannot_connect(tmp_path: Path) -> None:
    """One cable is slow, in both directions."""
    file = tmp_path / "network.json"
    with hosts(3) as names:
        namespaces.slow_down(1, RATE, burst=32 << 10)
        for number in (1, 2):
            namespaces.part(number)
        printed, *others = measured(names, file)
    network = read_network(file)
    assert [str(device) for device in network.devices] == ["m0:0", "m1:0", "m2:0"]
    assert [tuple(map(str, pair)) for pair in network.unconnected()] == [("m1:0", "m2:0")]
    assert "NO CONNECTION between m1:0 (rank 1) and m2:0 (rank 2)" in printed
    assert network.bandwidth()[0][1] == pytest.approx(RATE * 1e6 / 8, rel=0.3)  # of which headers take a part
    assert network.bandwidth()[0][2] > 5 * network.bandwidth()[0][1]
    assert max(device.speed for device in network.devices) == 1.0
    assert not any("network.json" in other for other in others)  # rank 0 speaks


class Chain(nn.Module):
    """Six layers, which is all that a profile needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.net(batch).sum()  # type: ignore[no-any-return]


def chain() -> tuple[nn.Module, Tensor]:
    return Chain(), torch.ones(8, 4)


def lame() -> tuple[nn.Module, Tensor]:
    if dist.get_rank() == 1:
        raise ImportError("no GPU here")
    return chain()


def meeting(rank: int, patience: float = 30.0) -> JobStore:
    """Two on each host."""
    os.environ["SDPIPE_HOST"] = f"host{rank // 2}"
    store: Any = dist.distributed_c10d._get_default_store()
    return JobStore(dist.PrefixStore("measure", store), rank, dist.get_world_size(), rank % 2, patience)


def _measure(rank: int, model: str | None) -> Network | str:
    try:
        network, _ = command.measure(meeting(rank), model, None, 10.0)
    except (WorkerFailedError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return network


@pytest.mark.distributed
def test_everybody_learns_the_links_the_speeds_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LEAST_SECONDS", 0.002)
    first, *others = run_workers(4, _measure, f"{__name__}:chain")
    assert others == [first] * 3
    assert isinstance(first, Network)
    assert [str(device) for device in first.devices] == ["host0:0", "host0:1", "host1:0", "host1:1"]
    assert not first.unconnected()
    assert first.model is not None
    assert (first.model.name, len(first.model.chain)) == ("Chain", 6)
    assert [block.activation_bytes for block in first.model.chain[:-1]] == [8 * 4 * 4] * 5
    assert max(device.speed for device in first.devices) == 1.0 > min(device.speed for device in first.devices)


@pytest.mark.distributed
def test_a_model_that_one_worker_cannot_build_ends_the_measurement_for_all() -> None:
    found = run_workers(2, _measure, f"{__name__}:lame")
    assert found == ["WorkerFailedError: rank 1: ImportError: no GPU here", "ImportError: no GPU here"]


def _absent(rank: int) -> str:
    if rank == 1:
        return "stays away"
    with pytest.raises(WorkerFailedError) as caught:
        meeting(rank, patience=0.5).share("names", "me", str)
    return str(caught.value)


@pytest.mark.distributed
def test_who_does_not_come_is_named() -> None:
    assert run_workers(3, _absent)[0] == "rank 1 did not come to 'names' within 0 s"


def test_two_machines_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"The host of a:0 appears twice: ranks \[0, 2\].*SDPIPE_HOST"):
        command._refuse_twins(["a:0", "a:1", "a:0"])


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_times_must_be_positive(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["measure", "--patience", seconds])
    assert "not a number of seconds above 0" in capsys.readouterr().err


def test_it_says_how_it_is_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["measure"]) == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["measure", "-o", str(tmp_path / "nowhere" / "network.json")]) == 2
    assert "nowhere is no directory where this user may write" in capsys.readouterr().err
