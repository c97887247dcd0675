"""Options are a value: what depends on hosts makes a new one, which the run has and the strategy does not."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_sdpipe import (
    ADPSGD,
    PHDPSGD,
    AllReduce,
    Balanced,
    ConfigurationError,
    DiLoCo,
    Exchange,
    LocalSGD,
    SDPipeStrategy,
)
from lightning_sdpipe.topology.placement_file import Placement, write_placement
from lightning_sdpipe.worker.launching.environment import environment_for
from lightning_sdpipe.worker.options import Options
from lightning_sdpipe.worker.run import TrainingRun


def test_defaults_are_those_of_the_strategy() -> None:
    assert SDPipeStrategy().options == Options(method=SDPipeStrategy().options.method)


def test_nothing_of_it_is_assigned() -> None:
    options: Any = SDPipeStrategy(2).options
    with pytest.raises(FrozenInstanceError):
        options.num_stages = 3


def test_arguments_are_resolved() -> None:
    options = SDPipeStrategy(3, schedule="zero_bubble", stages_per_worker=2).options
    assert (options.num_micro_batches, options.total_stages, options.division) == (3, 6, (3, 3))
    assert SDPipeStrategy(3, schedule="pipedream").options.num_micro_batches == 1


def test_a_run_on_hosts_has_new_options() -> None:
    sync: Any = PHDPSGD(staleness=3)
    options = SDPipeStrategy(1, sync=sync).options
    workers: Any = SimpleNamespace(num_nodes=2, num_processes=2)
    run = TrainingRun(options, workers, lambda: None)
    run.check()
    assert run.options.method.policy == PHDPSGD(groups=((0, 1), (2, 3)), staleness=3)
    assert options.method.policy == options.sync == sync


def test_a_run_whose_workers_do_not_fit_is_refused() -> None:
    workers: Any = SimpleNamespace(num_nodes=1, num_processes=3)
    with pytest.raises(ConfigurationError, match="3"):
        TrainingRun(SDPipeStrategy(2).options, workers, lambda: None).check()


def unlike(stages: Any = (1, 2, 2), **options: Any) -> Options:
    return SDPipeStrategy(list(stages), **{"sync": AllReduce(), **options}).options


def test_each_pipeline_may_have_its_own_cut() -> None:
    options = unlike(partition=[[26], [13, 13], [15, 11]])
    assert [(cut.num_stages, cut.partition) for cut in options.all_cuts] == [(1, [26]), (2, [13, 13]), (2, [15, 11])]
    assert (options.num_stages, options.num_micro_batches) == (2, 2)
    mesh = options.mesh(5)
    assert mesh.ranks == ((0,), (2, 1), (4, 3))
    assert not mesh.alike
    assert mesh.last_ranks == [0, 1, 3]
    with pytest.raises(AssertionError, match="no replicas"):
        mesh.stage_ranks(0)

    speeds, memory = [[1], [0.5, 0.5], [1, 0.5]], [[8e9], [4e9, 4e9], [8e9, 4e9]]
    cuts = unlike(partition=Balanced(speeds=speeds, memory=memory), num_micro_batches=4).all_cuts
    assert [(cut.partition.speeds, cut.partition.memory) for cut in cuts] == list(zip(speeds, memory, strict=True))  # type: ignore[union-attr]
    assert [cut.in_flight.micro_batches for cut in cuts if cut.in_flight] == [[1], [2, 1], [2, 1]]


def test_a_list_of_equal_pipelines_is_one_number() -> None:
    for partition in ("uniform", [[2, 3], [2, 3]]):
        options = SDPipeStrategy([2, 2], partition=partition).options  # of any method
        assert (options.num_stages, options.cuts) == (2, ())
        assert options.partition in ("uniform", [2, 3])
        assert options.mesh(4) == SDPipeStrategy(2).options.mesh(4)
    with pytest.raises(ConfigurationError, match=r"num_stages=\[2, 2\] are 4 workers, and devices × num_nodes are 6"):
        SDPipeStrategy([2, 2]).options.mesh(6)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stages": []}, r"num_stages=\[\] is not allowed; give the stages of each pipeline, 1 or more each"),
        ({"stages": [1, 0]}, r"num_stages=\[1, 0\] is not allowed"),
        ({"stages": ["a"]}, r"num_stages=\['a'\] is not allowed: give int or a list of int, such as 2, or \[1, 2, 2\]"),
        ({"partition": [13, 13]}, r"one list per pipeline, as in \[\[26\], \[13, 13\]\]"),
        ({"partition": [[26], [13, 13]]}, r"num_stages=\[1, 2, 2\], which are 3 pipelines: give one list per pipeline"),
        ({"partition": [[26], [26], [13, 13]]}, r"pipeline 1: partition=\[26\] names 1 stages, and num_stages is 2"),
        ({"partition": Balanced(speeds=[1, 1])}, r"one list per pipeline, as in \[\[1\], \[0.5, 0.5\]\]"),
        ({"partition": Balanced(speeds=[[1], [1], [1, 1]])}, r"pipeline 1: Balanced\(speeds=\[1\]\) names 1 devices"),
        ({"partition": "wide"}, "partition='wide' is not known"),
        (
            {"sync": DiLoCo(every=3)},
            r"num_stages=\[1, 2, 2\] .* none of their stages. Use sync=AllReduce\(\), SemiDecentralized\(\)",
        ),
        ({"sync": ADPSGD(asynchronous=True)}, "replicas of sections of the chain, and none of their stages"),
        ({"sync": LocalSGD(1), "exchange": Exchange(overlap="free")}, "Use overlap='none' or overlap='step'"),
        ({"sync": LocalSGD(1), "exchange": Exchange(hierarchy="hosts")}, "none of their stages. Use hierarchy='flat'"),
        ({"sync": PHDPSGD()}, "replicas of sections of the chain, and none of their stages"),
        ({"schedule": "pipedream"}, "schedule='pipedream' needs pipelines of one depth and cut.*use '1f1b' or 'gpipe'"),
        ({"schedule": "zero_bubble"}, "schedule='zero_bubble' needs pipelines of one depth and cut"),
        (
            {"exchange": "eight_bit"},
            r"exchange=.* does not go with sync=AllReduce.* and num_stages=.* Use Full\(\), or sync=Semi",
        ),
        ({"data": "dealt"}, "data='dealt' does not go with"),
    ],
)
def test_what_unlike_pipelines_cannot_do_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        unlike(**given)


def test_a_cut_for_each_pipeline_needs_the_number_of_stages_of_each() -> None:
    for partition in ([[1, 1], [1, 1]], Balanced(speeds=[[1, 1], [1, 1]])):
        with pytest.raises(ConfigurationError, match="as in num_stages=\\[1, 2\\]"):
            SDPipeStrategy(2, partition=partition)


def test_a_placement_may_have_the_cut_of_each_pipeline(tmp_path: Path) -> None:
    rows = (("a:1",), ("a:0", "b:0"), ("b:2", "b:1"))
    write_placement(tmp_path / "p", Placement("a test", {}, False, ((26,), (13, 13), (15, 11)), rows))
    placed: dict[str, Any] = {"placement": tmp_path / "p", "partition": "placed"}
    assert [cut.partition for cut in unlike(**placed).all_cuts] == [[26], [13, 13], [15, 11]]
    with pytest.raises(ConfigurationError, match="as in num_stages=\\[1, 2\\]"):
        SDPipeStrategy(2, **placed)
    workers: Any = SimpleNamespace(num_nodes=1, num_processes=5, cluster_environment=None)
    with pytest.raises(ConfigurationError, match=r"for pipelines of 1, 2, 2 stages .* Give num_stages=\[1, 2, 2\]"):
        TrainingRun(unlike((2, 2, 1), placement=tmp_path / "p"), workers, lambda: None).check()


def test_the_workers_of_unlike_pipelines_are_counted() -> None:
    workers: Any = SimpleNamespace(num_nodes=1, num_processes=4, cluster_environment=None)
    with pytest.raises(ConfigurationError, match=r"num_stages=\[1, 2, 2\] are 5 workers, and .* are 4"):
        TrainingRun(unlike(), workers, lambda: None).check()


def test_the_processes_of_torchrun_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "tests")
    monkeypatch.setenv("WORLD_SIZE", "4")
    torchrun = environment_for(True)
    workers: Any = SimpleNamespace(num_nodes=2, num_processes=3, world_size=4, cluster_environment=torchrun)
    with pytest.raises(ConfigurationError, match=r"num_stages=\[1, 2, 2\] are 5 workers, and torchrun has started 4"):
        TrainingRun(unlike(), workers, lambda: None).check()
