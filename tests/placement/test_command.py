"""``sdpipe place``: what it prints, writes, draws and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_sdpipe import cli
from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network, write_network
from lightning_sdpipe.topology.placement_file import read_placement
from tests.placement.fleets import FLEETS, Devices, fleet

BLOCK = {"seconds": 0.1, "parameter_bytes": 40_000_000, "activation_bytes": 1_000_000, "gradient_bytes": 1_000_000}
REGIONS: dict[str, Any] = {
    "format": "sdpipe-sites/1",
    "source": "two regions, by hand",
    "sites": [{"name": "east", "devices": 4}, {"name": "west", "devices": 4}],
    "latency_seconds": [[0.001, 0.011], [0.011, 0.001]],
    "bandwidth_bytes_per_second": [[6e8, 1.4e8], [1.4e8, 6e8]],
    "model": {"name": "Chain", "blocks": [{**BLOCK, "count": 8}]},
}
BYTES = ["--stage-bytes", "8e7", "--cut-bytes", "1e6"]


def network(directory: Path, **changes: Any) -> str:
    path = directory / "network.json"
    path.write_text(json.dumps({name: value for name, value in (REGIONS | changes).items() if value is not None}))
    return str(path)


def test_a_placement_is_explained_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "placement.json", tmp_path / "mesh.svg"
    drawn = ["--output", str(output), "--picture", str(picture)]
    assert cli.main(["place", network(tmp_path), "--stages", "2", "--moves", "4000", *drawn]) == 0
    text, meanwhile = capsys.readouterr()
    assert meanwhile == "searching for 8 devices; --for SECONDS makes it shorter\n"
    assert "8 devices as 2 stages × 4 pipelines; cost model pipelined, 2 micro-batches" in text
    assert re.search(r"^Search         40\d\d moves$", text, re.MULTILINE)
    assert "Rank 0         east:0 must be rank 0 and runs a last stage, which costs nothing" in text
    assert re.search(r"A mini-batch .* with computing \(default order and uniform cut: .* times as long\)", text)
    placement = read_placement(output)
    assert {device[:4] for row in placement.pipelines for device in row[:1]} == {"west"}  # replicas are near
    assert placement.blocks == ((4, 4),) * 4
    shapes = [each.text for each in ElementTree.parse(picture).iter()]
    assert {"stage 0, 4 blocks", "pipeline 3", "west:3", "east:0"} <= {*shapes}


def test_without_a_number_of_stages_all_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["place", network(tmp_path), "--moves", "8000"]) == 0
    shapes = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:5]]
    assert shapes == ["1 × 8", "2 × 4", "4 × 2", "8 × 1"]


def test_bytes_may_be_given_instead_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--stages", "4", "--cost", "dtfm", "--first", "west:1", "--moves", "4000", *BYTES]
    assert cli.main(["place", network(tmp_path, model=None), *arguments]) == 0
    text = capsys.readouterr().out
    assert "cost model dtfm" in text
    assert "west:1 must be rank 0" in text
    assert "with computing" not in text


def test_devices_of_unlike_speed_get_unlike_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = [{"name": "east", "devices": 4}, {"name": "west", "devices": 4, "speed": 0.5}]
    fast = [[1e12, 1e12], [1e12, 1e12]]
    file = network(tmp_path, sites=sites, bandwidth_bytes_per_second=fast)
    options = ["--stages", "2", "--sync", "all_reduce", "--moves", "8000", "--output", str(tmp_path / "placement.json")]
    assert cli.main(["place", file, *options]) == 0
    placement = read_placement(tmp_path / "placement.json")
    slow = 0 if placement.pipelines[0][0].startswith("west") else 1
    assert placement.blocks is not None
    assert placement.blocks[0][slow] < placement.blocks[0][1 - slow]
    assert {row[slow][:4] for row in placement.pipelines} == {"west"}


def a_fleet(directory: Path, name: str) -> str:
    path = directory / "fleet.json"
    write_network(path, FLEETS[name])
    return str(path)


def test_unlike_depths_are_proposed_where_they_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "placement.json", tmp_path / "mesh.svg"
    options = ["--micro-batches", "8", "--moves", "10000", "--output", str(output), "--picture", str(picture)]
    assert cli.main(["place", a_fleet(tmp_path, "1 at 1 (48) + 4 at 1/2 (24)"), *options]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^2 × 2 without 1 +1\.99$", text, re.MULTILINE)
    assert re.search(r"^1 \+ 2 \+ 2 +2\.76$", text, re.MULTILINE)
    assert "5 of 5 devices as pipelines of 1, 2, 2 stages; cost model pipelined, 8 micro-batches" in text
    assert "Together       2.76 mini-batches/s" in text
    assert "Best rectangle 1.99 mini-batches/s, 2 × 2 without 1: this is 1.39 times that" in text
    assert "num_stages=[1, 2, 2], num_micro_batches=8, partition=[[26], [13, 13], [13, 13]]" in text
    assert 'SDPipeStrategy(num_stages=[1, 2, 2], num_micro_batches=8, partition="placed", placement="' in text
    assert "not drawn" in text
    placement = read_placement(output)
    assert placement.blocks == ((26,), (13, 13), (13, 13))
    assert placement.pipelines[0] == ("large:0",)
    assert str(placement) == "pipelines of 1, 2, 2 stages (1 on large, 4 on small)"
    assert not picture.exists()


def test_a_rectangle_is_proposed_where_unlike_depths_gain_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["place", a_fleet(tmp_path, "5090 + 4060 Ti"), "--micro-batches", "8", "--moves", "6000"]) == 0
    assert "2 devices as 2 stages × 1 pipeline" in capsys.readouterr().out
    network = fleet(
        [Devices("a", 2, 1.0, 22.5), Devices("b", 1, 0.04, 22.5)], 1.3e9
    )  # of which one adds next to nothing
    write_network(tmp_path / "fleet.json", network)
    assert cli.main(["place", str(tmp_path / "fleet.json"), "--micro-batches", "8", "--moves", "6000"]) == 0
    text = capsys.readouterr().out
    assert "3 devices as 1 stage × 3 pipelines" in text


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["--stages", "3"], r"num_stages=3 stages.*Use num_stages from \[1, 2, 4, 8\]"),
        ({}, ["--stages", "1,2"], r"num_stages=\[1, 2\] are 3 workers, and the network's devices are 8"),
        ({}, ["--stages", "4,0"], "4,0: give a number of at least 1"),
        ({}, ["--stages", "4,4", "--cost", "pipedream"], "needs pipelines of one depth"),
        ({"model": None}, ["--stages", "4,4"], "measured without a model"),
        ({"model": None}, ["--stages", "2"], "measured without a model.*--stage-bytes"),
        ({"model": None}, [], "--stages has to say how many"),
        ({"model": None}, BYTES, "--stages has to say how many"),
        ({"model": None}, ["--stages", "2", "--stage-bytes", "8"], "--stage-bytes and --cut-bytes go together"),
        ({"model": None}, ["--stages", "2", "--stage-bytes", "-8", "--cut-bytes", "1"], "finite and at least 0"),
        ({}, ["--stages", "2", "--first", "north:0"], "north:0 is none of the devices: east:0"),
        ({}, ["--stages", "2", "--picture", "mesh.gif"], r"must end in \.svg"),
        ({}, ["--stages", "2", "--micro-batches", "0"], "--micro-batches"),
        ({}, ["--stages", "2", "--for", "nan"], "--for"),
        ({}, ["--stages", "2", "--moves", "-1"], "--moves"),
        ({}, ["--stages", "2", "--optimizer-state", "-1"], "--optimizer-state"),
        ({}, ["--stages", "2", "--output", "nowhere/placement.json"], "nowhere"),
        (
            {"sites": [{"name": n, "devices": 4, "memory_bytes": 300_000_000} for n in ("east", "west")]},
            ["--stages", "2"],
            r"stage 0 \(blocks 0 to 3\), which needs 610\.35 MiB where there are 286\.10 MiB: 324\.25 MiB too much",
        ),
        (
            {"latency_seconds": [[0.001, None], [None, 0.001]], "bandwidth_bytes_per_second": [[1, None], [None, 1]]},
            ["--stages", "8"],
            "needs a link that does not exist",
        ),
    ],
)
def test_what_cannot_be_placed_gets_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: list[str], message: str
) -> None:
    try:
        status = cli.main(["place", network(tmp_path, **changes), "--moves", "2000", *arguments])
    except SystemExit as end:  # of what argparse refuses
        status = int(str(end.code))
    assert status == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_default_order_that_is_impossible_is_not_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would pass from the second device to the first one, between which there is no link."""
    rates: list[list[float | None]] = [[None, None, 1e8], [None, None, 1e8], [1e8, 1e8, None]]
    late = [[None if rate is None else 0.001 for rate in row] for row in rates]
    devices = tuple(Device(host, 0, 1.0) for host in "acb")
    chain = Model("Chain", (Block(0.1, 1000, 1000, 1000, count=3),))
    write_network(tmp_path / "network.json", Network(devices, late, rates, "by hand", chain))
    arguments = [str(tmp_path / "network.json"), "--stages", "3", "--moves", "100"]
    assert cli.main(["place", *arguments, "-o", str(tmp_path / "placement.json")]) == 0
    text = capsys.readouterr().out
    assert "every pipeline (the default order and uniform cut are impossible)" in text
    assert read_placement(tmp_path / "placement.json").pipelines == (("c:0", "b:0", "a:0"),)
