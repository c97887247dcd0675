"""A policy as plain data: it survives JSON, and what cannot be is refused before anything starts."""

from __future__ import annotations

import math

import pytest

from lightning_sdpipe.errors import ConfigurationError
from lightning_sdpipe.scheduler.specification import (
    ADPSGDSpec,
    AllReduceSpec,
    LocalSGDSpec,
    NoSyncSpec,
    PolicySpec,
    SemiDecentralizedSpec,
    from_json,
    to_json,
)


@pytest.mark.parametrize(
    "spec",
    [
        AllReduceSpec(),
        NoSyncSpec(),
        LocalSGDSpec(every=4),
        ADPSGDSpec(seed=5, asynchronous=True),
        SemiDecentralizedSpec(),
        SemiDecentralizedSpec(window=math.inf, connectivity=None),
        SemiDecentralizedSpec(window=0.25, connectivity=3, min_group=3, max_group=4),
    ],
)
def test_a_policy_survives_json(spec: PolicySpec) -> None:
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1.0}, r"window=-1.0.*from 0 to inf"),
        ({"window": math.nan}, "window=nan"),
        ({"window": "often"}, "window='often'"),
        ({"connectivity": 0}, "connectivity=0.*from 1"),
        ({"min_group": 0}, "min_group=0"),
        ({"max_group": 1}, "max_group=1"),
        ({"max_group": 2, "min_group": 3}, "at least min_group"),
        ({"max_group": 2, "window": math.inf}, "contradicts"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SemiDecentralizedSpec(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", '{"type": "no_such"}', '{"type": "semi_decentralized", "window": -1}', "[]"])
def test_a_policy_from_bad_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        from_json(text)
