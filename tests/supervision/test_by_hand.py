"""The job scripts of docs/faults.md, run here with the variables that SLURM and Kubernetes set."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.semi_decentralized import SemiDecentralized
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import (
    own_keys,
    read_scheduler_keys,
    read_worker_keys,
    worker_keys,
    write_keys,
)
from lightning_sdpipe.scheduler.server.process import SchedulerProcess, SchedulerSettings
from lightning_sdpipe.scheduler.server.server import Endpoint

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "docs" / "faults"
BIN = Path(sys.executable).parent


@contextmanager
def scheduler(directory: Path, keys: Path | None = None) -> Iterator[str]:
    """For two pipelines of one stage, which begin together."""
    settings = SchedulerSettings(
        1,
        2,
        registry.to_plain(SemiDecentralized()),
        endpoint=Endpoint(keys=read_scheduler_keys(keys or own_keys()[0])),
        elastic=ElasticConfig(start_pipelines=2),
    )
    with SchedulerProcess(settings, directory / "scheduler.log", keeps_port=True) as standing:
        standing.start()
        yield standing.address


def outcomes(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], directory: Path) -> list[tuple[int, str]]:
    """Exit codes and outputs of commands that run at the same time, with no variables of a pipeline but theirs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SDPIPE", "SLURM"))}
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    clean |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env=clean | variables, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, variables in commands
    ]
    try:
        printed = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, printed, strict=True)]


@pytest.mark.distributed
def test_elements_of_a_slurm_array(tmp_path: Path) -> None:
    toy = ["-m", "tests.scripts.toy_trainer", "20"]
    with scheduler(tmp_path) as address:
        variables = [
            {"SDPIPE_SCHEDULER": address, "SLURM_ARRAY_TASK_ID": str(i), "SLURM_NTASKS": "1"} for i in range(2)
        ]
        script = ["bash", str(FAULTS / "pipeline.sbatch"), *toy]
        for code, output in outcomes([(script, each) for each in variables], tmp_path):
            assert code == 0, output
        members = ask_status(address, credentials=worker_keys(address, None)).members
        assert members is not None
        assert members.ever == [0, 1]
    ((code, output),) = outcomes([(script, {"SLURM_ARRAY_TASK_ID": "0"})], tmp_path)
    assert code != 0
    assert "SDPIPE_SCHEDULER: is the address of the scheduler" in output


@pytest.mark.slow
@pytest.mark.distributed
def test_pods_of_an_indexed_job(tmp_path: Path) -> None:
    """Their command, as in the manifest; only paths and the script are others."""
    job = manifest()["Job"]["spec"]
    assert job["completionMode"] == "Indexed"
    container = job["template"]["spec"]["containers"][0]
    write_keys(tmp_path / "keys")
    (text,) = container["args"]
    text = text.replace("/keys", str(tmp_path / "keys")).replace("/tmp/worker.key", "$OWN/worker.key")
    text = text.replace("--nproc-per-node 2", "--nproc-per-node 1").replace(
        "train.py", "-m tests.scripts.toy_trainer 20"
    )
    given = {each["name"]: each["value"] for each in container["env"]}
    assert given["SDPIPE_SCHEDULER"] == "tcp://sdpipe-scheduler:5555"
    with scheduler(tmp_path, tmp_path / "keys" / "scheduler.key") as address:
        commands = []
        for index in range(2):
            (tmp_path / str(index)).mkdir()
            own = {"OWN": str(tmp_path / str(index)), "SDPIPE_KEY_FILE": str(tmp_path / str(index) / "worker.key")}
            variables = given | own | {"SDPIPE_SCHEDULER": address, "JOB_COMPLETION_INDEX": str(index)}
            commands.append(([*container["command"], text], variables))
        for code, output in outcomes(commands, tmp_path):
            assert code == 0, output
        members = ask_status(address, credentials=read_worker_keys(tmp_path / "keys" / "worker.key")).members
        assert members is not None
        assert members.ever == [0, 1]


def test_the_manifest_starts_a_scheduler_that_there_is() -> None:
    parts = manifest()
    stateful, service = parts["StatefulSet"]["spec"], parts["Service"]
    container = stateful["template"]["spec"]["containers"][0]
    (text,) = container["args"]
    command = text.partition("exec ")[2].replace('"tcp://$POD_IP:5555"', "tcp://127.0.0.1:5555").split()
    from lightning_sdpipe.scheduler.command import _parser

    options = _parser().parse_args(command[2:])
    assert command[:2] == ["sdpipe", "scheduler"]
    assert {port["port"] for port in service["spec"]["ports"]} == {5555, options.lifeline_port}
    assert str(options.newest).startswith(container["volumeMounts"][0]["mountPath"])
    assert options.pipelines == parts["Job"]["spec"]["completions"]
    assert stateful["serviceName"] == service["metadata"]["name"]


def manifest() -> dict[str, Any]:
    """Its parts by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all((FAULTS / "kubernetes.yaml").read_text())}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_job_script_is_one_and_so_is_the_command_of_a_pod() -> None:
    subprocess.run(["bash", "-n", str(FAULTS / "pipeline.sbatch")], check=True)
    (text,) = manifest()["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
    subprocess.run(["bash", "-n", "-c", text], check=True)
