"""Placements as files, in runs whose ranks are numbered otherwise, and with rank 0 at the end of a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.topology.mesh import Mesh
from lightning_sdpipe.topology.placement_file import (
    Order,
    Placement,
    check_shape,
    mesh_of,
    order_of_stages,
    placed_blocks,
    read_placement,
    write_placement,
)

PLAIN: dict[str, Any] = {
    "format": "sdpipe-placement/2",
    "source": "a test",
    "cost": {"data": 1.5, "model": "pipelined"},
    "reversible": False,
    "blocks": [[3, 2], [3, 2]],
    "pipelines": [["a:1", "b:0"], ["a:0", "b:1"]],
}
RANKS = ("b:0", "b:1", "a:0", "a:1")


def placement(**changes: Any) -> Placement:
    plain = PLAIN | changes
    rows = tuple(map(tuple, plain["pipelines"]))
    return Placement(
        plain["source"],
        plain["cost"],
        plain["reversible"],
        plain["blocks"] and tuple(map(tuple, plain["blocks"])),
        rows,
    )


def test_a_file_holds_a_placement(tmp_path: Path) -> None:
    write_placement(tmp_path / "placement.json", placement())
    assert json.loads((tmp_path / "placement.json").read_text()) == PLAIN
    assert '  ["a:1","b:0"],' in (tmp_path / "placement.json").read_text().splitlines()
    assert read_placement(tmp_path / "placement.json") == placement()
    assert str(placement()) == "2 stages × 2 pipelines (2 on a, 2 on b)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "sdpipe-placement/1"}, "is not a placement of format sdpipe-placement/2: .*'sdpipe-placement/1'"),
        ({"pipelines": [["a:1", "b:0"], []]}, "a device for each of their stages"),
        ({"pipelines": [["a:1", "b:0"], ["a:0"]]}, r"blocks=\[\[3, 2\], \[3, 2\]\] are not those of pipelines of 2, 1"),
        ({"blocks": [[3, 2], [3, 1]]}, "are not those of pipelines of 2, 2 stages"),
        ({"pipelines": []}, "a device for each of their stages"),
        ({"pipelines": [["a:1", "b:0"], ["a:0", "b:0"]]}, "b:0 is placed more than once"),
        ({"blocks": [[3], [3]]}, r"blocks=\[\[3\], \[3\]\] are not those of pipelines of 2, 2 stages"),
        ({"stages": 2}, "is not a placement .*unknown field `stages`"),
    ],
)
def test_a_bad_file_gets_one_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(PLAIN | changes))
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_placement(path)
    assert "placement.json" in str(caught.value)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_placement(tmp_path / "absent.json")


UNLIKE = {"pipelines": [["a:1", "b:0"], ["a:0"], ["b:1", "c:0"]], "blocks": [[3, 2], [5], [1, 4]]}


def test_pipelines_of_unlike_depths_keep_their_numbers(tmp_path: Path) -> None:
    unlike = placement(**UNLIKE)
    write_placement(tmp_path / "placement.json", unlike)
    assert read_placement(tmp_path / "placement.json") == unlike
    mesh = mesh_of(unlike, ("a:0", "a:1", "b:0", "b:1", "c:0"), alike=False)
    assert mesh == Mesh(((1, 2), (0,), (3, 4)), alike=False)
    assert placed_blocks(unlike) == placed_blocks(unlike, of_each=True) == ((3, 2), (5,), (1, 4))
    assert (placed_blocks(placement()), placed_blocks(placement(), of_each=True)) == ((3, 2), ((3, 2), (3, 2)))
    check_shape(unlike, 2, 5, (2, 1, 2))
    made_for = r"made for pipelines of 2, 1, 2 stages \(2 on a, 2 on b, 1 on c\); this run has "
    for stages, workers, depths, given in (
        (2, 6, (), "num_stages=2 and 6 workers. Give"),
        (2, 5, (1, 2, 2), r"num_stages=\[1, 2, 2\] and 5 workers. Give num_stages=\[2, 1, 2\]"),
        (2, None, (), "num_stages=2. Give"),
    ):
        with pytest.raises(ConfigurationError, match=made_for + given):
            check_shape(unlike, stages, workers, depths)
    with pytest.raises(ConfigurationError, match="to which the placement gives stage 0 of 2"):
        mesh_of(unlike, ("b:1", "a:1", "b:0", "a:0", "c:0"), alike=False)


def test_ranks_get_the_places_of_their_devices() -> None:
    assert mesh_of(placement(), RANKS) == Mesh(((3, 0), (2, 1)))
    assert mesh_of(placement(), ("b:1", "a:0", "b:0", "a:1")) == Mesh(((1, 0), (3, 2)))


def test_a_pipeline_of_like_stages_may_be_reversed() -> None:
    numbered_otherwise = ("a:0", "a:1", "b:0", "b:1")
    assert mesh_of(placement(reversible=True), numbered_otherwise) == Mesh(((3, 0), (2, 1)))
    with pytest.raises(ConfigurationError) as caught:
        mesh_of(placement(), numbered_otherwise)
    assert "is a:0 in this run, to which the placement gives stage 0 of 2. Start the run so that b:0 is rank 0." in str(
        caught.value
    )


@pytest.mark.parametrize(("num_stages", "workers"), [(4, 4), (2, 6), (1, 4)])
def test_another_mesh_is_refused_with_what_it_was_made_for(num_stages: int, workers: int) -> None:
    check_shape(placement(), 2, 4)
    message = rf"made for 2 stages × 2 pipelines \(2 on a, 2 on b\); this run has num_stages={num_stages} and {workers}"
    with pytest.raises(ConfigurationError, match=message):
        check_shape(placement(), num_stages, workers)
    check_shape(placement(), 2, None)
    with pytest.raises(ConfigurationError, match=r"this run has num_stages=4\. Run `sdpipe measure`"):
        check_shape(placement(), 4, None)


def test_other_hosts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="this run has no a:1, a:0, but c:0, c:1"):
        mesh_of(placement(), ("b:0", "b:1", "c:0", "c:1"))
    with pytest.raises(ConfigurationError, match="Two ranks are b:0: two machines have the same host name"):
        mesh_of(placement(), ("b:0", "b:1", "b:0", "b:1"))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (["b:0", "a:1"], Order((1, 0))),  # a row, whoever else is there
        (["b:1", "a:1"], Order((1, 0))),  # of two rows
        (
            ["a:0", "b:0"],
            Order(
                (1, 0),
                "it gives rank 0, which must run the last stage, stage 0; start the pipeline so that b:0 is its rank 0",
            ),
        ),
        (["a:0", "c:0"], Order((1, 0), "it does not know c:0")),
        (["a:0", "a:1"], Order((1, 0), "it gives a:0, a:1 the stages [0, 0]")),
    ],
)
def test_an_elastic_pipeline_is_ordered_by_host(members: list[str], expected: Order) -> None:
    assert order_of_stages(placement(), members) == expected


def test_stages_between_the_first_and_the_last_are_ordered_too() -> None:
    three = placement(pipelines=[["b:1", "c:0", "a:0"], ["b:0", "c:1", "a:1"]], blocks=None)
    assert order_of_stages(three, ["a:1", "b:0", "c:0"]) == Order((1, 2, 0))
