"""Links: how they are timed, with a clock of our own, and what is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from lightning_sdpipe.placement import links as measured
from lightning_sdpipe.placement.links import Link, combine, summary
from lightning_sdpipe.placement.measure import DeviceProfile, relative
from lightning_sdpipe.placement.model import Block
from lightning_sdpipe.placement.network import Device

SECONDS, RATE = 0.01, 2e6


class Line(measured.Wire):
    """The end that leads; every message takes α + bytes / β."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[int] = []

    def send(self, tensor: Tensor) -> None:
        self.now += SECONDS + tensor.nbytes / RATE
        self.sent.append(tensor.nbytes)

    receive = send

    def clock(self) -> float:
        return self.now


def test_latency_is_half_of_a_ping_pong() -> None:
    line = Line()
    assert measured.latency(line, True, line.clock) == pytest.approx(SECONDS + 8 / RATE)
    assert len(line.sent) == 2 * (measured.PINGS + measured.WARM_UP)


@pytest.mark.parametrize("outward", [True, False])
def test_bandwidth_is_the_slope_so_that_latency_does_not_matter(outward: bool) -> None:
    line = Line()
    assert measured.bandwidth(line, True, outward, line.clock) == pytest.approx(RATE)
    assert max(line.sent) == 2 * max(size for size in line.sent if size != max(line.sent))


class Noise(Line):
    """Long messages are as quick as short ones."""

    def send(self, tensor: Tensor) -> None:
        self.now += 1.0

    receive = send


def test_a_slope_that_cannot_be_is_noise() -> None:
    line = Noise()
    assert measured.bandwidth(line, True, True, line.clock) == pytest.approx(2 * measured.SMALLEST / 3.0)


DEVICES = [Device("a", 0, 1.0), Device("a", 1, 1.0), Device("b", 0, 0.5), Device("b", 1, 0.5)]


def links(**changed: Link) -> list[Link]:
    found = {
        "near": Link((0, 1), 1e-4, 1e9, 1.2e9),
        "other": Link((2, 3), 1e-4, 1e9, 1e9),
        "across": Link((0, 2), 1e-2, 1e7, 2e7),
        "again": Link((1, 3), 1e-2, 1e7, 1e7),
        "crossed": Link((0, 3), 1e-2, 1e7, 1e7),
        "last": Link((1, 2), 1e-2, 1e7, 1e7),
    }
    return [link for link in (found | changed).values() if link.ranks[0] >= 0]


def test_each_direction_is_kept(tmp_path: Path) -> None:
    network = combine(DEVICES, links(), [], None)
    assert (network.bandwidth_bytes_per_second[0][2], network.bandwidth_bytes_per_second[2][0]) == (1e7, 2e7)
    assert network.latency_seconds[1][3] == network.latency_seconds[3][1] == 1e-2
    assert network.source == "measured over gloo between 4 workers on a, b"
    text = summary(network, links(), tmp_path / "n.json")
    assert "a – b: 10 ms, 9.54 MiB/s to 19.07 MiB/s" in text
    assert "b: 2 devices of speed 0.50 to 0.50" in text


def test_pairs_that_were_not_measured_are_like_those_of_the_same_hosts() -> None:
    unknown = Link((-1, -1))
    network = combine(DEVICES, links(crossed=unknown, last=unknown), [], None)
    assert network.bandwidth_bytes_per_second[0][3] == network.bandwidth_bytes_per_second[3][0] == 1e7
    assert not network.unconnected()


def test_a_failure_that_either_side_saw_counts_and_is_named(tmp_path: Path) -> None:
    found = [*links(), Link((0, 2), error="timed out"), Link((0, 2), error="refused")]
    network = combine(DEVICES, found, [], None)
    assert [tuple(map(str, pair)) for pair in network.unconnected()] == [("a:0", "b:0")]
    text = summary(network, found, tmp_path / "n.json")
    assert text.count("NO CONNECTION between a:0 (rank 0) and b:0 (rank 2)") == 1
    assert "GLOO_SOCKET_IFNAME" in text


@pytest.mark.parametrize(("busy", "share"), [(4e6, 0.4), (9e6, None)])
def test_links_that_slow_each_other_down_share_a_network_card(busy: float, share: float | None) -> None:
    together = [Link((0, 2), outward=busy), Link((1, 3), outward=busy)]
    network = combine(DEVICES, links(), together, None)
    assert [shared.share for shared in network.shared] == ([] if share is None else [pytest.approx(share)])
    assert network.bandwidth()[1][3] == pytest.approx(1e7 * (share or 1.0))


def test_speeds_are_relative_to_the_fastest_whose_model_counts() -> None:
    def able(seconds: float, blocks: list[Block]) -> DeviceProfile:
        return DeviceProfile("a", 0, seconds, None, blocks, "Chain" if blocks else "")

    speeds, model = relative([able(2.0, [Block(2.0, 8, 4, 4)]), able(1.0, [Block(1.0, 8, 4, 4)])])
    assert speeds == [0.5, 1.0]
    assert model is not None
    assert model.chain[0].seconds == 1.0
    assert relative([able(1e-12, []), able(4e-12, [])]) == ([1.0, 0.25], None)
