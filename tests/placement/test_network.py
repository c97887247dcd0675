"""Networks are checked when they are made, and files say what is wrong with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.placement.model import Block, Model
from lightning_sdpipe.placement.network import Device, Network, read_network, write_network
from tests.placement.sites import network_of_sites

DEVICES = (Device("a", 0, 1.0), Device("a", 1, 1.0), Device("b", 0, 0.5, 8 * 2**30))
LATENCY = [[0.0, 0.001, 0.02], [0.003, 0.0, 0.02], [0.02, 0.02, 0.0]]
BANDWIDTH = [[None, 1e9, 1e8], [3e9, None, 1e8], [1e8, 1e8, None]]


def file(**changes: Any) -> dict[str, Any]:
    plain = {
        "format": "sdpipe-network/1",
        "source": "made up",
        "devices": [{"host": "a", "index": 0, "speed": 1.0}, {"host": "b", "index": 0, "speed": 1.0}],
        "latency_seconds": [[0, 0.1], [0.1, 0]],
        "bandwidth_bytes_per_second": [[None, 1e6], [1e6, None]],
    }
    return plain | changes


def written(path: Path, plain: Any) -> Path:
    path.write_text(json.dumps(plain))
    return path


def test_both_directions_count_the_same() -> None:
    network = Network(DEVICES, LATENCY, BANDWIDTH)
    assert network.latency()[0][1] == network.latency()[1][0] == 0.002
    assert network.bandwidth()[1][0] == 2e9
    assert network.unconnected() == []


def test_a_file_holds_all_of_a_network(tmp_path: Path) -> None:
    model = Model("a chain", (Block(0.1, 100, 50, 50, count=3), Block(0.2, 100, None, 0, trained_bytes=10)))
    network = Network(DEVICES, LATENCY, BANDWIDTH, "by hand", model)
    write_network(tmp_path / "network.json", network)
    assert read_network(tmp_path / "network.json") == network
    lines = (tmp_path / "network.json").read_text().splitlines()
    assert '  {"host":"b","index":0,"speed":0.5,"memory_bytes":8589934592}' in lines
    assert [len(model.chain), model.chain[2], model.chain[3].seconds] == [4, model.blocks[0], 0.2]


def test_a_pair_without_a_connection_is_named() -> None:
    latency: list[list[float | None]] = [[0.0, None], [0.1, 0.0]]
    network = Network(DEVICES[1:], latency, [[None, None], [1e6, None]])
    assert network.unconnected() == [(DEVICES[1], DEVICES[2])]
    assert network.latency()[0][1] == math.inf
    assert network.bandwidth()[0][1] == 0.0


def test_sites_are_written_once() -> None:
    network = network_of_sites([("near", 2), ("far", 1)], [[0.001, 0.1], [0.1, 0.002]], [[1e9, 1e7], [1e7, 5e8]])
    assert list(map(str, network.devices)) == ["near:0", "near:1", "far:0"]
    assert network.latency() == [[0, 0.001, 0.1], [0.001, 0, 0.1], [0.1, 0.1, 0]]
    with pytest.raises(ConfigurationError, match="The device near:0 appears 2 times"):
        network_of_sites([("near", 2), ("near", 1)], [[0, 0], [0, 0]], [[1, 1], [1, 1]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency_seconds": [[0, 0.1]]}, r"latency_seconds has 1 rows of \[2\] entries; 2 devices or sites need 2"),
        ({"latency_seconds": [[0, 0.1], [0.1]]}, r"latency_seconds has 2 rows of \[1, 2\] entries"),
        ({"latency_seconds": [[0, -0.1], [0.1, 0]]}, "latency_seconds from a:0 to b:0 is -0.1; it must be a number at"),
        ({"bandwidth_bytes_per_second": [[0, 1e6], [0, 0]]}, "from b:0 to a:0 is 0.0; it must be a number above 0"),
        ({"bandwidth_bytes_per_second": [[0, 1e6], [None, 0]]}, "Give both, or null for both"),
        ({"devices": [{"host": "a", "index": 0}]}, "missing required field `speed`.*Every device needs a host"),
        ({"devices": [{"host": "a", "index": 0, "speed": 1.0}] * 2}, "The device a:0 appears 2 times.*SDPIPE_HOST"),
        ({"devices": []}, "of length >= 1"),
        (
            {"devices": [{"host": "a", "index": 0, "speed": 0}, {"host": "b", "index": 0, "speed": 1}]},
            r"> 0.0 - at `\$.devices\[0\].speed`",
        ),
        (
            {
                "devices": [
                    {"host": "a", "index": 0, "speed": 1, "memory_bytes": 0},
                    {"host": "b", "index": 0, "speed": 1},
                ]
            },
            r">= 1 - at `\$.devices\[0\].memory_bytes`",
        ),
        ({"format": "sdpipe-network/2"}, "'sdpipe-network/2'.*the format is sdpipe-network/1 or"),
        ({"extra": 1}, "unknown field `extra`"),
    ],
)
def test_a_bad_file_gets_one_message(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "network.json", file(**changes))
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_network(path)
    assert "network.json" in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("{", "not a network"), ('{"format": NaN}', "not a network")])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "network.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_network(tmp_path / "network.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_network(tmp_path / "absent.json")


def test_entries_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="latency_seconds from a:1 to b:0 is nan"):
        Network(DEVICES[1:], [[0, math.nan], [0, 0]], [[0, 1], [1, 0]])
