"""Checks of single values, whose messages say what was given and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_sdpipe.errors import ConfigurationError, check_number

BEYOND = [
    (-0.1, {"least": 0}),
    (0, {"above": 0}),
    (1.1, {"most": 1}),
    (1, {"below": 1}),
    (math.inf, {"below": math.inf}),
    (10**400, {"most": 1}),
]
NO_NUMBERS: list[Any] = [(math.nan, {}), (True, {}), ("1", {}), (None, {})]


@pytest.mark.parametrize(("value", "bounds"), [*BEYOND, *NO_NUMBERS])
def test_what_is_beyond_its_bounds_or_no_number(value: Any, bounds: dict[str, float]) -> None:
    check_number("share", 0.5, "a share", **bounds)
    with pytest.raises(ConfigurationError) as refused:
        check_number("share", value, "a share, such as 0.5", **bounds)
    assert str(refused.value) == f"share={value!r} is not allowed; give a share, such as 0.5"
