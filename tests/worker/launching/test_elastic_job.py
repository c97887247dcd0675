"""What a process learns of its job in an elastic run from the environment, and what is refused there."""

from __future__ import annotations

import pytest
import torch

from lightning_sdpipe import SDPipeStrategy
from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.worker.launching.elastic_job import ElasticJob, from_environment, require_scheduler
from lightning_sdpipe.worker.launching.environment import ElasticEnvironment

ELASTIC = {"SDPIPE_PIPELINE": "2", "SDPIPE_SCHEDULER": "tcp://10.0.0.1:5555"}
RANKS = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TWO_MACHINES = RANKS | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def job(**variables: str) -> ElasticJob:
    found = from_environment(ELASTIC | RANKS | variables)
    assert found is not None
    return found


def test_a_run_without_the_variable_is_not_elastic() -> None:
    assert from_environment(RANKS | {"SDPIPE_SCHEDULER": "tcp://10.0.0.1:5555"}) is None


def test_the_job_of_sdpipe_run_or_torchrun() -> None:
    found = job(SDPIPE_KEY_FILE="keys/worker.key")
    assert found == ElasticJob(2, 1, 2, 1, 2, 0, "127.0.0.1", 29500)
    assert found.num_nodes == 1
    assert job(**TWO_MACHINES).num_nodes == 2


def test_without_a_launcher_a_pipeline_is_one_process() -> None:
    found = from_environment(ELASTIC)
    assert found is not None
    assert (found.rank, found.world_size, found.local_world_size) == (0, 1, 1)


def test_a_job_takes_its_own_of_the_devices_that_the_strategy_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ELASTIC | RANKS).items():
        monkeypatch.setenv(name, value)
    devices = [torch.device("cuda", number) for number in range(3)]
    assert SDPipeStrategy(2, parallel_devices=devices).parallel_devices == [devices[1], devices[2]]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"SDPIPE_PIPELINE": "-1"}, "SDPIPE_PIPELINE='-1' is not allowed"),
        ({"SDPIPE_PIPELINE": ""}, "SDPIPE_PIPELINE='' is not allowed"),
        ({"SDPIPE_PIPELINE": "²"}, "SDPIPE_PIPELINE='²' is not allowed"),
        ({"SDPIPE_KEY_FILE": ""}, "SDPIPE_KEY_FILE is empty"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "x"}, "RANK='x' is not allowed"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not allowed"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "contradict each other"),
        ({"MASTER_PORT": "tcp"}, "MASTER_PORT='tcp' is not allowed"),
    ],
)
def test_what_a_variable_cannot_be(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        job(**variables)


def test_half_of_a_launcher() -> None:
    with pytest.raises(ConfigurationError, match="so are RANK, WORLD_SIZE, but not LOCAL_RANK, MASTER_ADDR, MASTER_P"):
        from_environment(ELASTIC | {"RANK": "0", "WORLD_SIZE": "2"})


def test_tasks_that_do_not_know_who_is_who() -> None:
    with pytest.raises(ConfigurationError, match="SLURM started 4 tasks"):
        from_environment(ELASTIC | {"SLURM_NTASKS": "4", "SLURM_PROCID": "1"})
    assert from_environment(ELASTIC | {"SLURM_NTASKS": "1"}) is not None


def test_the_number_of_stages_is_that_of_processes() -> None:
    assert job().num_stages(1) == 2, "the default is not a wish"
    assert job().num_stages(2) == 2
    with pytest.raises(ConfigurationError, match="num_stages=4, but pipeline 2 was started with 2 processes"):
        job().num_stages(4)


def test_shards_are_contradicted() -> None:
    assert job().data("auto") == job().data("dealt") == "dealt"
    with pytest.raises(ConfigurationError, match="data='sharded', but pipeline 2 is one of an elastic run"):
        job().data("sharded")


def test_a_scheduler_is_needed() -> None:
    lonely = from_environment(RANKS | {"SDPIPE_PIPELINE": "0"})
    assert lonely is not None
    require_scheduler(lonely, "tcp://given.to.the.strategy:5555")
    with pytest.raises(ConfigurationError, match=r"SDPIPE_PIPELINE=0 is set.*SDPIPE_SCHEDULER is not"):
        require_scheduler(lonely, None)


def test_devices_of_the_trainer() -> None:
    cpu, gpus = [torch.device("cpu")], [torch.device("cuda", number) for number in range(4)]
    assert job().devices(cpu * 4) == cpu * 2, "more than the job's processes"
    assert job().devices(cpu) == cpu * 2, "and fewer"
    assert job(SDPIPE_PIPELINE="1").devices(gpus) == gpus[2:], "pipelines of one machine get different ones"
    assert job(SDPIPE_PIPELINE="2").devices(gpus) == gpus[:2], "the next machine's first pipeline"
    assert job().devices(gpus[:2]) == gpus[:2], "only its own are visible"
    with pytest.raises(ConfigurationError, match=r"2 processes on this machine and the Trainer 1 device\(s\)"):
        job().devices(gpus[:1])


def test_what_is_overridden_is_said() -> None:
    assert job().overrides(2, 1) is None
    said = job().overrides(8, 2)
    assert said is not None
    assert "devices=8 and num_nodes=2" in said
    assert "pipeline 2 of an elastic run" in said


def test_lightnings_view() -> None:
    environment = ElasticEnvironment(job(**TWO_MACHINES))
    environment.set_global_rank(0)
    environment.set_world_size(1)
    assert environment.creates_processes_externally
    assert (environment.global_rank(), environment.world_size()) == (3, 4)
    assert (environment.local_rank(), environment.node_rank()) == (1, 1)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 29500)
    assert not ElasticEnvironment.detect()
