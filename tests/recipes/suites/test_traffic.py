from __future__ import annotations

import pytest

from lightning_sdpipe.exchange.payloads import EightBit, Full, Half, OneBit, Payload
from recipes.suites.exchange import traffic

D = 2**20


@pytest.mark.parametrize(
    ("payload", "sent"), [(Full(), 6_291_456), (Half(), 3_145_728), (EightBit(), 1_575_936), (OneBit(), 198_144)]
)
def test_all_reduce_of_four(payload: Payload, sent: int) -> None:
    assert [traffic.group(payload, D, 4, place) for place in range(4)] == [sent] * 4


def test_pairs_rings_and_servers() -> None:
    assert traffic.pair(EightBit(), D) == 1_050_624
    assert traffic.ring(Full(), D) == 8_388_608
    assert traffic.ring(EightBit(), D) == 2_101_248
    assert traffic.ring(Full(), D, neighbours=1) == traffic.pair(Full(), D)
    assert traffic.server(Full(), D, 4) == 3 * 4 * D


def test_a_rest_goes_to_the_first_members() -> None:
    assert [traffic.group(Full(), 10, 3, place) for place in range(3)] == [4 * (6 + 8), 4 * (7 + 6), 4 * (7 + 6)]
    assert traffic.group(Full(), 10, 1) == 0
