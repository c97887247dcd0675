import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.topology.mesh import Mesh, OnePipeline


def test_consecutive_ranks_form_a_pipeline_with_its_last_stage_first() -> None:
    mesh = Mesh.build(6, 3)
    assert mesh.ranks == ((2, 1, 0), (5, 4, 3))
    assert (mesh.num_stages, mesh.num_pipelines) == (3, 2)
    assert mesh.locate(0) == (2, 0)
    assert mesh.locate(5) == (0, 1)
    assert list(mesh.stage_ranks(2)) == [0, 3]
    assert list(mesh.pipeline_ranks(1)) == [5, 4, 3]


@pytest.mark.parametrize("stages", [0, 4, 7])
def test_a_number_of_stages_that_does_not_divide_is_refused(stages: int) -> None:
    with pytest.raises(ConfigurationError, match=r"num_stages from \[1, 2, 3, 6\]"):
        Mesh.build(6, stages)


@pytest.mark.parametrize("ranks", [((0, 1), (2, 2)), ((1, 0), (2,)), ((0, 1), (2, 3))])
def test_a_mesh_that_is_none_is_refused(ranks: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigurationError):
        Mesh(ranks)


def test_a_pipeline_of_an_elastic_run_knows_its_own_ranks_and_its_number() -> None:
    mesh = OnePipeline.of(3, number=7, counted=2)
    assert (mesh.num_stages, mesh.num_pipelines) == (3, 2)
    assert [mesh.locate(rank) for rank in range(3)] == [(2, 7), (1, 7), (0, 7)]
    assert [mesh.rank(stage, 7) for stage in range(3)] == [2, 1, 0]
    assert list(mesh.stage_ranks(0)) == [2]
    with pytest.raises(AssertionError, match="other worlds"):
        mesh.pipeline_ranks(0)
