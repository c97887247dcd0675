"""The codecs' timings say what the format asks for; the numbers are not judged here."""

from __future__ import annotations

import pytest

from recipes.suites import exchange
from recipes.suites.exchange import codecs
from tests.recipes.composed import parameters_of


@pytest.mark.distributed
def test_every_codec_is_timed_beside_a_copy() -> None:
    small = (f"suite.codecs.{name}={value}" for name, value in {"elements": 5000, "calls": 1, "repeats": 3}.items())
    rows, ratios = exchange.run(**parameters_of("exchange", "suite.only=[codecs]", *small))
    by_name = {row["what"]: row for row in rows}
    assert by_name["copy"]["copies"] == 1.0
    assert len(rows) == 1 + 4 * len(codecs.PAYLOADS) + 2
    assert all(row["copies"] > 0 for row in rows)
    assert {key: value["goal"] for key, value in ratios.items()} == {
        "codec/eight_bit_encode": 7.0,
        "codec/eight_bit_decode": 5.0,
        "codec/stochastic_encode": 10.0,
        "codec/one_bit_encode": 10.0,
    }
    assert {key.partition("/")[0] for key in ratios} == exchange.LOWER_IS_BETTER
    assert ratios["codec/one_bit_encode"]["value"] == by_name["one_bit encode"]["copies"]
