"""What cannot be meant by an exchange."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.exchange.options import Exchange
from lightning_sdpipe.exchange.payloads import EightBit, Full


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"payload": EightBit}, r"payload=<class '.*EightBit'> is not allowed; give .* such as EightBit\(\)"),
        ({"payload": "eight_bit"}, r"payload='eight_bit' is not allowed; give an object of .*, such as EightBit\(\)"),
        ({"overlap": "steps"}, "overlap='steps' is not allowed; give one of 'none', 'step', 'free'"),
        ({"hierarchy": "host"}, "hierarchy='host' is not allowed; give one of 'flat', 'hosts'"),
        ({"interval": -1.0, "overlap": "free"}, r"interval=-1\.0 is not allowed; give seconds from 0"),
        ({"interval": 0.1}, r"interval=0\.1 has no meaning with overlap='none'.*use overlap='free'"),
    ],
)
def test_it_is_refused_when_it_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Exchange(**given)


def test_the_default_is_full_precision_at_once() -> None:
    assert Exchange() == Exchange(Full(), "none", "flat")
    assert Exchange().is_full
    assert not Exchange(EightBit()).is_full
