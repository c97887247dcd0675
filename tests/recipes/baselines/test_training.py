"""Parameter servers as methods from outside: what they train, what they need of the package, and what they refuse."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sdpipe import ConfigurationError, SDPipeStrategy, SemiDecentralized
from lightning_sdpipe.simulate import Work, simulate
from lightning_sdpipe.sync.capabilities import Combination
from lightning_sdpipe.sync.methods import check
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.topology.groups import ProcessGroups
from lightning_sdpipe.topology.mesh import Mesh
from recipes import baselines
from recipes.baselines import HetPipe, ParameterServer
from recipes.baselines.admission import AdmissionRule
from tests.features.running import Regression, assert_same, samples
from tests.patience import limit
from tests.sync import test_asynchronous_pairs as pairs
from tests.sync.test_methods import Uneven, train
from tests.test_public_names import PUBLIC
from tests.workers import run_workers


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sync", "largest"), [(HetPipe(sync_every=2), 1.5), (ParameterServer(quorum=1, late="carry"), 2.0)], ids=str
)
def test_a_method_from_outside_learns_and_ends_each_epoch_with_equal_replicas(
    tmp_path: Path, sync: Any, largest: float
) -> None:
    x, y = samples(48).tensors
    before = nn.functional.mse_loss(Regression().net(x), y).item()
    model, metrics = train(tmp_path, sync, Regression(0.03), stages=1)
    assert nn.functional.mse_loss(model.net(x), y).item() < 0.9 * before
    assert metrics["groups"] == 12
    assert 1.01 < metrics["mean_group_size"] <= largest  # alone when the other has ended its epoch


@pytest.mark.distributed
def test_het_pipe_with_no_staleness_and_means_is_model_averaging(tmp_path: Path) -> None:
    server, _ = train(tmp_path / "server", HetPipe(staleness=0, sync_every=1, combine="mean"), stages=1)
    averaged, _ = train(tmp_path / "averaged", SemiDecentralized(window=math.inf), stages=1)
    assert_same([server.state_dict()], averaged.state_dict())


@pytest.mark.distributed
def test_a_server_sums_every_update_of_what_trains() -> None:
    updates = pairs.ITERATIONS * sum(rank + 1.0 for rank in range(pairs.WORKERS))
    for _, _, paused in run_workers(pairs.WORKERS, pairs.train, HetPipe(staleness=1, sync_every=2), 0.0, True):
        torch.testing.assert_close(paused, torch.full((5,), updates))


@pytest.mark.distributed
def test_a_pipeline_with_less_data_does_not_hold_others_up(tmp_path: Path) -> None:
    train(tmp_path, ParameterServer(quorum=2), Uneven(), stages=1)


def build_with_a_quorum_of_three(rank: int) -> str:
    groups, nobody = ProcessGroups.open(Mesh.build(2, 1), limit()), None
    with pytest.raises(ConfigurationError) as refused:
        ParameterServer(quorum=3).build(Replica(nobody, groups, [], [], [], limit()))  # type: ignore[arg-type]
    return str(refused.value)


@pytest.mark.distributed
def test_every_worker_refuses_a_quorum_that_can_never_come_together() -> None:
    message = "quorum=3 is not allowed with 2 pipelines; give 1 to 2"
    assert run_workers(2, build_with_a_quorum_of_three) == [message, message]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: HetPipe(staleness=-1), "staleness=-1"),
        (lambda: HetPipe(sync_every=0), "sync_every=0"),
        (lambda: HetPipe(combine="max"), "combine='max'"),  # type: ignore[arg-type]
        (lambda: ParameterServer(every=0), "every=0"),
        (lambda: ParameterServer(quorum=2, staleness=1), "staleness=1 contradicts quorum=2"),
        (lambda: SDPipeStrategy(sync=ParameterServer(), data="dealt"), "does not go with sync=ParameterServer"),
        (lambda: check(HetPipe(), Combination(HetPipe(), elastic=True)), r"does not work in an elastic run"),
        (lambda: SDPipeStrategy(2, sync="het_pipe"), "it has left the package: a checkout has it"),
    ],
)
def test_wrong_values_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()


def test_the_rule_of_admission_is_a_policy_that_can_be_simulated() -> None:
    run = simulate(AdmissionRule(staleness=1), Work(2, 3, 10, lambda worker, iteration: 1.0 + worker.pipeline))
    assert run.stuck == []
    assert {len(group.members) for _, group in run.groups} == {1}


def test_they_need_public_names_only() -> None:
    imported = {
        (node.module, alias.name)
        for name in ("admission", "parameter_server", "served_parameters")
        for node in ast.walk(ast.parse((Path(baselines.__path__[0]) / f"{name}.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lightning_sdpipe")
        for alias in node.names
    }
    modules = {("lightning_sdpipe", module.rpartition(".")[2]) for module in PUBLIC}
    assert imported - modules <= {(module, name) for module, names in PUBLIC.items() for name in names}
    assert imported
