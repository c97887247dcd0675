"""What a strategy asks of the place where its processes run."""

from __future__ import annotations

import os
import socket

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch.distributed import DistStoreError

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.worker.launching.environment import (
    check_tasks,
    choose_port,
    environment_for,
    free_port,
    naming_the_port,
    refuse_strangers,
)


def test_the_port_is_none_that_connections_get() -> None:
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        handed_out = connection.getsockname()[1]
    for _ in range(20):
        port = free_port()
        if port is None:
            pytest.skip("this system hands out nearly all ports")
        assert 10_000 <= port < handed_out
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "4711")
    choose_port()
    assert os.environ["MASTER_PORT"] == "4711"
    monkeypatch.delenv("MASTER_PORT")
    choose_port()
    if (chosen := os.environ.get("MASTER_PORT")) is not None:  # else this system hands out nearly all
        assert int(chosen) >= 10_000


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "num_nodes=2, .* nor is MASTER_ADDR, MASTER_PORT, NODE_RANK set.* torchrun or srun .* from 0 to 1"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "nor is NODE_RANK set"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "2"}, "NODE_RANK=2 .* from 0 to 1"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "two"}, "NODE_RANK='two' is no number"),
    ],
)
def test_machines_that_would_not_find_each_other(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    refuse_strangers(LightningEnvironment(), 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        refuse_strangers(LightningEnvironment(), 2)
    monkeypatch.setenv("NODE_RANK", "1")
    if len(variables) > 1:
        refuse_strangers(LightningEnvironment(), 2)


def test_who_has_not_come_is_told_with_what_to_look_at() -> None:
    message = r"Not all of 1 processes have come .* \(1/2 clients joined\). Start each machine"
    with pytest.raises(ConfigurationError, match=message), naming_the_port(LightningEnvironment()):
        raise DistStoreError("1/2 clients joined\n  C++ frames")


def test_slurm_and_the_trainer_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning compares the tasks of a node only, which srun may have been told otherwise."""
    for name, value in {"NTASKS": "2", "NTASKS_PER_NODE": "4", "NNODES": "1", "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    environment = SLURMEnvironment(auto_requeue=False)
    environment.validate_settings(4, 1)
    with pytest.raises(ConfigurationError, match=r"SLURM has started 2 tasks .* devices=4 × num_nodes=1 are 4"):
        check_tasks(environment, 4, 1)
    check_tasks(environment, 1, 2)
    check_tasks(LightningEnvironment(), 4, 2)


def test_torchrun_and_the_trainer_must_agree_unless_machines_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_for(False) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tests")
    monkeypatch.setenv("WORLD_SIZE", "3")
    equal, unlike = SDPipeStrategy().cluster_environment, SDPipeStrategy([1, 1, 1]).cluster_environment
    assert equal is not None
    assert unlike is not None
    message = r"started 3 .* devices=1 × num_nodes=2 are 2.* num_stages=\[1, 1, 1\]"
    with pytest.raises(ConfigurationError, match=message):
        equal.validate_settings(1, 2)
    equal.validate_settings(1, 3)
    unlike.validate_settings(1, 2)
